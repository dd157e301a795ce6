"""The norm + rotation kernels: one forward, one backward, for all of `docs/operators.md`.

Data flow and memory traffic, for T tokens, Hq + Hk heads of D lanes, e bytes an element, tables of t bytes a token:

    forward    one program = one tile of BT tokens x BH heads of q, of k, or of v (copied). Head tiles of the same
               tokens are neighbours in the grid: all but the first find the tables in the L2.
               bytes = T (2 (Hq + Hk) D e + t), and 2 T Hv D e where v is copied
    backward   one program = one head tile of q or of k, for its share of the blocks of tokens (or a tile of v, copied).
               It loads the next block before it stores this one. x is read again and its norm recomputed: nothing is
               saved. A program has one stream, so it holds one weight and one sum, and its loop is short.
               bytes = T (3 (Hq + Hk) D e + 2 Hv D e + t); head tiles of the same tokens find the tables in the L2
               Gradients of weights and biases accumulate in registers as whole tiles; a program writes one row, and
               `parameter_sums.py` adds the rows up.

With a norm over the whole hidden row (OLMo 2), or one weight row a head (Cohere), a tile holds all heads of a token.
Arithmetic is in ACC (float32, float64 for float64); there is one rounding, in the store.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .lanes import (
    load_lanes,
    load_parameter,
    load_tables,
    norm_backward,
    rotate,
    rotate_transposed,
    standardise,
    store_lanes,
    tile_mask,
    tile_pointers,
)

# Sizes and strides are not specialised on: alignment comes from VEC, and one binary serves every batch and sequence
# length.
FORWARD_INTEGERS = (
    "S", "blocks_per_sequence", "table_r", "table_b", "table_s", "position_r", "position_b", "position_s",
    "max_position", "q_b", "q_s", "q_g", "q_h", "k_b", "k_s", "k_h", "v_b", "v_s", "v_h", "qo_b", "qo_s", "qo_h",
    "ko_b", "ko_s", "ko_h", "vo_b", "vo_s", "vo_h",
)  # fmt: skip


@triton.jit
def forward_stream(
    X, x_b, x_s, x_g, x_h, OUT, o_b, o_s, o_h, W, BIAS, COS, SIN, POSITIONS, table_r, table_b, table_s, position_r,
    position_b, position_s, max_position, batch, s0, S, h0, H: tl.constexpr, BH: tl.constexpr, GROUP: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, PER_HEAD: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    START: tl.constexpr, L: tl.constexpr, P: tl.constexpr, ROTATE: tl.constexpr, READS_ADJACENT: tl.constexpr,
    WRITES_ADJACENT: tl.constexpr, CONJUGATE: tl.constexpr, PER_LANE: tl.constexpr, TABLE_VEC: tl.constexpr,
    LANE_STRIDE: tl.constexpr, GATHER: tl.constexpr, MROPE: tl.constexpr, SECTION_T: tl.constexpr,
    SECTION_H: tl.constexpr, SECTION_W: tl.constexpr, NORM: tl.constexpr, HIDDEN: tl.constexpr,
    NORM_FIRST: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr, VEC: tl.constexpr, WIDE: tl.constexpr,
    WHOLE_BLOCKS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """One tile of q or k, from memory to memory."""
    mask = tile_mask(s0, S, h0, H, BT, BH, WHOLE_BLOCKS)
    cos_a, cos_b, sin_a, sin_b = 0.0, 0.0, 0.0, 0.0
    if ROTATE:
        cos_a, cos_b, sin_a, sin_b = load_tables(
            COS, SIN, POSITIONS, table_r, table_b, table_s, position_r, position_b, position_s, max_position, batch,
            s0, S, R, L, TABLE_VEC, LANE_STRIDE, PER_LANE, GATHER, MROPE, SECTION_T, SECTION_H, SECTION_W,
            WRITES_ADJACENT, CONJUGATE, WHOLE_BLOCKS, ACC, BT, BH,
        )  # fmt: skip
    source = tile_pointers(X, x_b, x_s, x_g, x_h, batch, s0, h0, GROUP, VEC, WIDE, BT, BH)
    target = tile_pointers(OUT, o_b, o_s, 0, o_h, batch, s0, h0, 0, VEC, WIDE, BT, BH)
    a, b, rest = load_lanes(source, mask, D, R, START, L, P, READS_ADJACENT)
    a = a.to(ACC)
    b = b.to(ACC)
    rest = rest.to(ACC)
    if ROTATE and not NORM_FIRST:
        a, b = rotate(a, b, cos_a, cos_b, sin_a, sin_b)
    if NORM != "none":
        a, b, rest, _ = standardise(a, b, rest, mask, H, D, R, START, L, P, NORM, HIDDEN, EPS)
        # The parameters belong to the lanes of what is normalised: the input, or the rotated result.
        PARAMETER_ADJACENT: tl.constexpr = READS_ADJACENT if NORM_FIRST else WRITES_ADJACENT
        if HAS_WEIGHT:
            wa, wb, wrest = load_parameter(
                W, h0, H, D, R, START, L, P, PARAMETER_ADJACENT, PER_HEAD, NORM == "rms_one_plus", ACC, BH
            )
            a = a * wa
            b = b * wb
            if P > 0:
                rest = rest * wrest
        if HAS_BIAS:
            ba, bb, brest = load_parameter(BIAS, h0, H, D, R, START, L, P, PARAMETER_ADJACENT, PER_HEAD, False, ACC, BH)
            a = a + ba
            b = b + bb
            if P > 0:
                rest = rest + brest
    if ROTATE and NORM_FIRST:
        a, b = rotate(a, b, cos_a, cos_b, sin_a, sin_b)
    store_lanes(target, mask, a, b, rest, D, R, START, L, P, WRITES_ADJACENT)


@triton.jit
def copy_stream(
    V, v_b, v_s, v_h, OUT, o_b, o_s, o_h, batch, s0, S, h0, H: tl.constexpr, BH: tl.constexpr, D: tl.constexpr,
    PAD: tl.constexpr, VEC: tl.constexpr, WIDE: tl.constexpr, WHOLE_BLOCKS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """One tile of v, moved as it is."""
    i = tl.arange(0, PAD)[None, None, :]
    mask = tile_mask(s0, S, h0, H, BT, BH, WHOLE_BLOCKS) & (i < D)
    source = tile_pointers(V, v_b, v_s, 0, v_h, batch, s0, h0, 0, VEC, WIDE, BT, BH)
    target = tile_pointers(OUT, o_b, o_s, 0, o_h, batch, s0, h0, 0, VEC, WIDE, BT, BH)
    tl.store(target + i, tl.load(source + i, mask=mask, other=0), mask=mask)


@triton.jit(do_not_specialize=FORWARD_INTEGERS)
def forward_kernel(
    Q, QO, K, KO, V, VO, QW, QB, KW, KB, COS, SIN, POSITIONS, S, blocks_per_sequence,
    table_r, table_b, table_s, position_r, position_b, position_s, max_position,
    q_b, q_s, q_g, q_h, k_b, k_s, k_h, v_b, v_s, v_h, qo_b, qo_s, qo_h, ko_b, ko_s, ko_h, vo_b, vo_s, vo_h,
    HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    START: tl.constexpr, L: tl.constexpr, P: tl.constexpr, ROTATE: tl.constexpr, READS_ADJACENT: tl.constexpr,
    WRITES_ADJACENT: tl.constexpr, CONJUGATE: tl.constexpr, PER_LANE: tl.constexpr, TABLE_VEC: tl.constexpr,
    LANE_STRIDE: tl.constexpr, GATHER: tl.constexpr, MROPE: tl.constexpr, SECTION_T: tl.constexpr,
    SECTION_H: tl.constexpr, SECTION_W: tl.constexpr, NORM: tl.constexpr, HIDDEN: tl.constexpr,
    NORM_FIRST: tl.constexpr, EPS: tl.constexpr, PER_HEAD: tl.constexpr, HAS_QW: tl.constexpr, HAS_QB: tl.constexpr,
    HAS_KW: tl.constexpr, HAS_KB: tl.constexpr, ACC: tl.constexpr, VEC: tl.constexpr, WIDE: tl.constexpr,
    WHOLE_BLOCKS: tl.constexpr, BT: tl.constexpr, BHQ: tl.constexpr, BHK: tl.constexpr, BHV: tl.constexpr,
    PAD: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """OVERLAPS, here and below: it is set up while the launch before it ends (programmatic dependent launch)."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    Q_TILES: tl.constexpr = (HQ + BHQ - 1) // BHQ
    K_TILES: tl.constexpr = (HK + BHK - 1) // BHK
    V_TILES: tl.constexpr = (HV + BHV - 1) // BHV
    TILES: tl.constexpr = Q_TILES + K_TILES + V_TILES
    program = tl.program_id(0)
    tile = program % TILES
    block = program // TILES
    batch = block // blocks_per_sequence
    s0 = (block % blocks_per_sequence) * BT
    if tile < Q_TILES:
        forward_stream(
            Q, q_b, q_s, q_g, q_h, QO, qo_b, qo_s, qo_h, QW, QB, COS, SIN, POSITIONS, table_r, table_b, table_s,
            position_r, position_b, position_s, max_position, batch, s0, S, tile * BHQ, HQ, BHQ, GROUP, HAS_QW,
            HAS_QB, PER_HEAD, D, R, START, L, P, ROTATE, READS_ADJACENT, WRITES_ADJACENT, CONJUGATE, PER_LANE,
            TABLE_VEC, LANE_STRIDE, GATHER, MROPE, SECTION_T, SECTION_H, SECTION_W, NORM, HIDDEN, NORM_FIRST, EPS,
            ACC, VEC, WIDE, WHOLE_BLOCKS, BT,
        )  # fmt: skip
    elif tile < Q_TILES + K_TILES:
        if HK > 0:
            forward_stream(
                K, k_b, k_s, 0, k_h, KO, ko_b, ko_s, ko_h, KW, KB, COS, SIN, POSITIONS, table_r, table_b, table_s,
                position_r, position_b, position_s, max_position, batch, s0, S, (tile - Q_TILES) * BHK, HK, BHK, 0,
                HAS_KW, HAS_KB, PER_HEAD, D, R, START, L, P, ROTATE, READS_ADJACENT, WRITES_ADJACENT, CONJUGATE,
                PER_LANE, TABLE_VEC, LANE_STRIDE, GATHER, MROPE, SECTION_T, SECTION_H, SECTION_W, NORM, HIDDEN,
                NORM_FIRST, EPS, ACC, VEC, WIDE, WHOLE_BLOCKS, BT,
            )  # fmt: skip
    elif HV > 0:
        copy_stream(
            V, v_b, v_s, v_h, VO, vo_b, vo_s, vo_h, batch, s0, S, (tile - Q_TILES - K_TILES) * BHV, HV, BHV, D, PAD,
            VEC, WIDE, WHOLE_BLOCKS, BT,
        )  # fmt: skip


@triton.jit
def backward_tile(
    ga,
    gb,
    grest,
    xa,
    xb,
    xrest,
    target,
    mask,
    wa,
    wb,
    wrest,
    ba,
    bb,
    cos_a,
    cos_b,
    sin_a,
    sin_b,
    H: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_X: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    NEEDS_TABLES: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    START: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    ROTATE: tl.constexpr,
    READS_ADJACENT: tl.constexpr,
    NORM: tl.constexpr,
    HIDDEN: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    EPS: tl.constexpr,
    ACC: tl.constexpr,
):
    """dx of one tile, stored; and for the sums: the gradient of the norm's result g, g xhat, and the terms of the
    tables' gradients."""
    ga = ga.to(ACC)
    gb = gb.to(ACC)
    grest = grest.to(ACC)
    xa = xa.to(ACC)
    xb = xb.to(ACC)
    xrest = xrest.to(ACC)
    # The rotation's input and the gradient of its result, for the tables' gradients.
    na, nb, ya, yb = xa, xb, ga, gb
    if ROTATE and NORM_FIRST:
        ga, gb = rotate_transposed(ga, gb, cos_a, cos_b, sin_a, sin_b)
    if ROTATE and HAS_X and not NORM_FIRST:
        xa, xb = rotate(xa, xb, cos_a, cos_b, sin_a, sin_b)
    # Gradient of the norm's result, for the parameters' gradients.
    pa, pb, prest = ga, gb, grest
    if NORM != "none":
        xa, xb, xrest, r = standardise(xa, xb, xrest, mask, H, D, R, START, L, P, NORM, HIDDEN, EPS)
        if NEEDS_TABLES and NORM_FIRST:
            na, nb = xa, xb
            if HAS_WEIGHT:
                na = na * wa
                nb = nb * wb
            if HAS_BIAS:
                na = na + ba
                nb = nb + bb
        ga, gb, grest = norm_backward(ga, gb, grest, xa, xb, xrest, r, wa, wb, wrest, H, D, P, NORM, HIDDEN, HAS_WEIGHT)
    if not NORM_FIRST:
        ya, yb = ga, gb
        if ROTATE:
            ga, gb = rotate_transposed(ga, gb, cos_a, cos_b, sin_a, sin_b)
    if NEEDS_DX:
        store_lanes(target, mask, ga, gb, grest, D, R, START, L, P, READS_ADJACENT)
    return pa, pb, prest, pa * xa, pb * xb, prest * xrest, ya * na, yb * nb, ya * nb, yb * na


@triton.jit
def load_parts(
    pointers, part_stride, mask, D: tl.constexpr, R: tl.constexpr, START: tl.constexpr, L: tl.constexpr,
    P: tl.constexpr, ADJACENT: tl.constexpr, PARTS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The lanes at `pointers`, summed over PARTS tiles `part_stride` elements apart; of one part in the dtype of the
    memory."""
    a, b, rest = load_lanes(pointers, mask, D, R, START, L, P, ADJACENT)
    if PARTS > 1:
        a = a.to(ACC)
        b = b.to(ACC)
        rest = rest.to(ACC)
        for part in range(1, PARTS):
            more_a, more_b, more_rest = load_lanes(pointers + part * part_stride, mask, D, R, START, L, P, ADJACENT)
            a += more_a.to(ACC)
            b += more_b.to(ACC)
            rest += more_rest.to(ACC)
    return a, b, rest


@triton.jit
def load_gradient_and_input(
    G, g_b, g_s, g_h, g_part, X, x_b, x_s, x_g, x_h, batch, s0, h0, mask,
    PARTS: tl.constexpr, HAS_X: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    START: tl.constexpr, L: tl.constexpr, P: tl.constexpr, READS_ADJACENT: tl.constexpr, WRITES_ADJACENT: tl.constexpr,
    ACC: tl.constexpr, VEC: tl.constexpr, WIDE: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """One tile of the gradient of the result and of the input (a second name for the gradient where no input is
    needed)."""
    pointers = tile_pointers(G, g_b, g_s, 0, g_h, batch, s0, h0, 0, VEC, WIDE, BT, BH)
    ga, gb, grest = load_parts(pointers, g_part * VEC, mask, D, R, START, L, P, WRITES_ADJACENT, PARTS, ACC)
    xa, xb, xrest = ga, gb, grest
    if HAS_X:
        pointers = tile_pointers(X, x_b, x_s, x_g, x_h, batch, s0, h0, GROUP, VEC, WIDE, BT, BH)
        xa, xb, xrest = load_lanes(pointers, mask, D, R, START, L, P, READS_ADJACENT)
    return ga, gb, grest, xa, xb, xrest


@triton.jit
def store_partial(
    row, a, b, rest, H: tl.constexpr, PER_HEAD: tl.constexpr, D: tl.constexpr, R: tl.constexpr, START: tl.constexpr,
    L: tl.constexpr, P: tl.constexpr, ADJACENT: tl.constexpr,
):  # fmt: skip
    """One program's sum of a parameter's gradient, in the parameter's own order of lanes, at `row`."""
    BH: tl.constexpr = a.shape[1]
    a = tl.sum(a, 0)
    b = tl.sum(b, 0)
    rest = tl.sum(rest, 0)
    if PER_HEAD:
        head = tl.arange(0, BH)[None, :, None]
        store_lanes(
            row + head * D, head < H, a[None, :, :], b[None, :, :], rest[None, :, :], D, R, START, L, P, ADJACENT
        )
    else:
        a = tl.sum(a, 0)[None, None, :]
        b = tl.sum(b, 0)[None, None, :]
        rest = tl.sum(rest, 0)[None, None, :]
        one = tl.full([1, 1, 1], 1, tl.int1)
        store_lanes(row + tl.zeros([1, 1, 1], tl.int32), one, a, b, rest, D, R, START, L, P, ADJACENT)


@triton.jit
def zeros_like_lanes(
    NEEDED: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, L: tl.constexpr, P: tl.constexpr, ACC: tl.constexpr
):
    """Accumulators of a parameter's gradient; of one element each where it is not needed."""
    if NEEDED:
        pair = tl.zeros([BT, BH, L], ACC)
        rest = tl.zeros([BT, BH, P if P > 0 else 1], ACC)
    else:
        pair = tl.zeros([1, 1, 1], ACC)
        rest = tl.zeros([1, 1, 1], ACC)
    return pair, pair, rest


@triton.jit
def store_table_gradient(
    DCOS, DSIN, batch, s0, S, dcos_a, dcos_b, dsin_a, dsin_b, R: tl.constexpr, L: tl.constexpr, PER_LANE: tl.constexpr,
    WRITES_ADJACENT: tl.constexpr, CONJUGATE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """The gradients of this token's cos and sin, at [B, S, T] (contiguous)."""
    if CONJUGATE:
        dsin_a = -dsin_a
        dsin_b = -dsin_b
    T: tl.constexpr = R if PER_LANE else R // 2
    j = tl.arange(0, L)[None, None, :]
    token = s0 + tl.arange(0, BT)[:, None, None]
    mask = (token < S) & (j < R // 2)
    offset = (batch.to(tl.int64) * S + token) * T
    if PER_LANE:
        first = 2 * j if WRITES_ADJACENT else j
        second = first + (1 if WRITES_ADJACENT else R // 2)
        tl.store(DCOS + offset + first, dcos_a, mask=mask)
        tl.store(DCOS + offset + second, dcos_b, mask=mask)
        tl.store(DSIN + offset + first, dsin_a, mask=mask)
        tl.store(DSIN + offset + second, dsin_b, mask=mask)
    else:
        tl.store(DCOS + offset + j, dcos_a + dcos_b, mask=mask)
        tl.store(DSIN + offset + j, dsin_a + dsin_b, mask=mask)


@triton.jit
def backward_stream(
    G, g_b, g_s, g_h, g_part, scale, X, x_b, x_s, x_g, x_h, DX, d_b, d_s, d_g, d_h, W, BIAS, COS, SIN, POSITIONS,
    table_r, table_b, table_s, position_r, position_b, position_s, max_position, ROW, DCOS, DSIN, first, step, blocks,
    blocks_per_sequence, S, h0,
    H: tl.constexpr, BH: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, SCALED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, PER_HEAD: tl.constexpr, HAS_X: tl.constexpr,
    NEEDS_DX: tl.constexpr, NEEDS_WEIGHT: tl.constexpr,
    NEEDS_BIAS: tl.constexpr, NEEDS_TABLES: tl.constexpr, D: tl.constexpr, R: tl.constexpr, START: tl.constexpr,
    L: tl.constexpr, P: tl.constexpr, ROTATE: tl.constexpr, READS_ADJACENT: tl.constexpr,
    WRITES_ADJACENT: tl.constexpr, CONJUGATE: tl.constexpr, PER_LANE: tl.constexpr, TABLE_VEC: tl.constexpr,
    LANE_STRIDE: tl.constexpr, GATHER: tl.constexpr, MROPE: tl.constexpr, SECTION_T: tl.constexpr,
    SECTION_H: tl.constexpr, SECTION_W: tl.constexpr, NORM: tl.constexpr, HIDDEN: tl.constexpr,
    NORM_FIRST: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr, VEC: tl.constexpr, WIDE: tl.constexpr,
    WHOLE_BLOCKS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """One head tile of q or k for the blocks first, first + step, ...: stores dx, and at ROW the sums for the
    parameters. The gradient of the result is the sum of PARTS tensors `g_part` apart; SCALED: times `scale`."""
    PARAMETER_ADJACENT: tl.constexpr = READS_ADJACENT if NORM_FIRST else WRITES_ADJACENT
    wa, wb, wrest = 0.0, 0.0, 0.0
    ba, bb = 0.0, 0.0
    if HAS_WEIGHT:
        wa, wb, wrest = load_parameter(
            W, h0, H, D, R, START, L, P, PARAMETER_ADJACENT, PER_HEAD, NORM == "rms_one_plus", ACC, BH
        )
    if HAS_BIAS and NEEDS_TABLES:
        ba, bb, _ = load_parameter(BIAS, h0, H, D, R, START, L, P, PARAMETER_ADJACENT, PER_HEAD, False, ACC, BH)
    dwa, dwb, dwrest = zeros_like_lanes(NEEDS_WEIGHT, BT, BH, L, P, ACC)
    dba, dbb, dbrest = zeros_like_lanes(NEEDS_BIAS, BT, BH, L, P, ACC)
    batch = first // blocks_per_sequence
    s0 = (first % blocks_per_sequence) * BT
    mask = tile_mask(s0, S, h0, H, BT, BH, WHOLE_BLOCKS)
    ga, gb, grest, xa, xb, xrest = load_gradient_and_input(
        G, g_b, g_s, g_h, g_part, X, x_b, x_s, x_g, x_h, batch, s0, h0, mask, PARTS, HAS_X, GROUP, D, R, START, L, P,
        READS_ADJACENT, WRITES_ADJACENT, ACC, VEC, WIDE, BT, BH,
    )  # fmt: skip
    for block in range(first, blocks, step):
        cos_a, cos_b, sin_a, sin_b = 0.0, 0.0, 0.0, 0.0
        if ROTATE:
            cos_a, cos_b, sin_a, sin_b = load_tables(
                COS, SIN, POSITIONS, table_r, table_b, table_s, position_r, position_b, position_s, max_position,
                batch, s0, S, R, L, TABLE_VEC, LANE_STRIDE, PER_LANE, GATHER, MROPE, SECTION_T, SECTION_H, SECTION_W,
                WRITES_ADJACENT, CONJUGATE, WHOLE_BLOCKS, ACC, BT, BH,
            )  # fmt: skip
        # Before the stores of this block: the compiler may not move a load over a store that could alias it.
        following = block + step
        next_batch = following // blocks_per_sequence
        next_s0 = (following % blocks_per_sequence) * BT
        next_mask = tile_mask(next_s0, S, h0, H, BT, BH, WHOLE_BLOCKS) & (following < blocks)
        next_ga, next_gb, next_grest, next_xa, next_xb, next_xrest = load_gradient_and_input(
            G, g_b, g_s, g_h, g_part, X, x_b, x_s, x_g, x_h, next_batch, next_s0, h0, next_mask, PARTS, HAS_X, GROUP, D,
            R, START, L, P, READS_ADJACENT, WRITES_ADJACENT, ACC, VEC, WIDE, BT, BH,
        )  # fmt: skip
        if SCALED:
            ga = ga.to(ACC) * scale
            gb = gb.to(ACC) * scale
            grest = grest.to(ACC) * scale
        target = tile_pointers(DX, d_b, d_s, d_g, d_h, batch, s0, h0, GROUP, VEC, WIDE, BT, BH)
        pa, pb, prest, pxa, pxb, pxrest, yna, ynb, yanb, ybna = backward_tile(
            ga, gb, grest, xa, xb, xrest, target, mask, wa, wb, wrest, ba, bb, cos_a, cos_b, sin_a, sin_b, H,
            HAS_WEIGHT, HAS_BIAS, HAS_X, NEEDS_DX, NEEDS_TABLES, D, R, START, L, P, ROTATE, READS_ADJACENT, NORM,
            HIDDEN, NORM_FIRST, EPS, ACC,
        )  # fmt: skip
        if NEEDS_WEIGHT:
            dwa += pxa
            dwb += pxb
            if P > 0:
                dwrest += pxrest
        if NEEDS_BIAS:
            dba += pa
            dbb += pb
            if P > 0:
                dbrest += prest
        if NEEDS_TABLES:
            store_table_gradient(
                DCOS, DSIN, batch, s0, S, tl.sum(yna, 1)[:, None, :], tl.sum(ynb, 1)[:, None, :],
                -tl.sum(yanb, 1)[:, None, :], tl.sum(ybna, 1)[:, None, :], R, L, PER_LANE, WRITES_ADJACENT, CONJUGATE,
                BT,
            )  # fmt: skip
        batch = next_batch
        s0 = next_s0
        mask = tile_mask(s0, S, h0, H, BT, BH, WHOLE_BLOCKS)
        ga, gb, grest, xa, xb, xrest = next_ga, next_gb, next_grest, next_xa, next_xb, next_xrest
    if NEEDS_WEIGHT:
        store_partial(ROW, dwa, dwb, dwrest, H, PER_HEAD, D, R, START, L, P, PARAMETER_ADJACENT)
    if NEEDS_BIAS:
        BIAS_COLUMN: tl.constexpr = (H * D if PER_HEAD else D) if NEEDS_WEIGHT else 0
        store_partial(ROW + BIAS_COLUMN, dba, dbb, dbrest, H, PER_HEAD, D, R, START, L, P, PARAMETER_ADJACENT)


BACKWARD_INTEGERS = (
    "S", "blocks_per_sequence", "blocks", "walkers", "copiers", "table_r", "table_b", "table_s", "position_r",
    "position_b", "position_s", "max_position", "gq_b", "gq_s", "gq_h", "q_b", "q_s", "q_g", "q_h", "dq_b", "dq_s",
    "dq_g", "dq_h", "gk_b", "gk_s", "gk_h", "k_b", "k_s", "k_h", "dk_b", "dk_s", "dk_h", "gv_b", "gv_s", "gv_h", "dv_b",
    "dv_s", "dv_h",
)  # fmt: skip


@triton.jit(do_not_specialize=BACKWARD_INTEGERS)
def backward_kernel(
    GQ, Q, DQ, GK, K, DK, GV, DV, QW, QB, KW, KB, COS, SIN, POSITIONS, PARTIAL, DCOS, DSIN, S, blocks_per_sequence,
    blocks, walkers, copiers, table_r, table_b, table_s, position_r, position_b, position_s, max_position,
    gq_b, gq_s, gq_h, q_b, q_s, q_g, q_h, dq_b, dq_s, dq_g, dq_h, gk_b, gk_s, gk_h, k_b, k_s, k_h, dk_b, dk_s, dk_h,
    gv_b, gv_s, gv_h, dv_b, dv_s, dv_h,
    HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    START: tl.constexpr, L: tl.constexpr, P: tl.constexpr, ROTATE: tl.constexpr, READS_ADJACENT: tl.constexpr,
    WRITES_ADJACENT: tl.constexpr, CONJUGATE: tl.constexpr, PER_LANE: tl.constexpr, TABLE_VEC: tl.constexpr,
    LANE_STRIDE: tl.constexpr, GATHER: tl.constexpr, MROPE: tl.constexpr, SECTION_T: tl.constexpr,
    SECTION_H: tl.constexpr, SECTION_W: tl.constexpr, NORM: tl.constexpr, HIDDEN: tl.constexpr,
    NORM_FIRST: tl.constexpr, EPS: tl.constexpr, PER_HEAD: tl.constexpr, HAS_QW: tl.constexpr, HAS_QB: tl.constexpr,
    HAS_KW: tl.constexpr, HAS_KB: tl.constexpr, HAS_X: tl.constexpr, NEEDS_DQ: tl.constexpr, NEEDS_DK: tl.constexpr,
    NEEDS_QW: tl.constexpr, NEEDS_QB: tl.constexpr, NEEDS_KW: tl.constexpr, NEEDS_KB: tl.constexpr,
    NEEDS_TABLES: tl.constexpr, Q_COLUMNS: tl.constexpr, K_COLUMNS: tl.constexpr, ACC: tl.constexpr, VEC: tl.constexpr,
    WIDE: tl.constexpr, WHOLE_BLOCKS: tl.constexpr, BT: tl.constexpr, BHQ: tl.constexpr, BHK: tl.constexpr,
    BHV: tl.constexpr, PAD: tl.constexpr, OVERLAPS: tl.constexpr, REDUCED: tl.constexpr,
):  # fmt: skip
    """Each head tile of q and k has `walkers` programs, each tile of v `copiers`. REDUCED: the reduction follows, and
    may be set up meanwhile."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        if REDUCED:
            tl.extra.cuda.gdc_launch_dependents()
    Q_TILES: tl.constexpr = (HQ + BHQ - 1) // BHQ
    K_TILES: tl.constexpr = (HK + BHK - 1) // BHK
    V_TILES: tl.constexpr = (HV + BHV - 1) // BHV
    TILES: tl.constexpr = Q_TILES + K_TILES
    T: tl.constexpr = R if PER_LANE else R // 2
    program = tl.program_id(0)
    tile = program % TILES
    first = program // TILES
    if NEEDS_TABLES:
        # One plane a tile: a program does not see the other heads.
        plane = tile.to(tl.int64) * (blocks // blocks_per_sequence) * S * T
        DCOS += plane
        DSIN += plane
    if program >= walkers * TILES:
        if V_TILES > 0:
            h0 = (program - walkers * TILES) % V_TILES * BHV
            for block in range((program - walkers * TILES) // V_TILES, blocks, copiers):
                copy_stream(
                    GV, gv_b, gv_s, gv_h, DV, dv_b, dv_s, dv_h, block // blocks_per_sequence,
                    (block % blocks_per_sequence) * BT, S, h0, HV, BHV, D, PAD, VEC, WIDE, WHOLE_BLOCKS, BT,
                )  # fmt: skip
    elif tile < Q_TILES:
        backward_stream(
            GQ, gq_b, gq_s, gq_h, 0, 1.0, Q, q_b, q_s, q_g, q_h, DQ, dq_b, dq_s, dq_g, dq_h, QW, QB, COS, SIN,
            POSITIONS, table_r, table_b, table_s, position_r, position_b, position_s, max_position,
            PARTIAL + (first * Q_TILES + tile) * Q_COLUMNS, DCOS, DSIN, first, walkers, blocks, blocks_per_sequence, S,
            tile * BHQ, HQ, BHQ, GROUP, 1, False, HAS_QW, HAS_QB, PER_HEAD, HAS_X, NEEDS_DQ, NEEDS_QW, NEEDS_QB,
            NEEDS_TABLES, D, R, START, L, P, ROTATE, READS_ADJACENT, WRITES_ADJACENT, CONJUGATE, PER_LANE, TABLE_VEC,
            LANE_STRIDE, GATHER, MROPE, SECTION_T, SECTION_H, SECTION_W, NORM, HIDDEN, NORM_FIRST, EPS, ACC, VEC, WIDE,
            WHOLE_BLOCKS, BT,
        )  # fmt: skip
    elif HK > 0:
        row = walkers * Q_TILES * Q_COLUMNS + (first * K_TILES + tile - Q_TILES) * K_COLUMNS
        backward_stream(
            GK, gk_b, gk_s, gk_h, 0, 1.0, K, k_b, k_s, 0, k_h, DK, dk_b, dk_s, 0, dk_h, KW, KB, COS, SIN, POSITIONS,
            table_r, table_b, table_s, position_r, position_b, position_s, max_position,
            PARTIAL + row, DCOS, DSIN, first, walkers, blocks, blocks_per_sequence, S, (tile - Q_TILES) * BHK, HK, BHK,
            0, 1, False, HAS_KW, HAS_KB, PER_HEAD, HAS_X, NEEDS_DK, NEEDS_KW, NEEDS_KB, NEEDS_TABLES, D, R, START, L,
            P, ROTATE, READS_ADJACENT, WRITES_ADJACENT, CONJUGATE, PER_LANE, TABLE_VEC, LANE_STRIDE, GATHER, MROPE,
            SECTION_T, SECTION_H, SECTION_W, NORM, HIDDEN, NORM_FIRST, EPS, ACC, VEC, WIDE, WHOLE_BLOCKS, BT,
        )  # fmt: skip
