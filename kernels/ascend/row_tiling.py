"""How the norm + rotation kernels cut up heads and tokens: a pure function from sizes to a tile.

A tile is `[tokens, heads, head_dim]` in a vector core's Unified Buffer. A whole token is one tile only while it fits:
at 96 + 8 heads of 128 lanes the compiler switches its own optimisations off to make it fit, 128 + 8 overflow
(`docs/ascend.md`). The bytes an element are from the compiler's placement of the buffers, rounded up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .platform import Platform

FORWARD_BYTES: Final = 44
"""Unified Buffer an element of a tile needs in the forward, double buffers included."""
BACKWARD_BYTES: Final = 68
MAX_TOKENS: Final = 16
UB_SHARE: Final = 0.9
"""The rest is for tables, weights and what the compiler adds."""


@dataclass(frozen=True)
class RowTile:
    """`tokens` an iteration, and for each stream (and the copied one) the heads of a tile."""

    tokens: int
    heads: tuple[int, ...]


def tile_rows(
    heads: Sequence[int], head_dim: int, platform: Platform, *, backward: bool, one_run: bool, tokens: int
) -> RowTile:
    """The tile of each stream.

    Args:
        heads: heads of each stream that lie at one stride (of one group, for the grouped packing).
        backward: the backward keeps more values on chip.
        one_run: whether all tokens lie at one stride in every tensor and no table row is looked up by position; only
            then several tokens can be one tile.
        tokens: how many there are; an iteration takes no more than a core's share.

    Raises:
        ValueError: one head does not fit.
    """
    most = int(platform.ub * UB_SHARE) // (BACKWARD_BYTES if backward else FORWARD_BYTES) // head_dim
    if most < 1:
        raise ValueError(
            f"head_dim={head_dim} does not fit the {platform.ub} bytes of a vector core of {platform.name}; "
            'use backend="reference".'
        )
    tiles = tuple(_heads_per_tile(count, most) for count in heads)
    together = 1
    if one_run and all(tile == count for tile, count in zip(tiles, heads, strict=True)):
        share = -(-tokens // platform.vector_cores)
        together = max(1, min(most // max(tiles), share, MAX_TOKENS))
    return RowTile(together, tiles)


def _heads_per_tile(heads: int, most: int) -> int:
    """The largest tile that cuts the heads without a rest, unless that would be less than half of what fits."""
    if heads <= most:
        return heads
    even = max(tile for tile in range(1, most + 1) if heads % tile == 0)
    return even if 2 * even > most else most
