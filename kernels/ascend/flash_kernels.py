"""Flash attention forward on cube and vector cores, for the calls that the vendor's operators do not take.

Data flow. One program per cube core. The query blocks of all batches and heads, longest first
(`tiling.Tiling.row_order`), are dealt out to the programs in turn. A program keeps a block of queries and walks over
the keys its rows can see, `COLS` at a time: the cube multiplies, the vector cores take the softmax over the `ROWS x
COLS` scores with the running maximum and sum (Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv
2205.14135), the cube multiplies again. The tile is what both kinds of core can hold at once: the 128 x 1024 step of
the vendor's kernels needs 710 KB of a vector core's 192 KB when Triton-Ascend gets it as one tile, so it is cut here,
explicitly.

Memory traffic, `e` bytes an element, with `K` the keys that a block's rows can see:

    B Hq Sq (2 D e + 4)  +  sum over blocks of 2 K D e        (+ the mask, where there is one)
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def flash_forward_kernel(
    q, k, v, out, lse, row_order, sinks, mask, q_segments, k_segments,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, out_b, out_s, out_h,
    mask_b, mask_h, mask_q, mask_k, q_segment_b, k_segment_b,
    batch_heads, row_blocks, queries, keys, offset, left, right, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, MASK: tl.constexpr, SEGMENTS: tl.constexpr, SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """out [B, Sq, HEADS, D] and lse [B, HEADS, Sq] (contiguous); suffixes name strides, the last axis has stride 1.

    A query `i` sees key `j` when `-left <= j - i - offset <= right` (each side only with LEFT, RIGHT), the segments are
    equal (SEGMENTS) and the mask says so: MASK is none, bool (True: seen) or add (added; -inf: not seen).
    """
    lane = tl.arange(0, D)[None, :]
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    for turn in range((batch_heads * row_blocks - program + programs - 1) // programs):
        index = program + turn * programs
        first = tl.load(row_order + index // batch_heads) * ROWS
        b = ((index % batch_heads) // HEADS).to(tl.int64)
        h = (index % HEADS).to(tl.int64)
        row = first + tl.arange(0, ROWS)
        q_tile = tl.load(q + b * q_b + h * q_h + row[:, None] * q_s + lane, mask=row[:, None] < queries, other=0.0)
        start = 0
        stop = keys
        if LEFT:
            start = tl.maximum(first + offset - left, 0) // COLS * COLS
        if RIGHT:
            stop = tl.minimum(first + ROWS + offset + right, keys)
        maximum = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        if SINKS:
            # One more logit with a value of zero: it is where the sums start.
            maximum = tl.zeros((ROWS,), tl.float32) + tl.load(sinks + h).to(tl.float32)
            total += 1.0
        weighted = tl.zeros((ROWS, D), tl.float32)
        for col0 in range(start, stop, COLS):
            col = col0 + tl.arange(0, COLS)
            inside = col < keys
            k_tile = tl.load(
                k + b * k_b + (h // GROUP) * k_h + col[:, None] * k_s + lane, mask=inside[:, None], other=0.0
            )
            scores = tl.dot(q_tile, tl.trans(k_tile)) * scale
            if SOFTCAP:
                scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
            seen = inside[None, :] & (row[:, None] < queries)
            distance = col[None, :] - row[:, None] - offset
            if LEFT:
                seen = seen & (distance >= 0 - left)
            if RIGHT:
                seen = seen & (distance <= right)
            if MASK != "none":
                address = mask + b * mask_b + h * mask_h + row[:, None] * mask_q + col[None, :] * mask_k
                values = tl.load(address, mask=(row[:, None] < queries) & inside[None, :], other=0)
                if MASK == "bool":
                    seen = seen & (values != 0)
                else:
                    scores = scores + values.to(tl.float32)
            if SEGMENTS:
                mine = tl.load(q_segments + b * q_segment_b + row, mask=row < queries, other=0)
                theirs = tl.load(k_segments + b * k_segment_b + col, mask=inside, other=0)
                seen = seen & (mine[:, None] == theirs[None, :])
            scores = tl.where(seen, scores, float("-inf"))
            larger = tl.maximum(maximum, tl.max(scores, 1))
            # A row that has seen nothing yet has no maximum to subtract.
            base = tl.where(larger == float("-inf"), 0.0, larger)
            weights = tl.exp(scores - base[:, None])
            shrink = tl.exp(maximum - base)
            total = total * shrink + tl.sum(weights, 1)
            v_tile = tl.load(
                v + b * v_b + (h // GROUP) * v_h + col[:, None] * v_s + lane, mask=inside[:, None], other=0.0
            )
            weighted = weighted * shrink[:, None] + tl.dot(weights.to(v_tile.dtype), v_tile)
            maximum = larger
        # Without a key: weighted is 0, total is 0, maximum is -inf.
        divisor = tl.where(total > 0.0, total, 1.0)
        result = weighted / divisor[:, None]
        tl.store(out + b * out_b + h * out_h + row[:, None] * out_s + lane, result.to(out.dtype.element_ty),
                 mask=row[:, None] < queries)  # fmt: skip
        tl.store(lse + (b * HEADS + h) * queries + row, maximum + tl.log(divisor), mask=row < queries)
