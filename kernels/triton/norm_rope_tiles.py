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
    """How to cut a tile. `elements`: of two bytes, a thread's, padding counted; `registers`: a thread's, at most."""

    heads: int
    elements: int
    warps: int
    registers: int | None = None


CHOICES = {
    # 32+8 95.5 % (v copied: 96.7), separate q and k of Qwen3-8B 97.2, 16+2 92.9; with 16 elements 91.7, 96.4, 92.5
    "forward": Choice(heads=8, elements=32, warps=4),
    # Too few programs for many waves. 32+8, 1024 tokens: 8.1 us, as "forward" 8.3; 256 tokens: 3.2 us, 3.4
    "forward, small": Choice(heads=8, elements=16, warps=4),
    # Gemma 3, heads of 256: 95.4 %; with four warps 80.1
    "forward, wide heads": Choice(heads=8, elements=32, warps=8),
    # GLM-4, 97.0 %; as "forward" 94.8
    "forward, no norm": Choice(heads=8, elements=16, warps=4),
    # The tile is all heads of a token (a norm over the hidden row, one weight row a head). OLMo 2: 94.8 %; with 32
    # elements 91.8, with 8 74.1
    "forward, all heads": Choice(heads=0, elements=64, warps=16),
    # Biases and float64 take registers. Not measured.
    "forward, heavy": Choice(heads=8, elements=16, warps=4),
    "forward, all heads, heavy": Choice(heads=0, elements=16, warps=16),
    # 32+8 94.0 %, Qwen3-8B 96.0, Gemma 3 93.5, Flux 94.2; with eight elements and 64 registers 93.8, 93.7, -, 94.6
    "backward": Choice(heads=4, elements=16, warps=4, registers=128),
    # 32+8, 256 tokens: 7.6 us, as "backward, few keys" 8.4; one token: 3.1 us, 3.2
    "backward, small": Choice(heads=2, elements=8, warps=2),
    # Fewer than four key heads. 16+2 91.1 %; as "backward" 90.5
    "backward, few keys": Choice(heads=2, elements=8, warps=4, registers=64),
    # head_dim 64: 89.7 %; with eight heads a tile 88.3
    "backward, narrow heads": Choice(heads=2, elements=16, warps=4, registers=128),
    # head_dim 80: 80.7 %, 96: 87.5; as "backward" 75 or less and 81.9
    "backward, padded heads": Choice(heads=8, elements=8, warps=4, registers=64),
    # GLM-4, 97.5 %, one-shot like a forward
    "backward, no norm": Choice(heads=8, elements=16, warps=4),
    # OLMo 2: 93.5 %; with eight elements 68 or less
    "backward, all heads": Choice(heads=0, elements=16, warps=16, registers=128),
    # Gradients of biases or tables, and float64. Not measured.
    "backward, heavy": Choice(heads=4, elements=8, warps=4, registers=168),
    "backward, all heads, heavy": Choice(heads=0, elements=4, warps=16),
}

MEASURED_ON = 90
"""The architecture, sm_90. On others a limit of registers is relaxed, so that nothing spills; not measured there."""
RELAXED = {64: 96, 128: 168, 168: 168}


@dataclass(frozen=True)
class Site:
    """What the choice depends on. `head_lanes`: head_dim, padded; `tokens`: of all sequences; `all_heads`: a tile must
    hold all heads of a token; `heavy`: biases, gradients of biases or tables, or float64; `itemsize`: of activations.
    """

    q_heads: int
    k_heads: int
    head_dim: int
    head_lanes: int
    sequence: int
    tokens: int
    all_heads: bool
    norm: bool
    heavy: bool
    itemsize: int
    multiprocessors: int = 132
    architecture: int = MEASURED_ON


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


def forward_tiles(site: Site) -> Tiles:
    """Tiles of the forward."""
    return tiles_of(CHOICES[forward_choice(site)], site)


def backward_tiles(site: Site) -> Tiles:
    """Tiles of the backward."""
    return tiles_of(CHOICES[backward_choice(site)], site)


def forward_choice(site: Site) -> str:
    """The row of `CHOICES`; the first condition that holds."""
    if site.all_heads or site.heavy:
        return "forward" + ", all heads" * site.all_heads + ", heavy" * site.heavy
    if site.head_lanes > 128:
        return "forward, wide heads"
    if not site.norm:
        return "forward, no norm"
    if _programs("forward", site) < 16 * site.multiprocessors:
        return "forward, small"
    return "forward"


def backward_choice(site: Site) -> str:
    """The row of `CHOICES`; the first condition that holds."""
    if site.all_heads or site.heavy:
        return "backward" + ", all heads" * site.all_heads + ", heavy" * site.heavy
    if not site.norm:
        return "backward, no norm"
    if _programs("backward", site) < 16 * site.multiprocessors:
        return "backward, small"
    if site.head_lanes <= 128 and site.head_lanes * 5 > site.head_dim * 6:
        return "backward, padded heads"
    if 0 < site.k_heads < CHOICES["backward"].heads:
        return "backward, few keys"
    if site.head_lanes <= 64:
        return "backward, narrow heads"
    return "backward"


def _programs(name: str, site: Site) -> int:
    """Tiles of all tokens and heads."""
    choice = CHOICES[name]
    return site.tokens * (site.q_heads + site.k_heads) * site.head_lanes // (choice.elements * 32 * choice.warps)


def shares(resident: int, tiles: int, v_tiles: int, blocks: int) -> tuple[int, int]:
    """How many of the `resident` programs walk over the blocks of each head tile of q and k, and of v.

    A block of q or k moves three tiles' bytes, a block of v two: all should end at the same time.
    """
    walkers = max(1, min(blocks, 3 * resident // (3 * tiles + 2 * v_tiles)))
    return walkers, max(1, min(blocks, 2 * walkers // 3))


def tiles_of(choice: Choice, site: Site) -> Tiles:
    """The tile that a choice means for a site."""
    k_heads = max(site.k_heads, 1)
    if choice.heads:
        q, k = heads_per_tile(site.q_heads, choice.heads), heads_per_tile(k_heads, choice.heads)
        v = k
    else:
        q, k = next_power_of_2(site.q_heads), next_power_of_2(k_heads)
        v = heads_per_tile(k_heads, 8)
    lanes = next_power_of_2(site.head_lanes)
    elements = max(2 * choice.elements // max(site.itemsize, 2), 4)
    tokens = 1
    if choice.heads:
        room = elements * 32 * choice.warps // (q * lanes)
        tokens = _previous_power_of_2(min(room, next_power_of_2(max(site.sequence, 1))))
        elements = 4  # a tile that was cut short, for want of tokens, keeps its warps down to four elements a thread
    warps = min(choice.warps, _previous_power_of_2(tokens * q * lanes // (32 * elements)))
    registers = choice.registers
    if registers is not None and site.architecture != MEASURED_ON:
        registers = RELAXED[registers]
    programs = max(REGISTERS // ((registers or 128) * 32 * warps), 1)
    return Tiles(tokens, q, k, v, warps, programs, registers)


def _previous_power_of_2(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)
