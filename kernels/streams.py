"""What a back end of the norm + rotation operators is given: streams, tables and options.

Every operator is the same work on one or two *streams* (q and k, or x alone) that share the tables. `ops.py` checks
the arguments, cuts a packed buffer into strided views and allocates the results; a back end only fills them. So a
back end is two functions, `forward` and `backward` (`Backend` below), whatever the operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .options import Options
from .replay import Work


@dataclass(slots=True)
class Stream:
    """The forward work on q or k.

    `x` is [B, S, H, D], or [B, S, KV, H/KV, D] for the q heads of a grouped packing (their stride is not uniform).
    `out` is [B, S, H, D]. Any strides, the last is 1. `weight` and `bias` are [D] or one row a head ([H, D], or flat).
    """

    x: Tensor
    out: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None


@dataclass(slots=True)
class GradStream:
    """The backward work on q or k.

    `grad` is the gradient of the result, [B, S, H, D], last stride 1. `dx` receives the gradient of the input, in
    the shape of `Stream.x`; None if it is not needed. `x` is None when nothing depends on it: no norm, and no
    gradient of the tables asked for.
    """

    grad: Tensor
    x: Tensor | None
    dx: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    needs_weight: bool = False
    needs_bias: bool = False


@dataclass(slots=True)
class Copy:
    """A tensor that is moved as it is, in the same pass (V): `out` = `x`; both [B, S, H, D], last stride 1."""

    x: Tensor
    out: Tensor


@dataclass(frozen=True, slots=True)
class Counted:
    """Positions that are counted within each sequence, from an offset on.

    With `cu_seqlens` ([sequences + 1]) the only batch entry holds the sequences one after the other; without, each
    batch entry is one. `offsets` ([sequences]) and `offset` are added.
    """

    cu_seqlens: Tensor | None = None
    offsets: Tensor | None = None
    offset: int = 0

    def positions(self, sequence: int, device: torch.device) -> Tensor:
        """[S], or [B, S] where batch entries differ. Tokens from the last bound on count as one more sequence."""
        token = torch.arange(sequence, device=device) + self.offset
        if self.cu_seqlens is None:
            return token if self.offsets is None else token + self.offsets.unsqueeze(1)
        which = torch.bucketize(token - self.offset, self.cu_seqlens[1:], right=True)
        start = self.cu_seqlens[which]
        if self.offsets is not None:
            start = start - torch.nn.functional.pad(self.offsets, (0, 1))[which]
        return token - start


@dataclass(slots=True)
class Tables:
    """The rotation tables as the caller gave them; `Options` says how to read them. At most one of `positions` and
    `counted` is given."""

    cos: Tensor
    sin: Tensor
    positions: Tensor | None = None
    counted: Counted | None = None

    def with_positions(self, sequence: int) -> Tables:
        """The same with the positions as a tensor, for who cannot count them."""
        if self.counted is None:
            return self
        return Tables(self.cos, self.sin, self.counted.positions(sequence, self.cos.device))

    def table_view(self, table: Tensor, batch: int, sequence: int, mrope: bool) -> Tensor:
        """Without positions: [rows, B, S, T], broadcast axes with stride 0, rows 1 or 3."""
        return (table if mrope else table.unsqueeze(0)).expand(-1, batch, sequence, -1)

    def positions_view(self, batch: int, sequence: int, mrope: bool) -> Tensor:
        """[rows, B, S], broadcast axes with stride 0, rows 1 or 3."""
        assert self.positions is not None
        positions = self.positions if mrope else self.positions.unsqueeze(0)
        return (positions if positions.dim() == 3 else positions.unsqueeze(1)).expand(-1, batch, sequence)


@dataclass(slots=True)
class Gradients:
    """What `backward` returns beside the filled `dx`.

    `weights[i]`, `biases[i]`: for stream i, shaped and typed as the parameter, or None if not needed.
    `cos`, `sin`: per token, [B, S, T] in the arithmetic's dtype, summed over all heads of all streams;
    `fold_table_gradient` finishes them.
    `works`: see `Backend.forward`; `scratch`: what was allocated for them and is not returned.
    """

    weights: list[Tensor | None]
    biases: list[Tensor | None]
    cos: Tensor | None = None
    sin: Tensor | None = None
    works: Sequence[Work] | None = None
    scratch: Sequence[Tensor] = ()


class Backend(Protocol):
    """A back end of the norm + rotation operators. Modules satisfy it.

    Two capabilities are optional attributes, false where they are missing: `COUNTS_POSITIONS` (it takes
    `Tables.counted`; others are handed positions) and `WRITES_IN_PLACE` (`Stream.out` may be `Stream.x` itself; others
    are handed a result that is copied).
    """

    def forward(
        self, streams: Sequence[Stream], tables: Tables | None, options: Options, copy: Copy | None = None
    ) -> Sequence[Work] | None:
        """Fill `out` of every stream, and of `copy`.

        Returns the launches that did it, if making them again on other tensors of the same shapes, strides and dtypes
        is the same call (`replay.py`); else None.
        """

    def backward(
        self,
        streams: Sequence[GradStream],
        tables: Tables | None,
        options: Options,
        copy: Copy | None = None,
        needs_tables: bool = False,
    ) -> Gradients:
        """Fill `dx` of every stream that has one, and `copy.out`; return the other gradients."""


def arithmetic_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """float64 if any is float64, else float32: half types are computed in float32 and rounded once, at the end."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def fold_table_gradient(per_token: Tensor, table: Tensor, positions: Tensor | None, options: Options) -> Tensor:
    """Turn a gradient per token, [B, S, T], into the gradient of `table` as the caller passed it.

    A MRoPE entry goes to exactly the row that was read; broadcast axes are summed; with positions the rows of the
    table are accumulated (by `index_put_`, whose accumulation on CUDA is sorted and therefore reproducible).
    """
    batch, sequence, entries = per_token.shape
    mrope = options.mrope_layout != "none"
    rows = per_token.unsqueeze(0)
    if mrope:
        row_of_pair = torch.tensor(options.mrope_rows(), device=per_token.device)
        if entries == options.rotary_dim:
            row_of_pair = row_of_pair.repeat_interleave(2) if options.writes_adjacent else row_of_pair.repeat(2)
        row = torch.arange(3, device=per_token.device).view(3, 1, 1, 1)
        rows = torch.where(row_of_pair == row, rows, 0)
    if positions is None:
        grad = rows.sum_to_size(table.shape) if mrope else per_token.sum_to_size(table.shape)
    else:
        index = Tables(table, table, positions).positions_view(batch, sequence, mrope).reshape(-1).long()
        grad = torch.zeros(table.shape, dtype=rows.dtype, device=rows.device)
        grad.index_put_((index,), rows.reshape(-1, entries), accumulate=True)
    return grad.to(table.dtype)
