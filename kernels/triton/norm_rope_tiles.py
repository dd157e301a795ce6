"""Tile sizes of the norm + rotation kernels, as data.

Measured on an H100 (see `benchmarks/norm_rope.py`): a forward tile wants about 32 elements a thread in one-shot
programs of one or two warps, a backward tile about 8 elements a thread in four warps of persistent programs. A tile
holds several heads, because a token's tables are read once a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

FORWARD_ELEMENTS = 2048
"""Elements of a forward tile with two warps (BT x BH x padded head_dim)."""
BACKWARD_ELEMENTS = 1024
"""Elements of a backward tile with four warps."""
PROGRAMS_PER_SM = 5
"""Persistent backward programs on each multiprocessor."""
MAX_HEADS = 8
"""Heads in a tile, at most, where a norm does not need them all."""


@dataclass(frozen=True)
class Tiles:
    """Tokens in a tile, heads of q, k and v in a tile, and warps of a program."""

    tokens: int
    q_heads: int
    k_heads: int
    v_heads: int
    warps: int


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below `n` (which is positive)."""
    return 1 << (n - 1).bit_length()


def heads_per_tile(heads: int, limit: int) -> int:
    """The largest power of two up to `limit` that wastes no more than an eighth of the heads' lanes on padding."""
    size = min(limit, next_power_of_2(heads))
    while size > 1 and (-heads % size) * 8 > heads:
        size //= 2
    return size


def _previous_power_of_2(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)


def _tiles(
    q_heads: int, k_heads: int, head_lanes: int, sequence: int, all_heads: bool, elements: int, elements_a_thread: int
) -> Tiles:
    head_lanes = next_power_of_2(head_lanes)
    k = next_power_of_2(max(k_heads, 1))
    v = heads_per_tile(max(k_heads, 1), MAX_HEADS)
    if all_heads:
        q, tokens = next_power_of_2(q_heads), 1
    else:
        q = heads_per_tile(q_heads, MAX_HEADS)
        k = v
        if k_heads:
            q = min(q, k)
        tokens = min(_previous_power_of_2(elements // (q * head_lanes)), next_power_of_2(max(sequence, 1)))
    warps = _previous_power_of_2(tokens * q * head_lanes // (32 * elements_a_thread))
    return Tiles(tokens, q, k, v, min(warps, 16))


def forward_tiles(
    q_heads: int, k_heads: int, head_lanes: int, sequence: int, all_heads: bool, heavy: bool = False
) -> Tiles:
    """Tiles of the forward. `head_lanes`: head_dim, padded. `all_heads`: a tile holds all heads of a token. `heavy`:
    there are biases."""
    return _tiles(q_heads, k_heads, head_lanes, sequence, all_heads, FORWARD_ELEMENTS, 16 if heavy else 32)


def backward_tiles(
    q_heads: int, k_heads: int, head_lanes: int, sequence: int, all_heads: bool, heavy: bool = False
) -> Tiles:
    """Tiles of the backward; see `forward_tiles`. `heavy`: gradients of biases or tables are accumulated, too."""
    a_thread = 16 if all_heads else 8
    return _tiles(
        q_heads, k_heads, head_lanes, sequence, all_heads, BACKWARD_ELEMENTS, a_thread // 2 if heavy else a_thread
    )
