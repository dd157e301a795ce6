"""dK and dV for head dimensions above 128: 64 keys stay, the queries pass by. dQ has a kernel of its own
(`wide_queries.py`, which says why).

    load warp       K, V once;   Q, LSE -> sQ[2]   dO, delta -> sdO[2]
    warpgroup 0     S^T  = K Q^T      P^T  = exp2(S^T scale - LSE) -> sP[2]      dV += P^T dO
    warpgroup 1     dP^T = V dO^T     dS^T = P^T (dP^T - delta)                  dK += dS^T Q

Each warpgroup has half of the products and one of the two accumulators, 64 x head_dim, which is half of its registers;
P^T and dS^T are left operands in registers. P^T crosses once, in float32, through shared memory. The scheme is
reproducible: nothing is added in memory, and the heads that share keys come one after the other.

Global memory traffic per block of keys and query head that meets n queries: n (qk_dim + v_dim) elements and 8 n bytes
of LSE and delta read; per block of keys 64 (qk_dim + v_dim) elements of K and V read, of dK and dV written.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import barriers
from .backward_state import arrays_of_block, batch_and_head, batch_and_head_of, hide, new_barriers, scores_layout
from .gluon_api import aggregate, partition_barrier, reinterpret, tma_load, tma_store, tma_store_wait
from .scores import query_tiles, tanh
from .wide_queries import accumulate, no_sums

Q_FREE = gl.constexpr(4)
"""Named barriers: 4, 5 "stage of Q free", 6, 7 "stage of dO free", 8, 9 "P written", 10, 11 "P read"."""
DO_FREE = gl.constexpr(6)
P_FULL = gl.constexpr(8)
P_FREE = gl.constexpr(10)
_THREADS = gl.constexpr(288)
"""Two warpgroups and the load warp."""


@aggregate
class Problem:
    """The arguments of the kernel, see `wide_keys_kernel`. Names as in `backward_state.Problem`, whose functions read
    them."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    do: tma.tensor_descriptor
    dk: tma.tensor_descriptor
    dv: tma.tensor_descriptor
    lse: tma.tensor_descriptor
    delta: tma.tensor_descriptor
    row_low: gl.tensor
    row_high: gl.tensor
    labels: gl.tensor
    sizes: gl.tuple
    band: gl.tuple
    scales: gl.tuple
    parts: gl.tensor
    key0: gl.tensor
    tiles: gl.tuple


@aggregate
class Shared:
    """Shared memory and its barriers. `dv`, `dk`: the results, over K and V."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    dk: gl.shared_memory_descriptor
    dv: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor


@gluon.constexpr_function
def gradient_layout(dim):
    """Registers of dK or dV [64, dim] of one warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, dim, 16])


@gluon.jit
def load_partition(p, mem, T: gl.constexpr):
    kv_heads, group, seq_q, seq_k = p.sizes
    b, kv = batch_and_head(p)
    first, last, clear_first, clear_last = p.tiles
    per_head = padded_tiles(seq_q, T)
    mbarrier.expect(mem.kv_full.index(0), p.k.block_type.nbytes * T.qk_slices)
    for i in gl.static_range(T.qk_slices):
        tma_load(p.k, [b, kv // p.parts, p.key0, i * T.qk_lanes], mem.kv_full.index(0), mem.k.index(i))
    use = 0
    for member in range(group):
        h = kv * group + member
        row_of_tile = (b * kv_heads * group + h) * per_head
        for tile in range(first, last):
            stage = use % T.stages
            if use >= T.stages:
                barriers.sync(Q_FREE + stage, _THREADS)
            mbarrier.expect(mem.q_full.index(stage), p.q.block_type.nbytes * T.qk_slices + p.lse.block_type.nbytes)
            tma_load(p.lse, [row_of_tile + tile, 0], mem.q_full.index(stage), mem.lse.index(stage))
            for i in gl.static_range(T.qk_slices):
                part = mem.q.index(stage * T.qk_slices + i)
                tma_load(p.q, [b, h, tile * T.block_m, i * T.qk_lanes], mem.q_full.index(stage), part)
            if use == 0:
                mbarrier.expect(mem.kv_full.index(1), p.v.block_type.nbytes)
                tma_load(p.v, [b, kv // p.parts, p.key0, 0], mem.kv_full.index(1), mem.v)
            if use >= T.stages:
                barriers.sync(DO_FREE + stage, _THREADS)
            mbarrier.expect(mem.do_full.index(stage), p.do.block_type.nbytes + p.delta.block_type.nbytes)
            tma_load(p.delta, [row_of_tile + tile, 0], mem.do_full.index(stage), mem.delta.index(stage))
            tma_load(p.do, [b, h, tile * T.block_m, 0], mem.do_full.index(stage), mem.do.index(stage))
            use += 1


@gluon.jit
def padded_tiles(seq_q, T: gl.constexpr):
    """Tiles of a head in LSE and delta, which are padded to the 128 rows of the kernel of dQ."""
    return gl.cdiv(seq_q, 128) * (128 // T.block_m)


@gluon.jit
def values_partition(p, mem, T: gl.constexpr):
    """Warpgroup 0: S, P, dV."""
    SCORES: gl.constexpr = scores_layout(T)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, gradient_layout(T.v_dim), 2)
    kv_heads, group, seq_q, seq_k = p.sizes
    scale, cap_scale, grad_scale = p.scales
    first, last, clear_first, clear_last = p.tiles
    dv = gl.zeros((T.block_n, T.v_dim), gl.float32, gradient_layout(T.v_dim))
    zero = gl.zeros((T.block_n, T.block_m), gl.float32, SCORES)
    mbarrier.wait(mem.kv_full.index(0), 0)
    tile = first
    for use in range(group * (last - first)):
        stage = use % T.stages
        phase = (use // T.stages) & 1
        mbarrier.wait(mem.q_full.index(stage), phase)
        st = zero
        for i in gl.static_range(T.qk_slices):
            k = mem.k.index(i).reshape([T.block_n, T.qk_lanes])
            q = mem.q.index(stage * T.qk_slices + i).reshape([T.block_m, T.qk_lanes])
            st = warpgroup_mma(k, q.permute((1, 0)), st, use_acc=i > 0, is_async=True)
        lse = mem.lse.index(stage).load(SCORES)
        st = warpgroup_mma_wait(0, (st,))
        if T.softcap:
            st = tanh(st * cap_scale)
            capped = st
        if T.masked:  # noqa: SIM102 (decided at compile time; the next one is not)
            if (tile < clear_first) | (tile >= clear_last):
                st = hide(st, tile, batch_and_head(p)[0], p, T)
        pt = gl.exp2(st * scale - lse)
        barriers.arrive(Q_FREE + stage, _THREADS)
        operand = gl.convert_layout(pt.to(p.k.dtype), OPERAND, assert_trivial=True)
        if T.softcap:
            pt = pt * (1.0 - capped * capped)
        barriers.sync(P_FREE + stage, 256)
        mem.p.index(stage).store(pt)
        barriers.arrive(P_FULL + stage, 256)
        mbarrier.wait(mem.do_full.index(stage), phase)
        dv = warpgroup_mma(operand, mem.do.index(stage).reshape([T.block_m, T.v_dim]), dv, is_async=True)
        # The operand is a dependence of the wait: its registers must not be reused while the product reads them
        # (docs/hopper.md, hazards).
        dv, operand = warpgroup_mma_wait(0, (dv, operand))
        barriers.arrive(DO_FREE + stage, _THREADS)
        tile = gl.where(tile == last - 1, first, tile + 1)
    partition_barrier()
    mem.dv.reshape([T.block_n, T.v_dim]).store(dv.to(p.k.dtype))
    fence_async_shared()
    partition_barrier()
    b, kv = batch_and_head(p)
    tma_store(p.dv, [b, kv, p.key0, 0], mem.dv)
    tma_store_wait(0)


@gluon.jit
def keys_partition(p, mem, T: gl.constexpr):
    """Warpgroup 1: dP, dS, dK."""
    SCORES: gl.constexpr = scores_layout(T)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, gradient_layout(T.qk_lanes), 2)
    kv_heads, group, seq_q, seq_k = p.sizes
    scale, cap_scale, grad_scale = p.scales
    first, last, clear_first, clear_last = p.tiles
    v = mem.v.reshape([T.block_n, T.v_dim])
    dk = no_sums(T)
    zero = gl.zeros((T.block_n, T.block_m), gl.float32, SCORES)
    for either in gl.static_range(T.stages):
        barriers.arrive(P_FREE + either, 256)
    if last > first:  # V comes after the first Q, and not at all for keys that no query sees
        mbarrier.wait(mem.kv_full.index(1), 0)
    for use in range(group * (last - first)):
        stage = use % T.stages
        phase = (use // T.stages) & 1
        mbarrier.wait(mem.do_full.index(stage), phase)
        do = mem.do.index(stage).reshape([T.block_m, T.v_dim])
        dpt = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
        delta = mem.delta.index(stage).load(SCORES)
        barriers.sync(P_FULL + stage, 256)
        pt = mem.p.index(stage).load(SCORES)
        barriers.arrive(P_FREE + stage, 256)
        dpt = warpgroup_mma_wait(0, (dpt,))
        ds = (pt * (dpt - delta)).to(p.k.dtype)
        barriers.arrive(DO_FREE + stage, _THREADS)
        operand = gl.convert_layout(ds, OPERAND, assert_trivial=True)
        mbarrier.wait(mem.q_full.index(stage), phase)
        dk = accumulate(dk, operand, mem.q, stage, T)
        barriers.arrive(Q_FREE + stage, _THREADS)
    partition_barrier()
    for i in gl.static_range(T.qk_slices):
        mem.dk.index(i).reshape([T.block_n, T.qk_lanes]).store((dk[i] * grad_scale).to(p.k.dtype))
    fence_async_shared()
    partition_barrier()
    b, kv = batch_and_head(p)
    for i in gl.static_range(T.qk_slices):
        tma_store(p.dk, [b, kv, p.key0, i * T.qk_lanes], mem.dk.index(i))
    tma_store_wait(0)


@gluon.jit
def wide_keys_kernel(
    q, k, v, do, dk, dv, lse, delta,
    row_low, row_high, labels, ranges,
    kv_heads, group, parts, seq_q, seq_k,
    band_low, band_high, rows_stride, ranges_stride,
    scale, cap_scale, grad_scale,
    T: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Grid, arguments: those of `backward_kernel`; `lse` and `delta` have `padded_tiles` tiles a head."""
    K_SHAPE: gl.constexpr = [T.qk_slices, 1, 1, T.block_n, T.qk_lanes]
    V_SHAPE: gl.constexpr = [1, 1, T.block_n, T.v_dim]
    tile_q = gl.allocate_shared_memory(q.dtype, [T.stages * T.qk_slices, 1, 1, T.block_m, T.qk_lanes], q.layout)
    tile_do = gl.allocate_shared_memory(q.dtype, [T.stages, 1, 1, T.block_m, T.v_dim], do.layout)
    # Warpgroup 0 alone reads K and leaves dV there, warpgroup 1 alone reads V and leaves dK there.
    tile_k = gl.allocate_shared_memory(q.dtype, K_SHAPE, k.layout)
    tile_dk = gl.allocate_shared_memory(q.dtype, K_SHAPE, dk.layout)
    P_SHAPE: gl.constexpr = [T.block_n, T.block_m]
    tile_p = gl.allocate_shared_memory(
        gl.float32, [T.stages, T.block_n, T.block_m], gl.NVMMASharedLayout.get_default_for(P_SHAPE, gl.float32)
    )
    rows_lse = gl.allocate_shared_memory(gl.float32, [T.stages, 1, T.block_m], lse.layout)
    rows_delta = gl.allocate_shared_memory(gl.float32, [T.stages, 1, T.block_m], delta.layout)
    block = gl.program_id(1)
    b, kv = batch_and_head_of(kv_heads)
    row_low, row_high, labels, ranges = arrays_of_block(
        row_low, row_high, labels, ranges, b, kv, gl.num_programs(1), (rows_stride, ranges_stride), seq_q, seq_k, T
    )
    mem = Shared(
        tile_q, tile_do, tile_k, reinterpret(tile_dk, q.dtype, V_SHAPE, v.layout), tile_p,
        tile_dk, reinterpret(tile_k, q.dtype, V_SHAPE, dv.layout), rows_lse, rows_delta,
        new_barriers(T.stages), new_barriers(T.stages), new_barriers(2),
    )  # fmt: skip
    p = Problem(
        q, k, v, do, dk, dv, lse, delta, row_low, row_high, labels,
        (kv_heads, group, seq_q, seq_k), (band_low, band_high, rows_stride), (scale, cap_scale, grad_scale),
        parts, block * T.block_n, query_tiles(block, seq_q, seq_k, band_low, band_high, ranges, T),
    )  # fmt: skip
    gl.warp_specialize([
        (values_partition, (p, mem, T)),
        (keys_partition, (p, mem, T)),
        (load_partition, (p, mem, T)),
    ], [4, 1], [240, 24])  # fmt: skip
