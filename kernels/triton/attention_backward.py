"""Flash attention, backward: no atomics, so the gradients have the same bits every time.

    delta    (attention_rows.py)                                                        one program a tile of queries
    dq       for each visited key tile:    s = q k'   p = exp2(scale log2e s - lse)     one program a tile of queries
                                           ds = p (grad_out v' - delta)   dq += ds k
    dk, dv   for each query head of the group, for each visited query tile:             one program a tile of keys
                                           s' = k q'  p' = exp2(...)   dv += p' grad_out
                                           ds' = p' (v grad_out' - delta)   dk += ds' q

Memory traffic: dq, for a tile of M queries that visits n keys: M (2 D + Dv) elements and 8 M bytes, and n (D + Dv)
elements of k and v from the L2. dk and dv, for a tile of N keys: 2 N (D + Dv) elements, and for each query head of the
group and n visited queries n (D + Dv) elements and 8 n bytes of lse and delta, from the L2.

Seven matrix products where one pass with atomic dq would do five: the price of determinism, and of no float32 dq in
memory. The dk/dv pass computes the transposed scores as a product (k q'), never as a transposed accumulator: on
Hopper, Triton 3.4 to 3.7.0 miscompiles a transposed result fed to the next product (fla-org/flash-linear-attention
issue 640).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_common import (
    block_range,
    facing_key,
    head_pointer,
    hide,
    key_segment,
    load_tile,
    lse_for_backward,
    own_block,
    part_of_range,
    probabilities,
    query_segment,
    scores_of_products,
    tile_pointers,
)


@triton.jit
def _accumulate_dq(
    dq,
    q,
    grad_out,
    lse,
    delta,
    tail,
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
    """Add the key tiles [begin, end) to dq (without the factor `scale`)."""
    in_tile = tl.arange(0, BLOCK_N)
    k_tile = k_base + in_tile[:, None] * k_stride + tl.arange(0, BLOCK_D)[None, :]
    v_tile = v_base + in_tile[:, None] * v_stride + tl.arange(0, BLOCK_V)[None, :]
    for block in range(begin, end):
        first = block * BLOCK_N
        key = first + in_tile
        k = load_tile(k_tile + first.to(tl.int64) * k_stride, key, sizes.keys, HEAD_DIM, BLOCK_D, MASKED)
        v = load_tile(v_tile + first.to(tl.int64) * v_stride, key, sizes.keys, VALUE_DIM, BLOCK_V, MASKED)
        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores, capped = scores_of_products(products, sight, score_scale, softcap)
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
        p = probabilities(scores, sight, lse[:, None], tail[:, None])
        dp = tl.dot(grad_out, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        if softcap is not None:
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
    tail,
    dq,
    q_strides,
    k_strides,
    v_strides,
    grad_strides,
    dq_strides,
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
    """`tail`: None without an additive mask."""
    # Causal: the last rows see most, so start them first.
    block, batch, head = own_block(tl.cdiv(sizes.rows, BLOCK_M), sizes.heads, sight.right is not None)
    first = block * BLOCK_M
    row = first + tl.arange(0, BLOCK_M)

    q_ptrs = tile_pointers(q, q_strides, batch, head, first, BLOCK_M, BLOCK_D, ALIGN)
    queries = load_tile(q_ptrs, row, sizes.rows, HEAD_DIM, BLOCK_D, True)
    grad_ptrs = tile_pointers(grad_out, grad_strides, batch, head, first, BLOCK_M, BLOCK_V, ALIGN)
    grads = load_tile(grad_ptrs, row, sizes.rows, VALUE_DIM, BLOCK_V, True)
    statistics = (batch * sizes.heads + head) * sizes.rows + row
    row_lse = lse_for_backward(tl.load(lse + statistics, mask=row < sizes.rows, other=float("-inf")), sight)
    row_delta = tl.load(delta + statistics, mask=row < sizes.rows, other=0.0)
    row_tail = row_delta
    if tail is not None:
        row_tail = tl.load(tail + statistics, mask=row < sizes.rows, other=0.0)
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

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for part in tl.static_range(3):
        # Partly seen tiles before the full ones exist only with a left bound or with ranges from the data.
        if (part != 0) or (sight.left is not None) or (ranges.blocks is not None):
            part_begin, part_end = part_of_range(part, begin, full_begin, full_end, end)
            acc = _accumulate_dq(
                acc,
                queries,
                grads,
                row_lse,
                row_delta,
                row_tail,
                head_pointer(k, k_strides, batch, head // sizes.group, ALIGN),
                head_pointer(v, v_strides, batch, head // sizes.group, ALIGN),
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
    dq_ptrs = tile_pointers(dq, dq_strides, batch, head, first, BLOCK_M, BLOCK_D, ALIGN)
    inside = (row[:, None] < sizes.rows) & (tl.arange(0, BLOCK_D)[None, :] < HEAD_DIM)
    tl.store(dq_ptrs, (acc * score_scale).to(dq.dtype.element_ty), mask=inside)


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
    tail_base,
    q_stride,
    grad_stride,
    begin,
    end,
    key,
    k_segment,
    batch,
    head,
    sight,
    sizes,
    score_scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the query tiles [begin, end) of one head to dk (without the factor `scale`) and dv, transposed."""
    in_tile = tl.arange(0, BLOCK_M)
    q_tile = q_base + in_tile[:, None] * q_stride + tl.arange(0, BLOCK_D)[None, :]
    grad_tile = grad_base + in_tile[:, None] * grad_stride + tl.arange(0, BLOCK_V)[None, :]
    for block in range(begin, end):
        first = block * BLOCK_M
        row = first + in_tile
        q = load_tile(q_tile + first.to(tl.int64) * q_stride, row, sizes.rows, HEAD_DIM, BLOCK_D, MASKED)
        grad_out = load_tile(grad_tile + first.to(tl.int64) * grad_stride, row, sizes.rows, VALUE_DIM, BLOCK_V, MASKED)
        if MASKED:
            lse = tl.load(lse_base + row, mask=row < sizes.rows, other=float("-inf"))
            delta = tl.load(delta_base + row, mask=row < sizes.rows, other=0.0)
        else:
            lse = tl.load(lse_base + row)
            delta = tl.load(delta_base + row)
        tail = delta
        if sight.bias is not None:
            tail = tl.load(tail_base + row, mask=row < sizes.rows, other=0.0)
        products = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        scores, capped = scores_of_products(products, sight, score_scale, softcap)
        if MASKED:
            facing = facing_key(sight, row, sizes.rows)[None, :]
            q_segment = query_segment(sight, batch, row, sizes.rows)[None, :]
            scores = hide(
                scores, sight, sizes, batch, head, row[None, :], key[:, None], facing, q_segment, k_segment[:, None]
            )
        p = probabilities(scores, sight, lse_for_backward(lse, sight)[None, :], tail[None, :])
        dv = tl.dot(p.to(grad_out.dtype), grad_out, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(grad_out), input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        if softcap is not None:
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
    tail,
    dk,
    dv,
    q_strides,
    k_strides,
    v_strides,
    grad_strides,
    dk_strides,
    dv_strides,
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
    """`tail`: None without an additive mask. `sizes.heads` are the key heads."""
    # Causal: the first keys are seen by most rows, and start first.
    block, batch, kv_head = own_block(tl.cdiv(sizes.keys, BLOCK_N), sizes.heads, False)
    first = block * BLOCK_N
    key = first + tl.arange(0, BLOCK_N)

    k_ptrs = tile_pointers(k, k_strides, batch, kv_head, first, BLOCK_N, BLOCK_D, ALIGN)
    keys = load_tile(k_ptrs, key, sizes.keys, HEAD_DIM, BLOCK_D, True)
    v_ptrs = tile_pointers(v, v_strides, batch, kv_head, first, BLOCK_N, BLOCK_V, ALIGN)
    values = load_tile(v_ptrs, key, sizes.keys, VALUE_DIM, BLOCK_V, True)

    acc_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    for member in range(sizes.group):
        head = kv_head * sizes.group + member
        # Seen from a key the diagonal is shifted the other way, and left and right change places.
        begin, full_begin, full_end, end = block_range(
            first,
            -sight.offset,
            sight.right,
            sight.left,
            sizes.keys,
            sizes.rows,
            sight,
            ranges,
            batch,
            head,
            block,
            BLOCK_N,
            BLOCK_M,
        )
        statistics = (batch * sizes.heads * sizes.group + head) * sizes.rows
        tail_base = delta
        if tail is not None:
            tail_base = tail + statistics
        for part in tl.static_range(3):
            # Partly seen tiles before the full ones exist only with a right bound or with ranges from the data.
            if (part != 0) or (sight.right is not None) or (ranges.blocks is not None):
                part_begin, part_end = part_of_range(part, begin, full_begin, full_end, end)
                acc_k, acc_v = _accumulate_dkdv(
                    acc_k,
                    acc_v,
                    keys,
                    values,
                    head_pointer(q, q_strides, batch, head, ALIGN),
                    head_pointer(grad_out, grad_strides, batch, head, ALIGN),
                    lse + statistics,
                    delta + statistics,
                    tail_base,
                    q_strides[1] * ALIGN,
                    grad_strides[1] * ALIGN,
                    part_begin,
                    part_end,
                    key,
                    key_segment(sight, batch, key, sizes.keys),
                    batch,
                    head,
                    sight,
                    sizes,
                    score_scale,
                    softcap,
                    HEAD_DIM,
                    VALUE_DIM,
                    BLOCK_M,
                    BLOCK_D,
                    BLOCK_V,
                    PRECISION,
                    part != 1,
                )
    dk_ptrs = tile_pointers(dk, dk_strides, batch, kv_head, first, BLOCK_N, BLOCK_D, ALIGN)
    inside = (key[:, None] < sizes.keys) & (tl.arange(0, BLOCK_D)[None, :] < HEAD_DIM)
    tl.store(dk_ptrs, (acc_k * score_scale).to(dk.dtype.element_ty), mask=inside)
    dv_ptrs = tile_pointers(dv, dv_strides, batch, kv_head, first, BLOCK_N, BLOCK_V, ALIGN)
    inside = (key[:, None] < sizes.keys) & (tl.arange(0, BLOCK_V)[None, :] < VALUE_DIM)
    tl.store(dv_ptrs, acc_v.to(dv.dtype.element_ty), mask=inside)
