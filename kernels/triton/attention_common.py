"""What the attention kernels share: which keys a tile may see, which tiles to visit, and the softcap.

Scores are kept in units of log2 (multiplied by log2 e), so that every exponential is one `exp2`. All helpers
broadcast: a tile of scores is [queries, keys] in the forward and in the dq pass, [keys, queries] in the dk/dv pass,
and `row`, `key`, `facing`, `q_segment`, `k_segment` come as a column or as a row accordingly.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)

NO_MASK: tl.constexpr = tl.constexpr(0)
BOOLEAN_MASK: tl.constexpr = tl.constexpr(1)
ADDITIVE_MASK: tl.constexpr = tl.constexpr(2)


@triton.jit
def facing_key(positions, row, num_rows, offset, HAS_POSITIONS: tl.constexpr):
    """The key on each query's diagonal."""
    if HAS_POSITIONS:
        return tl.load(positions + row, mask=row < num_rows, other=0)
    else:
        return row + offset


@triton.jit
def segment(segments, token, num_tokens, HAS_SEGMENTS: tl.constexpr):
    if HAS_SEGMENTS:
        return tl.load(segments + token, mask=token < num_tokens, other=0)
    else:
        return token  # never read


@triton.jit
def hide(
    scores,
    row,
    key,
    facing,
    q_segment,
    k_segment,
    mask,
    mask_row_stride,
    mask_key_stride,
    mask_floor,
    num_rows,
    num_keys,
    left,
    right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    MASK: tl.constexpr,
):
    """Scores (log2 units) with an additive mask added and every unseen key at -inf."""
    seen = key < num_keys
    if HAS_RIGHT:
        seen = seen & (key - facing <= right)
    if HAS_LEFT:
        seen = seen & (facing - key <= left)
    if HAS_SEGMENTS:
        seen = seen & (q_segment == k_segment)
    if MASK != NO_MASK:
        inside = (row < num_rows) & (key < num_keys)
        value = tl.load(
            mask + row.to(tl.int64) * mask_row_stride + key.to(tl.int64) * mask_key_stride, mask=inside, other=0
        )
        if MASK == BOOLEAN_MASK:
            seen = seen & (value != 0)
        else:
            value = value.to(tl.float32)
            seen = seen & (value > mask_floor)
            scores += value * LOG2E
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def block_range(
    first,
    offset,
    before,
    after,
    num_own,
    num_other,
    ranges,
    OWN: tl.constexpr,
    OTHER: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    HAS_RANGES: tl.constexpr,
    ALL_MASKED: tl.constexpr,
):
    """(begin, full_begin, full_end, end): the other side's blocks that the own block from token `first` on meets.

    Own token `t` faces other token `t + offset` and sees from `before` tokens before that to `after` tokens after it.
    Blocks in [full_begin, full_end) are seen whole by every own token: no mask is needed there. `ranges` are four
    such numbers per own block, for what only the data knows (segments, masks); both are intersected.
    """
    begin, end = 0, tl.cdiv(num_other, OTHER)
    full_begin, full_end = 0, num_other // OTHER
    lowest = first + offset
    if HAS_AFTER:
        last = tl.minimum(first + OWN, num_own) - 1 + offset
        end = tl.minimum(end, tl.cdiv(tl.maximum(last + after + 1, 0), OTHER))
        full_end = tl.minimum(full_end, tl.maximum(lowest + after + 1, 0) // OTHER)
    if HAS_BEFORE:
        begin = tl.maximum(lowest - before, 0) // OTHER
        full_begin = tl.cdiv(tl.maximum(lowest + OWN - 1 - before, 0), OTHER)
    if HAS_RANGES:
        begin = tl.maximum(begin, tl.load(ranges))
        full_begin = tl.maximum(full_begin, tl.load(ranges + 1))
        full_end = tl.minimum(full_end, tl.load(ranges + 2))
        end = tl.minimum(end, tl.load(ranges + 3))
    if ALL_MASKED:
        full_end = 0
    end = tl.maximum(end, begin)
    full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
    full_end = tl.minimum(tl.maximum(full_end, full_begin), end)
    return begin, full_begin, full_end, end


@triton.jit
def tanh(x):
    """tanh to a few units in the last place of float32: 1 - exp would cancel near 0, so a series there.

    The first term left out is below 1382/155925 x^11, 3e-9 of x at the switch.
    """
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    decay = tl.exp2(-2 * LOG2E * tl.abs(x))
    closed = (1 - decay) / (1 + decay)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -closed, closed))
