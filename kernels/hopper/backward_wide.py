"""Flash attention backward for sm_90a, head dimensions above 128: 192/128 and 256.

The accumulators dK and dV of 64 keys fill half of the registers, so nothing else can stay in them: P and dS go
through shared memory, and the two warpgroups split the feature axis. The feature axis is kept in parts of 128 lanes,
of which q and k have two and v one or two.

    load warp     K, V once;   Q, LSE -> sQ[2]   dO, delta -> sdO (one stage, free again after dV)
    8 compute warps, per tile of 64 queries
        S^T  = sum over parts K_i Q_i^T      dP^T = sum over parts V_i dO_i^T
        P^T, dS^T -> shared memory
        dV_i += P^T dO_i     dQ_0 = dS K_0     dK_i += dS^T Q_i     dQ_1 = dS K_1
    dQ warp       dQ_i -> global memory by TMA reduce-add in float32, both parts through one buffer

Everything else is as in backward.py.
"""

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
    DO_FREE,
    DQ_FREE,
    DQ_FULL,
    FIRST,
    LAST,
    STAGE_FREE,
    Problem,
    Shared,
    batch_and_head,
    bound,
    earlier_blocks,
    following,
    hide,
    keep_bounds,
    needs_mask,
    new_barriers,
    scores_layout,
    tile_at,
)
from .gluon_api import partition_barrier, reinterpret, tma_load, tma_reduce_add, tma_store, tma_store_wait
from .scores import query_tiles, tanh

PART = gl.constexpr(128)
"""Lanes of the feature axis in one shared memory tile."""
_THREADS = gl.constexpr(288)
"""Eight compute warps and one other."""


@gluon.constexpr_function
def _part_layout(T):
    """Registers of a [64, 128] part of dK, dV or dQ: the warpgroups split the lanes."""
    return gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16])


@gluon.jit
def load_parts(desc, coord_b, coord_h, row, buffer, start, full, PARTS: gl.constexpr):
    for part in gl.static_range(PARTS):
        tma_load(desc, [coord_b, coord_h, row, part * PART], full, buffer.index(start + part))


@gluon.jit
def load_partition(p, mem, T: gl.constexpr):
    kv_heads, group, seq_q, seq_k = p.sizes
    b, kv = batch_and_head(p)
    first, last = p.tiles
    per_head = gl.cdiv(seq_q, T.block_m)
    mbarrier.expect(mem.kv_full.index(0), p.k.block_type.nbytes * T.qk_parts)
    load_parts(p.k, b, kv, p.key0, mem.k, 0, mem.kv_full.index(0), T.qk_parts)
    mbarrier.expect(mem.kv_full.index(1), p.v.block_type.nbytes * T.v_parts)
    load_parts(p.v, b, kv, p.key0, mem.v, 0, mem.kv_full.index(1), T.v_parts)
    use = 0
    for member in range(group):
        h = kv * group + member
        row_of_tile = (b * kv_heads * group + h) * per_head
        for i in range(last - first):
            tile = tile_at(i, first, last, T)
            stage = use % T.stages
            if use >= T.stages:
                barriers.sync(STAGE_FREE + stage, _THREADS)
            mbarrier.expect(mem.q_full.index(stage), p.q.block_type.nbytes * T.qk_parts + p.lse.block_type.nbytes)
            tma_load(p.lse, [row_of_tile + tile, 0], mem.q_full.index(stage), mem.lse.index(stage))
            load_parts(p.q, b, h, tile * T.block_m, mem.q, stage * T.qk_parts, mem.q_full.index(stage), T.qk_parts)
            if use >= 1:
                barriers.sync(DO_FREE, _THREADS)
            mbarrier.expect(mem.do_full.index(0), p.do.block_type.nbytes * T.v_parts + p.delta.block_type.nbytes)
            tma_load(p.delta, [row_of_tile + tile, 0], mem.do_full.index(0), mem.delta.index(0))
            load_parts(p.do, b, h, tile * T.block_m, mem.do, 0, mem.do_full.index(0), T.v_parts)
            use += 1


@gluon.jit
def dq_partition(p, mem, T: gl.constexpr):
    kv_heads, group, seq_q, seq_k = p.sizes
    b, kv = batch_and_head(p)
    first, last = p.tiles
    per_head = gl.cdiv(seq_q, T.block_m)
    barriers.arrive(DQ_FREE, _THREADS)
    for member in range(group):
        h = kv * group + member
        for i in range(last - first):
            tile = tile_at(i, first, last, T)
            if T.deterministic:
                turn = p.turns + (b * kv_heads * group + h) * per_head + tile
                barriers.wait_for_turn(turn, earlier_blocks(tile, p, T))
            for part in gl.static_range(T.qk_parts):
                barriers.sync(DQ_FULL, _THREADS)
                tma_reduce_add(p.dq, [b, h, tile * T.block_m, part * PART], mem.dq_halves.index(0))
                tma_store_wait(0)
                barriers.arrive(DQ_FREE, _THREADS)
            if T.deterministic:
                barriers.pass_turn(turn)


@gluon.jit
def rows_by_lanes(buffer, index, ROWS: gl.constexpr):
    return buffer.index(index).reshape([ROWS, PART])


@gluon.jit
def hand_over(dq, mem):
    """Put a part of dQ in the buffer and call the dQ warp."""
    barriers.sync(DQ_FREE, _THREADS)
    mem.dq.store(dq)
    fence_async_shared()
    barriers.arrive(DQ_FULL, _THREADS)


@gluon.jit
def step(use, tile, masked, dk0, dk1, dv0, dv1, p, mem, T: gl.constexpr):
    """One tile of queries, the `use`-th of this thread block."""
    BLOCK_M: gl.constexpr = T.block_m
    BLOCK_N: gl.constexpr = T.block_n
    SCORES: gl.constexpr = scores_layout(T)
    scale, cap_scale, grad_scale = p.scales
    stage = use % T.stages
    q0 = rows_by_lanes(mem.q, stage * 2, BLOCK_M)
    q1 = rows_by_lanes(mem.q, stage * 2 + 1, BLOCK_M)
    k0 = rows_by_lanes(mem.k, 0, BLOCK_N)
    k1 = rows_by_lanes(mem.k, 1, BLOCK_N)
    do0 = rows_by_lanes(mem.do, 0, BLOCK_M)
    do1 = rows_by_lanes(mem.do, T.v_parts - 1, BLOCK_M)
    zero = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, SCORES)
    mbarrier.wait(mem.q_full.index(stage), (use // T.stages) & 1)
    st = warpgroup_mma(k0, q0.permute((1, 0)), zero, use_acc=False, is_async=True)
    st = warpgroup_mma(k1, q1.permute((1, 0)), st, is_async=True)
    mbarrier.wait(mem.do_full.index(0), use & 1)
    dpt = warpgroup_mma(rows_by_lanes(mem.v, 0, BLOCK_N), do0.permute((1, 0)), zero, use_acc=False, is_async=True)
    if T.v_parts == 2:
        dpt = warpgroup_mma(rows_by_lanes(mem.v, 1, BLOCK_N), do1.permute((1, 0)), dpt, is_async=True)
    lse = mem.lse.index(stage).load(SCORES)
    st = warpgroup_mma_wait(T.v_parts, (st,))
    if T.softcap:
        st = tanh(st * cap_scale)
        capped = st
    if T.masked:  # noqa: SIM102 (decided at compile time; the next one is not)
        if masked:
            st = hide(st, tile, p, T)
    pt = gl.exp2(st * scale - lse)
    mem.p.store(pt.to(mem.q.dtype))
    if T.softcap:
        pt = pt * (1.0 - capped * capped)
    delta = mem.delta.index(0).load(SCORES)
    dpt = warpgroup_mma_wait(0, (dpt,))
    mem.ds.store((pt * (dpt - delta)).to(mem.q.dtype))
    fence_async_shared()
    partition_barrier()
    none = gl.zeros((BLOCK_M, PART), gl.float32, _part_layout(T))
    dv0 = warpgroup_mma(mem.p, do0, dv0, is_async=True)
    if T.v_parts == 2:
        dv1 = warpgroup_mma(mem.p, do1, dv1, is_async=True)
    dq = warpgroup_mma(mem.ds.permute((1, 0)), k0, none, use_acc=False, is_async=True)
    dk0 = warpgroup_mma(mem.ds, q0, dk0, is_async=True)
    dk1 = warpgroup_mma(mem.ds, q1, dk1, is_async=True)
    dv0, dv1 = warpgroup_mma_wait(3, (dv0, dv1))
    barriers.arrive(DO_FREE, _THREADS)
    dq = warpgroup_mma_wait(2, (dq,))
    hand_over(dq, mem)
    dq = warpgroup_mma(mem.ds.permute((1, 0)), k1, none, use_acc=False, is_async=True)
    dk0, dk1 = warpgroup_mma_wait(1, (dk0, dk1))
    barriers.arrive(STAGE_FREE + stage, _THREADS)
    dq = warpgroup_mma_wait(0, (dq,))
    hand_over(dq, mem)
    return dk0, dk1, dv0, dv1


@gluon.jit
def compute_partition(p, mem, T: gl.constexpr):
    BLOCK_N: gl.constexpr = T.block_n
    kv_heads, group, seq_q, seq_k = p.sizes
    scale, cap_scale, grad_scale = p.scales
    zero = gl.zeros((BLOCK_N, PART), gl.float32, _part_layout(T))
    dk0 = zero
    dk1 = zero
    dv0 = zero
    dv1 = zero
    mbarrier.wait(mem.kv_full.index(0), 0)
    mbarrier.wait(mem.kv_full.index(1), 0)
    tile = tile_at(0, bound(mem, FIRST), bound(mem, LAST), T)
    for use in range(group * (bound(mem, LAST) - bound(mem, FIRST))):
        dk0, dk1, dv0, dv1 = step(use, tile, needs_mask(tile, mem), dk0, dk1, dv0, dv1, p, mem, T)
        tile = following(tile, mem, T)
    partition_barrier()
    rows_by_lanes(mem.v, 0, BLOCK_N).store(dv0.to(mem.q.dtype))
    if T.v_parts == 2:
        rows_by_lanes(mem.v, 1, BLOCK_N).store(dv1.to(mem.q.dtype))
    rows_by_lanes(mem.k, 0, BLOCK_N).store((dk0 * grad_scale).to(mem.q.dtype))
    rows_by_lanes(mem.k, 1, BLOCK_N).store((dk1 * grad_scale).to(mem.q.dtype))
    fence_async_shared()
    partition_barrier()
    b, kv = batch_and_head(p)
    for part in gl.static_range(T.v_parts):
        tma_store(p.dv, [b, kv, p.key0, part * PART], mem.v.index(part))
    for part in gl.static_range(T.qk_parts):
        tma_store(p.dk, [b, kv, p.key0, part * PART], mem.k.index(part))
    tma_store_wait(0)


@gluon.jit
def backward_wide_kernel(
    q, k, v, do, dq, dk, dv, lse, delta,
    row_low, row_high, labels, ranges, order, turns,
    kv_heads, group, seq_q, seq_k,
    band_low, band_high, rows_stride, ranges_stride,
    scale, cap_scale, grad_scale,
    T: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Arguments and grid of `backward_kernel`; the tensor maps have tiles of 128 lanes."""
    tile_q = gl.allocate_shared_memory(q.dtype, [T.stages * T.qk_parts, 1, 1, T.block_m, PART], q.layout)
    tile_do = gl.allocate_shared_memory(q.dtype, [T.v_parts, 1, 1, T.block_m, PART], do.layout)
    tile_k = gl.allocate_shared_memory(q.dtype, [T.qk_parts, 1, 1, T.block_n, PART], k.layout)
    tile_v = gl.allocate_shared_memory(q.dtype, [T.v_parts, 1, 1, T.block_n, PART], v.layout)
    SQUARE: gl.constexpr = [T.block_n, T.block_m]
    SQUARE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SQUARE, q.dtype)
    tile_p = gl.allocate_shared_memory(q.dtype, SQUARE, SQUARE_LAYOUT)
    tile_ds = gl.allocate_shared_memory(q.dtype, SQUARE, SQUARE_LAYOUT)
    DQ_SHAPE: gl.constexpr = [T.block_m, PART]
    tile_dq = gl.allocate_shared_memory(
        gl.float32, DQ_SHAPE, gl.NVMMASharedLayout.get_default_for(DQ_SHAPE, gl.float32)
    )
    dq_to_send = reinterpret(tile_dq, gl.float32, [1, 1, 1, T.block_m, PART], dq.layout)
    rows_lse = gl.allocate_shared_memory(gl.float32, [T.stages, 1, T.block_m], lse.layout)
    rows_delta = gl.allocate_shared_memory(gl.float32, [1, 1, T.block_m], delta.layout)
    block = gl.program_id(1)
    if T.by_rows:
        ranges += (gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)) // kv_heads * ranges_stride
    first, last, clear_first, clear_last = query_tiles(block, seq_q, seq_k, band_low, band_high, ranges, T)
    mem = Shared(
        tile_q, tile_do, tile_k, tile_v, tile_p, tile_ds, tile_dq, dq_to_send, rows_lse, rows_delta,
        keep_bounds(first, last, clear_first, clear_last), new_barriers(T.stages), new_barriers(1), new_barriers(2),
    )  # fmt: skip
    p = Problem(
        q, k, v, do, dq, dk, dv, lse, delta, row_low, row_high, labels, order, turns,
        (kv_heads, group, seq_q, seq_k), (band_low, band_high, rows_stride), (scale, cap_scale, grad_scale),
        block * T.block_n, (first, last),
    )  # fmt: skip
    gl.warp_specialize([
        (compute_partition, (p, mem, T)),
        (load_partition, (p, mem, T)),
        (dq_partition, (p, mem, T)),
    ], [1, 1], [24, 24])  # fmt: skip
