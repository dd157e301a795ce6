"""What the partitions of the backward share: arguments, shared memory, barriers, layouts, and the mask of a tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .gluon_api import aggregate
from .scores import (
    add_numbers,
    bits_of_plane,
    extra_of_plane,
    has_numbers,
    hide_by_bits,
    hide_other_segments,
    values_of_plane,
)

DS_FULL = gl.constexpr(4)
"""Named barriers, of a pair of warpgroups: 4 to 7 "dS written", 8 to 11 "dS read", each by buffer and, within one, by
the warpgroup whose keys it has; 12 to 14 "stage of Q and dO free"; where there are two stages, 14, 15 "half of dQ
written"."""
DS_FREE = gl.constexpr(8)
STAGE_FREE = gl.constexpr(12)
DQ_FULL = gl.constexpr(14)
PAIR = gl.constexpr(256)
"""Threads of two warpgroups."""


@aggregate
class Problem:
    """The arguments of the kernel, see `backward_kernel`. `strides`: see `arrays_of_block`. `work`: (together, blocks,
    items). `ahead`: (ahead, ready, head_size)."""

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
    ranges: gl.tensor
    order: gl.tensor
    counter: gl.tensor
    turns: gl.tensor
    sums: gl.tensor
    zeroed: gl.tensor
    summed: gl.tensor
    sizes: gl.tuple
    band: gl.tuple
    strides: gl.tuple
    scales: gl.tuple
    parts: gl.tensor
    work: gl.tuple
    ahead: gl.tuple


@aggregate
class Keys:
    """The keys of a warpgroup, with the names that `hide` reads: the arrays of rows.py and explicit.py,
    moved to the plane of the batch and head, and the first key."""

    row_low: gl.tensor
    row_high: gl.tensor
    labels: gl.tensor
    sizes: gl.tuple
    band: gl.tuple
    scales: gl.tuple
    key0: gl.tensor


@aggregate
class Shared:
    """Shared memory and its barriers. `k`, `v`: 64 keys each. `ds`: as the barriers. `dq` and `dq_boxes` are the same
    buffers: written as a tile, sent as what a reduce-add takes. `dk` may be the buffers of dS. `tile`: see
    `forward_state.announce`. `dq_next`: of the warps that add dQ; with `dq_apart` its tile is written, else the
    other one has its tile."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    dq_boxes: gl.shared_memory_descriptor
    dk: gl.shared_memory_descriptor
    dv: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    tile: gl.shared_memory_descriptor
    tile_full: gl.shared_memory_descriptor
    tile_free: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    kv_free: gl.shared_memory_descriptor
    dq_free: gl.shared_memory_descriptor
    dq_next: gl.shared_memory_descriptor


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
    """Registers of dQ [block_m, dq_lanes]."""
    t = T.template
    return gl.NVMMADistributedLayout([3, 0], [t.num_warps, 1], [16, t.dq_lanes, 16])


@gluon.jit
def spread_rows(dq):
    """dQ as its tile in shared memory has it, without a bank conflict.

    It would be stored 8 bytes a thread, and that is done by half warps, four neighbouring rows; the swizzle tells rows
    0 and 1, and 2 and 3, apart only by exchanging 16 bytes inside the 32 that both write, and each bank is met twice.
    So row 8 a + 4 h + j stands at 8 a + 2 j + h (rows 0, 2, 4, 6 meet every bank once), and the tensor map of the
    accumulator puts the rows back (`descriptors.spread_rows_map`).
    """
    rows = dq.reshape([dq.shape[0] // 8, 2, 4, dq.shape[1]]).permute((0, 2, 1, 3))
    return rows.reshape(dq.shape)


@gluon.jit
def batch_and_head_of(kv_heads):
    """Batch and key/value head (times parts) of this thread block."""
    batch_head = gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)
    b = batch_head // kv_heads
    return b, batch_head - b * kv_heads


@gluon.jit
def batch_and_head(p):
    """`batch_and_head_of`, found where it is needed: two registers less in the loop over the queries."""
    kv_heads, group, seq_q, seq_k = p.sizes
    return batch_and_head_of(kv_heads)


@gluon.jit
def plane_of(b, kv, strides):
    """The plane of bits of a batch and head. `strides`: planes from one to the next. Where heads have planes of their
    own a block of keys visits one query head (`plans.parts_of`)."""
    of_batch, of_head = strides
    return b * of_batch + kv * of_head


@gluon.jit
def arrays_of_block(row_low, row_high, labels, ranges, b, kv, blocks, strides, seq_q, seq_k, T: gl.constexpr):
    """The arrays of rows.py and explicit.py, moved to the plane of bits of a batch and head or, `ranges`, to the batch.
    `blocks`: of keys. `strides`: from one batch to the next, of the rows and of `ranges`; of bits the planes from one
    batch, and one head, to the next."""
    rows_stride, ranges_stride = strides
    if T.bits:
        plane = plane_of(b, kv, strides)
        labels = bits_of_plane(labels, plane, seq_k, seq_q)
        if T.values:
            row_low = values_of_plane(row_low, plane, seq_k, seq_q)
            row_high = extra_of_plane(row_high, plane, seq_q, seq_k, seq_q)
        ranges += plane * blocks * 4
    elif T.by_data:
        ranges += b * ranges_stride
    return row_low, row_high, labels, ranges


@gluon.jit
def hide(st, tile, b, p, T: gl.constexpr):
    """Set the scores of hidden keys to -inf. `st`: of the keys from `p.key0` on. `b`: the batch."""
    LAYOUT: gl.constexpr = scores_layout(T)
    kv_heads, group, seq_q, seq_k = p.sizes
    band_low, band_high, rows_stride = p.band
    columns = gl.arange(0, T.block_m, gl.SliceLayout(0, LAYOUT))
    keys = p.key0 + gl.arange(0, st.shape[0], gl.SliceLayout(1, LAYOUT))
    row0 = tile * T.block_m
    if T.bits:
        if T.values:  # noqa: SIM102 (decided at compile time; the next one is not)
            if has_numbers(st, p.row_high, p.key0, row0, seq_q, seq_q):
                scale, cap_scale, grad_scale = p.scales
                shifts = gl.load(p.row_high + row0 + columns).to(gl.float32, bitcast=True)
                st = add_numbers(st, p.row_low, shifts[None, :], p.key0, row0, seq_q, scale)
        return hide_by_bits(st, p.labels, keys, seq_k, row0, seq_q)
    if T.by_rows:
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
def in_last_chunk(batch_head, p):
    """Whether a key head (times parts, of all batches) is of the last chunk of heads that run together."""
    together, blocks, items = p.work
    return (batch_head + together) * blocks >= items


@gluon.jit
def descends(b, kv, p, T: gl.constexpr):
    """Whether a block of keys visits the queries from the last tile down.

    Deterministic blocks that add in ascending order do: all blocks of a head start at the same tile, one turn apart.
    Where the later ones are first (`later_first`) each begins at the first tile that sees its keys, and comes to a tile
    two tiles' time after the one before it: in step, nobody waits.
    """
    kv_heads, group, seq_q, seq_k = p.sizes
    if T.last_reversed:
        return in_last_chunk(b * kv_heads + kv, p)
    else:
        return T.descending


@gluon.jit
def tile_at(i, first, last, down):
    """The i-th tile of queries of a head; `down`: see `descends`."""
    return gl.where(down, last - 1 - i, first + i)


@gluon.jit
def new_barriers(number: gl.constexpr, count: gl.constexpr = 1):
    """mbarriers that `count` arrivals complete."""
    result = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(result.index(i), count=count)
    return result
