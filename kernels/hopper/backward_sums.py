"""dQ's way to memory: two warps, or three, take turns to add the tiles that a thread block hands over (`backward.py`).

    wait for the block's turn at the tile                       (deterministic)
    wait until the tile is in shared memory                     at head_dim 128 in halves
    add it: TMA reduce-add in float32                           (deterministic: the first one stores it)
    read: the buffer is free;   written: pass the turn on       (deterministic)

From the turn to its passing on is longer than a tile takes; the warps are at it at the same time. Behind a block of
keys each counts for `prepare.after`, which rounds a head when all has been added to it.

Where nobody stores a warp zeroes the sums of the heads that come next.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from . import barriers
from .backward_state import DQ_FULL, descends, in_last_chunk, plane_of, tile_at
from .forward_state import announced
from .gluon_api import tma_reduce_add, tma_store, tma_store_wait, wait_for_prerequisites


@gluon.jit
def add_partition(p, mem, which: gl.constexpr, T: gl.constexpr):
    """Add every second, or third, of the tiles that are handed over, from number `which` on."""
    kv_heads, group, seq_q, seq_k = p.sizes
    # Of two warpgroups that compute dQ one tile late, the first tile of a block of keys is none.
    LATE: gl.constexpr = 0 if T.dq_apart else 1
    wait_for_prerequisites()
    handed = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    b, kv, key0, first, last, clear_first, clear_last = announced(turn, mem)
    while b >= 0:
        if not T.deterministic:
            _wait_until_zero(b * kv_heads + kv, p)
        tiles = last - first
        uses = group * tiles + LATE
        for i in range((which + T.adders - handed % T.adders) % T.adders, uses, T.adders):
            if i < LATE:
                _take_none((handed + i) // T.adders, mem, which, T)
            else:
                head, tile = _of(i - LATE, b, kv, first, last, p, T)
                if T.deterministic:
                    turns = p.turns + head * gl.cdiv(seq_q, T.block_m) + tile
                    earlier = _earlier(tile, b, kv, key0, p, T)
                    if earlier > 0:
                        barriers.wait_until(turns, earlier)
                    _add(handed + i, head, tile, earlier == 0, p, mem, which, T)
                    barriers.bulk_writes_done()
                    barriers.count_up(turns)
                else:
                    _add(handed + i, head, tile, False, p, mem, which, T)
        barriers.bulk_writes_done()
        barriers.count_up(p.summed + b * kv_heads + kv)
        handed += uses
        turn += 1
        b, kv, key0, first, last, clear_first, clear_last = announced(turn, mem)


@gluon.jit
def _of(i, b, kv, first, last, p, T: gl.constexpr):
    """Query head and tile of the `i`-th tile of a block of keys."""
    kv_heads, group, seq_q, seq_k = p.sizes
    member = i // (last - first)
    tile = tile_at(i - member * (last - first), first, last, descends(b, kv, p, T))
    return (b * kv_heads + kv) * group + member, tile


@gluon.jit
def _add(n, head, tile, first, p, mem, which: gl.constexpr, T: gl.constexpr):
    """The `n`-th tile that is handed over, once it is there; its buffers are free in the end. `first`: see `_send`."""
    if T.dq_apart:
        slot = n % T.dq_slots
        mbarrier.wait(mem.dq_next.index(which), (n // T.adders) & 1)
        _send(head, tile, 0, first, p, mem.dq_boxes.index(slot), T)
        tma_store_wait(0)
        mbarrier.arrive(mem.dq_free.index(slot), count=1)
    else:
        _wait_for_the_other(n // T.adders, mem, which)
        for w in gl.static_range(2):
            barriers.sync(DQ_FULL + w, 128 + 32)
            _send(head, tile, w * T.dq_lanes, first, p, mem.dq_boxes.index(w), T)
        mbarrier.arrive(mem.dq_next.index((which + 1) % T.adders), count=1)
        tma_store_wait(1)
        mbarrier.arrive(mem.dq_free.index(0), count=1)
        tma_store_wait(0)
        mbarrier.arrive(mem.dq_free.index(1), count=1)


@gluon.jit
def _send(head, tile, lane, first, p, boxes, T: gl.constexpr):
    """Add a tile, or half of its lanes; store it where it is the `first` one (never true unless `deterministic`), which
    so needs no zeros."""
    at = head, tile * (T.block_m // 8), 0, 0, lane
    if first:
        tma_store(p.dq, at, boxes)
    else:
        tma_reduce_add(p.dq, at, boxes)


@gluon.jit
def _take_none(use, mem, which: gl.constexpr, T: gl.constexpr):
    """What is handed over with the first tile of a block of keys, two halves of nothing."""
    _wait_for_the_other(use, mem, which)
    for w in gl.static_range(2):
        barriers.sync(DQ_FULL + w, 128 + 32)
        mbarrier.arrive(mem.dq_free.index(w), count=1)
    mbarrier.arrive(mem.dq_next.index((which + 1) % T.adders), count=1)


@gluon.jit
def _wait_for_the_other(use, mem, which: gl.constexpr):
    """Until the warp before has passed the named barriers of the tile before: they count arrivals, not who arrives."""
    mbarrier.wait(mem.dq_next.index(which), (use & 1) ^ (1 if which == 0 else 0))


@gluon.jit
def _earlier(tile, b, kv, key0, p, T: gl.constexpr):
    """How many blocks of keys add to a tile before this one: they were started earlier, so waiting for them cannot
    deadlock."""
    kv_heads, group, seq_q, seq_k = p.sizes
    band_low, band_high, rows_stride = p.band
    together, blocks, items = p.work
    own = key0 // T.block_n
    if T.later_first:
        last_key = gl.minimum(tile * T.block_m + T.block_m - 1 + band_high, seq_k - 1)
        later = last_key // T.block_n - own
        if T.last_reversed:
            return gl.where(in_last_chunk(b * kv_heads + kv, p), own, later)
        else:
            return later
    elif T.bits:
        tiles = plane_of(b, kv, p.strides) * gl.cdiv(seq_q, T.block_m) + tile
        return gl.load(p.order + tiles * blocks + own)
    elif T.by_rows:
        shared = gl.where(rows_stride > 0, b, 0)  # one row of `order` for all batches, or one each
        return own - gl.load(p.order + shared * gl.cdiv(seq_q, T.block_m) + tile)
    elif T.left_limit:
        return own - gl.maximum(tile * T.block_m + band_low, 0) // T.block_n
    else:
        return own


# ---------------------------------------------------------------------------------------------------- zeros


@gluon.jit
def third_partition(p, mem, T: gl.constexpr):
    """The third warp that adds or, where there are two, the one that zeroes."""
    if T.adders == 3:
        add_partition(p, mem, 2, T)
    else:
        zero_partition(p, mem, T)


@gluon.jit
def zero_partition(p, mem, T: gl.constexpr):
    """Zero what the heads that come `ahead` later will add to: with every block of keys an equal part of a head. Their
    sums are still in the L2 cache when they are added to, and `before` writes half as much."""
    wait_for_prerequisites()
    turn = gl.to_tensor(0)
    b, kv, key0, first, last, clear_first, clear_last = announced(turn, mem)
    while b >= 0:
        zero_part(b, kv, key0, p, T)
        turn += 1
        b, kv, key0, first, last, clear_first, clear_last = announced(turn, mem)


@gluon.jit
def zero_part(b, kv, key0, p, T: gl.constexpr):
    """What a block of keys zeroes."""
    kv_heads, group, seq_q, seq_k = p.sizes
    together, blocks, items = p.work
    ahead, ready, size = p.ahead
    head = b * kv_heads + kv + ahead
    if (head >= ready) & (head * blocks < items):
        part = gl.cdiv(size, blocks * 4) * 4
        begin = gl.minimum(key0 // T.block_n * part, size - 4)
        end = gl.minimum(begin + part, size)
        _zero(p.sums + head.to(gl.int64) * size, begin, end)
        barriers.order_proxies()
        barriers.count_up(p.zeroed + head)


@gluon.jit
def _zero(sums, begin, end):
    """Elements `begin` to `end`, multiples of 4, by one warp."""
    lanes = 4 * gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    address = sums.to(gl.int64, bitcast=True)
    for at in range(begin, end, 128):
        to = address + 4 * gl.minimum(at + lanes, end - 4)
        gl.inline_asm_elementwise(
            "{ .reg .f32 z; mov.f32 z, 0f00000000; st.global.v4.f32 [$1], {z, z, z, z}; mov.u32 $0, 0; }",
            "=r,l", [to], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def _wait_until_zero(head, p):
    """Until all blocks of keys that zero a part of this head have; the first heads are zero at launch."""
    together, blocks, items = p.work
    ahead, ready, size = p.ahead
    barriers.wait_until(p.zeroed + head, gl.where(head < ready, 0, blocks))
