"""Flash attention, backward: three kernels, no atomics, so the gradients have the same bits every time.

    delta    delta = sum_d grad_out out - grad_lse                                      one program a tile of queries
    dq       for each visited key tile:    s = q k'   p = exp2(scale log2e s - lse)     one program a tile of queries
                                           ds = p (grad_out v' - delta)   dq += ds k
    dk, dv   for each query head of the group, for each visited query tile:             one program a tile of keys
                                           s' = k q'  p' = exp2(...)   dv += p' grad_out
                                           ds' = p' (v grad_out' - delta)   dk += ds' q

Seven matrix products where one pass with atomic dq would do five: the price of determinism, and of no float32 dq in
memory. The dk/dv pass computes the transposed scores as a product (k q'), never as a transposed accumulator: on
Hopper, Triton 3.4 to 3.7.0 miscompiles a transposed result fed to the next product (fla-org/flash-linear-attention
issue 640).

A row that sees no key has lse = -inf and is read as +inf: every p of it is 0, and so is its gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_common import ADDITIVE_MASK, LOG2E, block_range, facing_key, hide, segment, tanh


@triton.jit
def attention_delta(
    out,
    grad_out,
    grad_lse,
    delta,
    out_batch_stride,
    out_row_stride,
    out_head_stride,
    grad_batch_stride,
    grad_row_stride,
    grad_head_stride,
    grad_lse_batch_stride,
    grad_lse_head_stride,
    grad_lse_row_stride,
    num_rows,
    num_heads,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """delta `[B, Hq, Sq]` float32. Reads out and grad_out once: 2 Sq Dv elements a head."""
    num_blocks = tl.cdiv(num_rows, BLOCK_M)
    head_of_batch = (tl.program_id(0) // num_blocks).to(tl.int64)
    batch = head_of_batch // num_heads
    head = head_of_batch % num_heads
    row = (tl.program_id(0) % num_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    lane = tl.arange(0, BLOCK_V)
    inside = (row[:, None] < num_rows) & (lane[None, :] < VALUE_DIM)
    row64 = row.to(tl.int64)
    out_ptrs = out + (batch * out_batch_stride + head * out_head_stride + row64[:, None] * out_row_stride) * ALIGN
    out_ptrs = out_ptrs + lane[None, :]
    grad_ptrs = (
        grad_out + (batch * grad_batch_stride + head * grad_head_stride + row64[:, None] * grad_row_stride) * ALIGN
    )
    grad_ptrs = grad_ptrs + lane[None, :]
    product = tl.load(out_ptrs, mask=inside, other=0.0).to(tl.float32)
    product *= tl.load(grad_ptrs, mask=inside, other=0.0).to(tl.float32)
    row_delta = tl.sum(product, 1)
    if HAS_GRAD_LSE:
        ptrs = grad_lse + batch * grad_lse_batch_stride + head * grad_lse_head_stride + row64 * grad_lse_row_stride
        row_delta -= tl.load(ptrs, mask=row < num_rows, other=0.0).to(tl.float32)
    tl.store(delta + head_of_batch * num_rows + row, row_delta, mask=row < num_rows)


@triton.jit
def _accumulate_dq(
    dq,
    q,
    grad_out,
    lse,
    delta,
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
    """Add the key tiles [begin, end) to dq (without the factor `scale`)."""
    lane_d = tl.arange(0, BLOCK_D)
    lane_v = tl.arange(0, BLOCK_V)
    in_tile = tl.arange(0, BLOCK_N)
    k_tile = k_base + in_tile[:, None] * k_stride + lane_d[None, :]
    v_tile = v_base + in_tile[:, None] * v_stride + lane_v[None, :]
    for block in range(begin, end):
        first = block * BLOCK_N
        key = first + in_tile
        k_ptrs = k_tile + first.to(tl.int64) * k_stride
        v_ptrs = v_tile + first.to(tl.int64) * v_stride
        k_inside = lane_d[None, :] < HEAD_DIM
        v_inside = lane_v[None, :] < VALUE_DIM
        if MASKED:
            k = tl.load(k_ptrs, mask=k_inside & (key[:, None] < num_keys), other=0.0)
            v = tl.load(v_ptrs, mask=v_inside & (key[:, None] < num_keys), other=0.0)
        else:
            k = tl.load(k_ptrs) if HEAD_DIM == BLOCK_D else tl.load(k_ptrs, mask=k_inside, other=0.0)
            v = tl.load(v_ptrs) if VALUE_DIM == BLOCK_V else tl.load(v_ptrs, mask=v_inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if HAS_SOFTCAP:
            capped = tanh(scores * (score_scale / softcap))
            scores = softcap * LOG2E * capped
        else:
            scores = scores * (score_scale * LOG2E)
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
        p = tl.exp2(scores - lse[:, None])
        dp = tl.dot(grad_out, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        if HAS_SOFTCAP:
            ds = ds * (1 - capped * capped)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def attention_dq(
    q,
    k,
    v,
    grad_out,
    lse,
    delta,
    dq,
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
    grad_batch_stride,
    grad_row_stride,
    grad_head_stride,
    dq_batch_stride,
    dq_row_stride,
    dq_head_stride,
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
    first64 = first.to(tl.int64)
    in_tile = tl.arange(0, BLOCK_M)
    row = first + in_tile
    lane_d = tl.arange(0, BLOCK_D)
    lane_v = tl.arange(0, BLOCK_V)
    q_inside = (row[:, None] < num_rows) & (lane_d[None, :] < HEAD_DIM)
    v_inside = (row[:, None] < num_rows) & (lane_v[None, :] < VALUE_DIM)

    q_base = q + (batch * q_batch_stride + head * q_head_stride + first64 * q_row_stride) * ALIGN
    queries = tl.load(q_base + in_tile[:, None] * (q_row_stride * ALIGN) + lane_d[None, :], mask=q_inside, other=0.0)
    grad_base = grad_out + (batch * grad_batch_stride + head * grad_head_stride + first64 * grad_row_stride) * ALIGN
    grads = tl.load(
        grad_base + in_tile[:, None] * (grad_row_stride * ALIGN) + lane_v[None, :], mask=v_inside, other=0.0
    )
    statistics = head_of_batch.to(tl.int64) * num_rows + row
    row_lse = tl.load(lse + statistics, mask=row < num_rows, other=float("inf"))
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse * LOG2E)
    row_delta = tl.load(delta + statistics, mask=row < num_rows, other=0.0)
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

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for part in tl.static_range(3):
        # Partly seen tiles before the full ones exist only with a left bound or with ranges from the data.
        if part == 1 or part == 2 or HAS_LEFT or HAS_RANGES:
            acc = _accumulate_dq(
                acc,
                queries,
                grads,
                row_lse,
                row_delta,
                k + (batch * k_batch_stride + (head // group) * k_head_stride) * ALIGN,
                v + (batch * v_batch_stride + (head // group) * v_head_stride) * ALIGN,
                k_row_stride,
                v_row_stride,
                begin if part == 0 else (full_begin if part == 1 else full_end),
                full_begin if part == 0 else (full_end if part == 1 else end),
                row,
                facing,
                q_segment,
                k_segments + batch * k_segments_stride,
                mask + batch * mask_batch_stride + head * mask_head_stride,
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
    dq_base = dq + (batch * dq_batch_stride + head * dq_head_stride + first64 * dq_row_stride) * ALIGN
    dq_ptrs = dq_base + in_tile[:, None] * (dq_row_stride * ALIGN) + lane_d[None, :]
    tl.store(dq_ptrs, (acc * score_scale).to(dq.dtype.element_ty), mask=q_inside)


@triton.jit
def _accumulate_dkdv(
    dk,
    dv,
    k,
    v,
    q_base,
    grad_base,
    lse_base,
    delta_base,
    q_stride,
    grad_stride,
    begin,
    end,
    key,
    k_segment,
    positions,
    q_segments,
    mask,
    mask_row_stride,
    mask_key_stride,
    mask_floor,
    num_rows,
    num_keys,
    offset,
    left,
    right,
    score_scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    MASK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the query tiles [begin, end) of one head to dk (without the factor `scale`) and dv, transposed."""
    lane_d = tl.arange(0, BLOCK_D)
    lane_v = tl.arange(0, BLOCK_V)
    in_tile = tl.arange(0, BLOCK_M)
    q_tile = q_base + in_tile[:, None] * q_stride + lane_d[None, :]
    grad_tile = grad_base + in_tile[:, None] * grad_stride + lane_v[None, :]
    for block in range(begin, end):
        first = block * BLOCK_M
        row = first + in_tile
        q_ptrs = q_tile + first.to(tl.int64) * q_stride
        grad_ptrs = grad_tile + first.to(tl.int64) * grad_stride
        q_inside = lane_d[None, :] < HEAD_DIM
        v_inside = lane_v[None, :] < VALUE_DIM
        if MASKED:
            q = tl.load(q_ptrs, mask=q_inside & (row[:, None] < num_rows), other=0.0)
            grad_out = tl.load(grad_ptrs, mask=v_inside & (row[:, None] < num_rows), other=0.0)
            lse = tl.load(lse_base + row, mask=row < num_rows, other=float("inf"))
            delta = tl.load(delta_base + row, mask=row < num_rows, other=0.0)
        else:
            q = tl.load(q_ptrs) if HEAD_DIM == BLOCK_D else tl.load(q_ptrs, mask=q_inside, other=0.0)
            grad_out = tl.load(grad_ptrs) if VALUE_DIM == BLOCK_V else tl.load(grad_ptrs, mask=v_inside, other=0.0)
            lse = tl.load(lse_base + row)
            delta = tl.load(delta_base + row)
        lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if HAS_SOFTCAP:
            capped = tanh(scores * (score_scale / softcap))
            scores = softcap * LOG2E * capped
        else:
            scores = scores * (score_scale * LOG2E)
        if MASKED:
            scores = hide(
                scores,
                row[None, :],
                key[:, None],
                facing_key(positions, row, num_rows, offset, HAS_POSITIONS)[None, :],
                segment(q_segments, row, num_rows, HAS_SEGMENTS)[None, :],
                k_segment[:, None],
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
        p = tl.exp2(scores - lse[None, :])
        dv = tl.dot(p.to(grad_out.dtype), grad_out, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(grad_out), input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        if HAS_SOFTCAP:
            ds = ds * (1 - capped * capped)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def attention_dkdv(
    q,
    k,
    v,
    grad_out,
    lse,
    delta,
    dk,
    dv,
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
    grad_batch_stride,
    grad_row_stride,
    grad_head_stride,
    dk_batch_stride,
    dk_row_stride,
    dk_head_stride,
    dv_batch_stride,
    dv_row_stride,
    dv_head_stride,
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
    num_kv_heads,
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
    q_row_stride *= ALIGN  # strides come in units of 16 bytes, as in attention_dq
    grad_row_stride *= ALIGN
    num_blocks = tl.cdiv(num_keys, BLOCK_N)
    head_of_batch = tl.program_id(0) // num_blocks
    block = tl.program_id(0) % num_blocks  # causal: the first keys are seen by most rows, and start first
    batch = (head_of_batch // num_kv_heads).to(tl.int64)
    kv_head = (head_of_batch % num_kv_heads).to(tl.int64)
    first = block * BLOCK_N
    first64 = first.to(tl.int64)
    in_tile = tl.arange(0, BLOCK_N)
    key = first + in_tile
    lane_d = tl.arange(0, BLOCK_D)
    lane_v = tl.arange(0, BLOCK_V)
    k_inside = (key[:, None] < num_keys) & (lane_d[None, :] < HEAD_DIM)
    v_inside = (key[:, None] < num_keys) & (lane_v[None, :] < VALUE_DIM)

    k_base = k + (batch * k_batch_stride + kv_head * k_head_stride + first64 * k_row_stride) * ALIGN
    keys = tl.load(k_base + in_tile[:, None] * (k_row_stride * ALIGN) + lane_d[None, :], mask=k_inside, other=0.0)
    v_base = v + (batch * v_batch_stride + kv_head * v_head_stride + first64 * v_row_stride) * ALIGN
    values = tl.load(v_base + in_tile[:, None] * (v_row_stride * ALIGN) + lane_v[None, :], mask=v_inside, other=0.0)
    k_segment = segment(k_segments + batch * k_segments_stride, key, num_keys, HAS_SEGMENTS)

    acc_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    for member in range(group):
        head = kv_head * group + member
        # Seen from a key the diagonal is shifted the other way, and left and right change places.
        begin, full_begin, full_end, end = block_range(
            first,
            -offset,
            right,
            left,
            num_keys,
            num_rows,
            ranges + batch * ranges_batch_stride + head * ranges_head_stride + block * 4,
            BLOCK_N,
            BLOCK_M,
            HAS_RIGHT and not HAS_POSITIONS,
            HAS_LEFT and not HAS_POSITIONS,
            HAS_RANGES,
            MASK == ADDITIVE_MASK,
        )
        statistics = (batch * num_kv_heads * group + head) * num_rows
        for part in tl.static_range(3):
            # Partly seen tiles before the full ones exist only with a right bound or with ranges from the data.
            if part == 1 or part == 2 or HAS_RIGHT or HAS_RANGES:
                acc_k, acc_v = _accumulate_dkdv(
                    acc_k,
                    acc_v,
                    keys,
                    values,
                    q + (batch * q_batch_stride + head * q_head_stride) * ALIGN,
                    grad_out + (batch * grad_batch_stride + head * grad_head_stride) * ALIGN,
                    lse + statistics,
                    delta + statistics,
                    q_row_stride,
                    grad_row_stride,
                    begin if part == 0 else (full_begin if part == 1 else full_end),
                    full_begin if part == 0 else (full_end if part == 1 else end),
                    key,
                    k_segment,
                    positions,
                    q_segments + batch * q_segments_stride,
                    mask + batch * mask_batch_stride + head * mask_head_stride,
                    mask_row_stride,
                    mask_key_stride,
                    mask_floor,
                    num_rows,
                    num_keys,
                    offset,
                    left,
                    right,
                    score_scale,
                    softcap,
                    HEAD_DIM,
                    VALUE_DIM,
                    BLOCK_M,
                    BLOCK_D,
                    BLOCK_V,
                    HAS_LEFT,
                    HAS_RIGHT,
                    HAS_POSITIONS,
                    HAS_SEGMENTS,
                    MASK,
                    HAS_SOFTCAP,
                    PRECISION,
                    part != 1,
                )
    dk_base = dk + (batch * dk_batch_stride + kv_head * dk_head_stride + first64 * dk_row_stride) * ALIGN
    dk_ptrs = dk_base + in_tile[:, None] * (dk_row_stride * ALIGN) + lane_d[None, :]
    tl.store(dk_ptrs, (acc_k * score_scale).to(dk.dtype.element_ty), mask=k_inside)
    dv_base = dv + (batch * dv_batch_stride + kv_head * dv_head_stride + first64 * dv_row_stride) * ALIGN
    dv_ptrs = dv_base + in_tile[:, None] * (dv_row_stride * ALIGN) + lane_v[None, :]
    tl.store(dv_ptrs, acc_v.to(dv.dtype.element_ty), mask=v_inside)
