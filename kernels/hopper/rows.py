"""Masks that only the data knows, as one interval of keys per query: packed documents, with or without causality and
a window.

The intervals of packed documents never step back: `low` and `high` ascend with the row. So the first and last row of
a tile bound the whole tile, and the blocks that a tile meets, or need not mask, follow by division and by binary
search.

Everything is computed on the GPU from `Visibility`; nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention_problem import Visibility

_NO_SEGMENT = 2**31 - 1


@dataclass(frozen=True)
class Rows:
    """Interval `[low, high)` of keys of every query, int32 `[B or 1, rows]`, rows padded to whole tiles of 128."""

    low: Tensor
    high: Tensor

    @property
    def stride(self) -> int:
        """Elements from one batch to the next; 0 where all share."""
        return self.low.stride(0) if self.low.shape[0] > 1 else 0


def intervals(seen: Visibility, num_queries: int, num_keys: int) -> Rows:
    """The intervals of ascending segments (`cu_seqlens`), cut by causality and window. Rows past the end repeat the
    last row."""
    assert seen.q_segments is not None
    assert seen.k_segments is not None
    queries, keys = (x.int() for x in (seen.q_segments, seen.k_segments))
    # Tokens outside of every document have negative ids and stand at the end.
    keys = torch.where(keys < 0, _NO_SEGMENT, keys)
    queries = torch.where(queries < 0, _NO_SEGMENT - 1, queries)
    low = torch.searchsorted(keys, queries, out_int32=True)
    high = end = torch.searchsorted(keys, queries, right=True, out_int32=True)
    if seen.left is not None or seen.right is not None:
        facing = seen.positions
        if facing is None:
            facing = torch.arange(num_queries, device=low.device, dtype=torch.int32) + seen.offset
        if seen.left is not None:
            low = torch.maximum(low, facing - seen.left)
        if seen.right is not None:
            high = torch.minimum(high, facing + (seen.right + 1))
    # A query that sees nothing keeps an empty interval at its place, so that the order holds.
    low = torch.minimum(low, end)
    high = torch.maximum(high, low)
    padding = -num_queries % 128
    if padding:
        low, high = (torch.cat([x, x[:, -1:].expand(-1, padding)], 1) for x in (low, high))
    return Rows(low.contiguous(), high.contiguous())


def key_ranges(rows: Rows, num_queries: int, block_m: int, block_n: int) -> Tensor:
    """For every tile of queries: first and last block of keys, first and last one without a mask. int32 `[B or 1,
    tiles, 4]`."""
    lowest, top_low, low_high, highest = _tile_ends(rows, num_queries, block_m)
    first = lowest // block_n
    last = torch.maximum(-(-highest // block_n), first + 1)  # the forward has no empty tile
    return torch.stack([first, last, -(-top_low // block_n), low_high // block_n], -1)


def query_ranges(rows: Rows, num_queries: int, num_keys: int, block_m: int, block_n: int) -> tuple[Tensor, Tensor]:
    """For every block of keys: first and last tile of queries, first and last one without a mask, int32 `[B or 1,
    blocks, 4]`; and for every tile the first block of keys that adds to it, int32 `[B or 1, tiles]`."""
    lowest, top_low, low_high, highest = (x.contiguous() for x in _tile_ends(rows, num_queries, block_m))
    start = (
        torch.arange(0, num_keys, block_n, device=lowest.device, dtype=torch.int32)
        .expand(lowest.shape[0], -1)
        .contiguous()
    )
    end = start + block_n
    first = torch.searchsorted(highest, start, right=True, out_int32=True)
    last = torch.maximum(torch.searchsorted(lowest, end, out_int32=True), first)
    clear_first = torch.searchsorted(low_high, end, out_int32=True)
    clear_last = torch.searchsorted(top_low, start, right=True, out_int32=True)
    return torch.stack([first, last, clear_first, clear_last], -1), lowest // block_n


def _tile_ends(rows: Rows, num_queries: int, block_m: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of every tile: `low` of its first and last row, `high` of its first and last row."""
    tiles = -(-num_queries // block_m)
    ends = []
    for x in (rows.low, rows.high):
        tiled = x[:, : tiles * block_m].view(x.shape[0], tiles, block_m)
        ends += [tiled[:, :, 0], tiled[:, :, -1]]
    return ends[0], ends[1], ends[2], ends[3]
