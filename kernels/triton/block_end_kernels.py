"""The end of a backward of norm + rotation + attention, from what the attention's main kernel left in memory.

Attention adds dQ up in float32, and where the query heads of a group were spread over parts there are as many dK and
dV. Rounding and summing these in kernels of their own writes gradients that the backward of norm + rotation reads
again. Here one kernel reads them as they are, undoes the rotation, goes through the norm and writes dq and dk; there
is one rounding, in the store.

Data flow and memory traffic, for T tokens, Hq + Hkv heads of D lanes, e bytes an element, n parts, tables of t bytes a
token:

    q     dQ (4), q (e)                ->  dq (e)      T Hq D (4 + 2 e)
    k     dK of n parts (n e), k (e)   ->  dk (e)      T Hkv D (n + 2) e
    v     dV of n parts (n e)          ->  dv (e)      T Hkv D (n + 1) e, nothing for one part: dV is written in place
    weights: a row of sums a program, added in a fixed order by `reduce_kernel`

One kernel that rounds dQ and another that reads it again move 2 T Hq D e bytes more, and as many of dK and dV where
there are parts. A program walks over its share of the blocks of tokens for one tile of heads, as in
`norm_rope_kernels.py`, whose pieces these are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .lanes import load_lanes, load_parameter, load_tables, tile_mask, tile_pointers
from .norm_rope_kernels import backward_tile, store_partial, zeros_like_lanes

INTEGERS = (
    "S", "blocks_per_sequence", "blocks", "q_walkers", "k_walkers", "v_walkers", "table_r", "table_b", "table_s",
    "position_r", "position_b", "position_s", "max_position", "gq_b", "gq_s", "gq_h", "q_b", "q_s", "q_g", "q_h",
    "dq_b", "dq_s", "dq_g", "dq_h", "gk_b", "gk_s", "gk_h", "gk_part", "k_b", "k_s", "k_h", "dk_b", "dk_s", "dk_h",
    "gv_b", "gv_s", "gv_h", "gv_part", "dv_b", "dv_s", "dv_h",
)  # fmt: skip


@triton.jit
def load_parts(
    G, g_b, g_s, g_h, part_stride, batch, s0, h0, mask, D: tl.constexpr, R: tl.constexpr, START: tl.constexpr,
    L: tl.constexpr, P: tl.constexpr, ADJACENT: tl.constexpr, VEC: tl.constexpr, WIDE: tl.constexpr, BT: tl.constexpr,
    BH: tl.constexpr, PARTS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One tile of a gradient, summed over its parts; of one part in the dtype of the memory."""
    pointers = tile_pointers(G, g_b, g_s, 0, g_h, batch, s0, h0, 0, VEC, WIDE, BT, BH)
    a, b, rest = load_lanes(pointers, mask, D, R, START, L, P, ADJACENT)
    if PARTS > 1:
        a = a.to(ACC)
        b = b.to(ACC)
        rest = rest.to(ACC)
        for part in range(1, PARTS):
            more_a, more_b, more_rest = load_lanes(
                pointers + part * part_stride * VEC, mask, D, R, START, L, P, ADJACENT
            )
            a += more_a.to(ACC)
            b += more_b.to(ACC)
            rest += more_rest.to(ACC)
    return a, b, rest


@triton.jit
def end_stream(
    G, g_b, g_s, g_h, part_stride, scale, X, x_b, x_s, x_g, x_h, DX, d_b, d_s, d_g, d_h, W, COS, SIN, POSITIONS,
    table_r, table_b, table_s, position_r, position_b, position_s, max_position, ROW, first, step, blocks,
    blocks_per_sequence, S, h0,
    H: tl.constexpr, BH: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, SCALED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_X: tl.constexpr, NEEDS_WEIGHT: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    START: tl.constexpr, L: tl.constexpr, P: tl.constexpr, ROTATE: tl.constexpr, READS_ADJACENT: tl.constexpr,
    WRITES_ADJACENT: tl.constexpr, CONJUGATE: tl.constexpr, PER_LANE: tl.constexpr, TABLE_VEC: tl.constexpr,
    LANE_STRIDE: tl.constexpr, GATHER: tl.constexpr, MROPE: tl.constexpr, SECTION_T: tl.constexpr,
    SECTION_H: tl.constexpr, SECTION_W: tl.constexpr, NORM: tl.constexpr, NORM_FIRST: tl.constexpr, EPS: tl.constexpr,
    ACC: tl.constexpr, VEC: tl.constexpr, WIDE: tl.constexpr, WHOLE_BLOCKS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """One head tile of q or k for the blocks first, first + step, ...: stores dx, and at ROW the sum for the weight."""
    PARAMETER_ADJACENT: tl.constexpr = READS_ADJACENT if NORM_FIRST else WRITES_ADJACENT
    wa, wb, wrest = 0.0, 0.0, 0.0
    if HAS_WEIGHT:
        wa, wb, wrest = load_parameter(
            W, h0, H, D, R, START, L, P, PARAMETER_ADJACENT, False, NORM == "rms_one_plus", ACC, BH
        )
    dwa, dwb, dwrest = zeros_like_lanes(NEEDS_WEIGHT, BT, BH, L, P, ACC)
    batch = first // blocks_per_sequence
    s0 = (first % blocks_per_sequence) * BT
    mask = tile_mask(s0, S, h0, H, BT, BH, WHOLE_BLOCKS)
    ga, gb, grest = load_parts(
        G, g_b, g_s, g_h, part_stride, batch, s0, h0, mask, D, R, START, L, P, WRITES_ADJACENT, VEC, WIDE, BT, BH,
        PARTS, ACC,
    )  # fmt: skip
    xa, xb, xrest = ga, gb, grest
    if HAS_X:
        source = tile_pointers(X, x_b, x_s, x_g, x_h, batch, s0, h0, GROUP, VEC, WIDE, BT, BH)
        xa, xb, xrest = load_lanes(source, mask, D, R, START, L, P, READS_ADJACENT)
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
        next_ga, next_gb, next_grest = load_parts(
            G, g_b, g_s, g_h, part_stride, next_batch, next_s0, h0, next_mask, D, R, START, L, P, WRITES_ADJACENT,
            VEC, WIDE, BT, BH, PARTS, ACC,
        )  # fmt: skip
        next_xa, next_xb, next_xrest = next_ga, next_gb, next_grest
        if HAS_X:
            source = tile_pointers(X, x_b, x_s, x_g, x_h, next_batch, next_s0, h0, GROUP, VEC, WIDE, BT, BH)
            next_xa, next_xb, next_xrest = load_lanes(source, next_mask, D, R, START, L, P, READS_ADJACENT)
        ga = ga.to(ACC)
        gb = gb.to(ACC)
        grest = grest.to(ACC)
        if SCALED:
            ga = ga * scale
            gb = gb * scale
            grest = grest * scale
        target = tile_pointers(DX, d_b, d_s, d_g, d_h, batch, s0, h0, GROUP, VEC, WIDE, BT, BH)
        _, _, _, pxa, pxb, pxrest, _, _, _, _ = backward_tile(
            ga, gb, grest, xa, xb, xrest, target, mask, wa, wb, wrest, 0.0, 0.0, cos_a, cos_b, sin_a, sin_b, H,
            HAS_WEIGHT, False, HAS_X, True, False, D, R, START, L, P, ROTATE, READS_ADJACENT, NORM, False, NORM_FIRST,
            EPS, ACC,
        )  # fmt: skip
        if NEEDS_WEIGHT:
            dwa += pxa
            dwb += pxb
            if P > 0:
                dwrest += pxrest
        batch = next_batch
        s0 = next_s0
        mask = tile_mask(s0, S, h0, H, BT, BH, WHOLE_BLOCKS)
        ga, gb, grest, xa, xb, xrest = next_ga, next_gb, next_grest, next_xa, next_xb, next_xrest
    if NEEDS_WEIGHT:
        store_partial(ROW, dwa, dwb, dwrest, H, False, D, R, START, L, P, PARAMETER_ADJACENT)


@triton.jit
def sum_stream(
    G, g_b, g_s, g_h, part_stride, OUT, o_b, o_s, o_h, first, step, blocks, blocks_per_sequence, S, h0,
    H: tl.constexpr, BH: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, ACC: tl.constexpr,
    VEC: tl.constexpr, WIDE: tl.constexpr, WHOLE_BLOCKS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """One head tile of dV, summed over its parts."""
    i = tl.arange(0, PAD)[None, None, :]
    for block in range(first, blocks, step):
        batch = block // blocks_per_sequence
        s0 = (block % blocks_per_sequence) * BT
        mask = tile_mask(s0, S, h0, H, BT, BH, WHOLE_BLOCKS) & (i < D)
        source = tile_pointers(G, g_b, g_s, 0, g_h, batch, s0, h0, 0, VEC, WIDE, BT, BH) + i
        target = tile_pointers(OUT, o_b, o_s, 0, o_h, batch, s0, h0, 0, VEC, WIDE, BT, BH) + i
        total = tl.load(source, mask=mask, other=0).to(ACC)
        for part in range(1, PARTS):
            total += tl.load(source + part * part_stride * VEC, mask=mask, other=0).to(ACC)
        tl.store(target, total.to(OUT.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=(*INTEGERS, "q_scale"))
def end_kernel(
    GQ, Q, DQ, GK, K, DK, GV, DV, QW, KW, COS, SIN, POSITIONS, PARTIAL, q_scale, S, blocks_per_sequence, blocks,
    q_walkers, k_walkers, v_walkers, table_r, table_b, table_s, position_r, position_b, position_s, max_position,
    gq_b, gq_s, gq_h, q_b, q_s, q_g, q_h, dq_b, dq_s, dq_g, dq_h, gk_b, gk_s, gk_h, gk_part, k_b, k_s, k_h, dk_b, dk_s,
    dk_h, gv_b, gv_s, gv_h, gv_part, dv_b, dv_s, dv_h,
    HQ: tl.constexpr, HK: tl.constexpr, SUMS_V: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, START: tl.constexpr, L: tl.constexpr, P: tl.constexpr, ROTATE: tl.constexpr,
    READS_ADJACENT: tl.constexpr, WRITES_ADJACENT: tl.constexpr, CONJUGATE: tl.constexpr, PER_LANE: tl.constexpr,
    TABLE_VEC: tl.constexpr, LANE_STRIDE: tl.constexpr, GATHER: tl.constexpr, MROPE: tl.constexpr,
    SECTION_T: tl.constexpr, SECTION_H: tl.constexpr, SECTION_W: tl.constexpr, NORM: tl.constexpr,
    NORM_FIRST: tl.constexpr, EPS: tl.constexpr, HAS_QW: tl.constexpr, HAS_KW: tl.constexpr, HAS_X: tl.constexpr,
    NEEDS_QW: tl.constexpr, NEEDS_KW: tl.constexpr, ACC: tl.constexpr, VEC: tl.constexpr, WIDE: tl.constexpr,
    WHOLE_BLOCKS: tl.constexpr, BT: tl.constexpr, BHQ: tl.constexpr, BHK: tl.constexpr, V_DIM: tl.constexpr,
    V_PAD: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Each head tile of q has `q_walkers` programs, of k `k_walkers`, of v `v_walkers`; those of q come first.
    OVERLAPS: the reduction may be set up meanwhile."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    Q_TILES: tl.constexpr = (HQ + BHQ - 1) // BHQ
    K_TILES: tl.constexpr = (HK + BHK - 1) // BHK
    program = tl.program_id(0)
    of_k = program - q_walkers * Q_TILES
    of_v = of_k - k_walkers * K_TILES
    if of_k < 0:
        end_stream(
            GQ, gq_b, gq_s, gq_h, 0, q_scale, Q, q_b, q_s, q_g, q_h, DQ, dq_b, dq_s, dq_g, dq_h, QW, COS, SIN,
            POSITIONS, table_r, table_b, table_s, position_r, position_b, position_s, max_position,
            PARTIAL + program * D, program // Q_TILES, q_walkers, blocks, blocks_per_sequence, S,
            (program % Q_TILES) * BHQ, HQ, BHQ, GROUP, 1, True, HAS_QW, HAS_X, NEEDS_QW, D, R, START, L, P, ROTATE,
            READS_ADJACENT, WRITES_ADJACENT, CONJUGATE, PER_LANE, TABLE_VEC, LANE_STRIDE, GATHER, MROPE, SECTION_T,
            SECTION_H, SECTION_W, NORM, NORM_FIRST, EPS, ACC, VEC, WIDE, WHOLE_BLOCKS, BT,
        )  # fmt: skip
    elif of_v < 0:
        rows_of_q = q_walkers * Q_TILES if NEEDS_QW else 0
        end_stream(
            GK, gk_b, gk_s, gk_h, gk_part, 1.0, K, k_b, k_s, 0, k_h, DK, dk_b, dk_s, 0, dk_h, KW, COS, SIN, POSITIONS,
            table_r, table_b, table_s, position_r, position_b, position_s, max_position,
            PARTIAL + (rows_of_q + of_k) * D, of_k // K_TILES, k_walkers, blocks, blocks_per_sequence, S,
            (of_k % K_TILES) * BHK, HK, BHK, 0, PARTS, False, HAS_KW, HAS_X, NEEDS_KW, D, R, START, L, P, ROTATE,
            READS_ADJACENT, WRITES_ADJACENT, CONJUGATE, PER_LANE, TABLE_VEC, LANE_STRIDE, GATHER, MROPE, SECTION_T,
            SECTION_H, SECTION_W, NORM, NORM_FIRST, EPS, ACC, VEC, WIDE, WHOLE_BLOCKS, BT,
        )  # fmt: skip
    elif SUMS_V:
        sum_stream(
            GV, gv_b, gv_s, gv_h, gv_part, DV, dv_b, dv_s, dv_h, of_v // K_TILES, v_walkers, blocks,
            blocks_per_sequence, S, (of_v % K_TILES) * BHK, HK, BHK, PARTS, V_DIM, V_PAD, ACC, VEC, WIDE,
            WHOLE_BLOCKS, BT,
        )  # fmt: skip
