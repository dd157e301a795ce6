"""Masks that only the data knows, as one interval of keys per query: packed documents and padding, with or without
causality and a window.

The intervals never step back: `low` and `high` ascend with the row. So the first and last row of a tile bound the whole
tile, and the blocks that a tile meets, or need not mask, follow by division and by binary search.

Documents (`cu_seqlens`) give such intervals by themselves. Segment ids do when they ascend, as a count of documents
does, and a mask of keys does when the keys it shows are one run, as in a padded batch. Whether that is so is found on
the GPU, batch by batch; nothing waits for the device. Where it is not, labels are compared instead (`rows_kernels.py`):
slower, and as right.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention_problem import Visibility
from ..launch import Launch
from .rows_kernels import LABELS_HEAD, query_ranges, row_intervals, segment_order

PADDED = 128
"""Rows and keys of the arrays are padded to multiples of this."""
_CHUNK = 2048
"""Tokens of a program that looks at the order of the ids."""
_BLOCKS = 32
"""Blocks of keys of a program that looks for their queries."""


@dataclass(frozen=True)
class Rows:
    """Interval `[low, high)` of keys of every query and what follows from it, int32; the first axis is the batch, or 1
    where all share."""

    low: Tensor
    """`[·, rows]`, rows padded to whole tiles of 128."""
    high: Tensor
    labels: Tensor
    """`[·, 4 + rows + keys]`: 1 in the first place where labels must be compared, and the labels of queries and keys,
    padded. Without segment ids or a mask of keys it is never read."""
    ranges: Tensor
    """Forward: `[·, tiles, 4]`, first and last block of keys of a tile of queries, first and last one without a mask.
    Backward: `[·, blocks, 4]`, the same tiles of queries of a block of keys."""
    order: Tensor | None
    """Backward: `[·, tiles]`, the first block of keys that adds to a tile of queries."""


def by_data(seen: Visibility) -> bool:
    """Whether only the data knows which keys are seen."""
    return seen.q_segments is not None or seen.mask is not None


def batches(seen: Visibility) -> int:
    """How many batches such a mask tells apart: 1 where all share it."""
    sources = [x for x in (seen.q_segments, seen.k_segments, seen.mask) if x is not None]
    return max(x.shape[0] for x in sources)


def rows_of_forward(seen: Visibility, num_queries: int, num_keys: int, block_m: int, block_n: int) -> Rows:
    """The intervals, and for every tile of `block_m` queries its blocks of `block_n` keys."""
    return _rows(seen, num_queries, num_keys, block_m, block_n, forward=True)


def rows_of_backward(seen: Visibility, num_queries: int, num_keys: int, block_m: int, block_n: int) -> Rows:
    """The intervals, and for every block of `block_n` keys its tiles of `block_m` queries."""
    return _rows(seen, num_queries, num_keys, block_m, block_n, forward=False)


def _rows(seen: Visibility, num_queries: int, num_keys: int, block_m: int, block_n: int, *, forward: bool) -> Rows:
    assert seen.documents is None or seen.mask is None, "a mask of keys beside cu_seqlens is refused"
    q_ids, k_ids = seen.q_segments, seen.k_segments
    if seen.documents is not None:
        q_ids, k_ids = seen.documents[0][None], seen.documents[1][None]
    mask = None if seen.mask is None else seen.mask[:, 0, 0].expand(-1, num_keys).view(torch.uint8)
    sources = [x for x in (q_ids, k_ids, mask) if x is not None]
    batch = batches(seen)
    plan = _plan(
        *(None if x is None else source(x) for x in (q_ids, k_ids, mask)),
        sources[0].device, batch, num_queries, num_keys, block_m, block_n, seen.offset, seen.left, seen.right,
        0 if seen.documents is None else seen.documents[0].shape[0] - 1, seen.documents is not None,
        seen.positions is not None, forward,
    )  # fmt: skip
    facts, low, high, labels, ranges, order = (
        torch.empty(shape, dtype=torch.int32, device=sources[0].device) for shape in plan.shapes
    )
    q_source, k_source, mask_source = (low if x is None else x for x in (q_ids, k_ids, mask))
    if plan.segment_order is not None:
        plan.segment_order.on((q_source, k_source, mask_source, facts))
    positions = low if seen.positions is None else seen.positions
    plan.row_intervals.on((q_source, k_source, mask_source, positions, facts, low, high, labels, ranges, order))
    if plan.query_ranges is not None:
        plan.query_ranges.on((low, high, labels, ranges))
    return Rows(low, high, labels, ranges, None if forward else order)


@dataclass(frozen=True)
class _Plan:
    """The launches for one combination of shapes. `shapes`: of facts, low, high, labels, ranges and order."""

    shapes: tuple[tuple[int, ...], ...]
    segment_order: Launch | None
    row_intervals: Launch
    query_ranges: Launch | None


@dataclass(frozen=True)
class Source:
    """What a plan needs to know of a tensor `[B or 1, tokens]`."""

    dtype: torch.dtype
    batch: int
    strides: tuple[int, ...]


def source(x: Tensor) -> Source:
    """Of a tensor `[B or 1, tokens]`."""
    return Source(x.dtype, x.shape[0], x.stride())


def steps(x: Source | None) -> tuple[int, int]:
    """Strides of the batch (0 where all share) and of the tokens; 0 of no tensor."""
    return (0, 0) if x is None else (x.strides[0] if x.batch > 1 else 0, x.strides[1])


@functools.lru_cache(maxsize=1024)
def _plan(
    q_ids: Source | None,
    k_ids: Source | None,
    mask: Source | None,
    device: torch.device,
    batch: int,
    num_queries: int,
    num_keys: int,
    block_m: int,
    block_n: int,
    offset: int,
    left: int | None,
    right: int | None,
    documents: int,
    packed: bool,
    has_positions: bool,
    forward: bool,
) -> _Plan:
    rows, keys = (-(-n // PADDED) * PADDED for n in (num_queries, num_keys))
    tiles, blocks = -(-num_queries // block_m), -(-num_keys // block_n)
    chunks = -(-max(num_queries, num_keys) // _CHUNK)
    dtypes = [torch.int32 if x is None else x.dtype for x in (q_ids, k_ids, mask)]
    strides = [n for x in (q_ids, k_ids, mask) for n in steps(x)]
    conditions = {"HAS_IDS": q_ids is not None, "HAS_MASK": mask is not None}
    int32 = torch.int32
    return _Plan(
        shapes=(
            (batch, 1 if packed else chunks, 4),
            (batch, rows),
            (batch, rows),
            (batch, 1 if packed else LABELS_HEAD.value + rows + keys),
            (batch, tiles if forward else blocks, 4),
            (batch, 1 if forward else tiles),
        ),
        segment_order=None if packed else Launch(
            segment_order, (chunks, batch), device, (*dtypes, int32), (*strides, num_queries, num_keys),
            {**conditions, "CHUNK": _CHUNK}, num_warps=8,
        ),
        row_intervals=Launch(
            row_intervals, (max(rows // block_m, -(-keys // block_m)), batch), device, (*dtypes, *[int32] * 7),
            (
                *strides, num_queries, num_keys, documents, max(num_keys, documents).bit_length(), chunks, offset,
                left or 0, right or 0,
            ),
            {
                "DOCUMENTS": packed, **conditions, "HAS_POSITIONS": has_positions, "HAS_LEFT": left is not None,
                "HAS_RIGHT": right is not None, "FORWARD": forward, "CHUNKS": 1 << (chunks - 1).bit_length(),
                "BLOCK_M": block_m, "BLOCK_N": block_n, "PADDED": PADDED,
            },
            num_warps=4,
        ),
        query_ranges=None if forward else Launch(
            query_ranges, (-(-blocks // _BLOCKS), batch), device, [int32] * 4,
            (num_queries, num_keys, tiles.bit_length()),
            {"LABELS": not packed, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCKS": _BLOCKS, "PADDED": PADDED},
            num_warps=1,
        ),
    )  # fmt: skip
