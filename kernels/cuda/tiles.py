"""How many warps a block has, how many blocks share a multiprocessor, how many heads a warp takes: as data.

Measured on an H100 and on an H200 (docs/cuda.md has the figures), whose faster memory wants more bytes on their way:
what differs between them is keyed by the card, and other cards go by the nearer of the two (`card.nearest`), those of
other architectures by the H100.

`blocks` is the second number of `__launch_bounds__`: it caps a thread's registers at 65536 / (32 warps blocks), and the
backward launches exactly that many blocks a multiprocessor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..card import H100, H200, Card, nearest
from .instance import WIDEST, Access, Constant, heads_per_warp

TABLE_GRADIENT_WARPS = 4

SUM_THREADS, SUM_THREADS_BESIDE_V = 256, 512
"""Of a block of the sums over a backward's rows: a column for each of its warps. H200, beside v, with 256 and 512
threads: 16+2 packed heads 8.98 and 8.24 us at 1024 tokens, 12.47 and 11.71 at 2048, 64.83 and 64.23 at 16384; 32+8
packed heads 21.20 and 20.59, 140.4 and 139.2; heads of 80 13.94 and 13.87, of 64 12.09 and 12.18 (2048)."""

DEFERRED_BYTES = 3 * 2**19
"""So much of dx, of the last tokens, is written beside the sums of a backward without v: what the memory takes while
those wait. Qwen3-8B, 2048 tokens: nothing 26.7 us, 0.6 MB 26.4, 1.3 MB 26.3, 2.6 MB 26.2, 5 MB 27.3; 1024 tokens: 15.8,
15.5, 15.4, 15.7, 16.9. Blocks of four warps gain nothing: interleaved MRoPE 27.6 instead of 27.3."""


class Tile(NamedTuple):
    """`tables`: cos and sin are loaded after the heads ("last"), before them ("first"), once a warp ("handed"; forward
    only) or, where there are stages, a token early ("ahead") or by copies ("staged"). `stages`: tokens whose x and g
    are on their way into shared memory (backward only; 0: they are loaded when it is their turn), by copies of up to
    `heads_a_copy` heads. `unroll`: how many times a warp's heads one warp takes at once; `flat`: these may be of two
    tokens; `prefetches`: what it asks for of a later token, "heads", "tables" or "both"; `keeps`: the tables are to
    stay in the L2 (these four forward only)."""

    warps: int
    blocks: int
    tables: str = "last"
    stages: int = 0
    heads_a_copy: int = 1
    unroll: int = 1
    flat: bool = False
    prefetches: str = ""
    keeps: bool = True


def tile_constants(tile: Tile) -> dict[str, Constant]:
    """The tile, under the names of the sources."""
    return {
        "WARPS": tile.warps,
        "BLOCKS": tile.blocks,
        "UNROLL": tile.unroll,
        "TABLES": tile.tables.upper(),
        "STAGES": tile.stages,
        "HEADS_A_COPY": tile.heads_a_copy,
        "FLAT": tile.flat,
        "PREFETCHES_HEADS": tile.prefetches in ("heads", "both"),
        "PREFETCHES_TABLES": tile.prefetches in ("tables", "both"),
    }


FORWARD = {H100: Tile(4, 6), H200: Tile(2, 12)}
"""H200, 16384 tokens: blocks of two warps take up to 1.2 % less than of four (Gemma 3: 1.4 % more, were it not for its
prefetches), of five, eight and ten 2, 6 and 10 % more: a block makes room only when its last warp ends."""
NARROW_TABLES = {H100: Tile(4, 4, unroll=2), H200: Tile(2, 12, unroll=2)}
"""Forward, entries of the tables read one by one: many loads, which twice as many heads share."""

SHORT_VECTORS = {H200: Tile(2, 12, unroll=3)}
"""Forward, vectors of eight bytes, as half a head of 72 is no multiple of eight lanes: three times as many heads a
warp, which share the tables. H200, 16+16 heads of 72, a token's heads as they come / two times / three times / four
times as many: a rotation alone, 16384 tokens 56.9 / - / 41.0 / 41.0 us (92 % of a copy), with an entry a pair 56.6 / -
/ 39.4 / 39.4, 4096 tokens 15.4 / 10.9 / 10.8 / 10.9; with a norm 56.4 / 51.8 / 48.1 / - (79 %). Loads of 16 bytes,
whose halves threads exchange, gained nothing."""

ROTATIONS = {H200: Tile(2, 12, unroll=2)}
"""Forward without a norm, heads rotated whole and in halves by float32 tables, which twice as many heads share. H200,
16+16 heads with an entry a lane, by blocks of 4 x 4 / twice / three times as many: of 80, 16384 tokens 47.4 / 44.7 /
45.5 us (94 % of a copy), with an entry a pair 44.1 / 42.5 / 42.9, 4096 tokens 12.5 / 11.5 / 12.6; of 128 69.7 / 69.8 /
71.9 and 18.7 / 18.4 / 19.5; of 64, 16384 tokens 35.8 / 35.8 / 36.1."""

HANDED = {H200}
"""Forward with a norm: the tables once a warp, where a head has 4, 8 or 16 lanes. H200, 2048 / 16384 tokens:
interleaved MRoPE 13.36 to 12.66 / 86.25 to 83.80 us, Gemma 3 15.05 to 14.47 / 104.5 to 103.1, Flux 14.11 to 13.95 /
99.4 to 98.5, 32+4 packed 11.23 to 11.20 / 77.8 to 77.0, heads of 64 6.83 to 6.67 / 42.5 to 42.1. Of 5 or 6 lanes: up
to 1 % slower. By blocks of four warps Qwen3-8B 11.81 us instead of 11.85 / 83.2 instead of 83.9, but 32+8 packed
12.28 instead of 12.21 / 86.8 instead of 86.1. Its warps, too, have heads of two tokens (`FLAT`): 16+2 packed 6.67 to
6.53 / 42.06 to 41.53. Tables that no other sequence shares need not stay in the L2: 16+2 42.11 to 41.71 / in training
46.26 to 45.61, others within 0.7 %; Gemma 3, whose four sequences share them, loses 5 % so."""

FLAT = {H200}
"""Forward with a norm: a warp has heads of two tokens where those of one fill no whole number of warps. H200, two runs:
16+16 heads of 80, 2048 tokens 7.34 to 7.18 and 7.26 to 7.10 us, in training 9.74 to 9.53, 1024 tokens 4.49 to 4.42,
4096 12.94 to 12.60 (256: 2.31 to 2.35). One run: 16+16 of 72, 2048 / 8192 tokens 8.63 to 8.43 / 29.49 to 28.70; 28+6 of
112 10.10 to 9.97 / 33.83 to 33.78; 20+4 of 96 and 32+32 of 80 the same. Not with prefetches: 16+16 of 80, 16384 tokens
44.92 to 45.32, 32+32 of 80, 8192 tokens 43.95 to 44.57."""

PREFETCHED_BYTES = {H100: 0, H200: 5 * 2**19}
"""Forward: so much of x lies between what a warp loads and what it prefetches. H200, 16384 tokens, 32+8 packed heads:
88.1 us without, 86.7, 85.8 and 92.0 with 128, 256 and 512 tokens; 64+8: 155.1, 149.5, 154.4 and 188; 16+2: 43.1, 43.5,
42.7 and 42.3. So the best are 2.4 to 2.6 MB, and twice as much is worse than none."""
PREFETCHES_FROM = 48 * 2**20
"""Bytes of x, at least. At 2048 tokens (9 to 38 MB) prefetches cost up to 4 %, and a kernel that has their code and
passes it by 5 to 12 % (heads of 80: 8.2 us, without it 7.2): so there are two. What lies between is not measured."""

STAGES = {H100: 0, H200: 2}
"""Backward. H200, 16384 tokens: Qwen3-8B 126.1 us with two, 139.4 with none; interleaved MRoPE 127.0 and 143.2; three
in blocks of four warps 130.5 and 133.5. An H100, where copies of 16 bytes (`cp.async`) lost, has not tried bulk copies.
"""
FEW_BYTES = 32 * 2**20
"""Backward, H200: tokens are few where x has less. By tables a token early and copies of 256 bytes / tables by copies
and copies of two heads: Qwen3-0.6B, 1024 tokens (6 MB) 9.73 / 8.92 us, 2048 (13 MB) 14.76 / 13.38, 4096 (25 MB) 22.87 /
22.98; Qwen3-8B, 1024 (10 MB) 12.40 / 11.77, 2048 (21 MB) 19.94 / 19.63, 4096 (42 MB) 34.69 / 35.19; Flux 13.83 / 13.35,
22.87 / 22.76, 40.07 / 41.29. Where they do not fit, copies of all heads: Gemma 3 15.22 / 15.06, 24.64 / 24.32."""
STAGED_BYTES = 128
"""Of a head, at least: shorter ones are not measured."""
SHARED_BYTES = 47 * 1024
"""Of a block's slots: less than what a kernel has without asking for more."""


def forward_tile(
    constants: Mapping[str, Constant],
    accesses: Mapping[str, Access],
    acc_bytes: int,
    card: Card = H100,
    prefetches: bool = False,
) -> Tile:
    """For an instance of the forward. `prefetches`: there are enough tokens (`prefetched_tokens`)."""
    tiles = FORWARD if wide_tables(accesses) else NARROW_TABLES
    measured = nearest(card, tiles) or H100
    if measured in ROTATIONS and acc_bytes == 4 and _rotates_whole_heads(constants, accesses):
        return _shared_tables(ROTATIONS[measured], constants)
    words = _words(constants, accesses, acc_bytes)
    if words > 48:
        return Tile(4, 2 if words > 80 else 4)
    tile = tiles[measured]
    if measured in SHORT_VECTORS and _short_vectors(constants, accesses):
        tile = _shared_tables(SHORT_VECTORS[measured], constants)
    if measured in HANDED:
        tile = tile._replace(keeps=bool(constants["BATCHED"]))
        if _hands_tables(constants, accesses):
            tile = _handed(tile, constants, accesses)
    tile = tile._replace(prefetches=_prefetches(constants, accesses, tile) if prefetches else "")
    usual = constants["NORM"] != "NO_NORM" and not constants["GATHER"] and not constants["COUNTED"]
    if measured in FLAT and usual and tile.unroll == 1 and not tile.prefetches:
        tile = tile._replace(flat=_fill_no_whole_warps(constants))
    return tile


def prefetched_tokens(tokens: int, token_bytes: int, card: Card) -> int:
    """How many tokens ahead a forward prefetches, whose x has `token_bytes` each; 0: it does not."""
    ahead = PREFETCHED_BYTES[nearest(card, PREFETCHED_BYTES) or H100] // token_bytes
    return ahead if tokens * token_bytes >= PREFETCHES_FROM else 0


def backward_tile(
    constants: Mapping[str, Constant],
    accesses: Mapping[str, Access],
    acc_bytes: int,
    card: Card = H100,
    packed: bool = False,
    few: bool = False,
) -> Tile:
    """For an instance of the backward. `packed`: v is moved, too. `few`: x has less than `FEW_BYTES`."""
    words = _words(constants, accesses, acc_bytes)
    # Few wide loads go before those of the heads, many narrow ones after them.
    tables = "first" if wide_tables(accesses) else "last"
    if words > 96:
        return Tile(4, 2, tables=tables)
    # Lanes that change places cost registers beyond what is counted.
    if constants["READS_ADJACENT"] != constants["WRITES_ADJACENT"]:
        return Tile(4, 3, tables=tables)
    # A rotation alone is like a forward. Llama: 117.5 us, with (8, 2) 125.6.
    if not constants["HAS_X"]:
        return Tile(4, 6 if words <= 48 else 4, tables=tables)
    stages = STAGES[nearest(card, STAGES) or H100]
    # Entries read one by one, of several sequences of packed heads, would spill.
    if stages and _staged(constants, accesses) and (tables == "first" or not (packed and constants["BATCHED"])):
        # By one, two and four heads a copy, 16384 tokens: 32+8 packed 140.7, 140.1 and 143.3 us, 64+8 240.6, 239.6 and
        # 252.9, 16+2 65.4, 64.1 and 64.4, heads of 64 77.7, 70.2 and 72.5; tables by loads: 145.4, 244.1, 70.4, 70.6.
        copies_tables = tables == "first" and _copies_tables(constants, accesses, stages)
        if packed and copies_tables:
            # Heads of 64, 2048 tokens: 12.1 us, in blocks of eight warps 12.8; 1024 and 4096: the same within 0.6 %.
            short_heads = int(constants["HEAD_DIM"]) * accesses["IN_BYTES"].itemsize <= 128
            return Tile(4, 4, "staged", stages, 16) if few and short_heads else Tile(8, 2, "staged", stages, 2)
        # The same, and tables by copies: Qwen3-8B 124.8, 132.0, 133.4 and 126.8; Flux 148.1, 157.8, 158.1 and 158.0.
        # Why copies of 256 bytes are better than longer ones is not known; of few tokens they are not.
        if tables == "first" and not packed:
            if few:
                return Tile(8, 2, "staged", stages, 2) if copies_tables else Tile(8, 2, "ahead", stages, 16)
            short = -(-256 // (int(constants["HEAD_DIM"]) * accesses["IN_BYTES"].itemsize))
            return Tile(8, 2, "ahead", stages, short)
        return Tile(8, 2, "last", stages, 16)
    # Interleaved MRoPE: (4, 4) 182.8 us, (8, 2) 184.1; sectioned: 201.3 and 200.0. Loading the next token before
    # this one is stored, as Triton's kernel does, was slower for most shapes: Qwen3-8B 189.2 us instead of 180.5.
    # The sums of biases fit into the registers of the latter.
    return Tile(8, 2, tables=tables) if tables == "first" and not constants["NEEDS_BIAS"] else Tile(4, 4, tables=tables)


def deferred_tokens(tokens: int, token_bytes: int) -> int:
    """How many tokens' dx, of `token_bytes` each, is written beside the sums; none where they would be many of them."""
    deferred = DEFERRED_BYTES // token_bytes
    return deferred if 4 * deferred <= tokens else 0


def _prefetches(constants: Mapping[str, Constant], accesses: Mapping[str, Access], tile: Tile) -> str:
    """What of a later token a forward asks for: where it was measured faster, 16384 tokens.

    Tables once a warp, by nothing, the heads and both: 32+8 packed 86.1, 85.0 and 85.7 us, 64+8 152.2, 149.3 and 148.9,
    32+4 78.1, 77.0 and 77.7, 16+2 with heads of two tokens in a warp 41.5, 42.0 and 42.0, Gemma 3 105.8, 103.1 and
    103.8, Flux 98.5, 99.0 and 99.5, interleaved MRoPE 83.8, 87.5 and 88.6.
    Else: entry by entry, interleaved MRoPE 91.8 us, 85.3 with the tables, 88.0 with the heads, 88.6 with both. Wide
    float32 tables: `PREFETCHED_BYTES`; heads of 80 46.4 and 44.6 us. Other tables in two bytes, heads of 64 lanes and
    rotations alone lose up to 2 %.
    """
    if constants["NORM"] == "NO_NORM" or constants["GATHER"] or constants["COUNTED"] or constants["CHUNKS"] != 1:
        return ""
    head_bytes = int(constants["HEAD_DIM"]) * accesses["IN_BYTES"].itemsize
    wide = accesses["TABLE_BYTES"].itemsize == 4 and head_bytes >= 160
    if tile.tables == "handed":
        wide = wide and wide_tables(accesses) and not constants["SPLIT_PAIRS"] and not tile.flat
        return "heads" if wide or head_bytes >= 512 else ""
    if not wide_tables(accesses):
        return "tables"
    return "heads" if head_bytes >= 512 else "both" if wide else ""


def _hands_tables(constants: Mapping[str, Constant], accesses: Mapping[str, Access]) -> bool:
    """A forward's tables may be loaded once a warp: rows that are found without positions, and lanes that take 16 bytes
    of them at a time. Rotations alone gain nothing."""
    lanes = int(constants["HEAD_DIM"]) // (2 * int(constants["PAIRS"]))
    itemsize = accesses["TABLE_BYTES"].itemsize
    per_lane = bool(constants["PER_LANE"])
    entries = int(constants["ROTARY_DIM"]) // (1 if per_lane else 2)
    neighbours = int(constants["PAIRS"]) // (2 if constants["SPLIT_PAIRS"] and not per_lane else 1)
    return (
        bool(constants["ROTATES"])
        and constants["NORM"] != "NO_NORM"
        and not constants["GATHER"]
        and not constants["COUNTED"]
        and lanes in (4, 8, 16)
        and entries * itemsize % WIDEST == 0
        and neighbours * itemsize % WIDEST == 0
    )


def _handed(tile: Tile, constants: Mapping[str, Constant], accesses: Mapping[str, Access]) -> Tile:
    """`tile` with tables once a warp."""
    if tile.unroll > 1:
        return tile._replace(tables="handed")
    if accesses["TABLE_BYTES"].itemsize == 2:
        tile = tile._replace(warps=4, blocks=8)
    return tile._replace(tables="handed", flat=_fill_no_whole_warps(constants))


def _short_vectors(constants: Mapping[str, Constant], accesses: Mapping[str, Access]) -> bool:
    """Of eight bytes, the most that divides half a head."""
    return 2 * int(constants["PAIRS"]) * accesses["IN_BYTES"].itemsize == WIDEST and constants["CHUNKS"] == 1


def _rotates_whole_heads(constants: Mapping[str, Constant], accesses: Mapping[str, Access]) -> bool:
    """And does nothing else, 16 bytes at a time, by rows of float32 that are found without positions."""
    return (
        constants["NORM"] == "NO_NORM"
        and int(constants["PAIRS"]) * accesses["IN_BYTES"].itemsize == WIDEST
        and accesses["IN_BYTES"].itemsize == 2
        and constants["ROTARY_DIM"] == constants["HEAD_DIM"]
        and not (constants["READS_ADJACENT"] or constants["WRITES_ADJACENT"])
        and constants["MROPE"] == "NO_MROPE"
        and not (constants["GATHER"] or constants["COUNTED"])
        and accesses["TABLE_BYTES"].itemsize == 4
        and wide_tables(accesses)
        and constants["CHUNKS"] == 1
    )


def _shared_tables(tile: Tile, constants: Mapping[str, Constant]) -> Tile:
    """`tile`, with no more heads a warp than a token has."""
    heads = int(constants["Q_HEADS"]) + int(constants["K_HEADS"])
    return tile._replace(unroll=min(tile.unroll, -(-heads // heads_per_warp(constants))))


def _fill_no_whole_warps(constants: Mapping[str, Constant]) -> bool:
    """A token's heads."""
    heads, held = int(constants["Q_HEADS"]) + int(constants["K_HEADS"]), heads_per_warp(constants)
    return heads > held and heads % held > 0


def _staged(constants: Mapping[str, Constant], accesses: Mapping[str, Access]) -> bool:
    """x and g come by bulk copies: of whole heads, 16 bytes at a time. Biases and wide tables would cost registers,
    mixed sizes shared memory; a backward without sums is no walk. None of these is measured."""
    x, g = accesses["IN_BYTES"], accesses["GRAD_BYTES"]
    return (
        x == g == Access(WIDEST, x.itemsize)
        and int(constants["HEAD_DIM"]) * x.itemsize >= STAGED_BYTES
        and constants["CHUNKS"] == 1
        and _table_words(constants, accesses) <= 16
        and bool(constants["NEEDS_WEIGHT"])
        and not constants["HAS_BIAS"]
    )


def _copies_tables(constants: Mapping[str, Constant], accesses: Mapping[str, Access], stages: int) -> bool:
    """cos and sin of a token come by bulk copies, too: a row of either, in memory as the caller made it."""
    table = accesses["TABLE_BYTES"]
    entries = int(constants["ROTARY_DIM"]) // (1 if constants["PER_LANE"] else 2)
    slot = 2 * heads_per_warp(constants) * int(constants["HEAD_DIM"]) * accesses["IN_BYTES"].itemsize
    return (
        table.bytes == WIDEST
        and not constants["GATHER"]
        and not constants["COUNTED"]
        and 8 * stages * (slot + 2 * entries * table.itemsize) <= SHARED_BYTES
    )


def wide_tables(accesses: Mapping[str, Access]) -> bool:
    """Entries of the tables are read several at a time."""
    return accesses["TABLE_BYTES"].bytes > accesses["TABLE_BYTES"].itemsize


def _table_words(constants: Mapping[str, Constant], accesses: Mapping[str, Access]) -> int:
    """Registers of cos and of sin, as they lie in memory."""
    lanes = 2 * int(constants["PAIRS"]) * int(constants["CHUNKS"])
    return lanes * accesses["TABLE_BYTES"].itemsize // 4 * (2 if constants["PER_LANE"] else 1)


def _words(constants: Mapping[str, Constant], accesses: Mapping[str, Access], acc_bytes: int) -> int:
    """Registers of what a thread keeps of one head: vectors as they lie in memory, and tiles of the arithmetic."""
    lanes = 2 * int(constants["PAIRS"]) * int(constants["CHUNKS"])

    def raw(name: str) -> int:
        return lanes * accesses[name].itemsize // 4 if name in accesses else 0

    words = raw("IN_BYTES") + raw("GRAD_BYTES") + _table_words(constants, accesses)
    words += raw("PARAM_BYTES") * (bool(constants["HAS_WEIGHT"]) + bool(constants["HAS_BIAS"]))
    tiles = 1 + bool(constants.get("NEEDS_WEIGHT")) + bool(constants.get("NEEDS_BIAS"))
    return words + tiles * lanes * acc_bytes // 4
