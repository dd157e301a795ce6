"""Flash attention forward for sm_90a: TMA, wgmma, warp specialisation, a persistent loop with no gap between tiles.

One thread block per SM: `warpgroups` consumer partitions of 64 queries each and a load warp. The algorithm is
FlashAttention's (arXiv 2205.14135) with FlashAttention-3's overlap of softmax and products (arXiv 2407.08608).

    load warp          Q tile -> sQ[2]     K, V blocks -> sK[stages], sV[stages]     next tile's number -> consumers
    consumer w, block j
        S_j = Q K_j^T              issued together with
        O  += P_{j-1} V_{j-1}      so that the tensor cores work while the softmax of the block before is computed
        P_j = exp2(S_j scale - max),  O and the row sum rescaled
    between tiles: the first S of the next tile is issued before the last P V of this one.

Keys run from the last block to the first, so that the masked (diagonal) blocks come first; masked and unmasked blocks
have loops of their own.

Global memory traffic per head and tile of block_m queries: block_m (qk_dim + v_dim) + seq_k (qk_dim + v_dim)
elements; heads that share K and V and neighbouring tiles run at the same time, so that K and V come from L2.
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
from .forward_state import (
    FREE,
    Problem,
    Shared,
    hide_keys,
    limits,
    num_tiles,
    out_layout,
    place,
    scores_layout,
    tile_after,
    zeros,
)
from .gluon_api import tma_load, tma_store, tma_store_wait
from .scores import tanh

# ---------------------------------------------------------------------------------------------------- load warp


@gluon.jit
def load_block(desc, block, full, free, use, coord, T: gl.constexpr):
    """Fetch one block of K or V into the stage of its `use`, once the consumers are done with that stage."""
    THREADS: gl.constexpr = T.warpgroups * 128 + 32
    stage = use % T.stages
    if use >= T.stages:
        barriers.sync(free + stage, THREADS)
    mbarrier.expect(full.index(stage), desc.block_type.nbytes)
    tma_load(desc, coord, full.index(stage), block.index(stage))


@gluon.jit
def load_partition(p, mem, T: gl.constexpr):
    batch, heads, group, seq_q, seq_k, head_chunk = p.sizes
    V_FREE: gl.constexpr = FREE + T.stages
    tiles = num_tiles(p, T)
    use = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < tiles:
        row0, head, first, last, clear_first, clear_last = place(tile, p, T)
        b = head // heads
        h = head - b * heads
        kv = h // group
        load_block(p.k, mem.k, mem.k_full, FREE, use, [b, kv, (last - 1) * T.block_n, 0], T)
        slot = turn % T.q_buffers
        for w in gl.static_range(T.warpgroups):
            at = slot * T.warpgroups + w
            mbarrier.wait(mem.q_free.index(at), ((turn // T.q_buffers) & 1) ^ 1)
            mbarrier.expect(mem.q_full.index(at), p.q.block_type.nbytes)
            tma_load(p.q, [b, h, row0 + w * 64, 0], mem.q_full.index(at), mem.q.index(at))
        load_block(p.v, mem.v, mem.v_full, V_FREE, use, [b, kv, (last - 1) * T.block_n, 0], T)
        use += 1
        turn += 1
        if T.dynamic:
            tile = gl.atomic_add(p.counter, 1) + gl.num_programs(0)
            mbarrier.wait(mem.tile_free, turn & 1)
            mem.next_tile.store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + tile)
            mbarrier.arrive(mem.tile_full, count=1)
        else:
            tile = tile_after(turn, p, T)
        for back in range(1, last - first):
            load_block(p.k, mem.k, mem.k_full, FREE, use, [b, kv, (last - 1 - back) * T.block_n, 0], T)
            load_block(p.v, mem.v, mem.v_full, V_FREE, use, [b, kv, (last - 1 - back) * T.block_n, 0], T)
            use += 1


# ---------------------------------------------------------------------------------------------------- consumers


@gluon.jit
def take_turn(w: gl.constexpr, T: gl.constexpr):
    if T.pingpong:
        barriers.sync(FREE + 2 * T.stages + w, 256)


@gluon.jit
def pass_turn(w: gl.constexpr, T: gl.constexpr):
    if T.pingpong:
        barriers.arrive(FREE + 2 * T.stages + (w + 1) % T.warpgroups, 256)


@gluon.jit
def row_sums(x):
    """Sum over the columns that a thread holds; the four threads of a row are summed once, at the end of the tile."""
    return gl.sum(gl.sum(gl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def scores(s, block, rows, p, T: gl.constexpr, MASKED: gl.constexpr):
    """Softcap, then the mask: in units of `p.scale`, which turns them into exponents of 2."""
    if T.softcap:
        s = tanh(s * p.cap_scale)
    if MASKED:
        s = hide_keys(s, block, rows, p, T)
    return s


@gluon.jit
def finite(maximum, MASKED: gl.constexpr):
    """The maximum to subtract: 0 for a row that has seen no key, whose -inf would make NaN of -inf - -inf."""
    if MASKED:
        return gl.where(maximum == float("-inf"), 0.0, maximum)
    else:
        return maximum


@gluon.jit
def first_probabilities(s, block, rows, p, T: gl.constexpr):
    s = scores(s, block, rows, p, T, T.masked)
    maximum = gl.max(s, 1)
    shift = finite(maximum, T.masked) * p.scale
    probabilities = gl.exp2(s * p.scale - shift[:, None])
    return probabilities, maximum, row_sums(probabilities)


@gluon.jit
def as_operand(probabilities, p, T: gl.constexpr):
    """P in the input's precision, in registers, as the left operand of the product with V."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, out_layout(T), 2)
    return gl.convert_layout(probabilities.to(p.v.dtype), LAYOUT, assert_trivial=True)


@gluon.jit
def k_block(mem, stage, T: gl.constexpr):
    return mem.k.index(stage).reshape([T.block_n, T.qk_dim]).permute((1, 0))


@gluon.jit
def v_block(mem, stage, T: gl.constexpr):
    return mem.v.index(stage).reshape([T.block_n, T.v_dim])


@gluon.jit
def attend(
    use,
    block,
    q,
    acc,
    maximum,
    total,
    operand,
    rows,
    p,
    mem,
    w: gl.constexpr,
    T: gl.constexpr,
    MASKED: gl.constexpr,
):
    """One block of keys: its scores, and the product of the block before with V."""
    LAYOUT: gl.constexpr = scores_layout(T)
    OUT: gl.constexpr = out_layout(T)
    THREADS: gl.constexpr = T.warpgroups * 128 + 32
    stage = use % T.stages
    before = (use - 1) % T.stages
    zero = zeros(T.block_n, LAYOUT)
    mbarrier.wait(mem.k_full.index(stage), (use // T.stages) & 1)
    take_turn(w, T)
    s = warpgroup_mma(q, k_block(mem, stage, T), zero, use_acc=False, is_async=True)
    mbarrier.wait(mem.v_full.index(before), ((use - 1) // T.stages) & 1)
    acc = warpgroup_mma(operand, v_block(mem, before, T), acc, is_async=True)
    pass_turn(w, T)
    s = warpgroup_mma_wait(1, (s,))
    barriers.arrive(FREE + stage, THREADS)
    s = scores(s, block, rows, p, T, MASKED)
    new_maximum = gl.maximum(maximum, gl.max(s, 1))
    shift = finite(new_maximum, MASKED)
    rescale = gl.exp2((maximum - shift) * p.scale)
    probabilities = gl.exp2(s * p.scale - (shift * p.scale)[:, None])
    total = total * gl.convert_layout(rescale, gl.SliceLayout(1, total.type.layout), assert_trivial=True)[
        :, None
    ] + row_sums(probabilities)
    # The operand is a dependence of the wait: its registers must not be reused while the product reads them
    # (docs/hopper.md, hazards).
    acc, operand = warpgroup_mma_wait(0, (acc, operand))
    barriers.arrive(FREE + T.stages + before, THREADS)
    operand = as_operand(probabilities, p, T)
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, OUT), assert_trivial=True)[:, None]
    return acc, new_maximum, total, operand


@gluon.jit
def finish(acc, maximum, total, row0, head, p, mem, w: gl.constexpr, T: gl.constexpr):
    """Normalise a tile, write O and LSE. A row that saw no key is 0 with LSE -inf."""
    LAYOUT: gl.constexpr = scores_layout(T)
    OUT: gl.constexpr = out_layout(T)
    batch, heads, group, seq_q, seq_k, head_chunk = p.sizes
    b = head // heads
    h = head - b * heads
    total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    top = maximum * p.scale
    if T.sinks:
        sink = gl.load(p.sinks + h) * 1.4426950408889634
        largest = gl.maximum(top, sink)
        weight = gl.exp2(top - largest)
        total = total * weight + gl.exp2(sink - largest)
        inverse = weight / total
        lse = (largest + gl.log2(total)) * 0.6931471805599453
    else:
        inverse = 1.0 / total
        lse = (top + gl.log2(total)) * 0.6931471805599453
        if T.masked:
            inverse = gl.where(total == 0.0, 0.0, inverse)
            lse = gl.where(total == 0.0, float("-inf"), lse)
    rows = row0 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    gl.store(p.lse + head.to(gl.int64) * seq_q + rows, lse, mask=rows < seq_q)
    out = (acc * gl.convert_layout(inverse, gl.SliceLayout(1, OUT), assert_trivial=True)[:, None]).to(p.v.dtype)
    if T.store_by_tma:
        buffer = mem.o.index(w)
        tma_store_wait(0)
        buffer.reshape([64, T.v_dim]).store(out)
        fence_async_shared()
        if row0 < seq_q:
            tma_store(p.o, [b, h, row0, 0], buffer)
    else:
        stride_b, stride_h, stride_s, v_head_dim = p.o_strides
        r = (row0 + gl.arange(0, 64, gl.SliceLayout(1, OUT)))[:, None]
        lane = gl.arange(0, T.v_dim, gl.SliceLayout(0, OUT))[None, :]
        base = p.o_ptr + b.to(gl.int64) * stride_b + h.to(gl.int64) * stride_h
        gl.store(base + r.to(gl.int64) * stride_s + lane, out, mask=(r < seq_q) & (lane < v_head_dim))


@gluon.jit
def consumer_partition(p, mem, w: gl.constexpr, T: gl.constexpr):
    LAYOUT: gl.constexpr = scores_layout(T)
    OUT: gl.constexpr = out_layout(T)
    THREADS: gl.constexpr = T.warpgroups * 128 + 32
    tiles = num_tiles(p, T)
    tile = gl.program_id(0)  # the grid is never larger than the number of tiles
    row0, head, first, last, clear_first, clear_last = place(tile, p, T)
    row0 += w * 64
    rows = limits(row0, head, p, T)
    zero = zeros(T.block_n, LAYOUT)
    mbarrier.wait(mem.q_full.index(w), 0)
    mbarrier.wait(mem.k_full.index(0), 0)
    if T.pingpong:  # noqa: SIM102 (decided at compile time; the next one is not)
        if w == T.warpgroups - 1:
            pass_turn(w, T)  # opens the first turn of warpgroup 0
    take_turn(w, T)
    s = warpgroup_mma(mem.q.index(w).reshape([64, T.qk_dim]), k_block(mem, 0, T), zero, use_acc=False, is_async=True)
    pass_turn(w, T)
    s = warpgroup_mma_wait(0, (s,))
    barriers.arrive(FREE, THREADS)
    probabilities, maximum, total = first_probabilities(s, last - 1, rows, p, T)
    operand = as_operand(probabilities, p, T)
    acc = zeros(T.v_dim, OUT)
    use = 1
    turn = 0
    while tile < tiles:
        slot = (turn % T.q_buffers) * T.warpgroups + w
        q = mem.q.index(slot).reshape([64, T.qk_dim])
        if T.masked:
            clear_last = gl.minimum(clear_last, last - 1)
            clear_first = gl.minimum(clear_first, clear_last)
            for back in range(1, last - clear_last):
                acc, maximum, total, operand = attend(
                    use, last - 1 - back, q, acc, maximum, total, operand, rows, p, mem, w, T, True
                )
                use += 1
            for back in range(clear_last - clear_first):
                acc, maximum, total, operand = attend(
                    use, clear_last - 1 - back, q, acc, maximum, total, operand, rows, p, mem, w, T, False
                )
                use += 1
            if T.left_limit:
                for back in range(clear_first - first):
                    acc, maximum, total, operand = attend(
                        use, clear_first - 1 - back, q, acc, maximum, total, operand, rows, p, mem, w, T, True
                    )
                    use += 1
        else:
            for back in range(1, last - first):
                acc, maximum, total, operand = attend(
                    use, last - 1 - back, q, acc, maximum, total, operand, rows, p, mem, w, T, False
                )
                use += 1
        mbarrier.arrive(mem.q_free.index(slot), count=1)
        if T.dynamic:
            mbarrier.wait(mem.tile_full, turn & 1)
            tile = gl.max(mem.next_tile.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
            mbarrier.arrive(mem.tile_free, count=1)
        else:
            tile = tile_after(turn + 1, p, T)
        turn += 1
        before = (use - 1) % T.stages
        if tile < tiles:
            next_row0, next_head, first, last, clear_first, clear_last = place(tile, p, T)
            next_row0 += w * 64
            rows = limits(next_row0, next_head, p, T)
            stage = use % T.stages
            slot = (turn % T.q_buffers) * T.warpgroups + w
            zero = zeros(T.block_n, LAYOUT)
            mbarrier.wait(mem.q_full.index(slot), (turn // T.q_buffers) & 1)
            mbarrier.wait(mem.k_full.index(stage), (use // T.stages) & 1)
            take_turn(w, T)
            s = warpgroup_mma(
                mem.q.index(slot).reshape([64, T.qk_dim]), k_block(mem, stage, T), zero, use_acc=False, is_async=True
            )
            mbarrier.wait(mem.v_full.index(before), ((use - 1) // T.stages) & 1)
            acc = warpgroup_mma(operand, v_block(mem, before, T), acc, is_async=True)
            pass_turn(w, T)
            s = warpgroup_mma_wait(1, (s,))
            barriers.arrive(FREE + stage, THREADS)
            probabilities, next_maximum, next_total = first_probabilities(s, last - 1, rows, p, T)
            acc, operand = warpgroup_mma_wait(0, (acc, operand))
            barriers.arrive(FREE + T.stages + before, THREADS)
            operand = as_operand(probabilities, p, T)
            finish(acc, maximum, total, row0, head, p, mem, w, T)
            acc = zeros(T.v_dim, OUT)
            row0 = next_row0
            head = next_head
            maximum = next_maximum
            total = next_total
            use += 1
        else:
            mbarrier.wait(mem.v_full.index(before), ((use - 1) // T.stages) & 1)
            acc = warpgroup_mma(operand, v_block(mem, before, T), acc, is_async=True)
            acc, operand = warpgroup_mma_wait(0, (acc, operand))
            finish(acc, maximum, total, row0, head, p, mem, w, T)
    if T.store_by_tma:
        tma_store_wait(0)


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
    tile_q = gl.allocate_shared_memory(q.dtype, [T.q_buffers * T.warpgroups, 1, 1, 64, T.qk_dim], q.layout)
    tile_k = gl.allocate_shared_memory(k.dtype, [T.stages, 1, 1, T.block_n, T.qk_dim], k.layout)
    tile_v = gl.allocate_shared_memory(v.dtype, [T.stages, 1, 1, T.block_n, T.v_dim], v.layout)
    if T.store_by_tma:
        tile_o = gl.allocate_shared_memory(o.dtype, [T.warpgroups, 1, 1, 64, T.v_dim], o.layout)
    else:
        tile_o = tile_q
    next_tile = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tile_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    tile_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(tile_full, count=1)
    mbarrier.init(tile_free, count=T.warpgroups)
    mem = Shared(
        tile_q, tile_k, tile_v, tile_o, next_tile,
        _barriers(T.q_buffers * T.warpgroups, 1), _barriers(T.q_buffers * T.warpgroups, 1),
        _barriers(T.stages, 1), _barriers(T.stages, 1), tile_full, tile_free,
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
