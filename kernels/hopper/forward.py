"""Flash attention forward for sm_90a: TMA, wgmma, warp specialisation, a persistent loop with no gap between tiles.

A thread block is `warpgroups` consumer partitions of 64 queries each and a load warp. The algorithm is FlashAttention's
(arXiv 2205.14135) with FlashAttention-3's overlap of softmax and products (arXiv 2407.08608).

    load warp          draws a tile, tells the consumers where it is    Q -> sQ[q_buffers]    K, V -> sK, sV[stages]
    consumer w, the j-th block that it visits, one thread block a multiprocessor
        S_j = Q K_j^T              issued together with
        O  += P_{j-1} V_{j-1}      so that the tensor cores work while the softmax of the block before is computed
        P_j = exp2(S_j scale - reference),  O and the row sum rescaled where a reference moved (`forward_softmax.py`)
    between tiles: the first S of the next tile is issued before the last P V of this one; with one buffer for Q
    (above head_dim 128) the next Q is loaded while the last P V is computed and O is written.
    the end of a tile:  O / sum -> sO -> TMA -> out,  LSE by plain stores
    consumer w, the same, two thread blocks a multiprocessor (`T.programs`)
        S_j = Q K_j^T,  P_j,  O += P_j V_j   one after the other: the other thread block's products fill the gaps

Keys run from the last block to the first, so that the masked blocks at the diagonal come first (those at the left end
of a window last); masked and unmasked blocks have loops of their own.

Global memory traffic per head and tile of block_m queries that sees n keys: block_m (qk_dim + v_dim) elements of Q and
O, 4 block_m bytes of LSE, and n (qk_dim + v_dim) elements of K and V. Heads that share K and V and neighbouring tiles
run at the same time, so that K and V come from L2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from . import barriers
from .forward_consumers import consumer_partition
from .forward_state import FREE, Problem, Shared, announce, num_tiles, place, tile_after
from .gluon_api import tma_load

# ---------------------------------------------------------------------------------------------------- load warp


@gluon.jit
def load_block(desc, block, full, free, use, coord, T: gl.constexpr, SLICES: gl.constexpr):
    """Fetch one block of K or V, slice by slice of its lanes, into the stage of its `use`, once the consumers are done
    with that stage."""
    b, head, row = coord
    THREADS: gl.constexpr = T.warpgroups * 128 + 32
    stage = use % T.stages
    if use >= T.stages:
        barriers.sync(free + stage, THREADS)
    mbarrier.expect(full.index(stage), desc.block_type.nbytes * SLICES)
    for i in gl.static_range(SLICES):
        tma_load(desc, [b, head, row, i * desc.block_type.shape[3]], full.index(stage), block.index(stage * SLICES + i))


@gluon.jit
def load_pair(p, mem, use, coord, T: gl.constexpr):
    """Fetch a block of K, and of V."""
    load_block(p.k, mem.k, mem.k_full, FREE, use, coord, T, T.qk_slices)
    load_block(p.v, mem.v, mem.v_full, FREE + T.stages, use, coord, T, 1)


@gluon.jit
def load_partition(p, mem, T: gl.constexpr):
    batch, heads, group, seq_q, seq_k, head_chunk = p.sizes
    tiles = num_tiles(p, T)
    use = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < tiles:
        row0, b, h, first, last, clear_first, clear_last = place(tile, p, T)
        announce(turn, (row0, b, h, first, last, clear_first, clear_last), mem)
        kv = h // group
        load_block(p.k, mem.k, mem.k_full, FREE, use, (b, kv, (last - 1) * T.block_n), T, T.qk_slices)
        slot = turn % T.q_buffers
        for w in gl.static_range(T.warpgroups):
            at = slot * T.warpgroups + w
            mbarrier.wait(mem.q_free.index(at), ((turn // T.q_buffers) & 1) ^ 1)
            mbarrier.expect(mem.q_full.index(at), p.q.block_type.nbytes * T.qk_slices)
            for i in gl.static_range(T.qk_slices):
                part = mem.q.index(at * T.qk_slices + i)
                tma_load(p.q, [b, h, row0 + w * 64, i * T.qk_lanes], mem.q_full.index(at), part)
        load_block(p.v, mem.v, mem.v_full, FREE + T.stages, use, (b, kv, (last - 1) * T.block_n), T, 1)
        use += 1
        turn += 1
        # The next tile is drawn before the last block is loaded. Earlier it would be kept from others who may have
        # nothing to do for as long as this one lasts; later its number would be waited for.
        begun = turn
        if T.draws_early:
            tile = gl.atomic_add(p.counter, 1) + gl.num_programs(0)
        if T.draws_late:  # noqa: SIM102 (decided at compile time; the next one is not)
            if last - first == 1:
                begun = barriers.begin_draw(p.counter)
        for back in range(1, last - first):
            if T.draws_late:  # noqa: SIM102
                if back == last - first - 1:
                    begun = barriers.begin_draw(p.counter)
            load_pair(p, mem, use, (b, kv, (last - 1 - back) * T.block_n), T)
            use += 1
        if T.draws_late:
            tile = barriers.end_draw(begun) + gl.num_programs(0)
        if not T.dynamic:
            tile = tile_after(turn, p, T)
    announce(turn, (-1, 0, 0, 0, 0, 0, 0), mem)


# ---------------------------------------------------------------------------------------------------- kernel


@gluon.jit
def _barriers(number: gl.constexpr, count: gl.constexpr):
    result = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(result.index(i), count=count)
    return result


@gluon.jit
def forward_kernel(
    q, k, v, o,
    o_ptr, lse, sinks, row_low, row_high, labels, ranges, counter,
    stride_b, stride_h, stride_s, v_head_dim,
    batch, heads, group, seq_q, seq_k, head_chunk,
    band_low, band_high, rows_stride, ranges_stride, scale, cap_scale,
    T: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """`q`, `k`, `v`, `o`: tensor maps over [batch, heads, seq, dim]; `lse`: float32 [batch, heads, seq_q], natural
    logarithm.

    `scale` turns scores into exponents of 2; with a softcap the scores are first `tanh(s * cap_scale)`. `sinks`:
    float32 [heads]. `row_low`, `row_high`, `labels`, `ranges`: see `rows.py`. `counter`: int32, zero at launch.
    """
    slices: gl.constexpr = T.qk_slices
    tile_q = gl.allocate_shared_memory(q.dtype, [T.q_buffers * T.warpgroups * slices, 1, 1, 64, T.qk_lanes], q.layout)
    tile_k = gl.allocate_shared_memory(k.dtype, [T.stages * slices, 1, 1, T.block_n, T.qk_lanes], k.layout)
    tile_v = gl.allocate_shared_memory(v.dtype, [T.stages, 1, 1, T.block_n, T.v_dim], v.layout)
    if T.store_by_tma:
        tile_o = gl.allocate_shared_memory(o.dtype, [T.warpgroups, 1, 1, 64, T.o_lanes], o.layout)
    else:
        tile_o = tile_q
    tile = gl.allocate_shared_memory(gl.int32, [2 * 8, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mem = Shared(
        tile_q, tile_k, tile_v, tile_o, tile,
        _barriers(T.q_buffers * T.warpgroups, 1), _barriers(T.q_buffers * T.warpgroups, 1),
        _barriers(T.stages, 1), _barriers(T.stages, 1), _barriers(2, 1), _barriers(2, T.warpgroups),
    )  # fmt: skip
    p = Problem(
        q, k, v, o, o_ptr, (stride_b, stride_h, stride_s, v_head_dim), lse, sinks, row_low, row_high, labels, ranges,
        counter, (batch, heads, group, seq_q, seq_k, head_chunk), (band_low, band_high), (rows_stride, ranges_stride),
        scale, cap_scale,
    )  # fmt: skip
    if T.warpgroups == 2:
        gl.warp_specialize([
            (consumer_partition, (p, mem, 0, T)),
            (consumer_partition, (p, mem, 1, T)),
            (load_partition, (p, mem, T)),
        ], [4, 1], [T.registers, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer_partition, (p, mem, 0, T)),
            (consumer_partition, (p, mem, 1, T)),
            (consumer_partition, (p, mem, 2, T)),
            (load_partition, (p, mem, T)),
        ], [4, 4, 1], [T.registers, T.registers, 24])  # fmt: skip
