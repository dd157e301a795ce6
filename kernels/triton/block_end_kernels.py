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
    weights: a row of sums a program, added in a fixed order by `parameter_sums.py`

One kernel that rounds dQ and another that reads it again move 2 T Hq D e bytes more, and as many of dK and dV where
there are parts. A program walks over its share of the blocks of tokens for one tile of heads: the walk is
`norm_rope_kernels.backward_stream`, told that the gradient comes in parts and scaled.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .lanes import tile_mask, tile_pointers
from .norm_rope_kernels import backward_stream

INTEGERS = (
    "S", "blocks_per_sequence", "blocks", "q_walkers", "k_walkers", "v_walkers", "table_r", "table_b", "table_s",
    "position_r", "position_b", "position_s", "max_position", "gq_b", "gq_s", "gq_h", "q_b", "q_s", "q_g", "q_h",
    "dq_b", "dq_s", "dq_g", "dq_h", "gk_b", "gk_s", "gk_h", "gk_part", "k_b", "k_s", "k_h", "dk_b", "dk_s", "dk_h",
    "gv_b", "gv_s", "gv_h", "gv_part", "dv_b", "dv_s", "dv_h",
)  # fmt: skip


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
        backward_stream(
            GQ, gq_b, gq_s, gq_h, 0, q_scale, Q, q_b, q_s, q_g, q_h, DQ, dq_b, dq_s, dq_g, dq_h, QW, QW, COS, SIN,
            POSITIONS, table_r, table_b, table_s, position_r, position_b, position_s, max_position,
            PARTIAL + program * D, PARTIAL, PARTIAL, program // Q_TILES, q_walkers, blocks, blocks_per_sequence, S,
            (program % Q_TILES) * BHQ, HQ, BHQ, GROUP, 1, True, HAS_QW, False, False, HAS_X, True, NEEDS_QW, False,
            False, D, R, START, L, P, ROTATE, READS_ADJACENT, WRITES_ADJACENT, CONJUGATE, PER_LANE, TABLE_VEC,
            LANE_STRIDE, GATHER, MROPE, SECTION_T, SECTION_H, SECTION_W, NORM, False, NORM_FIRST, EPS, ACC, VEC, WIDE,
            WHOLE_BLOCKS, BT,
        )  # fmt: skip
    elif of_v < 0:
        rows_of_q = q_walkers * Q_TILES if NEEDS_QW else 0
        backward_stream(
            GK, gk_b, gk_s, gk_h, gk_part, 1.0, K, k_b, k_s, 0, k_h, DK, dk_b, dk_s, 0, dk_h, KW, KW, COS, SIN,
            POSITIONS, table_r, table_b, table_s, position_r, position_b, position_s, max_position,
            PARTIAL + (rows_of_q + of_k) * D, PARTIAL, PARTIAL, of_k // K_TILES, k_walkers, blocks,
            blocks_per_sequence, S, (of_k % K_TILES) * BHK, HK, BHK, 0, PARTS, False, HAS_KW, False, False, HAS_X, True,
            NEEDS_KW, False, False, D, R, START, L, P, ROTATE, READS_ADJACENT, WRITES_ADJACENT, CONJUGATE, PER_LANE,
            TABLE_VEC, LANE_STRIDE, GATHER, MROPE, SECTION_T, SECTION_H, SECTION_W, NORM, False, NORM_FIRST, EPS, ACC,
            VEC, WIDE, WHOLE_BLOCKS, BT,
        )  # fmt: skip
    elif SUMS_V:
        sum_stream(
            GV, gv_b, gv_s, gv_h, gv_part, DV, dv_b, dv_s, dv_h, of_v // K_TILES, v_walkers, blocks,
            blocks_per_sequence, S, (of_v % K_TILES) * BHK, HK, BHK, PARTS, V_DIM, V_PAD, ACC, VEC, WIDE,
            WHOLE_BLOCKS, BT,
        )  # fmt: skip
