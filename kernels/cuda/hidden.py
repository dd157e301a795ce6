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
in eight warps 135.6 us, one in sixteen 149.0, four in four 145.5."""
FORWARD_RESIDENT = {1: 16, 2: 16, 4: 12}
"""Its warps on a multiprocessor, at most."""

STAGES = {H100: (3, 2), H200: (3, 2)}
"""Tokens on their way, forward and backward (one more with several slots a thread, whose slot is filled again a token
later). An H100 has not tried it: `backend="auto"` takes Triton there."""
HEADS_A_COPY = (1, 8)
"""Forward and backward, at most."""
REFILLS_LATE = False
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
    constants: Mapping[str, Constant], accesses: Mapping[str, Access], adjoin: bool, card: Card = H100
) -> Tile:
    """For an instance of the forward; without stages a block takes one token. `adjoin`: the heads of a token follow
    each other in memory."""
    tile = _tile(constants, FORWARD_WARPS, MOST_WARPS if constants["HAS_BIAS"] else FORWARD_RESIDENT)
    return _staged(tile, constants, accesses, adjoin, card)


def backward_tile(
    constants: Mapping[str, Constant], accesses: Mapping[str, Access], adjoin: bool, card: Card = H100
) -> Tile:
    """For an instance of the backward."""
    changes_places = constants["READS_ADJACENT"] != constants["WRITES_ADJACENT"]
    heavy = constants["NORM"] == "LAYER" or changes_places
    most = MOST_BIASED_WARPS if constants["NEEDS_BIAS"] else MOST_HEAVY_WARPS if heavy else MOST_WARPS
    return _staged(_tile(constants, most, most), constants, accesses, adjoin, card)


def blocks(tile: Tile, tokens: int, multiprocessors: int) -> int:
    """As many as are resident at once, of which each walks over tokens."""
    return min(tokens, multiprocessors * tile.blocks)


def shared_bytes(constants: Mapping[str, Constant], accesses: Mapping[str, Access]) -> int:
    """Of an instance's slots in a block."""
    return int(constants["STAGES"]) * _token_bytes(constants, accesses, constants["TABLES"] == "STAGED")


def _staged(
    tile: Tile, constants: Mapping[str, Constant], accesses: Mapping[str, Access], adjoin: bool, card: Card
) -> Tile:
    """With the stages that have room, where x and g come by bulk copies."""
    x = accesses["IN_BYTES"]
    if accesses.get("GRAD_BYTES", x) != x or x != Access(WIDEST, x.itemsize):
        return tile
    # The lanes of a warp make one copy each.
    copies = _kinds(accesses) * max(int(constants["Q_HEADS"]), int(constants["K_HEADS"]))
    kind = _kinds(accesses) - 1
    a_copy = max(HEADS_A_COPY[kind], -(-copies // 32)) if adjoin else 1
    tables = (
        constants["ROTATES"]
        and constants["MROPE"] == "NO_MROPE"
        and accesses["TABLE_BYTES"].bytes == WIDEST
        and not constants["GATHER"]
        and not constants["COUNTED"]
    )
    of_a_token = _token_bytes(constants, accesses, bool(tables))
    measured = nearest(card, STAGES)
    wanted = STAGES[measured][kind] + (kind == 1 and tile.unroll > 1) if measured else 0
    stages = min(wanted, SHARED_BYTES // (tile.blocks * of_a_token))
    if stages < 2:
        return tile
    return tile._replace(stages=stages, heads_a_copy=a_copy, tables="staged" if tables else "last")


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
