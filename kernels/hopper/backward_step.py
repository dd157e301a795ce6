"""One tile of queries against the thread block's keys, head dimensions up to 128: P and dS stay in registers as left
operands of dV and dK."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import barriers
from .backward_state import DQ_FREE, DQ_FULL, DQ_FULL_ODD, STAGE_FREE, dq_layout, gradient_layout, hide, scores_layout
from .gluon_api import partition_barrier
from .scores import tanh


@gluon.jit
def step(use, tile, masked, dk, dv, p, mem, T: gl.constexpr):
    """One tile of queries, the `use`-th of this thread block."""
    BLOCK_M: gl.constexpr = T.block_m
    BLOCK_N: gl.constexpr = T.block_n
    QK_DIM: gl.constexpr = T.qk_dim
    V_DIM: gl.constexpr = T.v_dim
    SCORES: gl.constexpr = scores_layout(T)
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(0, gradient_layout(T, T.v_dim), 2)
    DS_OPERAND: gl.constexpr = gl.DotOperandLayout(0, gradient_layout(T, T.qk_dim), 2)
    THREADS: gl.constexpr = T.num_warps * 32 + 32
    scale, cap_scale, grad_scale = p.scales
    stage = use % T.stages
    phase = (use // T.stages) & 1
    q = mem.q.index(stage).reshape([BLOCK_M, QK_DIM])
    do = mem.do.index(stage).reshape([BLOCK_M, V_DIM])
    k = mem.k.reshape([BLOCK_N, QK_DIM])
    v = mem.v.reshape([BLOCK_N, V_DIM])
    zero = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, SCORES)
    mbarrier.wait(mem.q_full.index(stage), phase)
    st = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(mem.do_full.index(stage), phase)
    dpt = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    lse = mem.lse.index(stage).load(SCORES)
    st = warpgroup_mma_wait(1, (st,))
    if T.softcap:
        st = tanh(st * cap_scale)
        capped = st
    if T.masked:  # noqa: SIM102 (decided at compile time; the next one is not)
        if masked:
            st = hide(st, tile, p, T)
    pt = gl.exp2(st * scale - lse)
    delta = mem.delta.index(stage).load(SCORES)
    p_operand = gl.convert_layout(pt.to(mem.q.dtype), P_OPERAND, assert_trivial=True)
    if T.softcap:
        pt = pt * (1.0 - capped * capped)
    dpt = warpgroup_mma_wait(0, (dpt,))
    ds = (pt * (dpt - delta)).to(mem.q.dtype)
    ds_operand = gl.convert_layout(ds, DS_OPERAND, assert_trivial=True)
    dv = warpgroup_mma(p_operand, do, dv, is_async=True)
    mem.ds.store(ds)
    fence_async_shared()
    partition_barrier()
    dq = warpgroup_mma(
        mem.ds.permute((1, 0)), k, gl.zeros((BLOCK_M, QK_DIM), gl.float32, dq_layout(T)), use_acc=False, is_async=True
    )
    dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
    # Operands are dependences of the waits: their registers must not be reused while a product reads them
    # (docs/hopper.md, hazards).
    dq, dv, p_operand = warpgroup_mma_wait(1, (dq, dv, p_operand))
    barriers.sync_of_warpgroup(DQ_FREE, 160)
    mem.dq.store(dq)
    fence_async_shared()
    if T.dq_warps == 1:
        barriers.arrive_of_warpgroup(DQ_FULL, 160)
    else:
        barriers.arrive_of_warpgroup(DQ_FULL + (use & 1) * (DQ_FULL_ODD - DQ_FULL), 160)
    dk, ds_operand = warpgroup_mma_wait(0, (dk, ds_operand))
    barriers.arrive(STAGE_FREE + stage, THREADS)
    return dk, dv
