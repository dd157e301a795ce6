"""How many warps a block has, how many blocks share a multiprocessor, how many heads a warp takes: as data.

Measured on an H100 (docs/cuda.md has the figures).

`blocks` is the second number of `__launch_bounds__`: it caps a thread's registers at 65536 / (32 warps blocks), and the
backward launches exactly that many blocks a multiprocessor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .instance import Access, Constant

TABLE_GRADIENT_WARPS = 4

DEFERRED_BYTES = 3 * 2**19
"""So much of dx, of the last tokens, is written beside the sums of a backward without v: what the memory takes while
those wait. Qwen3-8B, 2048 tokens: nothing 26.7 us, 0.6 MB 26.4, 1.3 MB 26.3, 2.6 MB 26.2, 5 MB 27.3; 1024 tokens: 15.8,
15.5, 15.4, 15.7, 16.9. Blocks of four warps gain nothing: interleaved MRoPE 27.6 instead of 27.3."""


class Tile(NamedTuple):
    """`unroll`: how many times a warp's heads one warp takes at once (forward only). `tables_first`: cos and sin are
    loaded before the heads."""

    warps: int
    blocks: int
    unroll: int = 1
    tables_first: bool = False


def forward_tile(constants: Mapping[str, Constant], accesses: Mapping[str, Access], acc_bytes: int) -> Tile:
    """For an instance of the forward."""
    words = _words(constants, accesses, acc_bytes)
    if words > 80:
        return Tile(4, 2)
    # Entries that are read one by one are many loads: twice as many heads share them.
    if words <= 48 and not _wide(accesses):
        return Tile(4, 4, unroll=2)
    return Tile(4, 6) if words <= 48 else Tile(4, 4)


def backward_tile(constants: Mapping[str, Constant], accesses: Mapping[str, Access], acc_bytes: int) -> Tile:
    """For an instance of the backward."""
    words = _words(constants, accesses, acc_bytes)
    # Few wide loads go before those of the heads, many narrow ones after them.
    first = _wide(accesses)
    if words > 96:
        return Tile(4, 2, tables_first=first)
    # Lanes that change places cost registers beyond what is counted.
    if constants["READS_ADJACENT"] != constants["WRITES_ADJACENT"]:
        return Tile(4, 3, tables_first=first)
    # A rotation alone is like a forward. Llama: 117.5 us, with (8, 2) 125.6.
    if not constants["HAS_X"]:
        return Tile(4, 6 if words <= 48 else 4, tables_first=first)
    # Interleaved MRoPE: (4, 4) 182.8 us, (8, 2) 184.1; sectioned: 201.3 and 200.0. Loading the next token before
    # this one is stored, as Triton's kernel does, was slower for most shapes: Qwen3-8B 189.2 us instead of 180.5.
    return Tile(8, 2, tables_first=first) if first else Tile(4, 4, tables_first=first)


def deferred_tokens(tokens: int, token_bytes: int) -> int:
    """How many tokens' dx, of `token_bytes` each, is written beside the sums; none where they would be many of them."""
    deferred = DEFERRED_BYTES // token_bytes
    return deferred if 4 * deferred <= tokens else 0


def _wide(accesses: Mapping[str, Access]) -> bool:
    """Entries of the tables are read several at a time."""
    return accesses["TABLE_BYTES"].bytes > accesses["TABLE_BYTES"].itemsize


def _words(constants: Mapping[str, Constant], accesses: Mapping[str, Access], acc_bytes: int) -> int:
    """Registers of what a thread keeps of one head: vectors as they lie in memory, and tiles of the arithmetic."""
    lanes = 2 * int(constants["PAIRS"]) * int(constants["CHUNKS"])

    def raw(name: str) -> int:
        return lanes * accesses[name].itemsize // 4 if name in accesses else 0

    entries = 2 if constants["PER_LANE"] else 1
    words = raw("IN_BYTES") + raw("GRAD_BYTES") + raw("TABLE_BYTES") * entries
    words += raw("PARAM_BYTES") * (bool(constants["HAS_WEIGHT"]) + bool(constants["HAS_BIAS"]))
    tiles = 1 + bool(constants.get("NEEDS_WEIGHT")) + bool(constants.get("NEEDS_BIAS"))
    return words + tiles * lanes * acc_bytes // 4
