"""Flash attention, forward: a program takes BLOCK_M queries of a head and walks over tiles of BLOCK_N keys.

    for each visited key tile:   s = scale log2e q.k       m' = max(m, rowmax s)      p = exp2(s - m')
                                 l = l exp2(m - m') + rowsum p      acc = acc exp2(m - m') + p v        m = m'
    out = acc / l                lse = m ln2 + ln l

Memory traffic of a head, where a tile of queries visits n keys: reads Sq D elements of q and (Sq / BLOCK_M) n (D + Dv)
of k and v, these from the L2 (once from memory while the keys of the heads in flight fit there); writes Sq Dv elements
and 4 Sq bytes of lse. Nothing of size Sq x Sk exists.

A sink is a key of logit `sink` with a zero value row: the running maximum starts there and the sum at 1. A row that
sees no key: l = 0, out = 0, lse = -inf. (Dao, FlashAttention-2, arXiv 2307.08691; the base-2 softmax and the split
into masked and unmasked tiles are standard since.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_common import (
    LN2,
    LOG2E,
    block_range,
    facing_key,
    head_pointer,
    hide,
    key_segment,
    load_tile,
    own_block,
    part_of_range,
    query_segment,
    tanh,
    tile_pointers,
)


@triton.jit
def _attend(
    acc,
    row_max,
    row_sum,
    q,
    k_base,
    v_base,
    k_stride,
    v_stride,
    begin,
    end,
    row,
    facing,
    q_segment,
    batch,
    head,
    sight,
    sizes,
    score_scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The online softmax over key tiles [begin, end). `MASKED`: a key may be unseen, or lie past the end."""
    lane_d = tl.arange(0, BLOCK_D)
    lane_v = tl.arange(0, BLOCK_V)
    in_tile = tl.arange(0, BLOCK_N)
    k_tile = k_base + in_tile[None, :] * k_stride + lane_d[:, None]
    v_tile = v_base + in_tile[:, None] * v_stride + lane_v[None, :]
    for block in range(begin, end):
        first = block * BLOCK_N
        key = first + in_tile
        k_ptrs = k_tile + first.to(tl.int64) * k_stride
        k_inside = lane_d[:, None] < HEAD_DIM
        if MASKED:
            k = tl.load(k_ptrs, mask=k_inside & (key[None, :] < sizes.keys), other=0.0)
        elif HEAD_DIM != BLOCK_D:
            k = tl.load(k_ptrs, mask=k_inside, other=0.0)
        else:
            k = tl.load(k_ptrs)
        scores = tl.dot(q, k, input_precision=PRECISION)
        factor = 1.0
        unit: tl.constexpr = 1.0 if sight.bias is not None else LOG2E
        if softcap is not None:
            scores = tanh(scores * (score_scale / softcap)) * (softcap * unit)
        elif sight.bias is not None:
            scores = scores * score_scale
        else:
            factor = score_scale * LOG2E  # positive: folded into the exponential's multiply-add
        if MASKED:
            k_segment = key_segment(sight, batch, key, sizes.keys)[None, :]
            scores = hide(
                scores,
                sight,
                sizes,
                batch,
                head,
                row[:, None],
                key[None, :],
                facing[:, None],
                q_segment[:, None],
                k_segment,
            )
        new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
        if MASKED:
            # A row with nothing seen yet: -inf - -inf is NaN, exp2(-inf - 0) is the 0 that is meant.
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        else:
            shift = new_max
        if sight.bias is not None:
            p = tl.exp2((scores - shift[:, None]) * LOG2E)
            decay = tl.exp2((row_max - shift) * LOG2E)
        else:
            p = tl.exp2(scores * factor - shift[:, None])
            decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(p, 1)
        acc = acc * decay[:, None]
        v = load_tile(v_tile + first.to(tl.int64) * v_stride, key, sizes.keys, VALUE_DIM, BLOCK_V, MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def attention_forward(
    q,
    k,
    v,
    out,
    lse,
    sinks,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    sight,
    ranges,
    sizes,
    score_scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGN: tl.constexpr,
):
    num_blocks = tl.cdiv(sizes.rows, BLOCK_M)
    # Causal: the last rows see most, so start them first.
    block, batch, head = own_block(num_blocks, sizes.heads, sight.right is not None)
    first = block * BLOCK_M
    row = first + tl.arange(0, BLOCK_M)

    q_ptrs = tile_pointers(q, q_strides, batch, head, first, BLOCK_M, BLOCK_D, ALIGN)
    queries = load_tile(q_ptrs, row, sizes.rows, HEAD_DIM, BLOCK_D, True)
    k_base = head_pointer(k, k_strides, batch, head // sizes.group, ALIGN)
    v_base = head_pointer(v, v_strides, batch, head // sizes.group, ALIGN)
    facing = facing_key(sight, row, sizes.rows)
    q_segment = query_segment(sight, batch, row, sizes.rows)
    begin, full_begin, full_end, end = block_range(
        first,
        sight.offset,
        sight.left,
        sight.right,
        sizes.rows,
        sizes.keys,
        sight,
        ranges,
        batch,
        head,
        block,
        BLOCK_M,
        BLOCK_N,
    )

    unit: tl.constexpr = 1.0 if sight.bias is not None else LOG2E
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * unit
        row_max = tl.zeros([BLOCK_M], tl.float32) + sink
        row_sum = tl.where(row_max == float("-inf"), 0.0, tl.full([BLOCK_M], 1.0, tl.float32))
    else:
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)

    for part in tl.static_range(3):
        # Partly seen tiles before the full ones exist only with a left bound or with ranges from the data.
        if (part != 0) or (sight.left is not None) or (ranges.blocks is not None):
            part_begin, part_end = part_of_range(part, begin, full_begin, full_end, end)
            acc, row_max, row_sum = _attend(
                acc,
                row_max,
                row_sum,
                queries,
                k_base,
                v_base,
                k_strides[1] * ALIGN,
                v_strides[1] * ALIGN,
                part_begin,
                part_end,
                row,
                facing,
                q_segment,
                batch,
                head,
                sight,
                sizes,
                score_scale,
                softcap,
                HEAD_DIM,
                VALUE_DIM,
                BLOCK_N,
                BLOCK_D,
                BLOCK_V,
                PRECISION,
                part != 1,
            )

    empty = row_sum == 0.0
    acc = acc * tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, row_sum))[:, None]
    largest = row_max if sight.bias is not None else row_max * LN2
    row_lse = tl.where(empty, float("-inf"), largest + tl.log(tl.where(empty, 1.0, row_sum)))
    out_ptrs = tile_pointers(out, out_strides, batch, head, first, BLOCK_M, BLOCK_V, ALIGN)
    inside = (row[:, None] < sizes.rows) & (tl.arange(0, BLOCK_V)[None, :] < VALUE_DIM)
    tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + (batch * sizes.heads + head) * sizes.rows + row, row_lse, mask=row < sizes.rows)
