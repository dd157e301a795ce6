"""What the attention kernels share: their arguments, which keys a tile may see, which tiles to visit, and the softcap.

An absent condition is None: the kernel compiled for it has no code for the condition.

Scores are kept in units of log2 (multiplied by log2 e), so that every exponential is one `exp2`; with an additive mask
in natural units, because the values that libraries write for "not seen" (finfo.min) do not survive a multiplication.
All helpers broadcast: a tile of scores is [queries, keys] in the forward and in the dq pass, [keys, queries] in the
dk/dv pass, and what is known of queries and keys comes as a column or as a row accordingly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# Tensors stand on the left of constants: in the interpreter of Triton 3.8 a constant times a tensor is a constant.
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


class Sight(NamedTuple):
    """`Visibility` as a kernel argument. `mask` (bytes) and `bias` (added) are never both given; None: absent.

    The strides stand one by one: of a tuple within this one Triton 3.6 loses a constant (a stride of 1) when `left` and
    `right` are both given, and does not compile.
    """

    positions: Any
    q_segments: Any
    k_segments: Any
    mask: Any
    bias: Any
    q_segments_stride: int
    k_segments_stride: int
    mask_batch_stride: int
    mask_head_stride: int
    mask_row_stride: int
    mask_key_stride: int
    offset: int
    left: int | None
    right: int | None


class Ranges(NamedTuple):
    """The tiles to visit, where only the data knows (`attention_ranges.py`), with the strides of batch and head."""

    blocks: Any
    batch_stride: int
    head_stride: int


class Sizes(NamedTuple):
    """`heads` are those of the grid, `group` the query heads a key head."""

    rows: int
    keys: int
    heads: int
    group: int


@triton.jit
def own_block(num_blocks, num_heads, LAST_FIRST: tl.constexpr):
    """(block, batch, head) of this program. Blocks of a head are neighbours, so they share its keys in the L2."""
    block = tl.program_id(0) % num_blocks
    if LAST_FIRST:
        block = num_blocks - 1 - block
    head_of_batch = (tl.program_id(0) // num_blocks).to(tl.int64)
    return block, head_of_batch // num_heads, head_of_batch % num_heads


@triton.jit
def head_pointer(x, strides, batch, head, ALIGN: tl.constexpr):
    """The first row of one head. Strides come in units of 16 bytes: so the compiler knows every row to be aligned."""
    return x + (batch * strides[0] + head * strides[2]) * ALIGN


@triton.jit
def tile_pointers(x, strides, batch, head, first, TOKENS: tl.constexpr, LANES: tl.constexpr, ALIGN: tl.constexpr):
    """Pointers to the rows from token `first` on, [TOKENS, LANES]."""
    base = head_pointer(x, strides, batch, head, ALIGN) + first.to(tl.int64) * (strides[1] * ALIGN)
    return base + tl.arange(0, TOKENS)[:, None] * (strides[1] * ALIGN) + tl.arange(0, LANES)[None, :]


@triton.jit
def facing_key(sight, row, num_rows):
    """The key on each query's diagonal."""
    if sight.positions is not None:
        return tl.load(sight.positions + row, mask=row < num_rows, other=0)
    else:
        return row + sight.offset


@triton.jit
def query_segment(sight, batch, row, num_rows):
    """The segment ids of queries; the queries, which nobody reads, where there are none."""
    if sight.q_segments is not None:
        return tl.load(sight.q_segments + batch * sight.q_segments_stride + row, mask=row < num_rows, other=0)
    else:
        return row


@triton.jit
def key_segment(sight, batch, key, num_keys):
    """The segment ids of keys, as `query_segment`."""
    if sight.k_segments is not None:
        return tl.load(sight.k_segments + batch * sight.k_segments_stride + key, mask=key < num_keys, other=0)
    else:
        return key


@triton.jit
def hide(scores, sight, sizes, batch, head, row, key, facing, q_segment, k_segment):
    """Scores with an additive mask added and every unseen key at -inf."""
    seen = key < sizes.keys
    if sight.right is not None:
        seen = seen & (key - facing <= sight.right)
    if sight.left is not None:
        seen = seen & (facing - key <= sight.left)
    if sight.q_segments is not None:
        seen = seen & (q_segment == k_segment)
    if (sight.mask is not None) or (sight.bias is not None):
        inside = (row < sizes.rows) & (key < sizes.keys)
        offset = batch * sight.mask_batch_stride + head * sight.mask_head_stride
        offset = offset + row.to(tl.int64) * sight.mask_row_stride + key.to(tl.int64) * sight.mask_key_stride
        if sight.mask is not None:
            seen = seen & (tl.load(sight.mask + offset, mask=inside, other=0) != 0)
        else:
            scores += tl.load(sight.bias + offset, mask=inside, other=0).to(tl.float32)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def scores_of_products(products, sight, score_scale, softcap):
    """(scores, tanh of the cap) of products q.k: scaled and capped, in the unit of this call. No cap: scores twice."""
    unit: tl.constexpr = 1.0 if sight.bias is not None else LOG2E
    if softcap is not None:
        capped = tanh(products * (score_scale / softcap))
        return capped * (softcap * unit), capped
    else:
        scores = products * (score_scale * unit)
        return scores, scores


@triton.jit
def probabilities(scores, sight, lse, tail):
    """exp(scores - lse); `lse` is in the unit of the scores, +inf in a row that sees nothing.

    With an additive mask `tail` is what float32 has lost of a large lse (`attention_rows.py`).
    """
    if sight.bias is not None:
        return tl.exp2((scores - lse - tail) * LOG2E)
    else:
        return tl.exp2(scores - lse)


@triton.jit
def lse_for_backward(lse, sight):
    """A stored lse in the unit of the scores. A row that sees nothing, -inf, becomes +inf: all its p are 0 then."""
    if sight.bias is not None:
        return tl.where(lse == float("-inf"), float("inf"), lse)
    else:
        return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)


@triton.jit
def block_range(
    first,
    offset,
    before,
    after,
    num_own,
    num_other,
    sight,
    ranges,
    batch,
    head,
    block,
    OWN: tl.constexpr,
    OTHER: tl.constexpr,
):
    """(begin, full_begin, full_end, end): the other side's blocks that the own block from token `first` on meets.

    Own token `t` faces other token `t + offset` and sees from `before` tokens before that to `after` tokens after it.
    Blocks in [full_begin, full_end) are seen whole by every own token: no mask is needed there. `ranges` are four
    such numbers per own block, for what only the data knows (segments, masks); both are intersected.
    """
    begin, end = 0, tl.cdiv(num_other, OTHER)
    full_begin, full_end = 0, num_other // OTHER
    if sight.positions is None:
        lowest = first + offset
        if after is not None:
            last = tl.minimum(first + OWN, num_own) - 1 + offset
            end = tl.minimum(end, tl.cdiv(tl.maximum(last + after + 1, 0), OTHER))
            full_end = tl.minimum(full_end, tl.maximum(lowest + after + 1, 0) // OTHER)
        if before is not None:
            begin = tl.maximum(lowest - before, 0) // OTHER
            full_begin = tl.cdiv(tl.maximum(lowest + OWN - 1 - before, 0), OTHER)
    if ranges.blocks is not None:
        four = ranges.blocks + batch * ranges.batch_stride + head * ranges.head_stride + block * 4
        begin = tl.maximum(begin, tl.load(four))
        full_begin = tl.maximum(full_begin, tl.load(four + 1))
        full_end = tl.minimum(full_end, tl.load(four + 2))
        end = tl.minimum(end, tl.load(four + 3))
    if sight.bias is not None:
        full_end = 0  # every score has a number to be added
    end = tl.maximum(end, begin)
    full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
    full_end = tl.minimum(tl.maximum(full_end, full_begin), end)
    return begin, full_begin, full_end, end


@triton.jit
def part_of_range(part: tl.constexpr, begin, full_begin, full_end, end):
    """The blocks of one of the three loops: partly seen, seen whole (part 1), partly seen."""
    if part == 0:
        return begin, full_begin
    elif part == 1:
        return full_begin, full_end
    else:
        return full_end, end


@triton.jit
def load_tile(ptrs, token, num_tokens, LANES: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Rows [tokens, lanes]; 0 past the lanes and, `MASKED`, past the tokens."""
    lane = tl.arange(0, PADDED)[None, :]
    if MASKED:
        return tl.load(ptrs, mask=(lane < LANES) & (token[:, None] < num_tokens), other=0.0)
    elif LANES != PADDED:
        return tl.load(ptrs, mask=lane < LANES, other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def tanh(x):
    """tanh to a few units in the last place of float32: 1 - exp would cancel near 0, so a series there.

    The first term left out is below 1382/155925 x^11, 3e-9 of x at the switch.
    """
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    decay = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    closed = (1 - decay) / (1 + decay)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -closed, closed))
