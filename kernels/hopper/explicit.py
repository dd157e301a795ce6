"""Boolean masks that no interval of keys describes, as bits: those that differ from query to query or from head to
head, `[B or 1, Hq or 1, Sq or 1, Sk]`, and any beside `cu_seqlens`.

A small kernel reads the mask once, together with causality, a window and the segments, and writes a bit for every pair,
so that what the attention kernel reads is an eighth of a byte a pair, and only in blocks that are neither hidden nor
seen whole; another finds these. A mask that happens to be causal costs half the square, as a causal call does. Rows of
bits belong to the tokens along the first axis of the scores: to queries in the forward, to keys in the backward.

Every batch, and every head, whose mask differs has a *plane* of bits of its own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ..attention_problem import Visibility
from ..launch import Launch
from .explicit_kernels import BLOCK, WORD, mask_bits, mask_order, mask_ranges
from .rows import Rows, Source, batches, source, steps

_RANGES_WORDS = 32
"""Words of a row that a program of `mask_ranges` looks at together."""


def explicit(seen: Visibility) -> bool:
    """Whether it takes a bit for every pair to say what is seen."""
    mask = seen.mask
    return mask is not None and (mask.shape[1] != 1 or mask.shape[2] != 1 or seen.documents is not None)


def heads_apart(seen: Visibility) -> int:
    """How many heads the mask tells apart: 1 where all share it."""
    return 1 if seen.mask is None else seen.mask.shape[1]


def bits_of_forward(seen: Visibility, num_queries: int, num_keys: int, block_m: int, block_n: int) -> Rows:
    """The bits by query, and for every tile of `block_m` queries its blocks of `block_n` keys."""
    return _bits(seen, num_queries, num_keys, block_m, block_n, order=False, forward=True)


def bits_of_backward(
    seen: Visibility, num_queries: int, num_keys: int, block_m: int, block_n: int, *, order: bool
) -> Rows:
    """The bits by key, and for every block of `block_n` keys its tiles of `block_m` queries. `order`: also how many
    blocks before it meet the same tile."""
    return _bits(seen, num_queries, num_keys, block_m, block_n, order=order, forward=False)


def _bits(
    seen: Visibility, num_queries: int, num_keys: int, block_m: int, block_n: int, *, order: bool, forward: bool
) -> Rows:
    assert seen.mask is not None
    mask = seen.mask.expand(-1, -1, num_queries, num_keys).view(torch.uint8)
    ids = (seen.q_segments, seen.k_segments)
    plan = _plan(
        batches(seen), mask.shape, mask.stride(), *(None if x is None else source(x) for x in ids), mask.device,
        block_m, block_n, seen.offset, seen.left, seen.right, seen.positions is not None, order, forward,
    )  # fmt: skip
    bits, ranges, counts = (torch.empty(shape, dtype=torch.int32, device=mask.device) for shape in plan.shapes)
    q_ids, k_ids, positions = (bits if x is None else x for x in (*ids, seen.positions))
    plan.bits.on((mask, q_ids, k_ids, positions, bits))
    plan.ranges.on((bits, ranges))
    if plan.order is not None:
        plan.order.on((ranges, counts))
    return Rows(bits, bits, bits, ranges, counts)


@dataclass(frozen=True)
class _Plan:
    """The launches for one combination of shapes. `shapes`: of the bits, ranges and order."""

    shapes: tuple[tuple[int, ...], ...]
    bits: Launch
    ranges: Launch
    order: Launch | None


@functools.lru_cache(maxsize=1024)
def _plan(
    batch: int,
    shape: tuple[int, int, int, int],
    strides: tuple[int, int, int, int],
    q_ids: Source | None,
    k_ids: Source | None,
    device: torch.device,
    block_m: int,
    block_n: int,
    offset: int,
    left: int | None,
    right: int | None,
    has_positions: bool,
    order: bool,
    forward: bool,
) -> _Plan:
    mask_batch, heads, num_queries, num_keys = shape
    own, other = (num_queries, num_keys) if forward else (num_keys, num_queries)
    own_block, other_block = (block_m, block_n) if forward else (block_n, block_m)
    block, word = BLOCK.value, WORD.value
    planes = batch * heads
    own_blocks = -(-own // block)
    other_blocks = -(-other // block) + 1  # one more, of zeros: an attention kernel's last block may end in it
    width = other_blocks * block // word
    words = _power_of_2(other_block // word)
    tiles, others = -(-own // own_block), -(-other // other_block)
    int32 = torch.int32
    dtypes = (int32 if x is None else x.dtype for x in (q_ids, k_ids))
    return _Plan(
        shapes=((planes, own_blocks * block, width), (planes, tiles, 4), (planes, others, tiles) if order else (0,)),
        bits=Launch(
            mask_bits, (planes * own_blocks, other_blocks), device, (torch.uint8, *dtypes, int32, int32),
            (
                strides[0] if mask_batch > 1 else 0, strides[1] if heads > 1 else 0, *strides[2:],
                *steps(q_ids), *steps(k_ids), heads, own_blocks, num_queries, num_keys, offset, left or 0, right or 0,
            ),
            {
                "OWN_ARE_KEYS": not forward, "HAS_IDS": q_ids is not None, "HAS_POSITIONS": has_positions,
                "HAS_LEFT": left is not None, "HAS_RIGHT": right is not None,
            },
            num_warps=8,
        ),
        ranges=Launch(
            mask_ranges, (planes * tiles,), device, (int32, int32), (own, other, own_blocks * block, width),
            {
                "FORWARD": forward, "OWN": own_block, "OWN_PADDED": _power_of_2(own_block), "OTHER": other_block,
                "WORDS_PADDED": words, "BLOCKS": _RANGES_WORDS // words,
            },
            num_warps=8,
        ),
        order=Launch(
            mask_order, (planes * others,), device, (int32, int32), (tiles, others),
            {"BLOCKS": _power_of_2(tiles)}, num_warps=4,
        ) if order else None,
    )  # fmt: skip


def _power_of_2(n: int) -> int:
    """The smallest one that is not below `n`."""
    return 1 << (n - 1).bit_length()
