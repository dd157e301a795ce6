"""Tile sizes of the norm + rotation kernels, as data.

Measured on an H100 (see `benchmarks/tune_norm_rope.py`): a forward tile wants about 16 elements a thread in one-shot
programs of one or two warps, a backward tile about 8 elements a thread in four warps of persistent programs. A tile
holds several heads, because a token's tables are read once a tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

FORWARD_ELEMENTS = 2048
"""Elements of a forward tile (BT x BH x padded head_dim); twice as many where k has fewer heads than fill it."""
BACKWARD_ELEMENTS = 1024
"""Elements of a backward tile."""
BACKWARD_HEADS = 2
"""Heads in a backward tile."""
RESIDENT_WARPS = 16
"""Warps of persistent backward programs on each multiprocessor."""
MAX_HEADS = 8
"""Heads in a tile, at most, where a norm does not need them all."""


@dataclass(frozen=True)
class Tiles:
    """Tokens in a tile, heads of q, k and v in a tile, and warps of a program.

    `programs`: persistent programs on a multiprocessor (backward); `registers`: most registers of a thread (None: as
    the compiler likes).
    """

    tokens: int
    q_heads: int
    k_heads: int
    v_heads: int
    warps: int
    programs: int = 0
    registers: int | None = None


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below `n` (which is positive)."""
    return 1 << (n - 1).bit_length()


def heads_per_tile(heads: int, limit: int) -> int:
    """The largest power of two up to `limit` that wastes no more than an eighth of the heads' lanes on padding."""
    size = min(limit, next_power_of_2(heads))
    while size > 1 and (-heads % size) * 8 > heads:
        size //= 2
    return size


def forward_tiles(
    q_heads: int, k_heads: int, head_lanes: int, sequence: int, all_heads: bool, heavy: bool = False
) -> Tiles:
    """Tiles of the forward. `head_lanes`: head_dim, padded. `all_heads`: a tile holds all heads of a token.

    `heavy`: there are biases, which take registers.
    """
    q, k, v = _heads(q_heads, k_heads, all_heads, MAX_HEADS)
    larger = k < q and k_heads > 0
    elements = 2 * FORWARD_ELEMENTS if larger else FORWARD_ELEMENTS
    a_thread = 32 if (larger or all_heads) and not heavy else 16
    return _tiles(q, k, v, head_lanes, sequence, 1 if all_heads else elements, a_thread)


def backward_tiles(
    q_heads: int, k_heads: int, head_lanes: int, sequence: int, all_heads: bool, heavy: bool = False
) -> Tiles:
    """Tiles of the backward; see `forward_tiles`. `heavy`: gradients of biases or tables are accumulated, too."""
    q, k, v = _heads(q_heads, k_heads, all_heads, BACKWARD_HEADS)
    tiles = _tiles(q, k, v, head_lanes, sequence, 1 if all_heads else BACKWARD_ELEMENTS, 4 if heavy else 8)
    return replace(tiles, programs=max(RESIDENT_WARPS // tiles.warps, 1))


def shares(resident: int, tiles: int, v_tiles: int, blocks: int) -> tuple[int, int]:
    """How many of the `resident` programs walk over the blocks of each head tile of q and k, and of v.

    A block of q or k moves three tiles' bytes, a block of v two: all should end at the same time.
    """
    walkers = max(1, min(blocks, 3 * resident // (3 * tiles + 2 * v_tiles)))
    return walkers, max(1, min(blocks, 2 * walkers // 3))


def _heads(q_heads: int, k_heads: int, all_heads: bool, limit: int) -> tuple[int, int, int]:
    k_heads = max(k_heads, 1)
    if all_heads:
        return next_power_of_2(q_heads), next_power_of_2(k_heads), heads_per_tile(k_heads, limit)
    k = heads_per_tile(k_heads, limit)
    return heads_per_tile(q_heads, limit), k, k


def _tiles(q: int, k: int, v: int, head_lanes: int, sequence: int, elements: int, elements_a_thread: int) -> Tiles:
    head_lanes = next_power_of_2(head_lanes)
    tokens = _previous_power_of_2(min(elements // (q * head_lanes), next_power_of_2(max(sequence, 1))))
    warps = _previous_power_of_2(tokens * q * head_lanes // (32 * elements_a_thread))
    return Tiles(tokens, q, k, v, min(warps, 16))


def _previous_power_of_2(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)
