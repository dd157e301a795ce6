"""A norm over the whole row of q, and over that of k (`norm_scope="hidden"`, OLMo 2): how a block of warps holds all
heads of a token (`source/hidden.cuh`), which rows that takes, and the tiles, as data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..card import H100, H200, Card, nearest
from ..options import Options
from .instance import WIDEST, Access, Constant, heads_per_warp, slot_constants
from .tiles import Tile, wide_tables

MOST_WARPS = {1: 16, 2: 12, 4: 8}
"""By the slots that a thread holds of q or k: what the registers are enough for, 128, 168 and 255 a thread."""
MOST_HEAVY_WARPS = {1: 12, 2: 12, 4: 8}
"""The same of a backward with more to keep: LayerNorm, biases, lanes that change places."""

STAGES = {H100: 0, H200: 3}
"""Tokens on their way. An H100 has not tried it."""
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


def forward_tile(constants: Mapping[str, Constant], accesses: Mapping[str, Access], card: Card = H100) -> Tile:
    """For an instance of the forward; without stages a block takes one token."""
    return _staged(_tile(constants, MOST_WARPS), constants, accesses, 1, card)


def backward_tile(constants: Mapping[str, Constant], accesses: Mapping[str, Access], card: Card = H100) -> Tile:
    """For an instance of the backward."""
    changes_places = constants["READS_ADJACENT"] != constants["WRITES_ADJACENT"]
    heavy = constants["NORM"] == "LAYER" or constants["NEEDS_BIAS"] or changes_places
    return _staged(_tile(constants, MOST_HEAVY_WARPS if heavy else MOST_WARPS), constants, accesses, 2, card)


def blocks(tile: Tile, tokens: int, multiprocessors: int) -> int:
    """As many as are resident at once, of which each walks over tokens."""
    return min(tokens, multiprocessors * tile.blocks)


def shared_bytes(instance_constants: Mapping[str, Constant], itemsize: int, kinds: int) -> int:
    """Of a block's slots; `kinds`: x, or x and g."""
    return int(instance_constants["STAGES"]) * _token_bytes(instance_constants, itemsize, kinds)


def _staged(
    tile: Tile, constants: Mapping[str, Constant], accesses: Mapping[str, Access], kinds: int, card: Card
) -> Tile:
    """With the stages that have room, where x and g come by bulk copies."""
    x = accesses["IN_BYTES"]
    heads = heads_per_warp(constants) * tile.unroll
    if accesses.get("GRAD_BYTES", x) != x or x != Access(WIDEST, x.itemsize) or kinds * heads > 32:
        return tile
    of_a_token = _token_bytes({**constants, "WARPS": tile.warps, "UNROLL": tile.unroll}, x.itemsize, kinds)
    stages = min(STAGES[nearest(card, STAGES) or H100], SHARED_BYTES // (tile.blocks * of_a_token))
    if stages < 2:
        return tile
    return tile._replace(stages=stages, tables="ahead" if wide_tables(accesses) else "last")


def _token_bytes(constants: Mapping[str, Constant], itemsize: int, kinds: int) -> int:
    """Of a token in shared memory."""
    heads = int(constants["WARPS"]) * int(constants["UNROLL"]) * heads_per_warp(constants)
    return kinds * heads * int(constants["HEAD_DIM"]) * itemsize


def _tile(constants: Mapping[str, Constant], most: Mapping[int, int]) -> Tile:
    """As many blocks as the registers have room for."""
    found = shape(constants, [int(constants["Q_HEADS"]), int(constants["K_HEADS"])], most)
    assert found is not None
    unroll, warps = found
    return Tile(warps, most[unroll * int(constants["CHUNKS"])] // warps, unroll=unroll)


def _warps(slots: Mapping[str, Constant], heads: Sequence[int], unroll: int) -> int:
    """A warp has heads of one stream."""
    of_a_warp = heads_per_warp(slots) * unroll
    return sum(-(-count // of_a_warp) for count in heads)
