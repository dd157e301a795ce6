"""What the partitions of the forward share: arguments, shared memory, layouts, and which tile of queries comes next."""

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
    hide_outside,
    key_blocks,
    key_limits,
    values_of_plane,
)

FREE = gl.constexpr(5)
"""First named barrier: `stages` for "K block free", `stages` for "V block free", one per warpgroup for its turn
(pingpong)."""


@aggregate
class Problem:
    """The arguments of the kernel, see `forward_kernel`."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    o: tma.tensor_descriptor
    o_ptr: gl.tensor
    o_strides: gl.tuple
    lse: gl.tensor
    sinks: gl.tensor
    row_low: gl.tensor
    row_high: gl.tensor
    labels: gl.tensor
    ranges: gl.tensor
    counter: gl.tensor
    sizes: gl.tuple
    band: gl.tuple
    rows_strides: gl.tuple
    scale: gl.tensor
    cap_scale: gl.tensor


@aggregate
class Shared:
    """Shared memory and its barriers."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    o: gl.shared_memory_descriptor
    tile: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_free: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    tile_full: gl.shared_memory_descriptor
    tile_free: gl.shared_memory_descriptor


@gluon.constexpr_function
def scores_layout(T):
    """Registers of a [64, block_n] tile of scores: one warpgroup, the accumulator of wgmma."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.template.block_n, 16])


@gluon.constexpr_function
def out_layout(T):
    """Registers of a [64, v_dim] tile of the output. Its rows sit in the same threads as those of the scores."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.template.v_dim, 16])


@gluon.jit
def zeros(columns: gl.constexpr, LAYOUT: gl.constexpr):
    return gl.zeros((64, columns), gl.float32, LAYOUT)


@gluon.jit
def zeros_of_rows(T: gl.constexpr):
    LAYOUT: gl.constexpr = gl.SliceLayout(1, scores_layout(T))
    return gl.zeros((64,), gl.float32, LAYOUT)


@gluon.jit
def of_out(factor, T: gl.constexpr):
    """A factor for every row, in the layout of O."""
    return gl.convert_layout(factor, gl.SliceLayout(1, out_layout(T)), assert_trivial=True)[:, None]


# ---------------------------------------------------------------------------------------------------- which tile


@gluon.jit
def num_tiles(p, T: gl.constexpr):
    batch, heads, group, seq_q, seq_k, head_chunk = p.sizes
    return gl.cdiv(seq_q, T.block_m) * batch * heads


@gluon.jit
def plane(b, h, p):
    """Plane of bits of a (batch, head)."""
    of_batch, of_head = p.rows_strides
    return b * of_batch + h * of_head


@gluon.jit
def place(tile, p, T: gl.constexpr):
    """Row, batch and head of a tile, and its blocks of keys (`key_blocks`). `head_chunk` heads at a time (their K and V
    fit L2), last rows first. With `from_end` a head's last tile begins at row 0 and has some rows of the tile before:
    both write the same, bit by bit."""
    batch, heads, group, seq_q, seq_k, head_chunk = p.sizes
    band_low, band_high = p.band
    rows_stride, ranges_stride = p.rows_strides
    per_head = gl.cdiv(seq_q, T.block_m)
    chunk = tile // (per_head * head_chunk)
    within = tile - chunk * (per_head * head_chunk)
    chunk_heads = gl.minimum(head_chunk, batch * heads - chunk * head_chunk)
    from_last = within // chunk_heads
    head = chunk * head_chunk + (within - from_last * chunk_heads)
    if T.from_end:
        row0 = gl.maximum(gl.cdiv(seq_q, 64) * 64 - (from_last + 1) * T.block_m, 0)
    else:
        row0 = (per_head - 1 - from_last) * T.block_m
    b = head // heads
    h = head - b * heads
    if T.bits:
        ranges = p.ranges + plane(b, h, p) * (per_head * 4)
    else:
        ranges = p.ranges + b * ranges_stride
    first, last, clear_first, clear_last = key_blocks(row0, seq_q, seq_k, band_low, band_high, ranges, T)
    return row0, b, h, first, last, clear_first, clear_last


@gluon.jit
def announce(turn, tile, mem):
    """Load warp: tell the consumers where their next tile is, `place`; a row below 0 ends their work."""
    slot = turn & 1
    mbarrier.wait(mem.tile_free.index(slot), ((turn >> 1) & 1) ^ 1)
    for i in gl.static_range(7):
        number = gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + tile[i]
        mem.tile.index(slot * 8 + i).store(number)
    mbarrier.arrive(mem.tile_full.index(slot), count=1)


@gluon.jit
def announced(turn, mem):
    """Consumers: what was told, once it was."""
    slot = turn & 1
    mbarrier.wait(mem.tile_full.index(slot), (turn >> 1) & 1)
    tile = (
        _number(mem, slot, 0), _number(mem, slot, 1), _number(mem, slot, 2), _number(mem, slot, 3),
        _number(mem, slot, 4), _number(mem, slot, 5), _number(mem, slot, 6),
    )  # fmt: skip
    mbarrier.arrive(mem.tile_free.index(slot), count=1)
    return tile


@gluon.jit
def _number(mem, slot, i: gl.constexpr):
    return gl.max(mem.tile.index(slot * 8 + i).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def tile_after(turn, p, T: gl.constexpr):
    """Round robin that turns back at each end: a program that got a heavy tile gets a light one next."""
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 1, programs - 1 - program, program)


@gluon.jit
def shifts_of(rows, b, h, p):
    """The shifts of rows (additive.py)."""
    batch, heads, group, seq_q, seq_k, head_chunk = p.sizes
    extra = extra_of_plane(p.row_high, plane(b, h, p), seq_q, seq_q, seq_k)
    return gl.load(extra + rows).to(gl.float32, bitcast=True)


@gluon.jit
def limits(row0, b, h, p, T: gl.constexpr):
    """The interval of keys of each of the 64 rows at `row0`, and which rows they are: (low, high, row0, b, h)."""
    LAYOUT: gl.constexpr = scores_layout(T)
    batch, heads, group, seq_q, seq_k, head_chunk = p.sizes
    band_low, band_high = p.band
    rows_stride, ranges_stride = p.rows_strides
    rows = row0 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    if T.values:
        return rows, shifts_of(rows, b, h, p), row0, b, h
    elif T.bits:
        return rows, rows, row0, b, h
    else:
        offset = b * rows_stride
        low, high = key_limits(rows, seq_k, band_low, band_high, p.row_low + offset, p.row_high + offset, T)
        return low, high, row0, b, h


@gluon.jit
def unshifted(lse, rows, b, h, p, T: gl.constexpr):
    """The LSE of the scores as the mask has them, from that of the shifted ones (additive.py)."""
    if T.values:
        lse += shifts_of(rows, b, h, p)
    return lse


@gluon.jit
def hide_keys(s, block, rows, p, T: gl.constexpr):
    """Set the scores of hidden keys to -inf: 64 rows (`limits`) against a block of keys."""
    LAYOUT: gl.constexpr = scores_layout(T)
    low, high, row0, b, h = rows
    if T.bits:
        batch, heads, group, seq_q, seq_k, head_chunk = p.sizes
        if T.values:
            extra = extra_of_plane(p.row_high, plane(b, h, p), seq_q, seq_q, seq_k)
            if has_numbers(s, extra, row0, block * T.block_n, seq_q, seq_k):
                values = values_of_plane(p.row_low, plane(b, h, p), seq_q, seq_k)
                s = add_numbers(s, values, high[:, None], row0, block * T.block_n, seq_k, p.scale)
        bits = bits_of_plane(p.labels, plane(b, h, p), seq_q, seq_k)
        s = hide_by_bits(s, bits, low, seq_q, block * T.block_n, seq_k)
    else:
        column0 = block * T.block_n
        s = hide_outside(s, low - column0, high - column0, T.left_limit)
        if T.segments:
            batch, heads, group, seq_q, seq_k, head_chunk = p.sizes
            tile = row0 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
            columns = column0 + gl.arange(0, T.block_n, gl.SliceLayout(0, LAYOUT))
            s = hide_other_segments(s, p.labels, b, p.rows_strides[0], tile, columns, seq_q, seq_k, True)
    return s
