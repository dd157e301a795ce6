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
from torch import Tensor

from ..attention_problem import Visibility
from ..launch import Launch
from .explicit_kernels import BLOCK, WORD, mask_bits, mask_order, mask_ranges
from .rows import Rows, Source, batches, source, steps

BLOCK_TOKENS: int = BLOCK.value
"""Own tokens, and tokens of the other side, of a program that reads the mask."""
_WORD: int = WORD.value
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
    conditions = Conditions.of(seen, num_queries, num_keys)
    tiling = Tiling.of(conditions, mask.shape[1], block_m, block_n, forward)
    plan = _plan(tiling, mask.stride(), conditions, mask.device, order)
    bits, ranges, counts = (torch.empty(shape, dtype=torch.int32, device=mask.device) for shape in plan.shapes)
    plan.bits.on((mask, *conditions.tensors(seen, bits), bits))
    plan.ranges.on((bits, bits, ranges))
    if plan.order is not None:
        plan.order.on((ranges, counts))
    return Rows(bits, bits, bits, ranges, counts)


@dataclass(frozen=True)
class Conditions:
    """What the small kernels need to know of the conditions beside the mask, but for addresses."""

    batches: int
    """Batches that the mask, or another condition, tells apart."""
    mask_batches: int
    num_queries: int
    num_keys: int
    q_ids: Source | None
    k_ids: Source | None
    has_positions: bool
    offset: int
    left: int | None
    right: int | None

    @classmethod
    def of(cls, seen: Visibility, num_queries: int, num_keys: int) -> Conditions:
        """Of a call with a mask."""
        assert seen.mask is not None
        q_ids, k_ids = (None if x is None else source(x) for x in (seen.q_segments, seen.k_segments))
        return cls(
            batches(seen), seen.mask.shape[0], num_queries, num_keys, q_ids, k_ids, seen.positions is not None,
            seen.offset, seen.left, seen.right,
        )  # fmt: skip

    @staticmethod
    def tensors(seen: Visibility, none: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Segment ids of queries and keys, and positions; `none` where there are none."""
        q_ids, k_ids, positions = (none if x is None else x for x in (seen.q_segments, seen.k_segments, seen.positions))
        return q_ids, k_ids, positions

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """Of `tensors`."""
        q_ids, k_ids = (torch.int32 if x is None else x.dtype for x in (self.q_ids, self.k_ids))
        return q_ids, k_ids, torch.int32

    def strides(self, mask: tuple[int, ...]) -> tuple[int, ...]:
        """Of a mask `[B or 1, Hq or 1, Sq, Sk]` with the strides `mask`, and of the ids."""
        return (mask[0] if self.mask_batches > 1 else 0, *mask[1:], *steps(self.q_ids), *steps(self.k_ids))

    @property
    def numbers(self) -> tuple[int, ...]:
        """Lengths and the bounds of causality and a window."""
        return self.num_queries, self.num_keys, self.offset, self.left or 0, self.right or 0

    @property
    def constants(self) -> dict[str, bool]:
        """Which of them there are."""
        return {
            "HAS_IDS": self.q_ids is not None, "HAS_POSITIONS": self.has_positions,
            "HAS_LEFT": self.left is not None, "HAS_RIGHT": self.right is not None,
        }  # fmt: skip


@dataclass(frozen=True)
class _Plan:
    """The launches for one combination of shapes. `shapes`: of the bits, ranges and order."""

    shapes: tuple[tuple[int, ...], ...]
    bits: Launch
    ranges: Launch
    order: Launch | None


@functools.lru_cache(maxsize=1024)
def _plan(tiling: Tiling, strides: tuple[int, ...], conditions: Conditions, device: torch.device, order: bool) -> _Plan:
    int32 = torch.int32
    return _Plan(
        shapes=(tiling.bits, tiling.ranges, tiling.order if order else (0,)),
        bits=Launch(
            mask_bits, tiling.grid, device, (torch.uint8, *conditions.dtypes, int32),
            (*conditions.strides(strides), tiling.heads, tiling.own_blocks, *conditions.numbers),
            {"OWN_ARE_KEYS": not tiling.forward, **conditions.constants}, num_warps=8,
        ),
        ranges=tiling.launch_ranges(device),
        order=tiling.launch_order(device) if order else None,
    )  # fmt: skip


@dataclass(frozen=True)
class Tiling:
    """Shapes of the arrays, and the launches that find which tiles meet."""

    forward: bool
    planes: int
    heads: int
    """Planes of a batch."""
    own: int
    """Tokens along the first axis of the scores."""
    other: int
    own_tile: int
    other_tile: int

    @classmethod
    def of(cls, conditions: Conditions, heads: int, block_m: int, block_n: int, forward: bool) -> Tiling:
        """`block_m`, `block_n`: queries and keys of a tile of the attention kernel."""
        sizes = (conditions.num_queries, conditions.num_keys), (block_m, block_n)
        (own, other), tile = sizes if forward else (x[::-1] for x in sizes)
        return cls(forward, conditions.batches * heads, heads, own, other, *tile)

    @property
    def own_blocks(self) -> int:
        """Blocks of the kernels that read the mask."""
        return -(-self.own // BLOCK_TOKENS)

    @property
    def other_blocks(self) -> int:
        """As `own_blocks`."""
        return -(-self.other // BLOCK_TOKENS)

    @property
    def grid(self) -> tuple[int, int]:
        """Of those kernels. One block more, of zeros: an attention kernel's last block of others may end in it."""
        return self.planes * self.own_blocks, self.other_blocks + 1

    @property
    def bits(self) -> tuple[int, int, int]:
        """Words."""
        return self.planes, self.own_blocks * BLOCK_TOKENS, (self.other_blocks + 1) * BLOCK_TOKENS // _WORD

    @property
    def ranges(self) -> tuple[int, int, int]:
        """See `Rows`."""
        return self.planes, -(-self.own // self.own_tile), 4

    @property
    def order(self) -> tuple[int, int, int]:
        """See `mask_order`."""
        return self.planes, -(-self.other // self.other_tile), self.ranges[1]

    def launch_ranges(self, device: torch.device, flags_plane: int = 0) -> Launch:
        """Pointers: bits, flags, ranges. `flags_plane`: elements of a plane of flags; 0: there are none."""
        words = _power_of_2(self.other_tile // _WORD)
        return Launch(
            mask_ranges, (self.planes * self.ranges[1],), device, [torch.int32] * 3,
            (self.own, self.other, *self.bits[1:], flags_plane),
            {
                "FORWARD": self.forward, "HAS_FLAGS": flags_plane > 0, "OWN": self.own_tile,
                "OWN_PADDED": _power_of_2(self.own_tile), "OTHER": self.other_tile, "WORDS_PADDED": words,
                "BLOCKS": _RANGES_WORDS // words,
            },
            num_warps=8,
        )  # fmt: skip

    def launch_order(self, device: torch.device) -> Launch:
        """Pointers: ranges, order."""
        _, tiles, blocks = self.order
        return Launch(
            mask_order, (self.planes * tiles,), device, [torch.int32] * 2, (blocks, tiles),
            {"BLOCKS": _power_of_2(blocks)}, num_warps=4,
        )  # fmt: skip


def _power_of_2(n: int) -> int:
    """The smallest one that is not below `n`."""
    return 1 << (n - 1).bit_length()
