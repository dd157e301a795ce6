"""Tile shapes of the attention kernels, as data: per pass, architecture and head_dim.

`benchmarks/tune_attention.py` times them. The rows of sm_90 were measured on an H100 (bfloat16, 4 x 4096 tokens); the
others are guesses that fit the shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tile:
    """`block_m` queries by `block_n` keys, `num_warps` warps a program, `num_stages` tiles in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


PASSES = ("forward", "dq", "dkdv")

# Per pass and architecture: (largest head_dim, tile), ascending. An architecture not listed uses the next lower one's
# row. 80: 163 KiB of shared memory a program; 86: 99 KiB (also sm_89 and sm_120); 90: 227 KiB (also sm_100).
TILES: dict[tuple[str, int], tuple[tuple[int, Tile], ...]] = {
    ("forward", 90): ((64, Tile(128, 64, 4, 3)), (128, Tile(128, 64, 8, 3)), (256, Tile(128, 32, 8, 3))),
    ("forward", 80): ((64, Tile(128, 64, 4, 3)), (128, Tile(128, 64, 8, 3)), (256, Tile(64, 32, 4, 2))),
    ("forward", 86): ((64, Tile(128, 64, 4, 3)), (128, Tile(128, 32, 4, 2)), (256, Tile(64, 32, 4, 1))),
    ("dq", 90): ((64, Tile(64, 64, 4, 3)), (128, Tile(128, 64, 8, 3)), (256, Tile(128, 32, 8, 2))),
    ("dq", 80): ((64, Tile(128, 64, 8, 2)), (128, Tile(64, 64, 4, 2)), (256, Tile(64, 32, 8, 1))),
    ("dq", 86): ((64, Tile(64, 64, 4, 2)), (128, Tile(64, 32, 4, 1)), (256, Tile(32, 32, 4, 1))),
    ("dkdv", 90): ((64, Tile(64, 64, 4, 3)), (128, Tile(64, 128, 8, 3)), (256, Tile(32, 64, 8, 2))),
    ("dkdv", 80): ((64, Tile(64, 128, 8, 2)), (128, Tile(64, 64, 8, 2)), (256, Tile(32, 64, 8, 1))),
    ("dkdv", 86): ((64, Tile(64, 64, 4, 2)), (128, Tile(32, 64, 4, 1)), (256, Tile(32, 32, 4, 1))),
}

# float32 takes twice the space and runs as three TF32 products: small tiles everywhere.
FLOAT32_TILES: tuple[tuple[int, Tile], ...] = (
    (64, Tile(64, 32, 4, 1)),
    (128, Tile(32, 32, 4, 1)),
    (256, Tile(16, 16, 4, 1)),
)


def choose_tile(name: str, architecture: int, head_dim: int, dtype: torch.dtype) -> Tile:
    """The tile of pass `name` for `head_dim` = the larger of q's and v's; `architecture` is 10 major + minor."""
    rows = FLOAT32_TILES
    if dtype != torch.float32:
        family = 86 if architecture in (86, 87, 89) or architecture >= 120 else 90 if architecture >= 90 else 80
        rows = TILES[name, family]
    return next(tile for largest, tile in rows if head_dim <= largest)
