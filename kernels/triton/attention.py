"""Flash attention in Triton for every GPU from sm_80 on: the launchers. `AttentionBackend` is the contract."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from ..attention_problem import Problem, mask_floor
from ..attention_reference import sinks_gradient
from .attention_backward import attention_delta, attention_dkdv, attention_dq
from .attention_forward import attention_forward
from .attention_ranges import attention_ranges
from .attention_tiles import Tile, choose_tile

_DELTA_ROWS = 32


def forward(problem: Problem, order: str) -> tuple[Tensor, Tensor]:
    """(out, lse): one kernel, and one small one before it when the tiles to visit depend on data."""
    problem = _aligned_problem(problem)
    q, k, v = problem.q, problem.k, problem.v
    out, lse = problem.empty_out(order), problem.empty_lse()
    tile = _tile("forward", problem)
    sight = _Sight(problem)
    batch, rows, heads, _ = q.shape
    programs = triton.cdiv(rows, tile.block_m) * batch * heads
    if programs:
        with _on(q):
            ranges = sight.ranges(tile.block_m, tile.block_n, own_are_keys=False)
            attention_forward[(programs,)](
                q,
                k,
                v,
                out,
                lse,
                q if problem.sinks is None else problem.sinks,
                *sight.tensors,
                *_ranges_argument(ranges, q),
                *_strides(q),
                *_strides(k),
                *_strides(v),
                *_strides(out),
                *sight.strides,
                *_ranges_strides(ranges),
                *_sizes(problem, heads),
                *sight.bounds,
                problem.scale,
                problem.softcap,
                HAS_SINKS=problem.sinks is not None,
                **_constants(problem, tile, sight, ranges),
            )
    return out, lse


def backward(
    problem: Problem,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    needs: Sequence[bool],
    into: Sequence[Tensor | None] = (None, None, None),
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v and the sinks: kernels for delta, dq, and dk with dv, launched where needed."""
    problem = _aligned_problem(problem)
    q, k, v = problem.q, problem.k, problem.v
    batch, rows, heads, _ = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    grad_out, out = _aligned(grad_out), _aligned(out)
    dq, dk, dv = problem.gradients(needs, into)
    for name, given in zip(("dq", "dk", "dv"), (dq, dk, dv), strict=True):
        if given is not None and not _is_aligned(given):
            raise ValueError(
                f"into: {name} has strides {list(given.stride())}; its rows must start at multiples of 16 bytes."
            )
    sight = _Sight(problem)
    with _on(q):
        delta = _delta(problem, grad_out, grad_lse, out)
        tile = _tile("dq", problem)
        programs = triton.cdiv(rows, tile.block_m) * batch * heads
        if dq is not None and programs:
            ranges = sight.ranges(tile.block_m, tile.block_n, own_are_keys=False)
            attention_dq[(programs,)](
                q,
                k,
                v,
                grad_out,
                lse,
                delta,
                dq,
                *sight.tensors,
                *_ranges_argument(ranges, q),
                *_strides(q),
                *_strides(k),
                *_strides(v),
                *_strides(grad_out),
                *_strides(dq),
                *sight.strides,
                *_ranges_strides(ranges),
                *_sizes(problem, heads),
                *sight.bounds,
                problem.scale,
                problem.softcap,
                **_constants(problem, tile, sight, ranges),
            )
        tile = _tile("dkdv", problem)
        programs = triton.cdiv(keys, tile.block_n) * batch * kv_heads
        if (dk is not None or dv is not None) and programs:
            # One kernel computes both; the one that nobody asked for is written and dropped.
            dk_out = torch.empty_like(k) if dk is None else dk
            dv_out = torch.empty_like(v) if dv is None else dv
            ranges = sight.ranges(tile.block_n, tile.block_m, own_are_keys=True)
            attention_dkdv[(programs,)](
                q,
                k,
                v,
                grad_out,
                lse,
                delta,
                dk_out,
                dv_out,
                *sight.tensors,
                *_ranges_argument(ranges, q),
                *_strides(q),
                *_strides(k),
                *_strides(v),
                *_strides(grad_out),
                *_strides(dk_out),
                *_strides(dv_out),
                *sight.strides,
                *_ranges_strides(ranges),
                *_sizes(problem, kv_heads),
                *sight.bounds,
                problem.scale,
                problem.softcap,
                **_constants(problem, tile, sight, ranges),
            )
    sinks = problem.sinks
    return dq, dk, dv, sinks_gradient(sinks, lse, delta) if sinks is not None and needs[3] else None


class _Sight:
    """`Visibility` as kernel arguments. q stands in for an absent tensor; a `HAS_` constant keeps it unread."""

    def __init__(self, problem: Problem) -> None:
        seen, q = problem.seen, problem.q
        self.problem = problem
        self.has_positions = seen.positions is not None
        self.has_segments = seen.q_segments is not None
        self.has_left, self.has_right = seen.left is not None, seen.right is not None
        mask = seen.mask
        self.mask_kind = 0 if mask is None else 1 if mask.dtype == torch.bool else 2
        mask_strides: list[int] = [0, 0, 0, 0]
        if mask is not None:
            mask_strides = [0 if mask.shape[axis] == 1 else mask.stride(axis) for axis in range(4)]
        self.tensors = (
            q if seen.positions is None else seen.positions,
            q if seen.q_segments is None else seen.q_segments,
            q if seen.k_segments is None else seen.k_segments,
            q if mask is None else mask.view(torch.uint8) if self.mask_kind == 1 else mask,
        )
        self.strides = (
            _batch_stride(seen.q_segments),
            _batch_stride(seen.k_segments),
            *mask_strides,
            mask_floor(mask.dtype) if mask is not None and self.mask_kind == 2 else 0.0,
        )
        self.bounds = (seen.offset, seen.left or 0, seen.right or 0)
        self.flags = {
            "HAS_LEFT": self.has_left,
            "HAS_RIGHT": self.has_right,
            "HAS_POSITIONS": self.has_positions,
            "HAS_SEGMENTS": self.has_segments,
        }

    def ranges(self, own: int, other: int, own_are_keys: bool) -> Tensor | None:
        """`[B or 1, Hq or 1, blocks, 4]`: the tiles to visit, where only the data knows; None where arithmetic does.

        A mask that differs by head and is added (a position bias) is not read for it: such masks hide little.
        """
        seen, q = self.problem.seen, self.problem.q
        mask = seen.mask
        kind = self.mask_kind
        if mask is not None and kind == 2 and mask.shape[1] != 1:
            kind = 0
        if not (self.has_segments or kind):
            return None
        batch = max(
            seen.q_segments.shape[0] if seen.q_segments is not None else 1,
            seen.k_segments.shape[0] if seen.k_segments is not None else 1,
            mask.shape[0] if mask is not None and kind else 1,
        )
        heads = mask.shape[1] if mask is not None and kind else 1
        rows, keys = q.shape[1], self.problem.k.shape[1]
        blocks = triton.cdiv(keys if own_are_keys else rows, own)
        ranges = torch.empty((batch, heads, blocks, 4), dtype=torch.int32, device=q.device)
        attention_ranges[(ranges.numel() // 4,)](
            ranges,
            *self.tensors,
            *self.strides,
            rows,
            keys,
            heads,
            *self.bounds,
            OWN_ARE_KEYS=own_are_keys,
            OWN=own,
            OTHER=other,
            MASK=kind,
            **self.flags,
        )
        return ranges


def _delta(problem: Problem, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor) -> Tensor:
    batch, rows, heads, lanes = out.shape
    delta = problem.empty_lse()
    programs = triton.cdiv(rows, _DELTA_ROWS) * batch * heads
    if programs:
        attention_delta[(programs,)](
            out,
            grad_out,
            delta if grad_lse is None else grad_lse,
            delta,
            *_strides(out),
            *_strides(grad_out),
            *((0, 0, 0) if grad_lse is None else grad_lse.stride()),
            rows,
            heads,
            VALUE_DIM=lanes,
            BLOCK_M=_DELTA_ROWS,
            BLOCK_V=triton.next_power_of_2(lanes),
            HAS_GRAD_LSE=grad_lse is not None,
            ALIGN=_alignment(out),
        )
    return delta


def _constants(problem: Problem, tile: Tile, sight: _Sight, ranges: Tensor | None) -> dict[str, Any]:
    head_dim, value_dim = problem.q.shape[3], problem.v.shape[3]
    return {
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_V": max(16, triton.next_power_of_2(value_dim)),
        "HAS_RANGES": ranges is not None,
        "HAS_SOFTCAP": problem.softcap > 0,
        "MASK": sight.mask_kind,
        "PRECISION": "tf32x3" if problem.q.dtype == torch.float32 else "tf32",
        "ALIGN": _alignment(problem.q),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **sight.flags,
    }


def _aligned_problem(problem: Problem) -> Problem:
    q, k, v = (_aligned(x) for x in (problem.q, problem.k, problem.v))
    return problem if q is problem.q and k is problem.k and v is problem.v else replace(problem, q=q, k=k, v=v)


def _aligned(x: Tensor) -> Tensor:
    """`x`, or a copy of it if its rows do not start at multiples of 16 bytes or its lanes are apart (the expanded
    gradient of a sum).

    Rows that are not aligned are loaded lane by lane, each with its own address in a register. That is slow, and on
    sm_90 such a kernel read wrong addresses (head_dim 40 and 24, Triton 3.6.0, seen on an H100): `_triton_supports`
    wants head_dim a multiple of 8.
    """
    return x if _is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def _is_aligned(x: Tensor) -> bool:
    align = _alignment(x)
    rows = all(x.shape[axis] == 1 or x.stride(axis) % align == 0 for axis in range(3))
    return rows and x.stride(3) == 1 and x.data_ptr() % 16 == 0


def _alignment(x: Tensor) -> int:
    """Elements in 16 bytes."""
    return 16 // x.element_size()


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Batch, row and head stride in units of 16 bytes."""
    batch, row, head, _ = x.stride()
    align = _alignment(x)
    return batch // align, row // align, head // align


def _sizes(problem: Problem, heads: int) -> tuple[int, int, int, int]:
    """(queries, keys, heads of the grid, query heads a key head)."""
    return problem.q.shape[1], problem.k.shape[1], heads, problem.q.shape[2] // problem.k.shape[2]


def _ranges_argument(ranges: Tensor | None, stand_in: Tensor) -> tuple[Tensor]:
    return (stand_in if ranges is None else ranges,)


def _ranges_strides(ranges: Tensor | None) -> tuple[int, int]:
    if ranges is None:
        return 0, 0
    return _batch_stride(ranges), 0 if ranges.shape[1] == 1 else ranges.stride(1)


def _batch_stride(x: Tensor | None) -> int:
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)


def _tile(name: str, problem: Problem) -> Tile:
    head_dim = max(problem.q.shape[3], problem.v.shape[3])
    return choose_tile(name, _architecture(problem.q.device), head_dim, problem.q.dtype)


def _architecture(device: torch.device) -> int:
    """10 major + minor; 80 for the interpreter."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _on(x: Tensor) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(x.device) if x.device.type == "cuda" else contextlib.nullcontext()
