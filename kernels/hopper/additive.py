"""Masks that are added, `[B or 1, Hq or 1, Sq or 1, Sk]`: bits for the keys that they hide, and the numbers for the
blocks that have any.

Only -inf hides, or a number that leaves no trace in its row (`attention_problem.Visibility.row_floors`). So there are
four kinds of blocks of scores: hidden (passed over), seen whole with nothing but zeros (free of any mask), partly seen
with nothing but zeros (bits, as in `explicit.py`), and with numbers. A causal mask of 0 and -inf, or of 0 and
`finfo.min`, costs what a boolean one does.

Numbers are added in float32 to scores in natural units. A row whose largest number is far from 0 is *shifted* by it,
after the addition: the sum has lost what float32 loses of it, as the definition says (docs/attention.md: a row of
nothing but finfo.min is the mean of all values), and what follows is of ordinary size and cannot overflow. Every block
such a row sees counts as one with numbers.

The numbers are copied into the order of the threads that add them (`additive_kernels.py`): a copy of the mask, in the
dtype of q if the mask has that, else in float32, and for the backward one by key.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention_problem import Visibility, mask_floor
from ..launch import Launch
from .additive_kernels import mask_values, row_shifts
from .explicit import BLOCK_TOKENS, Conditions, Tiling
from .explicit_kernels import FLAG
from .rows import Rows

_SHIFT_ROWS, _SHIFT_KEYS = 16, 512
"""Of a program that looks for the largest number of its rows."""


def additive(seen: Visibility) -> bool:
    """Whether there is a mask that is added."""
    return seen.mask is not None and seen.mask.dtype != torch.bool


def shifts(seen: Visibility, num_queries: int, num_keys: int) -> Tensor:
    """The shift of every row, float32 `[planes, Sq padded]`: 0 of most."""
    mask, conditions = _described(seen, num_queries, num_keys)
    plan = _shifts_plan(mask.shape[1], mask.stride(), mask.dtype, conditions, mask.device)
    found = mask.new_empty(plan.shape, dtype=torch.float32)
    plan.launch.on((mask, *conditions.tensors(seen, found.view(torch.int32)), found))
    return found


def values_of_forward(seen: Visibility, of_rows: Tensor, dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> Rows:
    """Bits and numbers by query, in `dtype`, and for every tile of queries its blocks of keys. `of_rows`: `shifts`;
    `sizes`: queries, keys, queries of a tile, keys of a block."""
    return _values(seen, of_rows, dtype, sizes, order=False, forward=True)


def values_of_backward(
    seen: Visibility, of_rows: Tensor, dtype: torch.dtype, sizes: tuple[int, int, int, int], *, order: bool
) -> Rows:
    """Bits and numbers by key, and for every block of keys its tiles of queries. `order`: see
    `explicit.bits_of_backward`."""
    return _values(seen, of_rows, dtype, sizes, order=order, forward=False)


def shifted_lse(lse: Tensor, of_rows: Tensor, tail: Tensor, heads: int) -> Tensor:
    """LSE of the shifted scores, `[B, Hq, Sq]`: what the backward recomputes probabilities with. `heads`: that `shifts`
    tells apart; `tail`: what float32 has lost of a large lse (`triton/attention_rows.py`)."""
    planes, rows = of_rows.shape
    return lse - of_rows.view(planes // heads, heads, rows)[:, :, : lse.shape[2]] + tail


def _described(seen: Visibility, num_queries: int, num_keys: int) -> tuple[Tensor, Conditions]:
    assert seen.mask is not None
    mask = seen.mask.expand(-1, -1, num_queries, num_keys)
    return mask, Conditions.of(seen, num_queries, num_keys)


def _values(
    seen: Visibility,
    of_rows: Tensor,
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    *,
    order: bool,
    forward: bool,
) -> Rows:
    num_queries, num_keys, block_m, block_n = sizes
    mask, conditions = _described(seen, num_queries, num_keys)
    tiling = Tiling.of(conditions, mask.shape[1], block_m, block_n, forward)
    floor = mask_floor(mask.dtype) if seen.has_row_floors() else float("-inf")
    plan = _plan(tiling, mask.stride(), mask.dtype, dtype, conditions, mask.device, floor, order)
    bits, ranges, counts, extra = (torch.empty(shape, dtype=torch.int32, device=mask.device) for shape in plan.shapes)
    values = mask.new_empty(plan.values_shape, dtype=dtype)
    rows = of_rows.shape[1]
    extra[:, :rows].copy_(of_rows.view(torch.int32))
    plan.values.on((mask, *conditions.tensors(seen, bits), bits, values, extra.view(torch.float32), extra))
    plan.ranges.on((bits, extra[:, rows:], ranges))
    if plan.order is not None:
        plan.order.on((ranges, counts))
    return Rows(values, extra, bits, ranges, counts)


@dataclass(frozen=True)
class _ShiftsPlan:
    shape: tuple[int, int]
    launch: Launch


@functools.lru_cache(maxsize=1024)
def _shifts_plan(
    heads: int, strides: tuple[int, ...], dtype: torch.dtype, conditions: Conditions, device: torch.device
) -> _ShiftsPlan:
    rows = -(-conditions.num_queries // BLOCK_TOKENS) * BLOCK_TOKENS
    blocks = rows // _SHIFT_ROWS
    planes = conditions.batches * heads
    launch = Launch(
        row_shifts, (planes * blocks,), device, (dtype, *conditions.dtypes, torch.float32),
        (*conditions.strides(strides), heads, blocks, *conditions.numbers),
        {**conditions.constants, "ROWS": _SHIFT_ROWS, "KEYS": _SHIFT_KEYS}, num_warps=4,
    )  # fmt: skip
    return _ShiftsPlan((planes, rows), launch)


@dataclass(frozen=True)
class _Plan:
    """`shapes`: of the bits, ranges, order, and shifts with flags."""

    shapes: tuple[tuple[int, ...], ...]
    values_shape: tuple[int, ...]
    values: Launch
    ranges: Launch
    order: Launch | None


@functools.lru_cache(maxsize=1024)
def _plan(
    tiling: Tiling,
    strides: tuple[int, ...],
    mask_dtype: torch.dtype,
    dtype: torch.dtype,
    conditions: Conditions,
    device: torch.device,
    floor: float,
    order: bool,
) -> _Plan:
    parts: int = BLOCK_TOKENS // FLAG.value
    own, other = tiling.own_blocks, tiling.other_blocks
    rows = -(-conditions.num_queries // BLOCK_TOKENS) * BLOCK_TOKENS
    extra = rows + own * parts * other * parts
    int32, float32 = torch.int32, torch.float32
    return _Plan(
        shapes=(tiling.bits, tiling.ranges, tiling.order if order else (0,), (tiling.planes, extra)),
        values_shape=(tiling.planes, own * BLOCK_TOKENS // 16, other * BLOCK_TOKENS // 16, 256),
        values=Launch(
            mask_values, tiling.grid, device, (mask_dtype, *conditions.dtypes, int32, dtype, float32, int32),
            (*conditions.strides(strides), tiling.heads, own, extra, *conditions.numbers, floor),
            {"OWN_ARE_KEYS": not tiling.forward, **conditions.constants}, num_warps=8,
        ),
        ranges=tiling.launch_ranges(device, flags_plane=extra),
        order=tiling.launch_order(device) if order else None,
    )  # fmt: skip
