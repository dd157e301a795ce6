"""One call of `attention`, resolved: what a back end is given, and which keys a query may see.

Causality, a window, packed documents and an explicit mask are independent conditions; a key is seen when all of them
hold. Query `i` faces key `position(i)`, the diagonal; causality and the window are distances from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

CAUSAL = ("none", "top_left", "bottom_right")

_OUTSIDE_QUERY, _OUTSIDE_KEY = -1, -2  # tokens after the last document: two ids that never meet


def mask_floor(dtype: torch.dtype) -> float:
    """Numbers of an additive mask at or below this are written to hide a key: `-inf`, `finfo.min`, `-1e9`.

    In a row that also sees a key without such a number they leave no trace: the exponential of the difference is 0
    (scores differ by far less than 1e8). `attention` itself only adds them. float16 cannot hold -1e8: there its most
    negative value is the floor.
    """
    return max(-1e8, torch.finfo(dtype).min)


_ORDINARY = -1e7
"""A key with a number above this is not meant to be hidden. Scores are taken to differ by less than 9e7."""


@dataclass(frozen=True)
class Visibility:
    """The conditions of one call, resolved to plain tensors and integers."""

    offset: int
    """Query `i` faces key `i + offset`, unless `positions` says otherwise."""
    left: int | None
    """A key at most this far before the diagonal is seen; None: any."""
    right: int | None
    """A key at most this far after the diagonal is seen; None: any. Causal is 0."""
    positions: Tensor | None
    """`[Sq]` int32: the key that each query faces (documents of unequal query and key lengths)."""
    q_segments: Tensor | None
    """`[B or 1, Sq]`, any integer type; a key is seen when its segment equals the query's."""
    k_segments: Tensor | None
    """`[B or 1, Sk]`, any integer type."""
    mask: Tensor | None
    """`[B or 1, Hq or 1, Sq or 1, Sk or 1]`, boolean (True: seen) or added to the scaled, capped scores."""
    documents: tuple[Tensor, Tensor] | None = None
    """`[documents + 1]` twice: the `cu_seqlens` of queries and keys that the segments were made from (one tensor for
    both if they are the same documents)."""

    def keep(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor | None:
        """The whole condition as a boolean tensor that broadcasts to `[B, Hq, Sq, Sk]`; None when every key is seen."""
        conditions: list[Tensor] = []
        if self.left is not None or self.right is not None:
            facing = self.positions
            if facing is None:
                facing = torch.arange(num_queries, device=device) + self.offset
            distance = torch.arange(num_keys, device=device)[None, :] - facing[:, None]
            if self.right is not None:
                conditions.append((distance <= self.right)[None, None])
            if self.left is not None:
                conditions.append((distance >= -self.left)[None, None])
        if self.q_segments is not None and self.k_segments is not None:
            conditions.append((self.q_segments[:, :, None] == self.k_segments[:, None, :])[:, None])
        if self.mask is not None:
            conditions.append(self.mask if self.mask.dtype == torch.bool else self.mask > float("-inf"))
        if not conditions:
            return None
        keep = conditions[0]
        for condition in conditions[1:]:
            keep = keep & condition
        return keep

    def has_row_floors(self) -> bool:
        """Whether `row_floors` says anything."""
        mask = self.mask
        if mask is None or mask.dtype in (torch.bool, torch.float16) or mask.shape[1] != 1 or not mask.shape[3]:
            return False
        return self.left is None and self.right is None and self.q_segments is None

    def row_floors(self) -> Tensor | None:
        """`[B or 1, Sq or 1]` float32: numbers of the additive mask at or below it leave no trace in their row, so a
        kernel may pass over tiles of them; -inf in a row of nothing else, whose softmax is over these very numbers.

        None: only -inf may be passed over. That is so for a mask that differs by head (a position bias hides little),
        in float16 (its least value is no further from a score than scores are apart), and beside another condition,
        which could hide the very key that makes the others negligible.
        """
        mask = self.mask
        if mask is None or not self.has_row_floors():
            return None
        hides = mask[:, 0].amax(-1) > _ORDINARY
        return torch.full_like(hides, float("-inf"), dtype=torch.float32).masked_fill_(hides, mask_floor(mask.dtype))


@dataclass(frozen=True, slots=True)
class Problem:
    """What is computed. Tensors have any strides with last stride 1; the front function has checked them."""

    q: Tensor
    """`[B, Sq, Hq, D]`"""
    k: Tensor
    """`[B, Sk, Hkv, D]`"""
    v: Tensor
    """`[B, Sk, Hkv, Dv]`"""
    sinks: Tensor | None
    """`[Hq]`"""
    seen: Visibility
    scale: float
    softcap: float
    """0: none."""
    deterministic: bool = False
    """Gradients must have the same bits in every run."""

    def empty_out(self, order: str) -> Tensor:
        """`[B, Sq, Hq, Dv]` in q's dtype, in memory `bshd` or `bhsd`."""
        (batch, rows, heads, _), lanes = self.q.shape, self.v.shape[3]
        if order == "bhsd":
            # No view of something else: that could not be written in place where a gradient is recorded.
            strides = heads * rows * lanes, lanes, rows * lanes, 1
            return self.q.new_empty_strided((batch, rows, heads, lanes), strides)
        return self.q.new_empty((batch, rows, heads, lanes))

    def gradients(self, needs: Sequence[bool], into: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Unfilled dq, dk, dv: those of `into`, else new contiguous ones; None where not needed."""
        inputs = (self.q, self.k, self.v)
        return [
            None if not needed else x.new_empty(x.shape) if given is None else given
            for x, needed, given in zip(inputs, needs, into, strict=False)
        ]

    def empty_lse(self) -> Tensor:
        """`[B, Hq, Sq]` in the dtype of the arithmetic."""
        batch, rows, heads, _ = self.q.shape
        return self.q.new_empty((batch, heads, rows), dtype=arithmetic_dtype(self.q.dtype))


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Gradients as the main kernel of a backward leaves them, for an operator that has more to do with them than to
    round them (`block.py`)."""

    dq: Tensor
    """`[B, Sq, Hq, D]` float32, still to be multiplied by `dq_scale`."""
    dq_scale: float
    dk: Tensor
    """`[B, Sk, Hkv * parts, D]` in k's dtype: the gradient of a key head is the sum of its parts, which are
    neighbours."""
    dv: Tensor
    """Likewise, in v's dtype."""
    parts: int
    sinks: Tensor | None
    """`[Hq]`, finished."""


class AttentionBackend(Protocol):
    """An implementation of `attention`, as the registry loads it. Modules satisfy it.

    The forward and the backward of one call may come from two back ends: nothing but `out` and `lse` passes between
    them.

    One function more is optional: `unfinished_backward(problem, grad_out, grad_lse, out, lse, dv, needs_sinks)` returns
    an `Unfinished`, or None where `backward` has nothing to leave out; its dv is the tensor given, if it could be
    written as it is.
    """

    def forward(self, problem: Problem, order: str) -> tuple[Tensor, Tensor]:
        """(out `[B, Sq, Hq, Dv]` in memory `order`, lse `[B, Hq, Sq]` contiguous)."""

    def backward(
        self,
        problem: Problem,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        needs: Sequence[bool],
        into: Sequence[Tensor | None] = (None, None, None),
    ) -> tuple[Tensor | None, ...]:
        """The gradients of q, k, v and the sinks, None where `needs` says so.

        `into` names tensors for dq, dk and dv to be written to, of any strides with last stride 1: the parts of one
        packed dqkv.
        """


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64; float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def resolve(
    num_queries: int,
    num_keys: int,
    *,
    causal: str,
    window_left: int,
    window_right: int,
    mask: Tensor | None = None,
    q_segment_ids: Tensor | None = None,
    k_segment_ids: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Visibility:
    """Resolve checked arguments of `attention` (docs/attention.md). -1 is an unlimited window."""
    left = None if window_left < 0 else window_left
    right = None if window_right < 0 else window_right
    if causal != "none":
        right = 0  # causality is the tighter bound: a window's right side is at least 0
    positions: Tensor | None = None
    q_segments, k_segments = q_segment_ids, k_segment_ids if k_segment_ids is not None else q_segment_ids
    packed: tuple[Tensor, Tensor] | None = None
    if cu_seqlens_q is not None:
        keys_are_queries = cu_seqlens_k is None or cu_seqlens_k is cu_seqlens_q
        starts_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        packed = cu_seqlens_q, starts_k
        q_document = _document_of_token(cu_seqlens_q, num_queries)
        k_document = q_document if keys_are_queries else _document_of_token(starts_k, num_keys)
        documents = cu_seqlens_q.numel() - 1
        q_segments = torch.where(q_document < documents, q_document, _OUTSIDE_QUERY)[None]
        k_segments = torch.where(k_document < documents, k_document, _OUTSIDE_KEY)[None]
        if not keys_are_queries and (left is not None or right is not None):
            shift = starts_k - cu_seqlens_q  # of every document's start, and of the next one's: its end
            shift = shift[1:] if causal == "bottom_right" else shift[:-1]
            if documents:
                every = torch.arange(num_queries, device=shift.device)
                positions = every + shift[q_document.clamp(max=documents - 1)]
    return Visibility(
        offset=num_keys - num_queries if causal == "bottom_right" and cu_seqlens_q is None else 0,
        left=left,
        right=right,
        positions=None if positions is None else positions.to(torch.int32),
        q_segments=q_segments,
        k_segments=k_segments,
        mask=None if mask is None else mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape)),
        documents=packed,
    )


def _document_of_token(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Index of the document each token lies in; the number of documents for a token after the last one."""
    token = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.bucketize(token, cu_seqlens[1:].contiguous(), right=True)
