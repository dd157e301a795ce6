"""A norm over the whole row of q, and over that of k (`norm_scope="hidden"`, OLMo 2): how a block of warps holds all
heads of a token (`source/hidden.cuh`), which rows that takes, and the tiles, as data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..card import H100, H200, Card, nearest
from ..options import Options
from .instance import WIDEST, Access, Constant, heads_per_warp, slot_constants
from .tiles import Tile

MOST_WARPS = {1: 16, 2: 12, 4: 8}
"""By the slots that a thread holds of q or k: what the registers are enough for, 128, 168 and 255 a thread."""
MOST_HEAVY_WARPS = {1: 12, 2: 12, 4: 8}
MOST_BIASED_WARPS = {1: 12, 2: 8}
"""The same of a backward with more to keep: LayerNorm and lanes that change places; gradients of biases, where longer
rows spill."""

FORWARD_WARPS = {1: 10, 2: 10, 4: 8}
"""Of a forward: fewer warps that have more slots each share more instructions. OLMo 2 7B, H200, 16384 tokens: two slots
in eight warps 136.2 us, one in sixteen 149.0, four in four 145.5."""
FORWARD_RESIDENT = {1: 24, 2: 16, 4: 12}
"""Its warps on a multiprocessor, at most."""

STAGED = {H100, H200}
"""Where rows come through shared memory. An H100 has not tried it: `backend="auto"` takes Triton there."""
FEW_BYTES = 2**27
"""Of x. With more a forward has less on its way, because many reads ahead of the writes slow the memory down. 7B, two
blocks of eight warps, by (stages, heads a copy): (2, 1) 136.2 us at 16384 tokens and 19.8 at 2048, (3, 1) 136.6 and
20.1, (2, 4) 149.6 and 20.0, (2, 32) 147.7 and 19.5, (4, 4) 149.8 and 19.1; 4096 tokens: (2, 1) 37.6, (4, 4) 36.5."""
SHARED_BYTES = 192 * 1024
"""Of a multiprocessor, for the slots of all its blocks: the rest is the L1's."""


def over_rows(options: Options) -> bool:
    """There is a norm, and it is over the whole row."""
    return options.norm != "none" and options.norm_scope == "hidden"


def unsupported(options: Options, head_dim: int, heads: Sequence[int], itemsize: int) -> str | None:
    """None, or why the rows of these many heads of q and of k, `itemsize` bytes an element, do not fit."""
    slots = slot_constants(itemsize, head_dim, options)
    if shape(slots, heads) is not None:
        return None
    return (
        f"norm_scope is 'hidden', and the {' + '.join(map(str, heads))} heads of {head_dim} lanes that a token has, "
        f"{itemsize} bytes each, are more than a block holds."
    )


def shape(
    slots: Mapping[str, Constant], heads: Sequence[int], most: Mapping[int, int] = MOST_WARPS
) -> tuple[int, int] | None:
    """(`UNROLL`, warps) of a block that holds a token; None if none does."""
    for unroll in most:
        warps = _warps(slots, heads, unroll)
        if warps <= most.get(unroll * int(slots["CHUNKS"]), 0):
            return unroll, warps
    return None


def forward_tile(
    constants: Mapping[str, Constant],
    accesses: Mapping[str, Access],
    adjoin: bool,
    card: Card = H100,
    few: bool = True,
) -> Tile:
    """For an instance of the forward; without stages a block takes one token. `adjoin`: the heads of a token follow
    each other in memory; `few`: x has less than `FEW_BYTES`."""
    tile = _tile(constants, FORWARD_WARPS, MOST_WARPS if constants["HAS_BIAS"] else FORWARD_RESIDENT)
    # 13B, of which a multiprocessor has room for one block: (3, 4) 173.5 us at 16384 tokens and 24.4 at 2048, (4, 4)
    # 178.9 and 24.0. 32B: (2, 2) 107.6 and 15.9, (2, 4) 110 and 15.5, (3, 4) 119.8 and 15.3.
    stages, a_copy = (4, 4) if few else (2, 1) if tile.blocks > 1 else (3, 4)
    return _staged(tile._replace(stages=stages, heads_a_copy=a_copy), constants, accesses, adjoin, card)


def backward_tile(
    constants: Mapping[str, Constant], accesses: Mapping[str, Access], adjoin: bool, card: Card = H100
) -> Tile:
    """For an instance of the backward."""
    changes_places = constants["READS_ADJACENT"] != constants["WRITES_ADJACENT"]
    heavy = constants["NORM"] == "LAYER" or changes_places
    most = MOST_BIASED_WARPS if constants["NEEDS_BIAS"] else MOST_HEAVY_WARPS if heavy else MOST_WARPS
    tile = _tile(constants, most, most)
    # Halves of rows. 16384 / 2048 tokens, 7B: 197.8 / 31.2 us, quarters 197.0 / 31.8, rows 198.5 / 31.2, with a stage
    # more 214 and above / 32.1. 32B, whose warps are fewer: 151.7 / 23.9, fifths 164.1 / 25.7, rows 158.1 / 23.9, with
    # a stage less 167.4 / 25.6. 13B, two slots a thread: fifths 243 to 251 / 38.8, tenths 276.5 / 42.1.
    halves = -(-_most_heads(constants) // 2)
    a_copy, stages = (halves, 2 if tile.warps * tile.blocks > 12 else 3) if tile.unroll == 1 else (8, 3)
    return _staged(tile._replace(stages=stages, heads_a_copy=a_copy), constants, accesses, adjoin, card)


def blocks(tile: Tile, tokens: int, multiprocessors: int) -> int:
    """As many as are resident at once, of which each walks over tokens."""
    return min(tokens, multiprocessors * tile.blocks)


def shared_bytes(constants: Mapping[str, Constant], accesses: Mapping[str, Access]) -> int:
    """Of an instance's slots in a block."""
    return int(constants["STAGES"]) * _token_bytes(constants, accesses, constants["TABLES"] == "STAGED")


def _staged(
    tile: Tile, constants: Mapping[str, Constant], accesses: Mapping[str, Access], adjoin: bool, card: Card
) -> Tile:
    """With as many of its stages as there is room for, where x and g come by bulk copies; else without."""
    x = accesses["IN_BYTES"]
    tables = (
        constants["ROTATES"]
        and constants["MROPE"] == "NO_MROPE"
        and accesses["TABLE_BYTES"].bytes == WIDEST
        and not constants["GATHER"]
        and not constants["COUNTED"]
    )
    stages = min(tile.stages, SHARED_BYTES // (tile.blocks * _token_bytes(constants, accesses, bool(tables))))
    copied = accesses.get("GRAD_BYTES", x) == x == Access(WIDEST, x.itemsize) and nearest(card, STAGED) is not None
    if not copied or stages < 2:
        return tile._replace(stages=0, heads_a_copy=1)
    # The lanes of a warp make one copy each.
    a_copy = max(tile.heads_a_copy, -(-_kinds(accesses) * _most_heads(constants) // 32)) if adjoin else 1
    return tile._replace(stages=stages, heads_a_copy=a_copy, tables="staged" if tables else "last")


def _most_heads(constants: Mapping[str, Constant]) -> int:
    """Of q or k."""
    return max(int(constants["Q_HEADS"]), int(constants["K_HEADS"]))


def _kinds(accesses: Mapping[str, Access]) -> int:
    """x, or x and g."""
    return 2 if "GRAD_BYTES" in accesses else 1


def _token_bytes(constants: Mapping[str, Constant], accesses: Mapping[str, Access], tables: bool) -> int:
    """Of a token in shared memory; `tables`: each row has the token's cos and sin."""
    heads = [int(constants[name]) for name in ("Q_HEADS", "K_HEADS")]
    of_heads = _kinds(accesses) * sum(heads) * int(constants["HEAD_DIM"]) * accesses["IN_BYTES"].itemsize
    entries = int(constants["ROTARY_DIM"]) // (1 if constants["PER_LANE"] else 2)
    rows = sum(count > 0 for count in heads)
    return of_heads + (2 * rows * entries * accesses["TABLE_BYTES"].itemsize if tables else 0)


def _tile(constants: Mapping[str, Constant], most: Mapping[int, int], resident: Mapping[int, int]) -> Tile:
    """`most`: warps of a block; `resident`: of a multiprocessor."""
    heads = [int(constants["Q_HEADS"]), int(constants["K_HEADS"])]
    found = shape(constants, heads, most) or shape(constants, heads)
    assert found is not None
    unroll, warps = found
    slots = unroll * int(constants["CHUNKS"])
    return Tile(warps, max(1, resident.get(slots, 0) // warps), unroll=unroll)


def _warps(slots: Mapping[str, Constant], heads: Sequence[int], unroll: int) -> int:
    """A warp has heads of one stream."""
    of_a_warp = heads_per_warp(slots) * unroll
    return sum(-(-count // of_a_warp) for count in heads)
