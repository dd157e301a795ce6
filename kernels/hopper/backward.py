"""Flash attention backward for sm_90a: dQ, dK, dV from Q, K, V, dO, LSE and delta = rowsum(dO * O).

A thread block keeps `block_n` keys and values and lets the queries pass; it visits every query head that shares its keys, so dK and dV are
summed over the group in registers, in a fixed order. The structure follows FlashAttention-3 (arXiv 2407.08608).

    load warp     K, V once;   Q, LSE -> sQ[stages]   dO, delta -> sdO[stages]
    8 compute warps, per tile of queries
        S^T  = K Q^T                   dP^T = V dO^T                       (both issued at once)
        P^T  = exp2(S^T scale - LSE)   dS^T = P^T (dP^T - delta)
        dV  += P^T dO                  dK  += dS^T Q                       (P^T, dS^T stay in registers)
        dQ   = dS K                    through shared memory (dS^T) and back
    dQ warp       dQ tile -> global memory by TMA reduce-add in float32

Named barriers hand the dQ tile over; with 64-row tiles each compute warpgroup owns half of the feature axis and a barrier of its own.
With `deterministic` the blocks of keys add to a tile of dQ in ascending order: the dQ warp waits for its turn before it adds and passes it on after
the addition is written.

Global memory traffic per block of keys and query head: seq_q (qk_dim + v_dim) elements read, 4 seq_q qk_dim bytes of reduce-add in L2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from . import barriers
from .gluon_api import aggregate, tma_load, tma_reduce_add, tma_store, tma_store_wait
from .scores import query_tiles, tanh

_DQ_FULL = gl.constexpr(4)
"""Named barriers: 4, 5 "dQ tile (half) written", 6, 7 "dQ tile (half) free", 8.. "Q and dO stage free"."""
_DQ_FREE = gl.constexpr(6)
_STAGE_FREE = gl.constexpr(8)

_FIRST = gl.constexpr(0)
"""Bounds of the loop over tiles, by place in shared memory: first and last tile, first and last one without a mask."""
_LAST = gl.constexpr(1)
_CLEAR_FIRST = gl.constexpr(2)
_CLEAR_LAST = gl.constexpr(3)


@aggregate
class Problem:
    """The arguments of the kernel, see `backward_kernel`, and what this thread block does."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    do: tma.tensor_descriptor
    dq: tma.tensor_descriptor
    dk: tma.tensor_descriptor
    dv: tma.tensor_descriptor
    lse: tma.tensor_descriptor
    delta: tma.tensor_descriptor
    row_low: gl.tensor
    row_high: gl.tensor
    order: gl.tensor
    turns: gl.tensor
    sizes: gl.tuple
    band: gl.tuple
    scales: gl.tuple
    key0: gl.tensor
    tiles: gl.tuple

    @gluon.constexpr_function
    def __init__(self, q, k, v, do, dq, dk, dv, lse, delta, row_low, row_high, order, turns, sizes, band, scales, key0, tiles):
        self.q = q
        self.k = k
        self.v = v
        self.do = do
        self.dq = dq
        self.dk = dk
        self.dv = dv
        self.lse = lse
        self.delta = delta
        self.row_low = row_low
        self.row_high = row_high
        self.order = order
        self.turns = turns
        self.sizes = sizes
        self.band = band
        self.scales = scales
        self.key0 = key0
        self.tiles = tiles


@aggregate
class Shared:
    """Shared memory and its barriers. `dq` and `dq_halves` are one buffer: written as a tile, sent as halves."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    dq_halves: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    bounds: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, do, k, v, ds, dq, dq_halves, lse, delta, bounds, q_full, do_full, kv_full):
        self.q = q
        self.do = do
        self.k = k
        self.v = v
        self.ds = ds
        self.dq = dq
        self.dq_halves = dq_halves
        self.lse = lse
        self.delta = delta
        self.bounds = bounds
        self.q_full = q_full
        self.do_full = do_full
        self.kv_full = kv_full


@gluon.constexpr_function
def _scores_layout(T):
    """Registers of S^T [block_n, block_m]."""
    return gl.NVMMADistributedLayout([3, 0], [T.template.num_warps, 1], [16, T.template.block_m, 16])


@gluon.constexpr_function
def _gradient_layout(T, dim):
    """Registers of dK and dV [block_n, dim]."""
    return gl.NVMMADistributedLayout([3, 0], [T.template.num_warps, 1], [16, dim, 16])


@gluon.constexpr_function
def _dq_layout(T):
    """Registers of dQ [block_m, qk_dim]: 64 rows leave the feature axis for the second warpgroup."""
    t = T.template
    if t.split_dq:
        return gl.NVMMADistributedLayout([3, 0], [4, t.num_warps // 4], [16, t.qk_dim // (t.num_warps // 4), 16])
    return gl.NVMMADistributedLayout([3, 0], [t.num_warps, 1], [16, t.qk_dim, 16])


@gluon.jit
def batch_and_head(p):
    """Batch and key/value head of this thread block. Found where it is needed: two registers less in the loop over the queries."""
    kv_heads, group, seq_q, seq_k = p.sizes
    batch_head = gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)
    b = batch_head // kv_heads
    return b, batch_head - b * kv_heads


@gluon.jit
def tile_at(i, first, last, T: gl.constexpr):
    """The i-th tile of queries of a head.

    Deterministic blocks run from the last tile down: all blocks of a head start at the same tile, one turn apart, and the later ones of a
    causal mask have as many tiles less to do as they wait. From the first tile up each would wait twice as long.
    """
    if T.deterministic:
        return last - 1 - i
    else:
        return first + i


@gluon.jit
def load_partition(p, mem, T: gl.constexpr):
    kv_heads, group, seq_q, seq_k = p.sizes
    b, kv = batch_and_head(p)
    first, last = p.tiles
    THREADS: gl.constexpr = T.num_warps * 32 + 32
    per_head = gl.cdiv(seq_q, T.block_m)
    mbarrier.expect(mem.kv_full.index(0), p.k.block_type.nbytes)
    tma_load(p.k, [b, kv, p.key0, 0], mem.kv_full.index(0), mem.k)
    mbarrier.expect(mem.kv_full.index(1), p.v.block_type.nbytes)
    tma_load(p.v, [b, kv, p.key0, 0], mem.kv_full.index(1), mem.v)
    use = 0
    for member in range(group):
        h = kv * group + member
        row_of_tile = (b * kv_heads * group + h) * per_head
        for i in range(last - first):
            tile = tile_at(i, first, last, T)
            stage = use % T.stages
            if use >= T.stages:
                barriers.sync(_STAGE_FREE + stage, THREADS)
            mbarrier.expect(mem.q_full.index(stage), p.q.block_type.nbytes + p.lse.block_type.nbytes)
            tma_load(p.lse, [row_of_tile + tile, 0], mem.q_full.index(stage), mem.lse.index(stage))
            tma_load(p.q, [b, h, tile * T.block_m, 0], mem.q_full.index(stage), mem.q.index(stage))
            mbarrier.expect(mem.do_full.index(stage), p.do.block_type.nbytes + p.delta.block_type.nbytes)
            tma_load(p.delta, [row_of_tile + tile, 0], mem.do_full.index(stage), mem.delta.index(stage))
            tma_load(p.do, [b, h, tile * T.block_m, 0], mem.do_full.index(stage), mem.do.index(stage))
            use += 1


# ---------------------------------------------------------------------------------------------------- dQ


@gluon.jit
def earlier_blocks(tile, p, T: gl.constexpr):
    """How many blocks of keys before this one add to a tile of dQ: they have lower program ids, so waiting for them cannot deadlock."""
    band_low, band_high, rows_stride = p.band
    own = p.key0 // T.block_n
    if T.by_rows:
        b, kv = batch_and_head(p)
        return own - gl.load(p.order + b * gl.cdiv(rows_stride, T.block_m) + tile)
    elif T.left_limit:
        return own - gl.maximum(tile * T.block_m + band_low, 0) // T.block_n
    else:
        return own


@gluon.jit
def dq_partition(p, mem, T: gl.constexpr):
    kv_heads, group, seq_q, seq_k = p.sizes
    b, kv = batch_and_head(p)
    first, last = p.tiles
    ALL: gl.constexpr = T.num_warps * 32 + 32
    HALF: gl.constexpr = 128 + 32
    per_head = gl.cdiv(seq_q, T.block_m)
    if T.split_dq:
        barriers.arrive(_DQ_FREE, HALF)
        barriers.arrive(_DQ_FREE + 1, HALF)
    else:
        barriers.arrive(_DQ_FREE, ALL)
    for member in range(group):
        h = kv * group + member
        for i in range(last - first):
            tile = tile_at(i, first, last, T)
            row0 = tile * T.block_m
            if T.deterministic:
                turn = p.turns + (b * kv_heads * group + h) * per_head + tile
                rank = earlier_blocks(tile, p, T)
                barriers.wait_for_turn(turn, rank)
            if T.split_dq:
                barriers.sync(_DQ_FULL, HALF)
                tma_reduce_add(p.dq, [b, h, row0, 0], mem.dq_halves.index(0))
                barriers.sync(_DQ_FULL + 1, HALF)
                tma_reduce_add(p.dq, [b, h, row0, T.qk_dim // 2], mem.dq_halves.index(1))
                tma_store_wait(1)
                barriers.arrive(_DQ_FREE, HALF)
                tma_store_wait(0)
                barriers.arrive(_DQ_FREE + 1, HALF)
            else:
                barriers.sync(_DQ_FULL, ALL)
                tma_reduce_add(p.dq, [b, h, row0, 0], mem.dq_halves.index(0))
                tma_store_wait(0)
                barriers.arrive(_DQ_FREE, ALL)
            if T.deterministic:
                barriers.pass_turn(turn)


# ---------------------------------------------------------------------------------------------------- compute


@gluon.jit
def hide(st, tile, p, T: gl.constexpr):
    """Set the scores of hidden keys to -inf."""
    LAYOUT: gl.constexpr = _scores_layout(T)
    kv_heads, group, seq_q, seq_k = p.sizes
    band_low, band_high, rows_stride = p.band
    columns = gl.arange(0, T.block_m, gl.SliceLayout(0, LAYOUT))
    keys = p.key0 + gl.arange(0, T.block_n, gl.SliceLayout(1, LAYOUT))
    row0 = tile * T.block_m
    if T.by_rows:
        b, kv = batch_and_head(p)
        rows = row0 + columns
        low = gl.load(p.row_low + b * rows_stride + rows)
        high = gl.load(p.row_high + b * rows_stride + rows)
        keep = (keys[:, None] < high[None, :]) & (keys[:, None] >= low[None, :])
    else:
        # The limit stands on the side of the keys, of which a thread has two, not of its sixteen or more queries: registers are scarce here.
        earliest = gl.where(keys < seq_k, keys - band_high - row0, T.block_m)
        keep = columns[None, :] >= earliest[:, None]
        if T.left_limit:
            keep = keep & (columns[None, :] <= (keys - band_low - row0)[:, None])
    return gl.where(keep, st, float("-inf"))


@gluon.jit
def step(use, tile, masked, dk, dv, p, mem, T: gl.constexpr):
    """One tile of queries, the `use`-th of this thread block."""
    BLOCK_M: gl.constexpr = T.block_m
    BLOCK_N: gl.constexpr = T.block_n
    QK_DIM: gl.constexpr = T.qk_dim
    V_DIM: gl.constexpr = T.v_dim
    SCORES: gl.constexpr = _scores_layout(T)
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(0, _gradient_layout(T, T.v_dim), 2)
    DS_OPERAND: gl.constexpr = gl.DotOperandLayout(0, _gradient_layout(T, T.qk_dim), 2)
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
    if T.masked:
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
    gl.thread_barrier()
    dq = warpgroup_mma(mem.ds.permute((1, 0)), k, gl.zeros((BLOCK_M, QK_DIM), gl.float32, _dq_layout(T)), use_acc=False, is_async=True)
    dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
    # Operands are dependences of the waits: their registers must not be reused while a product reads them (docs/hopper.md, hazards).
    dq, dv, p_operand = warpgroup_mma_wait(1, (dq, dv, p_operand))
    if T.split_dq:
        barriers.sync_of_warpgroup(_DQ_FREE, 160)
    else:
        barriers.sync(_DQ_FREE, THREADS)
    mem.dq.store(dq)
    fence_async_shared()
    if T.split_dq:
        barriers.arrive_of_warpgroup(_DQ_FULL, 160)
    else:
        barriers.arrive(_DQ_FULL, THREADS)
    dk, ds_operand = warpgroup_mma_wait(0, (dk, ds_operand))
    barriers.arrive(_STAGE_FREE + stage, THREADS)
    return dk, dv


@gluon.jit
def bound(mem, which: gl.constexpr):
    """One of the bounds of the loop over tiles of queries."""
    return gl.max(mem.bounds.index(which).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def compute_partition(p, mem, T: gl.constexpr):
    BLOCK_N: gl.constexpr = T.block_n
    QK_DIM: gl.constexpr = T.qk_dim
    V_DIM: gl.constexpr = T.v_dim
    kv_heads, group, seq_q, seq_k = p.sizes
    scale, cap_scale, grad_scale = p.scales
    dk = gl.zeros((BLOCK_N, QK_DIM), gl.float32, _gradient_layout(T, T.qk_dim))
    dv = gl.zeros((BLOCK_N, V_DIM), gl.float32, _gradient_layout(T, T.v_dim))
    mbarrier.wait(mem.kv_full.index(0), 0)
    mbarrier.wait(mem.kv_full.index(1), 0)
    # One loop over the tiles of all heads. Its bounds come from shared memory in every turn: in registers they would make it spill, and so
    # would a loop each for masked and unmasked tiles.
    tile = tile_at(0, bound(mem, _FIRST), bound(mem, _LAST), T)
    for use in range(group * (bound(mem, _LAST) - bound(mem, _FIRST))):
        masked = (tile < bound(mem, _CLEAR_FIRST)) | (tile >= bound(mem, _CLEAR_LAST))
        dk, dv = step(use, tile, masked, dk, dv, p, mem, T)
        if T.deterministic:
            tile -= 1
            tile = gl.where(tile < bound(mem, _FIRST), bound(mem, _LAST) - 1, tile)
        else:
            tile += 1
            tile = gl.where(tile == bound(mem, _LAST), bound(mem, _FIRST), tile)
    gl.thread_barrier()
    mem.v.reshape([BLOCK_N, V_DIM]).store(dv.to(mem.q.dtype))
    mem.k.reshape([BLOCK_N, QK_DIM]).store((dk * grad_scale).to(mem.q.dtype))
    fence_async_shared()
    gl.thread_barrier()
    b, kv = batch_and_head(p)
    tma_store(p.dv, [b, kv, p.key0, 0], mem.v)
    tma_store(p.dk, [b, kv, p.key0, 0], mem.k)
    tma_store_wait(0)


# ---------------------------------------------------------------------------------------------------- kernel


@gluon.jit
def _barriers(number: gl.constexpr):
    result = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(result.index(i), count=1)
    return result


@gluon.jit
def _store(bounds, which: gl.constexpr, value):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    bounds.index(which).store(gl.full([1], 0, gl.int32, LAYOUT) + value)


@gluon.jit
def backward_kernel(
    q, k, v, do, dq, dk, dv, lse, delta,
    row_low, row_high, ranges, order, turns,
    kv_heads, group, seq_q, seq_k,
    band_low, band_high, rows_stride, ranges_stride,
    scale, cap_scale, grad_scale,
    T: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Grid (head_chunk, blocks of keys, batch * kv_heads / head_chunk): the heads of a chunk run together, blocks of low number first,
    which under a causal mask see the most queries.

    `q` … `dv`: tensor maps over [batch, heads, seq, dim]; `dq` float32, zero at launch, unscaled (the post kernel scales and rounds it).

    `lse`, `delta`: float32 [tiles, block_m], base 2, +inf in `lse` for rows that take no part (see prepare.py).
    `row_low`, `row_high`, `ranges`, `order`: see `rows.py`. `turns`: int32 [tiles], zero at launch (deterministic only).
    """
    tile_q = gl.allocate_shared_memory(q.dtype, [T.stages, 1, 1, T.block_m, T.qk_dim], q.layout)
    tile_do = gl.allocate_shared_memory(q.dtype, [T.stages, 1, 1, T.block_m, T.v_dim], do.layout)
    tile_k = gl.allocate_shared_memory(q.dtype, [1, 1, T.block_n, T.qk_dim], k.layout)
    tile_v = gl.allocate_shared_memory(q.dtype, [1, 1, T.block_n, T.v_dim], v.layout)
    DS_SHAPE: gl.constexpr = [T.block_n, T.block_m]
    tile_ds = gl.allocate_shared_memory(q.dtype, DS_SHAPE, gl.NVMMASharedLayout.get_default_for(DS_SHAPE, q.dtype))
    DQ_SHAPE: gl.constexpr = [T.block_m, T.qk_dim]
    tile_dq = gl.allocate_shared_memory(gl.float32, DQ_SHAPE, gl.NVMMASharedLayout.get_default_for(DQ_SHAPE, gl.float32))
    if T.split_dq:
        halves = tile_dq._reinterpret(gl.float32, [2, 1, 1, T.block_m, T.qk_dim // 2], dq.layout)
    else:
        halves = tile_dq._reinterpret(gl.float32, [1, 1, 1, T.block_m, T.qk_dim], dq.layout)
    rows_lse = gl.allocate_shared_memory(gl.float32, [T.stages, 1, T.block_m], lse.layout)
    rows_delta = gl.allocate_shared_memory(gl.float32, [T.stages, 1, T.block_m], delta.layout)
    block = gl.program_id(1)
    if T.by_rows:
        ranges += (gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)) // kv_heads * ranges_stride
    first, last, clear_first, clear_last = query_tiles(block, seq_q, seq_k, band_low, band_high, ranges, T)
    bounds = gl.allocate_shared_memory(gl.int32, [4, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    _store(bounds, _FIRST, first)
    _store(bounds, _LAST, last)
    _store(bounds, _CLEAR_FIRST, clear_first)
    _store(bounds, _CLEAR_LAST, clear_last)
    gl.thread_barrier()
    mem = Shared(
        tile_q, tile_do, tile_k, tile_v, tile_ds, tile_dq, halves, rows_lse, rows_delta, bounds,
        _barriers(T.stages), _barriers(T.stages), _barriers(2),
    )  # fmt: skip
    p = Problem(
        q, k, v, do, dq, dk, dv, lse, delta, row_low, row_high, order, turns,
        (kv_heads, group, seq_q, seq_k), (band_low, band_high, rows_stride), (scale, cap_scale, grad_scale),
        block * T.block_n, (first, last),
    )  # fmt: skip
    gl.warp_specialize([
        (compute_partition, (p, mem, T)),
        (load_partition, (p, mem, T)),
        (dq_partition, (p, mem, T)),
    ], [1, 1], [24, 24])  # fmt: skip
