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
from .backward_state import (
    DQ_FREE,
    DQ_FULL,
    DQ_FULL_ODD,
    STAGE_FREE,
    dq_layout,
    following,
    gradient_layout,
    hide,
    needs_mask,
    scores_layout,
    to_store,
    transposed_dq_layout,
)
from .gluon_api import partition_barrier
from .opaque import hidden
from .scores import tanh


@gluon.jit
def step(use, more, tile, masked, operands, warpgroup, st, dk, dv, p, mem, odd: gl.constexpr, T: gl.constexpr):
    """One tile of queries, the `use`-th of this thread block; `odd` uses have a buffer of dS of their own.

    `operands`: see `left_operands`. With `T.early_scores`, `st` is the tile's S^T, and that of the next one is
    returned (`more`: there is one). With `T.looks_ahead`, Q and dO have come, and `masked` says whether the tile needs
    a mask. Returned with the accumulators: the next tile, and whether it needs one.
    """
    BLOCK_M: gl.constexpr = T.block_m
    BLOCK_N: gl.constexpr = T.block_n
    QK_DIM: gl.constexpr = T.qk_dim
    V_DIM: gl.constexpr = T.v_dim
    SCORES: gl.constexpr = scores_layout(T)
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(0, gradient_layout(T, T.v_dim), 2)
    DS_OPERAND: gl.constexpr = gl.DotOperandLayout(0, gradient_layout(T, T.qk_dim), 2)
    THREADS: gl.constexpr = T.num_warps * 32 + 32
    scale, cap_scale, grad_scale = p.scales
    # Two of these steps stand in one loop, and what is constant in both would be kept in registers, and spilled.
    use = hidden(use)
    k, v, kt = operands if T.keys_in_registers else left_operands(mem, T)
    ds_tile = (mem.ds_odd if odd else mem.ds).index(hidden(0))
    stage = use % T.stages
    q = mem.q.index(stage).reshape([BLOCK_M, QK_DIM])
    do = mem.do.index(stage).reshape([BLOCK_M, V_DIM])
    if not T.looks_ahead:
        masked = needs_mask(tile, mem)
    if not T.early_scores:
        if not T.looks_ahead:
            wait_for(mem.q_full, use, True, T)
        st = scores(use, k, mem, T)
    if not T.looks_ahead:
        wait_for(mem.do_full, use, True, T)
    zero = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, SCORES)
    dpt = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    if not T.rows_late:
        lse = mem.lse.index(stage).load(SCORES)
    if not T.early_scores:
        st = warpgroup_mma_wait(1, (st,))
    if T.softcap:
        st = tanh(st * cap_scale)
        capped = st
    if T.masked:  # noqa: SIM102 (decided at compile time; the next one is not)
        if masked:
            st = hide(st, tile, p, T)
    if T.rows_late:
        lse = mem.lse.index(stage).load(SCORES)
    pt = gl.exp2(st * scale - lse)
    if not T.rows_late:
        delta = mem.delta.index(stage).load(SCORES)
    p_operand = gl.convert_layout(pt.to(mem.q.dtype), P_OPERAND, assert_trivial=True)
    if T.softcap:
        pt = pt * (1.0 - capped * capped)
    dpt = warpgroup_mma_wait(0, (dpt,))
    if T.rows_late:
        delta = mem.delta.index(stage).load(SCORES)
    ds = (pt * (dpt - delta)).to(mem.q.dtype)
    ds_operand = gl.convert_layout(ds, DS_OPERAND, assert_trivial=True)
    # Stored before the product is issued: the fence need not wait for it.
    ds_tile.store(ds)
    dv = warpgroup_mma(p_operand, do, dv, is_async=True)
    fence_async_shared()
    partition_barrier()
    dq = _dq(kt, ds_tile, T)
    dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
    # Operands are dependences of the waits: their registers must not be reused while a product reads them
    # (docs/hopper.md, hazards).
    dq, dv, p_operand = warpgroup_mma_wait(1, (dq, dv, p_operand))
    barriers.sync(DQ_FREE + warpgroup, 160)
    mem.dq.store(to_store(dq, T))
    fence_async_shared()
    if T.dq_warps == 1:
        barriers.arrive(DQ_FULL + warpgroup, 160)
    else:
        barriers.arrive((DQ_FULL_ODD if odd else DQ_FULL) + warpgroup, 160)
    if T.early_scores | T.looks_ahead:
        wait_for(mem.q_full, use + 1, more, T)
    if T.early_scores:  # of whatever is there, if there is no next tile
        st = scores(use + 1, k, mem, T)
    if T.looks_ahead:
        wait_for(mem.do_full, use + 1, more, T)
        tile = following(tile, mem, T)
        masked = needs_mask(tile, mem)
    if T.early_scores:
        dk, st, ds_operand = warpgroup_mma_wait(0, (dk, st, ds_operand))
    else:
        dk, ds_operand = warpgroup_mma_wait(0, (dk, ds_operand))
    barriers.arrive(STAGE_FREE + stage, THREADS)
    if not T.looks_ahead:
        tile = following(tile, mem, T)
    return st, dk, dv, tile, masked


@gluon.jit
def left_operands(mem, T: gl.constexpr):
    """K and V, the left operands of S^T and dP^T, and K^T, that of dQ^T (otherwise the right one of dQ).

    In registers where there is room, at head_dim 64 with 64 queries a tile: the two operands of a product of 64 rows
    and 64 columns take shared memory as long to deliver as the product takes.
    """
    k = mem.k.index(hidden(0)).reshape([T.block_n, T.qk_dim])
    v = mem.v.index(hidden(0)).reshape([T.block_n, T.v_dim])
    kt = k.permute((1, 0))
    if T.keys_in_registers:
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, scores_layout(T), 2)
        return k.load(OPERAND), v.load(OPERAND), kt.load(gl.DotOperandLayout(0, transposed_dq_layout(T), 2))
    else:
        return k, v, kt


@gluon.jit
def wait_for(full, use, exists, T: gl.constexpr):
    """Wait until Q, or dO, of the `use`-th tile has come, if there is such a tile. `full`: barriers of the stages."""
    mbarrier.wait(full.index(use % T.stages), (use // T.stages) & 1, pred=exists)


@gluon.jit
def scores(use, k, mem, T: gl.constexpr):
    """Issue S^T of the `use`-th tile."""
    q = mem.q.index(use % T.stages).reshape([T.block_m, T.qk_dim])
    zero = gl.zeros((T.block_n, T.block_m), gl.float32, scores_layout(T))
    return warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _dq(kt, ds_tile, T: gl.constexpr):
    """Issue dQ = dS K, or dQ^T = K^T dS^T."""
    if T.keys_in_registers:
        zero = gl.zeros((T.qk_dim, T.block_m), gl.float32, transposed_dq_layout(T))
        return warpgroup_mma(kt, ds_tile, zero, use_acc=False, is_async=True)
    else:
        zero = gl.zeros((T.block_m, T.qk_dim), gl.float32, dq_layout(T))
        return warpgroup_mma(ds_tile.permute((1, 0)), kt.permute((1, 0)), zero, use_acc=False, is_async=True)
