"""Flash attention, forward: a program takes BLOCK_M queries of a head and walks over tiles of BLOCK_N keys.

    for each visited key tile:   s = scale log2e q.k       m' = max(m, rowmax s)      p = exp2(s - m')
                                 l = l exp2(m - m') + rowsum p      acc = acc exp2(m - m') + p v        m = m'
    out = acc / l                lse = m ln2 + ln l

Memory traffic of a head, in elements: reads Sq D + (Sq / BLOCK_M) Sk (D + Dv) seen / Sk from the L2 (once from memory
while the keys of the heads in flight fit there), writes Sq Dv + Sq float32. Nothing of size Sq x Sk exists.

A sink is a key of logit `sink` with a zero value row: the running maximum starts there and the sum at 1. A row that
sees no key: l = 0, out = 0, lse = -inf. (Dao, FlashAttention-2, arXiv 2307.08691; the base-2 softmax and the split
into masked and unmasked tiles are standard since.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_common import ADDITIVE_MASK, LN2, LOG2E, block_range, facing_key, hide, segment, tanh


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
    k_segments,
    mask,
    mask_row_stride,
    mask_key_stride,
    mask_floor,
    num_rows,
    num_keys,
    left,
    right,
    score_scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    MASK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
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
        v_ptrs = v_tile + first.to(tl.int64) * v_stride
        k_inside = lane_d[:, None] < HEAD_DIM
        v_inside = lane_v[None, :] < VALUE_DIM
        if MASKED:
            k = tl.load(k_ptrs, mask=k_inside & (key[None, :] < num_keys), other=0.0)
        elif HEAD_DIM != BLOCK_D:
            k = tl.load(k_ptrs, mask=k_inside, other=0.0)
        else:
            k = tl.load(k_ptrs)
        scores = tl.dot(q, k, input_precision=PRECISION)
        factor = 1.0
        if HAS_SOFTCAP:
            scores = softcap * LOG2E * tanh(scores * (score_scale / softcap))
        elif MASK == ADDITIVE_MASK:
            scores = scores * (score_scale * LOG2E)
        else:
            factor = score_scale * LOG2E  # positive: folded into the exponential's multiply-add
        if MASKED:
            scores = hide(
                scores,
                row[:, None],
                key[None, :],
                facing[:, None],
                q_segment[:, None],
                segment(k_segments, key, num_keys, HAS_SEGMENTS)[None, :],
                mask,
                mask_row_stride,
                mask_key_stride,
                mask_floor,
                num_rows,
                num_keys,
                left,
                right,
                HAS_LEFT,
                HAS_RIGHT,
                HAS_SEGMENTS,
                MASK,
            )
        new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
        if MASKED:
            # A row with nothing seen yet: -inf - -inf is NaN, exp2(-inf - 0) is the 0 that is meant.
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        else:
            shift = new_max
        p = tl.exp2(scores * factor - shift[:, None])
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(p, 1)
        acc = acc * decay[:, None]
        if MASKED:
            v = tl.load(v_ptrs, mask=v_inside & (key[:, None] < num_keys), other=0.0)
        elif VALUE_DIM != BLOCK_V:
            v = tl.load(v_ptrs, mask=v_inside, other=0.0)
        else:
            v = tl.load(v_ptrs)
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
    positions,
    q_segments,
    k_segments,
    mask,
    ranges,
    q_batch_stride,
    q_row_stride,
    q_head_stride,
    k_batch_stride,
    k_row_stride,
    k_head_stride,
    v_batch_stride,
    v_row_stride,
    v_head_stride,
    out_batch_stride,
    out_row_stride,
    out_head_stride,
    q_segments_stride,
    k_segments_stride,
    mask_batch_stride,
    mask_head_stride,
    mask_row_stride,
    mask_key_stride,
    mask_floor,
    ranges_batch_stride,
    ranges_head_stride,
    num_rows,
    num_keys,
    num_heads,
    group,
    offset,
    left,
    right,
    score_scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    HAS_RANGES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASK: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGN: tl.constexpr,
):
    # Strides of the [B, S, H, D] tensors come in units of 16 bytes, so that the compiler knows every row to be aligned.
    k_row_stride *= ALIGN
    v_row_stride *= ALIGN
    num_blocks = tl.cdiv(num_rows, BLOCK_M)
    head_of_batch = tl.program_id(0) // num_blocks
    block = tl.program_id(0) % num_blocks
    if HAS_RIGHT:
        block = num_blocks - 1 - block  # causal: the last rows see most, so start them first
    batch = (head_of_batch // num_heads).to(tl.int64)
    head = (head_of_batch % num_heads).to(tl.int64)
    first = block * BLOCK_M
    in_tile = tl.arange(0, BLOCK_M)
    row = first + in_tile
    lane_d = tl.arange(0, BLOCK_D)
    lane_v = tl.arange(0, BLOCK_V)

    q_ptrs = q + (batch * q_batch_stride + head * q_head_stride + first.to(tl.int64) * q_row_stride) * ALIGN
    q_ptrs = q_ptrs + in_tile[:, None] * (q_row_stride * ALIGN) + lane_d[None, :]
    queries = tl.load(q_ptrs, mask=(row[:, None] < num_rows) & (lane_d[None, :] < HEAD_DIM), other=0.0)
    k_base = k + (batch * k_batch_stride + (head // group) * k_head_stride) * ALIGN
    v_base = v + (batch * v_batch_stride + (head // group) * v_head_stride) * ALIGN
    mask_base = mask + batch * mask_batch_stride + head * mask_head_stride
    k_segments_base = k_segments + batch * k_segments_stride

    facing = facing_key(positions, row, num_rows, offset, HAS_POSITIONS)
    q_segment = segment(q_segments + batch * q_segments_stride, row, num_rows, HAS_SEGMENTS)
    begin, full_begin, full_end, end = block_range(
        first,
        offset,
        left,
        right,
        num_rows,
        num_keys,
        ranges + batch * ranges_batch_stride + head * ranges_head_stride + block * 4,
        BLOCK_M,
        BLOCK_N,
        HAS_LEFT and not HAS_POSITIONS,
        HAS_RIGHT and not HAS_POSITIONS,
        HAS_RANGES,
        MASK == ADDITIVE_MASK,
    )

    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        row_max = tl.zeros([BLOCK_M], tl.float32) + sink
        row_sum = tl.where(row_max == float("-inf"), 0.0, tl.full([BLOCK_M], 1.0, tl.float32))
    else:
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)

    for part in tl.static_range(3):
        # Partly seen tiles before the full ones exist only with a left bound or with ranges from the data.
        if part == 1 or part == 2 or HAS_LEFT or HAS_RANGES:
            part_begin = begin if part == 0 else (full_begin if part == 1 else full_end)
            part_end = full_begin if part == 0 else (full_end if part == 1 else end)
            acc, row_max, row_sum = _attend(
                acc,
                row_max,
                row_sum,
                queries,
                k_base,
                v_base,
                k_row_stride,
                v_row_stride,
                part_begin,
                part_end,
                row,
                facing,
                q_segment,
                k_segments_base,
                mask_base,
                mask_row_stride,
                mask_key_stride,
                mask_floor,
                num_rows,
                num_keys,
                left,
                right,
                score_scale,
                softcap,
                HEAD_DIM,
                VALUE_DIM,
                BLOCK_N,
                BLOCK_D,
                BLOCK_V,
                HAS_LEFT,
                HAS_RIGHT,
                HAS_SEGMENTS,
                MASK,
                HAS_SOFTCAP,
                PRECISION,
                part != 1,
            )

    empty = row_sum == 0.0
    acc = acc * tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, row_sum))[:, None]
    row_lse = tl.where(empty, float("-inf"), row_max * LN2 + tl.log(tl.where(empty, 1.0, row_sum)))
    out_ptrs = out + (batch * out_batch_stride + head * out_head_stride + first.to(tl.int64) * out_row_stride) * ALIGN
    out_ptrs = out_ptrs + in_tile[:, None] * (out_row_stride * ALIGN) + lane_v[None, :]
    tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=(row[:, None] < num_rows) & (lane_v[None, :] < VALUE_DIM))
    tl.store(lse + head_of_batch.to(tl.int64) * num_rows + row, row_lse, mask=row < num_rows)
