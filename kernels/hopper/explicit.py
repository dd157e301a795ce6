"""Boolean masks that differ from query to query, as bits: `[B or 1, 1, Sq, Sk]`.

A small kernel reads the mask once, together with causality and a window, and writes a bit for every pair, so that what
the attention kernel reads is an eighth of a byte a pair, and only in blocks that are neither hidden nor seen whole;
another finds these. A mask that happens to be causal costs half the square, as a causal call does. Rows of bits belong
to the tokens along the first axis of the scores: to queries in the forward, to keys in the backward.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ..attention_problem import Visibility
from ..launch import Launch
from .explicit_kernels import BLOCK, WORD, mask_bits, mask_order, mask_ranges
from .rows import Rows

_RANGES_WORDS = 32
"""Words of a row that a program of `mask_ranges` looks at together."""


def explicit(seen: Visibility) -> bool:
    """Whether the mask differs from query to query."""
    return seen.mask is not None and seen.mask.shape[2] != 1


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
    mask = seen.mask[:, 0].expand(-1, num_queries, num_keys).view(torch.uint8)
    plan = _plan(
        mask.shape, mask.stride(), mask.device, block_m, block_n, seen.offset, seen.left, seen.right, order, forward
    )
    bits, ranges, counts = (torch.empty(shape, dtype=torch.int32, device=mask.device) for shape in plan.shapes)
    plan.bits.on((mask, bits))
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
    shape: tuple[int, int, int],
    strides: tuple[int, int, int],
    device: torch.device,
    block_m: int,
    block_n: int,
    offset: int,
    left: int | None,
    right: int | None,
    order: bool,
    forward: bool,
) -> _Plan:
    batch, num_queries, num_keys = shape
    own, other = (num_queries, num_keys) if forward else (num_keys, num_queries)
    own_block, other_block = (block_m, block_n) if forward else (block_n, block_m)
    block, word = BLOCK.value, WORD.value
    own_blocks = -(-own // block)
    other_blocks = -(-other // block) + 1  # one more, of zeros: an attention kernel's last block may end in it
    width = other_blocks * block // word
    words = _power_of_2(other_block // word)
    tiles, others = -(-own // own_block), -(-other // other_block)
    int32 = torch.int32
    return _Plan(
        shapes=((batch, own_blocks * block, width), (batch, tiles, 4), (batch, others, tiles) if order else (0,)),
        bits=Launch(
            mask_bits, (own_blocks, other_blocks, batch), device, (torch.uint8, int32),
            (
                strides[0] if batch > 1 else 0, strides[1], strides[2], num_queries, num_keys, offset, left or 0,
                right or 0,
            ),
            {"OWN_ARE_KEYS": not forward, "HAS_LEFT": left is not None, "HAS_RIGHT": right is not None},
            num_warps=8,
        ),
        ranges=Launch(
            mask_ranges, (tiles, batch), device, (int32, int32), (own, other, own_blocks * block, width),
            {
                "FORWARD": forward, "OWN": own_block, "OWN_PADDED": _power_of_2(own_block), "OTHER": other_block,
                "WORDS_PADDED": words, "BLOCKS": _RANGES_WORDS // words,
            },
            num_warps=8,
        ),
        order=Launch(
            mask_order, (others, batch), device, (int32, int32), (tiles, others),
            {"BLOCKS": _power_of_2(tiles)}, num_warps=4,
        ) if order else None,
    )  # fmt: skip


def _power_of_2(n: int) -> int:
    """The smallest one that is not below `n`."""
    return 1 << (n - 1).bit_length()
