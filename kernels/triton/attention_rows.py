"""What the backward needs of each row of queries before it walks over tiles.

    delta    sum_d grad_out out - grad_lse                   reads out and grad_out once: 2 Sq Dv elements a head
    tail     log(sum over the seen keys of exp(s - lse))     0 but for rounding, and only where the lse is large

`tail` is what is lost of an lse that is large against the sum of the row's exponentials. A row whose keys an additive
mask moves to finfo.min has lse = finfo.min, whatever the number of keys: float32 steps by 2e31 there. exp(s - lse) is
then 1 for each of n keys, instead of 1/n. So for additive masks the sum is taken once more, relative to the stored lse,
for the blocks with such a row (the padding of a batch); the others read their lse and write zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_common import (
    LOG2E,
    block_range,
    facing_key,
    head_pointer,
    hide,
    key_segment,
    load_tile,
    lse_for_backward,
    own_block,
    query_segment,
    scores_of_products,
    tile_pointers,
)

LARGE: tl.constexpr = tl.constexpr(64.0)
"""|lse| from which the tail is taken: below, the rounding of the lse is at most 64 * 2^-24, 4e-6 of a probability."""


@triton.jit
def attention_delta(
    out,
    grad_out,
    grad_lse,
    delta,
    out_strides,
    grad_strides,
    grad_lse_strides,
    sizes,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """delta `[B, Hq, Sq]` float32."""
    block, batch, head = own_block(tl.cdiv(sizes.rows, BLOCK_M), sizes.heads, False)
    first = block * BLOCK_M
    row = first + tl.arange(0, BLOCK_M)
    out_ptrs = tile_pointers(out, out_strides, batch, head, first, BLOCK_M, BLOCK_V, ALIGN)
    grad_ptrs = tile_pointers(grad_out, grad_strides, batch, head, first, BLOCK_M, BLOCK_V, ALIGN)
    product = load_tile(out_ptrs, row, sizes.rows, VALUE_DIM, BLOCK_V, True).to(tl.float32)
    product *= load_tile(grad_ptrs, row, sizes.rows, VALUE_DIM, BLOCK_V, True).to(tl.float32)
    row_delta = tl.sum(product, 1)
    if grad_lse is not None:
        ptrs = grad_lse + batch * grad_lse_strides[0] + head * grad_lse_strides[1]
        ptrs += row.to(tl.int64) * grad_lse_strides[2]
        row_delta -= tl.load(ptrs, mask=row < sizes.rows, other=0.0).to(tl.float32)
    tl.store(delta + (batch * sizes.heads + head) * sizes.rows + row, row_delta, mask=row < sizes.rows)


@triton.jit
def attention_tail(
    q,
    k,
    sinks,
    lse,
    tail,
    q_strides,
    k_strides,
    sight,
    ranges,
    sizes,
    score_scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """tail `[B, Hq, Sq]` float32, for a call with an additive mask."""
    block, batch, head = own_block(tl.cdiv(sizes.rows, BLOCK_M), sizes.heads, False)
    first = block * BLOCK_M
    row = first + tl.arange(0, BLOCK_M)
    statistics = (batch * sizes.heads + head) * sizes.rows + row
    row_lse = lse_for_backward(tl.load(lse + statistics, mask=row < sizes.rows, other=0.0), sight)
    large = (tl.abs(row_lse) >= LARGE) & (row_lse != float("inf"))
    row_tail = tl.zeros([BLOCK_M], tl.float32)
    if tl.max(large.to(tl.int32), 0) == 1:
        q_ptrs = tile_pointers(q, q_strides, batch, head, first, BLOCK_M, BLOCK_D, ALIGN)
        queries = load_tile(q_ptrs, row, sizes.rows, HEAD_DIM, BLOCK_D, True)
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
        in_tile = tl.arange(0, BLOCK_N)
        k_tile = head_pointer(k, k_strides, batch, head // sizes.group, ALIGN)
        k_tile = k_tile + in_tile[:, None] * (k_strides[1] * ALIGN) + tl.arange(0, BLOCK_D)[None, :]
        total = tl.zeros([BLOCK_M], tl.float32)
        if sinks is not None:
            total += tl.exp2((tl.load(sinks + head).to(tl.float32) - row_lse) * LOG2E)
        for other in range(begin, end):
            key = other * BLOCK_N + in_tile
            k_ptrs = k_tile + tl.cast(other, tl.int64) * BLOCK_N * (k_strides[1] * ALIGN)
            keys = load_tile(k_ptrs, key, sizes.keys, HEAD_DIM, BLOCK_D, True)
            products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
            scores, capped = scores_of_products(products, sight, score_scale, softcap)
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
            total += tl.sum(tl.exp2((scores - row_lse[:, None]) * LOG2E), 1)
        row_tail = tl.where(large, tl.log(tl.where(large, total, 1.0)), 0.0)
    tl.store(tail + statistics, row_tail, mask=row < sizes.rows)
