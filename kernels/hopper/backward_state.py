"""What the partitions of the backward share: arguments, shared memory, barriers, layouts, and the mask of a tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .gluon_api import aggregate, partition_barrier
from .scores import (
    add_numbers,
    bits_of_plane,
    extra_of_plane,
    has_numbers,
    hide_by_bits,
    hide_other_segments,
    values_of_plane,
)

DQ_FULL = gl.constexpr(4)
"""Named barriers: 4, 5 "dQ tile (half) written", 6, 7 "dQ tile (half) free", 8, 9 "stage of Q and dO
free", 10, 11 as 4, 5 for every second tile, where two warps add dQ."""
DQ_FULL_ODD = gl.constexpr(10)
DQ_FREE = gl.constexpr(6)
STAGE_FREE = gl.constexpr(8)

FIRST = gl.constexpr(0)
"""Bounds of the loop over tiles, by place in shared memory: first and last tile, first and last one without a mask."""
LAST = gl.constexpr(1)
CLEAR_FIRST = gl.constexpr(2)
CLEAR_LAST = gl.constexpr(3)


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
    labels: gl.tensor
    order: gl.tensor
    turns: gl.tensor
    sizes: gl.tuple
    band: gl.tuple
    scales: gl.tuple
    parts: gl.tensor
    key0: gl.tensor
    tiles: gl.tuple

    @gluon.constexpr_function
    def __init__(
        self,
        q,
        k,
        v,
        do,
        dq,
        dk,
        dv,
        lse,
        delta,
        row_low,
        row_high,
        labels,
        order,
        turns,
        sizes,
        band,
        scales,
        parts,
        key0,
        tiles,
    ):
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
        self.labels = labels
        self.order = order
        self.turns = turns
        self.sizes = sizes
        self.band = band
        self.scales = scales
        self.parts = parts
        self.key0 = key0
        self.tiles = tiles


@aggregate
class Shared:
    """Shared memory and its barriers. `k`, `v`, `ds` and `ds_odd` are arrays of one tile, to be indexed by `hidden(0)`
    where the address shall not be kept. `dq` and `dq_boxes` are one buffer: written as a tile, sent as the parts that
    one reduce-add takes."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    ds_odd: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    dq_boxes: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    bounds: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, do, k, v, ds, ds_odd, dq, dq_boxes, lse, delta, bounds, q_full, do_full, kv_full):
        self.q = q
        self.do = do
        self.k = k
        self.v = v
        self.ds = ds
        self.ds_odd = ds_odd
        self.dq = dq
        self.dq_boxes = dq_boxes
        self.lse = lse
        self.delta = delta
        self.bounds = bounds
        self.q_full = q_full
        self.do_full = do_full
        self.kv_full = kv_full


@gluon.constexpr_function
def scores_layout(T):
    """Registers of S^T [block_n, block_m]: the warpgroups split the keys."""
    t = T.template
    return gl.NVMMADistributedLayout([3, 0], [t.num_warps, 1], [16, t.block_m, 16])


@gluon.constexpr_function
def gradient_layout(T, dim):
    """Registers of dK and dV [block_n, dim]."""
    return gl.NVMMADistributedLayout([3, 0], [T.template.num_warps, 1], [16, dim, 16])


@gluon.constexpr_function
def dq_layout(T):
    """Registers of dQ [block_m, qk_dim]: 64 rows leave the feature axis for the second warpgroup."""
    t = T.template
    if t.rows_halved:
        return gl.NVMMADistributedLayout([3, 0], [t.num_warps, 1], [16, t.qk_dim, 16])
    return gl.NVMMADistributedLayout([3, 0], [4, t.num_warps // 4], [16, t.dq_lanes, 16])


@gluon.constexpr_function
def transposed_dq_layout(T):
    """Registers of dQ^T [qk_dim, block_m], qk_dim 64: the warpgroups split the queries."""
    t = T.template
    return gl.NVMMADistributedLayout([3, 0], [4, t.num_warps // 4], [16, t.block_m // 2, 16])


@gluon.jit
def to_store(dq, T: gl.constexpr):
    """dQ as its tile in shared memory has it, without a bank conflict.

    dQ^T is transposed: a store of 4 bytes a thread is 32 bytes of four rows, which the swizzle keeps apart. dQ would be
    stored 8 bytes a thread, and that is done by half warps, four neighbouring rows; the swizzle tells rows 0 and 1, and
    2 and 3, apart only by exchanging 16 bytes inside the 32 that both write, and each bank is met twice. So row
    8 a + 4 h + j stands at 8 a + 2 j + h (rows 0, 2, 4, 6 meet every bank once), and the tensor map of the accumulator
    puts the rows back (`descriptors.spread_rows_map`).
    """
    if T.keys_in_registers:
        return dq.permute((1, 0))
    else:
        rows = dq.reshape([T.block_m // 8, 2, 4, T.qk_dim]).permute((0, 2, 1, 3))
        return rows.reshape([T.block_m, T.qk_dim])


@gluon.jit
def batch_and_head(p):
    """Batch and key/value head (times parts) of this thread block. Found where it is needed: two registers less in
    the loop over the queries."""
    kv_heads, group, seq_q, seq_k = p.sizes
    batch_head = gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)
    b = batch_head // kv_heads
    return b, batch_head - b * kv_heads


@gluon.jit
def plane_of_block(kv_heads, of_batch, of_head):
    """This thread block's plane of bits. `of_batch`, `of_head`: planes from one to the next. Where heads have planes of
    their own a thread block visits one query head (`plans.parts_of`)."""
    batch_head = gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)
    b = batch_head // kv_heads
    return b * of_batch + (batch_head - b * kv_heads) * of_head


@gluon.jit
def arrays_of_block(row_low, row_high, labels, ranges, kv_heads, strides, seq_q, seq_k, T: gl.constexpr):
    """The arrays of rows.py and explicit.py, moved to this thread block's plane of bits or, `ranges`, to its batch.
    `strides`: from one batch to the next, of the rows and of `ranges`; of bits the planes from one batch, and one head,
    to the next."""
    rows_stride, ranges_stride = strides
    if T.bits:
        plane = plane_of_block(kv_heads, rows_stride, ranges_stride)
        labels = bits_of_plane(labels, plane, seq_k, seq_q)
        if T.values:
            row_low = values_of_plane(row_low, plane, seq_k, seq_q)
            row_high = extra_of_plane(row_high, plane, seq_q, seq_k, seq_q)
        ranges += plane * gl.num_programs(1) * 4
    elif T.by_data:
        ranges += (gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)) // kv_heads * ranges_stride
    return row_low, row_high, labels, ranges


@gluon.jit
def hide(st, tile, p, T: gl.constexpr):
    """Set the scores of hidden keys to -inf."""
    LAYOUT: gl.constexpr = scores_layout(T)
    kv_heads, group, seq_q, seq_k = p.sizes
    band_low, band_high, rows_stride = p.band
    columns = gl.arange(0, T.block_m, gl.SliceLayout(0, LAYOUT))
    keys = p.key0 + gl.arange(0, T.block_n, gl.SliceLayout(1, LAYOUT))
    row0 = tile * T.block_m
    if T.bits:
        if T.values:  # noqa: SIM102 (decided at compile time; the next one is not)
            if has_numbers(st, p.row_high, p.key0, row0, seq_q, seq_q):
                scale, cap_scale, grad_scale = p.scales
                shifts = gl.load(p.row_high + row0 + columns).to(gl.float32, bitcast=True)
                st = add_numbers(st, p.row_low, shifts[None, :], p.key0, row0, seq_q, scale)
        return hide_by_bits(st, p.labels, keys, seq_k, row0, seq_q)
    if T.by_rows:
        b, kv = batch_and_head(p)
        rows = row0 + columns
        low = gl.load(p.row_low + b * rows_stride + rows)
        high = gl.load(p.row_high + b * rows_stride + rows)
        keep = (keys[:, None] < high[None, :]) & (keys[:, None] >= low[None, :])
        if T.segments:
            st = hide_other_segments(st, p.labels, b, rows_stride, rows, keys, seq_q, seq_k, False)
    else:
        # The limit stands on the side of the keys, of which a thread has two, not of its sixteen or more queries:
        # registers are scarce here.
        earliest = gl.where(keys < seq_k, keys - band_high - row0, T.block_m)
        keep = columns[None, :] >= earliest[:, None]
        if T.left_limit:
            keep = keep & (columns[None, :] <= (keys - band_low - row0)[:, None])
    return gl.where(keep, st, float("-inf"))


@gluon.jit
def tile_at(i, first, last, T: gl.constexpr):
    """The i-th tile of queries of a head.

    Deterministic blocks that add in ascending order run from the last tile down: all blocks of a head start at the same
    tile, one turn apart. Where the later ones are first (`later_first`) each begins at the first tile that sees its
    keys, and comes to a tile two tiles' time after the one before it: in step, nobody waits.
    """
    if T.deterministic and not T.later_first:
        return last - 1 - i
    else:
        return first + i


@gluon.jit
def earlier_blocks(tile, p, T: gl.constexpr):
    """How many blocks of keys add to a tile of dQ before this one: they have lower program ids, so waiting for them
    cannot deadlock."""
    band_low, band_high, rows_stride = p.band
    own = p.key0 // T.block_n
    if T.later_first:
        kv_heads, group, seq_q, seq_k = p.sizes
        last_key = gl.minimum(tile * T.block_m + T.block_m - 1 + band_high, seq_k - 1)
        return last_key // T.block_n - own
    elif T.bits:
        blocks = gl.num_programs(1)
        return gl.load(p.order + tile * blocks + own)
    elif T.by_rows:
        b, kv = batch_and_head(p)
        shared = gl.where(rows_stride > 0, b, 0)  # one row of `order` for all batches, or one each
        return own - gl.load(p.order + shared * gl.cdiv(p.sizes[2], T.block_m) + tile)
    elif T.left_limit:
        return own - gl.maximum(tile * T.block_m + band_low, 0) // T.block_n
    else:
        return own


@gluon.jit
def _store(bounds, which: gl.constexpr, value):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    bounds.index(which).store(gl.full([1], 0, gl.int32, LAYOUT) + value)


@gluon.jit
def keep_bounds(first, last, clear_first, clear_last):
    """The bounds of the loop over tiles, in shared memory: in registers they would make the loop spill."""
    bounds = gl.allocate_shared_memory(gl.int32, [4, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    _store(bounds, FIRST, first)
    _store(bounds, LAST, last)
    _store(bounds, CLEAR_FIRST, clear_first)
    _store(bounds, CLEAR_LAST, clear_last)
    partition_barrier()
    return bounds


@gluon.jit
def bound(mem, which: gl.constexpr):
    """One of the bounds of the loop over tiles of queries."""
    return gl.max(mem.bounds.index(which).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def needs_mask(tile, mem):
    """Whether some query of the tile must not see some key of the block."""
    return (tile < bound(mem, CLEAR_FIRST)) | (tile >= bound(mem, CLEAR_LAST))


@gluon.jit
def following(tile, mem, T: gl.constexpr):
    """The tile after `tile`; after the last one of a head the first one of the next."""
    if T.deterministic and not T.later_first:
        return gl.where(tile == bound(mem, FIRST), bound(mem, LAST), tile) - 1
    else:
        return gl.where(tile == bound(mem, LAST) - 1, bound(mem, FIRST), tile + 1)


@gluon.jit
def new_barriers(number: gl.constexpr):
    """mbarriers that one arrival completes."""
    result = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(result.index(i), count=1)
    return result
