"""The small kernels behind `additive.py`, in plain Triton.

    row_shifts     the number that every row is shifted by                       reads the mask once
    mask_values    bits of what is seen, and the numbers in the order of the     reads the mask once, writes an eighth
                   threads that add them, where there are any but 0              of a byte a pair, and the numbers

*Order of the threads*: the scores of 16 x 16 pairs (a unit) are 8 registers of the 32 threads of a warp (the
accumulator of wgmma). The unit's numbers lie thread by thread, so that a thread loads its 8 as one vector, or two.
"""

import triton
import triton.language as tl

from .explicit_kernels import BLOCK, FLAG, pairs_of_program, seen_beside, store_bits

_LARGE = tl.constexpr(64.0)
"""Rows whose largest number is below in magnitude need no shift: float32 adds it to a score with an error of 4e-6."""
_ORDINARY = tl.constexpr(-1e7)
"""See `attention_problem.row_floors`."""


@triton.jit
def row_shifts(
    mask, q_ids, k_ids, positions, shifts,
    mask_batch, mask_head, mask_row, mask_key, q_batch, q_step, k_batch, k_step,
    heads, blocks, num_queries, num_keys, offset, left, right,
    HAS_IDS: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Grid (planes * blocks of ROWS queries,). `shifts`: float32 [planes, blocks * ROWS]."""
    plane = tl.program_id(0) // blocks
    b = (plane // heads).to(tl.int64)
    h = (plane % heads).to(tl.int64)
    row = (tl.program_id(0) - plane * blocks) * ROWS + tl.arange(0, ROWS)
    line = mask + b * mask_batch + h * mask_head + row.to(tl.int64)[:, None] * mask_row
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    for start in range(0, num_keys, KEYS):
        key = start + tl.arange(0, KEYS)
        inside = (row < num_queries)[:, None] & (key < num_keys)[None, :]
        number = tl.load(line + key.to(tl.int64)[None, :] * mask_key, mask=inside, other=float("-inf")).to(tl.float32)
        seen = seen_beside(
            inside, row[:, None], key[None, :], b, q_ids, k_ids, positions, q_batch, q_step, k_batch, k_step,
            num_queries, num_keys, offset, left, right, HAS_IDS, HAS_POSITIONS, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        largest = tl.maximum(largest, tl.max(tl.where(seen, number, float("-inf")), 1))
    shifted = (tl.abs(largest) >= _LARGE) & (largest != float("-inf"))
    tl.store(shifts + plane.to(tl.int64) * blocks * ROWS + row, tl.where(shifted, largest, 0.0))


@triton.jit
def mask_values(
    mask, q_ids, k_ids, positions, bits, values, extra, flags,
    mask_batch, mask_head, mask_row, mask_key, q_batch, q_step, k_batch, k_step,
    heads, own_blocks, extra_plane, num_queries, num_keys, offset, left, right, floor,
    OWN_ARE_KEYS: tl.constexpr, HAS_IDS: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Grid and `bits`: as `mask_bits`. `values`: [planes, own tokens / 16, others / 16, 256], written where a number
    counts. `extra` and `flags` are one buffer, [planes, extra_plane], as float32 and int32: the shifts of the padded
    queries, then a flag for every FLAG x FLAG pairs: 1 where a number counts.

    `floor`: a number at or below it hides its key from a row that has an ordinary number.
    """
    plane, b, own, row, key, inside, at = pairs_of_program(
        mask, mask_batch, mask_head, mask_row, mask_key, heads, own_blocks, num_queries, num_keys, OWN_ARE_KEYS
    )
    number = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    mine = plane.to(tl.int64) * extra_plane
    shift = tl.load(extra + mine + row, mask=row < num_queries, other=0.0)
    seen = seen_beside(
        inside, row, key, b, q_ids, k_ids, positions, q_batch, q_step, k_batch, k_step,
        num_queries, num_keys, offset, left, right, HAS_IDS, HAS_POSITIONS, HAS_LEFT, HAS_RIGHT,
    )  # fmt: skip
    # Not `number > floor`: a NaN must stay.
    seen = seen & ~(number <= tl.where(shift > _ORDINARY, floor, float("-inf")))
    store_bits(bits, plane, own_blocks, own, seen)
    # The last block of others is one past the end: it has bits, but no flags and no numbers.
    blocks = tl.num_programs(1) - 1
    if tl.program_id(1) < blocks:
        PARTS: tl.constexpr = BLOCK // FLAG
        block = tl.program_id(0) - plane * own_blocks
        counts = (seen & ((number != 0.0) | (shift != 0.0))).to(tl.int32)
        flag = tl.max(tl.max(tl.reshape(counts, [PARTS, FLAG, PARTS, FLAG]), 3), 1)
        part = tl.arange(0, PARTS)
        place = (block * PARTS + part)[:, None] * (blocks * PARTS) + (tl.program_id(1) * PARTS + part)[None, :]
        shifts = tl.cdiv(num_queries, BLOCK) * BLOCK  # stand first
        tl.store(flags + mine + shifts + place, flag)
        if tl.max(tl.max(counts, 1), 0) != 0:
            UNITS: tl.constexpr = BLOCK // 16
            units = tl.reshape(tl.where(seen, number, 0.0), [UNITS, 2, 8, UNITS, 2, 4, 2])
            ordered = tl.reshape(tl.permute(units, (0, 3, 2, 5, 4, 1, 6)), [UNITS, UNITS, 256])
            unit = tl.arange(0, UNITS)
            of_own = (plane.to(tl.int64) * own_blocks + block) * UNITS + unit
            of_other = tl.program_id(1) * UNITS + unit
            to = (of_own[:, None] * (blocks * UNITS) + of_other[None, :])[:, :, None] * 256 + tl.arange(0, 256)[
                None, None, :
            ]
            tl.store(values + to, ordered.to(values.dtype.element_ty))
