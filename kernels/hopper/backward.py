"""Flash attention backward for sm_90a: dQ, dK, dV from Q, K, V, dO, LSE and delta = rowsum(dO * O).

A thread block keeps `block_n` keys and values and lets the queries pass; it visits every query head that shares its
keys, so dK and dV are summed over the group in registers, in a fixed order. The structure follows FlashAttention-3
(arXiv 2407.08608).

    load warp     K, V once;   Q, LSE -> sQ[stages]   dO, delta -> sdO[stages]
    8 compute warps, per tile of queries
        S^T  = K Q^T                   dP^T = V dO^T                       (both issued at once)
        P^T  = exp2(S^T scale - LSE)   dS^T = P^T (dP^T - delta)
        dV  += P^T dO                  dK  += dS^T Q                       (P^T, dS^T stay in registers)
        dQ   = dS K                    dS^T through two buffers in shared memory; with K in registers as dQ^T = K^T dS^T
    dQ warp       dQ tile -> global memory by TMA reduce-add in float32

A tile has 64 queries. At head_dim 64 K, V and K^T, the left operands of S^T, dP^T and dQ^T, are in registers, or,
without a mask, a tile has 128 queries and they are not; at head_dim 128 there is no room for either.

It may start before the kernel before it ends (`prepare.py`): whatever touches more than K and V waits for that one.

Named barriers hand the dQ tile over; each compute warpgroup owns half of it (of the features, or of the queries of dQ^T
or of a tile of 128) and a barrier of its own. With `deterministic` the blocks of keys add to a tile of dQ in a fixed
order: the dQ warp waits for its turn before it adds and passes it on after the addition is written.

Global memory traffic per block of keys and query head: seq_q (qk_dim + v_dim) elements read, 4 seq_q qk_dim bytes of
reduce-add in L2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from . import barriers
from .backward_state import (
    DQ_FREE,
    DQ_FULL,
    DQ_FULL_ODD,
    FIRST,
    LAST,
    STAGE_FREE,
    Problem,
    Shared,
    arrays_of_block,
    batch_and_head,
    bound,
    earlier_blocks,
    gradient_layout,
    keep_bounds,
    needs_mask,
    new_barriers,
    plane_of_block,
    scores_layout,
    tile_at,
)
from .backward_step import left_operands, scores, step, wait_for
from .gluon_api import (
    launch_dependents,
    partition_barrier,
    reinterpret,
    tma_load,
    tma_reduce_add,
    tma_store,
    tma_store_wait,
    wait_for_prerequisites,
)
from .scores import query_tiles


@gluon.jit
def load_partition(p, mem, T: gl.constexpr):
    kv_heads, group, seq_q, seq_k = p.sizes
    b, kv = batch_and_head(p)
    first, last = p.tiles
    THREADS: gl.constexpr = T.num_warps * 32 + 32
    per_head = gl.cdiv(seq_q, T.block_m)
    mbarrier.expect(mem.kv_full.index(0), p.k.block_type.nbytes)
    tma_load(p.k, [b, kv // p.parts, p.key0, 0], mem.kv_full.index(0), mem.k.index(0))
    mbarrier.expect(mem.kv_full.index(1), p.v.block_type.nbytes)
    tma_load(p.v, [b, kv // p.parts, p.key0, 0], mem.kv_full.index(1), mem.v.index(0))
    wait_for_prerequisites()
    use = 0
    for member in range(group):
        h = kv * group + member
        row_of_tile = (b * kv_heads * group + h) * per_head
        for i in range(last - first):
            tile = tile_at(i, first, last, T)
            stage = use % T.stages
            if use >= T.stages:
                barriers.sync(STAGE_FREE + stage, THREADS)
            mbarrier.expect(mem.q_full.index(stage), p.q.block_type.nbytes + p.lse.block_type.nbytes)
            tma_load(p.lse, [row_of_tile + tile, 0], mem.q_full.index(stage), mem.lse.index(stage))
            tma_load(p.q, [b, h, tile * T.block_m, 0], mem.q_full.index(stage), mem.q.index(stage))
            mbarrier.expect(mem.do_full.index(stage), p.do.block_type.nbytes + p.delta.block_type.nbytes)
            tma_load(p.delta, [row_of_tile + tile, 0], mem.do_full.index(stage), mem.delta.index(stage))
            tma_load(p.do, [b, h, tile * T.block_m, 0], mem.do_full.index(stage), mem.do.index(stage))
            use += 1


# ---------------------------------------------------------------------------------------------------- dQ


@gluon.jit
def _add(p, mem, head, row0, half: gl.constexpr, T: gl.constexpr):
    """Add a warpgroup's half of a tile of dQ: half of the queries, which lie in two slices of 32 lanes, or of the
    lanes."""
    if T.rows_halved:
        row = row0 + half * T.dq_rows
        for i in gl.static_range(2):
            if T.keys_in_registers:
                kv_heads, group, seq_q, seq_k = p.sizes
                heads = kv_heads * group
                at = [head // heads, head % heads, row, i * T.dq_lanes]
            else:
                at = [head, row // 8, 0, 0, i * T.dq_lanes]
            tma_reduce_add(p.dq, at, mem.dq_boxes.index(2 * i + half))
    else:
        tma_reduce_add(p.dq, [head, row0 // 8, 0, 0, half * T.dq_lanes], mem.dq_boxes.index(half))


@gluon.jit
def dq_partition(p, mem, which: gl.constexpr, T: gl.constexpr):
    """Add tiles of dQ to memory: all of them, or every second one (`which`) where two warps take turns."""
    kv_heads, group, seq_q, seq_k = p.sizes
    b, kv = batch_and_head(p)
    first, last = p.tiles
    HALF: gl.constexpr = 128 + 32
    FULL: gl.constexpr = DQ_FULL if which == 0 else DQ_FULL_ODD
    per_head = gl.cdiv(seq_q, T.block_m)
    wait_for_prerequisites()
    if which == 0:
        barriers.arrive(DQ_FREE, HALF)
        barriers.arrive(DQ_FREE + 1, HALF)
    h = kv * group
    i = last * 0 + which
    for _ in range(which, group * (last - first), T.dq_warps):
        while i >= last - first:
            i -= last - first
            h += 1
        tile = tile_at(i, first, last, T)
        row0 = tile * T.block_m
        head = b * kv_heads * group + h
        if T.deterministic:
            turn = p.turns + head * per_head + tile
            barriers.wait_for_turn(turn, earlier_blocks(tile, p, T))
        barriers.sync(FULL, HALF)
        _add(p, mem, head, row0, 0, T)
        barriers.sync(FULL + 1, HALF)
        _add(p, mem, head, row0, 1, T)
        tma_store_wait(2 if T.rows_halved else 1)
        barriers.arrive(DQ_FREE, HALF)
        tma_store_wait(0)
        barriers.arrive(DQ_FREE + 1, HALF)
        if T.deterministic:
            barriers.pass_turn(turn)
        i += T.dq_warps


# ---------------------------------------------------------------------------------------------------- compute


@gluon.jit
def _uses(group, mem):
    """Tiles of queries that this thread block visits, of all its heads."""
    return group * (bound(mem, LAST) - bound(mem, FIRST))


@gluon.jit
def compute_partition(p, mem, T: gl.constexpr):
    BLOCK_N: gl.constexpr = T.block_n
    QK_DIM: gl.constexpr = T.qk_dim
    V_DIM: gl.constexpr = T.v_dim
    kv_heads, group, seq_q, seq_k = p.sizes
    scale, cap_scale, grad_scale = p.scales
    dk = gl.zeros((BLOCK_N, QK_DIM), gl.float32, gradient_layout(T, T.qk_dim))
    dv = gl.zeros((BLOCK_N, V_DIM), gl.float32, gradient_layout(T, T.v_dim))
    mbarrier.wait(mem.kv_full.index(0), 0)
    mbarrier.wait(mem.kv_full.index(1), 0)
    operands = left_operands(mem, T)
    st = gl.zeros((BLOCK_N, T.block_m), gl.float32, scores_layout(T))
    tile = tile_at(0, bound(mem, FIRST), bound(mem, LAST), T)
    masked = needs_mask(tile, mem)
    some = bound(mem, LAST) > bound(mem, FIRST)
    if T.early_scores | T.looks_ahead:
        wait_for(mem.q_full, 0, some, T)
    if T.looks_ahead:
        wait_for(mem.do_full, 0, some, T)
    if T.early_scores:  # noqa: SIM102 (decided at compile time; the next one is not)
        if some:
            st = warpgroup_mma_wait(0, (scores(0, operands[0], mem, T),))
    warpgroup = barriers.warpgroup_index()
    # One loop over the tiles of all heads; a loop each for masked and unmasked tiles made it spill. Two tiles at a
    # time: only of two buffers by name does Triton see that one may be written while the other is read, and puts no
    # barrier before the store.
    for use in range(0, _uses(group, mem), 2):
        more = use + 1 < _uses(group, mem)
        st, dk, dv, tile, masked = step(use, more, tile, masked, operands, warpgroup, st, dk, dv, p, mem, False, T)
        if use + 1 < _uses(group, mem):
            more = use + 2 < _uses(group, mem)
            st, dk, dv, tile, masked = step(
                use + 1, more, tile, masked, operands, warpgroup, st, dk, dv, p, mem, True, T
            )
        else:
            partition_barrier()  # once; without it Triton would put one before every store to the first buffer
    partition_barrier()
    tile_k, tile_v = mem.k.index(0), mem.v.index(0)
    tile_v.reshape([BLOCK_N, V_DIM]).store(dv.to(mem.q.dtype))
    tile_k.reshape([BLOCK_N, QK_DIM]).store((dk * grad_scale).to(mem.q.dtype))
    fence_async_shared()
    partition_barrier()
    b, kv = batch_and_head(p)
    tma_store(p.dv, [b, kv, p.key0, 0], tile_v)
    tma_store(p.dk, [b, kv, p.key0, 0], tile_k)
    tma_store_wait(0)


# ---------------------------------------------------------------------------------------------------- kernel


@gluon.jit
def backward_kernel(
    q, k, v, do, dq, dk, dv, lse, delta,
    row_low, row_high, labels, ranges, order, turns,
    kv_heads, group, parts, seq_q, seq_k,
    band_low, band_high, rows_stride, ranges_stride,
    scale, cap_scale, grad_scale,
    T: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Grid (head_chunk, blocks of keys, batch * kv_heads / head_chunk): the heads of a chunk run together, and the
    first blocks first, which under a causal mask see the most queries; the last first with `later_first`.

    `parts`: the query heads of a group are spread over as many thread blocks, each of which writes dK and dV of its own
    to "heads" of their own: `kv_heads` counts parts and `group` the query heads of one.

    `q` … `dv`: tensor maps over [batch, heads, seq, dim]; `dq` float32, zero at launch, unscaled (the post kernel
    scales and rounds it), its map by `BackwardTemplate.dq_box`.

    `lse`, `delta`: float32 [tiles, block_m], base 2, +inf in `lse` for rows that take no part (see prepare.py).
    `row_low`, `row_high`, `labels`, `ranges`, `order`: see `rows.py` and, for bits, `explicit.py`. `turns`: int32
    [tiles], zero at launch (deterministic only).
    """
    tile_q = gl.allocate_shared_memory(q.dtype, [T.stages, 1, 1, T.block_m, T.qk_dim], q.layout)
    tile_do = gl.allocate_shared_memory(q.dtype, [T.stages, 1, 1, T.block_m, T.v_dim], do.layout)
    tile_k = gl.allocate_shared_memory(q.dtype, [1, 1, 1, T.block_n, T.qk_dim], k.layout)
    tile_v = gl.allocate_shared_memory(q.dtype, [1, 1, 1, T.block_n, T.v_dim], v.layout)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([T.block_n, T.block_m], q.dtype)
    tile_ds = gl.allocate_shared_memory(q.dtype, [1, T.block_n, T.block_m], DS_LAYOUT)
    tile_ds_odd = gl.allocate_shared_memory(q.dtype, [1, T.block_n, T.block_m], DS_LAYOUT)
    DQ_SHAPE: gl.constexpr = [T.block_m, T.qk_dim]
    tile_dq = gl.allocate_shared_memory(
        gl.float32, DQ_SHAPE, gl.NVMMASharedLayout.get_default_for(DQ_SHAPE, gl.float32)
    )
    if T.keys_in_registers:
        boxes = reinterpret(tile_dq, gl.float32, [4, 1, 1, T.dq_rows, T.dq_lanes], dq.layout)
    else:
        BOXES: gl.constexpr = 4 if T.rows_halved else 2
        boxes = reinterpret(tile_dq, gl.float32, [BOXES, 1, T.dq_rows // 8, 4, 2, T.dq_lanes], dq.layout)
    rows_lse = gl.allocate_shared_memory(gl.float32, [T.stages, 1, T.block_m], lse.layout)
    rows_delta = gl.allocate_shared_memory(gl.float32, [T.stages, 1, T.block_m], delta.layout)
    launch_dependents()
    if T.by_data:
        wait_for_prerequisites()
    block = gl.program_id(1)
    if T.later_first:
        block = gl.num_programs(1) - 1 - block
    row_low, row_high, labels, ranges = arrays_of_block(
        row_low, row_high, labels, ranges, kv_heads, (rows_stride, ranges_stride), seq_q, seq_k, T
    )
    if T.bits:
        plane = plane_of_block(kv_heads, rows_stride, ranges_stride)
        order += plane * gl.cdiv(seq_q, T.block_m) * gl.num_programs(1)
    first, last, clear_first, clear_last = query_tiles(block, seq_q, seq_k, band_low, band_high, ranges, T)
    mem = Shared(
        tile_q, tile_do, tile_k, tile_v, tile_ds, tile_ds_odd, tile_dq, boxes, rows_lse, rows_delta,
        keep_bounds(first, last, clear_first, clear_last),
        new_barriers(T.stages), new_barriers(T.stages), new_barriers(2),
    )  # fmt: skip
    p = Problem(
        q, k, v, do, dq, dk, dv, lse, delta, row_low, row_high, labels, order, turns,
        (kv_heads, group, seq_q, seq_k), (band_low, band_high, rows_stride), (scale, cap_scale, grad_scale),
        parts, block * T.block_n, (first, last),
    )  # fmt: skip
    if T.deterministic:
        gl.warp_specialize([
            (compute_partition, (p, mem, T)),
            (load_partition, (p, mem, T)),
            (dq_partition, (p, mem, 0, T)),
            (dq_partition, (p, mem, 1, T)),
        ], [1, 1, 1], [24, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (compute_partition, (p, mem, T)),
            (load_partition, (p, mem, T)),
            (dq_partition, (p, mem, 0, T)),
        ], [1, 1], [24, 24])  # fmt: skip
