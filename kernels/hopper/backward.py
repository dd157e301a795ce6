"""Flash attention backward for sm_90a: dQ, dK, dV from Q, K, V, dO, LSE and delta = rowsum(dO * O).

Keys stay, queries pass by: a block of 128 keys visits every query head that shares them, so dK and dV are summed over
the group in registers, in a fixed order. Thread blocks are as many as multiprocessors, and draw blocks of keys from a
counter. The products are those of FlashAttention-3 (arXiv 2407.08608).

    load warp     next block of keys: K, V;   Q, LSE -> sQ[stages]   dO, delta -> sdO[stages]
    2 warpgroups of 64 keys each, per tile of 64 queries                       (`backward_step.py`)
        S^T  = K Q^T                   dP^T = V dO^T                           (both issued at once)
        P^T  = exp2(S^T scale - LSE)   dS^T = P^T (dP^T - delta) -> sdS[2]
        dV  += P^T dO                  dK  += dS^T Q                           (P^T, dS^T stay in registers)
    dQ = dS K, over the keys of both:
        head_dim 64    a warpgroup of its own
        head_dim 128   half of the lanes in each of the two, one tile late
    2 warps, a tile of dQ after the other: TMA reduce-add in float32                  (`backward_sums.py`)
    1 warp: zeros for the heads that come next; with `deterministic` a third one that adds

So no warpgroup waits for another inside a tile: what it needs of the other one was written a tile before. At head_dim
64 K and V are in registers as left operands, and shared memory holds two blocks of them and what dK and dV leave
through; at head_dim 128 dK leaves through the buffers of dS, while K, V and the first queries of the next block come.

It may start before the kernel before it ends, and the one after it before it ends itself (`prepare.py`).

With `deterministic` the blocks of keys add to a tile of dQ in a fixed order: who adds waits for its turn before and
passes it on after the addition is written. The first one stores, so nothing is zeroed. A warp that waits, for a turn or
for zeros, waits for blocks of keys that were drawn before its own, by thread blocks that run: also where few thread
blocks run at a time nobody waits forever.

Global memory traffic per block of keys and query head that meets n queries: n (qk_dim + v_dim) elements and 8 n bytes
of LSE and delta read, 4 n qk_dim bytes of reduce-add in L2. Per block of keys: 128 (qk_dim + v_dim) elements of K and V
read, of dK and dV written. Per query head: 4 seq_q qk_dim bytes of zeros, which stay in L2 until they are added to
(none with `deterministic`).
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
    DS_FREE,
    DS_FULL,
    PAIR,
    STAGE_FREE,
    Problem,
    Shared,
    arrays_of_block,
    descends,
    dq_layout,
    in_last_chunk,
    new_barriers,
    spread_rows,
    tile_at,
)
from .backward_step import consumer_partition
from .backward_sums import add_partition, third_partition
from .forward_state import announce, announced
from .gluon_api import (
    launch_dependents,
    reinterpret,
    tma_load,
    wait_for_prerequisites,
)
from .opaque import hidden
from .scores import query_tiles

# ---------------------------------------------------------------------------------------------------- loads


@gluon.jit
def _place(item, p, T: gl.constexpr):
    """(batch, key head times parts, first key, bounds of the loop over tiles) of the `item`-th block of keys: the heads
    of a chunk run together, and the first blocks first, which under a causal mask see the most queries; the last first
    with `later_first`, but for the last chunk with `last_reversed`."""
    kv_heads, group, seq_q, seq_k = p.sizes
    band_low, band_high, rows_stride = p.band
    together, blocks, items = p.work
    chunk = item // (together * blocks)
    in_chunk = item - chunk * (together * blocks)
    block = in_chunk // together
    batch_head = chunk * together + in_chunk - block * together
    if T.last_reversed:
        block = gl.where(in_last_chunk(batch_head, p), block, blocks - 1 - block)
    elif T.later_first:
        block = blocks - 1 - block
    b = batch_head // kv_heads
    kv = batch_head - b * kv_heads
    row_low, row_high, labels, ranges = arrays_of_block(
        p.row_low, p.row_high, p.labels, p.ranges, b, kv, blocks, p.strides, seq_q, seq_k, T
    )
    first, last, clear_first, clear_last = query_tiles(block, seq_q, seq_k, band_low, band_high, ranges, T)
    return b, kv, block * T.block_n, first, last, clear_first, clear_last


@gluon.jit
def _load_keys(b, kv, key0, turn, p, mem, T: gl.constexpr):
    for w in gl.static_range(2):
        at = (turn % T.key_slots) * 2 + w
        mbarrier.wait(mem.kv_free.index(at), ((turn // T.key_slots) & 1) ^ 1)
        mbarrier.expect(mem.kv_full.index(at), p.k.block_type.nbytes + p.v.block_type.nbytes)
        tma_load(p.k, [b, kv // p.parts, key0 + w * 64, 0], mem.kv_full.index(at), mem.k.index(at))
        tma_load(p.v, [b, kv // p.parts, key0 + w * 64, 0], mem.kv_full.index(at), mem.v.index(at))


@gluon.jit
def load_partition(p, mem, T: gl.constexpr):
    """Where there is one buffer of K and V, the first queries of a block come before its keys, whose buffer is free
    later."""
    kv_heads, group, seq_q, seq_k = p.sizes
    together, blocks, items = p.work
    wait_for_prerequisites()
    launch_dependents()
    per_head = gl.cdiv(seq_q, T.block_m)
    use = 0
    turn = 0
    item = barriers.draw(p.counter)
    while item < items:
        b, kv, key0, first, last, clear_first, clear_last = _place(item, p, T)
        announce(turn, (b, kv, key0, first, last, clear_first, clear_last), mem)
        late = (T.key_slots == 1) & (turn > 0) & (last > first)
        if not late:
            _load_keys(b, kv, key0, turn, p, mem, T)
        down = descends(b, kv, p, T)
        for member in range(group):
            h = kv * group + member
            row_of_tile = (b * kv_heads * group + h) * per_head
            for i in range(last - first):
                tile = tile_at(i, first, last, down)
                stage = use % T.stages
                if use >= T.stages:
                    barriers.sync(STAGE_FREE + stage, PAIR + 32)
                mbarrier.expect(mem.q_full.index(stage), p.q.block_type.nbytes + p.lse.block_type.nbytes)
                tma_load(p.lse, [row_of_tile + tile, 0], mem.q_full.index(stage), mem.lse.index(stage))
                tma_load(p.q, [b, h, tile * T.block_m, 0], mem.q_full.index(stage), mem.q.index(stage))
                mbarrier.expect(mem.do_full.index(stage), p.do.block_type.nbytes + p.delta.block_type.nbytes)
                tma_load(p.delta, [row_of_tile + tile, 0], mem.do_full.index(stage), mem.delta.index(stage))
                tma_load(p.do, [b, h, tile * T.block_m, 0], mem.do_full.index(stage), mem.do.index(stage))
                use += 1
                if late:
                    _load_keys(b, kv, key0, turn, p, mem, T)
                    late = turn < 0
        turn += 1
        item = barriers.draw(p.counter)
    announce(turn, (-1, 0, 0, 0, 0, 0, 0), mem)


# ---------------------------------------------------------------------------------------------------- dQ


@gluon.jit
def dq_warpgroup(p, mem, T: gl.constexpr):
    """dQ by a warpgroup of its own, tile by tile to the warps that add it."""
    kv_heads, group, seq_q, seq_k = p.sizes
    for buffer in gl.static_range(4):
        barriers.arrive(DS_FREE + buffer, PAIR)
    use = 0
    turn = gl.to_tensor(0)
    b, kv, key0, first, last, clear_first, clear_last = announced(turn, mem)
    while b >= 0:
        at = (turn % T.key_slots) * 2
        for w in gl.static_range(2):
            mbarrier.wait(mem.kv_full.index(at + w), (turn // T.key_slots) & 1)
        for _ in range(group * (last - first)):
            dq = _product(at, use % 2, mem, T)
            slot = use % T.dq_slots
            mbarrier.wait(mem.dq_free.index(slot), ((use // T.dq_slots) & 1) ^ 1)
            mem.dq.index(slot).store(spread_rows(dq))
            fence_async_shared()
            mbarrier.arrive(mem.dq_next.index(use % T.adders), count=1)
            use += 1
        for w in gl.static_range(2):
            mbarrier.arrive(mem.kv_free.index(at + w), count=1)
        turn += 1
        b, kv, key0, first, last, clear_first, clear_last = announced(turn, mem)


@gluon.jit
def _product(at, odd, mem, T: gl.constexpr):
    """dQ = dS K of a tile, over the keys of the one and the other warpgroup."""
    dq = gl.zeros((T.block_m, T.qk_dim), gl.float32, dq_layout(T))
    for w in gl.static_range(2):
        barriers.sync(DS_FULL + 2 * odd + w, PAIR)
        k = mem.k.index(hidden(at + w)).reshape([64, T.qk_dim])
        ds = mem.ds.index(2 * odd + w).permute((1, 0))
        dq = warpgroup_mma(ds, k, dq, use_acc=w > 0, is_async=True)
    dq = warpgroup_mma_wait(0, (dq,))
    for w in gl.static_range(2):
        barriers.arrive(DS_FREE + 2 * odd + w, PAIR)
    return dq


# ---------------------------------------------------------------------------------------------------- kernel


@gluon.jit
def backward_kernel(
    q, k, v, do, dq, dk, dv, lse, delta,
    row_low, row_high, labels, ranges, order, counter, sums,
    kv_heads, group, parts, seq_q, seq_k,
    band_low, band_high, rows_stride, ranges_stride,
    scale, cap_scale, grad_scale, together, blocks, items, ahead, ready, head_size,
    zeroed_at, summed_at, turns_at,
    T: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Grid: as many thread blocks as multiprocessors, at most `items` = `blocks` of keys * batch * kv_heads.

    `parts`: the query heads of a group are spread over as many blocks of keys, each of which writes dK and dV of its
    own to "heads" of their own: `kv_heads` counts parts and `group` the query heads of one. `together`: heads of a
    chunk, see `_place`.

    `q` … `dv`: tensor maps over [batch, heads, seq, dim]; `dq` float32, unscaled (the post kernel scales and rounds
    it), its map by `BackwardTemplate.dq_box`.

    `lse`, `delta`: float32 [tiles, block_m], base 2, +inf in `lse` for rows that take no part (see prepare.py).
    `row_low`, `row_high`, `labels`, `ranges`, `order`: see `rows.py` and, for bits, `explicit.py`. `counter`: int32,
    zero at launch, for the blocks of keys to be drawn from; `zeroed_at`, `summed_at` and `turns_at` behind it other
    counts that are zero (`plans.Counts`).
    `sums`: the address of `dq`. The first `ready` heads (key heads times parts, of whose query heads there are
    `head_size` elements) are zero at launch, the others are zeroed by the blocks of keys of `ahead` heads before; with
    `deterministic` none is, and a tile that no block of keys visits is not written.
    """
    tile_q = gl.allocate_shared_memory(q.dtype, [T.stages, 1, 1, T.block_m, T.qk_dim], q.layout)
    tile_do = gl.allocate_shared_memory(q.dtype, [T.stages, 1, 1, T.block_m, T.v_dim], do.layout)
    tile_k = gl.allocate_shared_memory(q.dtype, [2 * T.key_slots, 1, 1, 64, T.qk_dim], k.layout)
    tile_v = gl.allocate_shared_memory(q.dtype, [2 * T.key_slots, 1, 1, 64, T.v_dim], v.layout)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, T.block_m], q.dtype)
    tile_ds = gl.allocate_shared_memory(q.dtype, [4, 64, T.block_m], DS_LAYOUT)
    tile_dv = gl.allocate_shared_memory(q.dtype, [2, 1, 1, 64, T.v_dim], dv.layout)
    if T.dq_apart:
        tile_dk = gl.allocate_shared_memory(q.dtype, [2, 1, 1, 64, T.dk_lanes], dk.layout)
    else:
        tile_dk = reinterpret(tile_ds, q.dtype, [4, 1, 1, 64, T.dk_lanes], dk.layout)
    DQ_SHAPE: gl.constexpr = [T.block_m, T.dq_lanes]
    DQ_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(DQ_SHAPE, gl.float32)
    tile_dq = gl.allocate_shared_memory(gl.float32, [T.dq_slots, T.block_m, T.dq_lanes], DQ_LAYOUT)
    boxes = reinterpret(tile_dq, gl.float32, [T.dq_slots, 1, T.block_m // 8, 4, 2, T.dq_lanes], dq.layout)
    rows_lse = gl.allocate_shared_memory(gl.float32, [T.stages, 1, T.block_m], lse.layout)
    rows_delta = gl.allocate_shared_memory(gl.float32, [T.stages, 1, T.block_m], delta.layout)
    places = gl.allocate_shared_memory(gl.int32, [2 * 8, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    KEYS: gl.constexpr = 2 * T.key_slots
    # K and V are free when their readers have arrived: dQ by whom it may be, and the warpgroup that has them.
    mem = Shared(
        tile_q, tile_do, tile_k, tile_v, tile_ds, tile_dq, boxes, tile_dk, tile_dv, rows_lse, rows_delta, places,
        new_barriers(2), new_barriers(2, 6 if T.dq_apart else 5), new_barriers(T.stages), new_barriers(T.stages),
        new_barriers(KEYS), new_barriers(KEYS, 2), new_barriers(T.dq_slots), new_barriers(T.adders),
    )  # fmt: skip
    p = Problem(
        q, k, v, do, dq, dk, dv, lse, delta, row_low, row_high, labels, ranges, order, counter,
        counter + turns_at, sums, counter + zeroed_at, counter + summed_at,
        (kv_heads, group, seq_q, seq_k), (band_low, band_high, rows_stride),
        (rows_stride, ranges_stride), (scale, cap_scale, grad_scale), parts, (together, blocks, items),
        (ahead, ready, head_size),
    )  # fmt: skip
    if T.dq_apart:
        gl.warp_specialize([
            (consumer_partition, (p, mem, 0, T)),
            (consumer_partition, (p, mem, 1, T)),
            (dq_warpgroup, (p, mem, T)),
            (load_partition, (p, mem, T)),
            (add_partition, (p, mem, 0, T)),
            (add_partition, (p, mem, 1, T)),
            (third_partition, (p, mem, T)),
        ], [4, 4, 1, 1, 1, 1], [T.registers, T.dq_registers, 24, 24, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer_partition, (p, mem, 0, T)),
            (consumer_partition, (p, mem, 1, T)),
            (load_partition, (p, mem, T)),
            (add_partition, (p, mem, 0, T)),
            (add_partition, (p, mem, 1, T)),
            (third_partition, (p, mem, T)),
        ], [4, 1, 1, 1, 1], [T.registers, 24, 24, 24, 24])  # fmt: skip
