"""Tile sizes of the norm + rotation kernels, as data: `CHOICES`, each with the measurement that chose it.

Measured by `benchmarks/tune_norm_rope.py` on an H100 80GB HBM3 (torch 2.11, triton 3.6, bfloat16, 16384 tokens unless
said otherwise): percent of a 1 GiB device copy, least possible bytes.

What the search shows: a forward wants 32 elements a thread and four warps in one-shot programs; a backward 16 elements
a thread and as many persistent programs as fit with 128 registers a thread. 16 elements are two 16-byte loads a half.
A tile holds several heads, because a token's tables are read once a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

REGISTERS = 65536
"""Of a multiprocessor: the same on sm_80, sm_90 and sm_100."""


@dataclass(frozen=True)
class Choice:
    """How to cut a tile. `elements`: a thread's, padding counted; `registers`: a thread's, at most."""

    heads: int
    elements: int
    warps: int
    registers: int | None = None


CHOICES = {
    # 32+8 95.5 % (v copied: 96.7), separate q and k of Qwen3-8B 97.2, 16+2 92.9; with 16 elements 91.7, 96.4, 92.5
    "forward": Choice(heads=8, elements=32, warps=4),
    # 32+8 94.0 %, Qwen3-8B 96.0; with eight elements and 64 registers 93.8, 93.7; the compiler's own count 93.7
    "backward": Choice(heads=4, elements=16, warps=4, registers=128),
    # Fewer than four key heads. 16+2 91.1 %; as "backward" 90.5
    "backward, few keys": Choice(heads=2, elements=8, warps=4, registers=64),
    # The tile is all heads of a token (a norm over the hidden row, one weight row a head): warps follow.
    "forward, all heads": Choice(heads=0, elements=32, warps=16),
    "backward, all heads": Choice(heads=0, elements=8, warps=16),
    # Biases, gradients of the tables and float64 take registers.
    "forward, heavy": Choice(heads=8, elements=16, warps=4),
    "backward, heavy": Choice(heads=4, elements=8, warps=4, registers=168),
    "forward, all heads, heavy": Choice(heads=0, elements=16, warps=16),
    "backward, all heads, heavy": Choice(heads=0, elements=4, warps=16),
}


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
    name = "forward" + ", all heads" * all_heads + ", heavy" * heavy
    return _tiles(CHOICES[name], q_heads, k_heads, head_lanes, sequence)


def backward_tiles(
    q_heads: int, k_heads: int, head_lanes: int, sequence: int, all_heads: bool, heavy: bool = False
) -> Tiles:
    """Tiles of the backward; see `forward_tiles`. `heavy`: gradients of biases or tables are accumulated, too, or the
    arithmetic is in float64."""
    few_keys = 0 < k_heads < CHOICES["backward"].heads and not (all_heads or heavy)
    name = "backward" + ", few keys" * few_keys + ", all heads" * all_heads + ", heavy" * heavy
    return _tiles(CHOICES[name], q_heads, k_heads, head_lanes, sequence)


def shares(resident: int, tiles: int, v_tiles: int, blocks: int) -> tuple[int, int]:
    """How many of the `resident` programs walk over the blocks of each head tile of q and k, and of v.

    A block of q or k moves three tiles' bytes, a block of v two: all should end at the same time.
    """
    walkers = max(1, min(blocks, 3 * resident // (3 * tiles + 2 * v_tiles)))
    return walkers, max(1, min(blocks, 2 * walkers // 3))


def _tiles(choice: Choice, q_heads: int, k_heads: int, head_lanes: int, sequence: int) -> Tiles:
    k_heads = max(k_heads, 1)
    if choice.heads:
        q, k = heads_per_tile(q_heads, choice.heads), heads_per_tile(k_heads, choice.heads)
        v = k
    else:
        q, k = next_power_of_2(q_heads), next_power_of_2(k_heads)
        v = heads_per_tile(k_heads, 8)
    lanes = next_power_of_2(head_lanes)
    room = choice.elements * 32 * choice.warps // (q * lanes) if choice.heads else 1
    tokens = _previous_power_of_2(min(room, next_power_of_2(max(sequence, 1))))
    elements = tokens * q * lanes
    # A tile cut short for want of tokens keeps four elements a thread and more.
    warps = min(choice.warps, _previous_power_of_2(elements // (32 * choice.elements if not choice.heads else 128)))
    registers = choice.registers or 128
    return Tiles(tokens, q, k, v, warps, max(REGISTERS // (registers * 32 * warps), 1), choice.registers)


def _previous_power_of_2(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)
