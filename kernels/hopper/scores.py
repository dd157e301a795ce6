"""Device code shared by the passes: softcap, and which blocks of the score matrix need a mask or no work at all.

Every mask here is *one interval of keys per query*: `[low(row), high(row))`. Causality and the end of the keys give
`high`, a window gives `low`, packed documents and padding give both. So a mask costs two comparisons with per-row
values in the blocks that it cuts, and nothing in the others. In `band` form the interval is `[row + band_low, row +
band_high]` cut to the keys there are; in `rows` form it is read from memory. A mask that is no interval has a bit for
every query and key (`bits`): a thread loads a word for 32 of its scores. One that is added has numbers as well
(`values`), in the blocks that a flag names.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_LABELS_HEAD = gl.constexpr(4)
_PADDED = gl.constexpr(128)
"""Of the arrays in rows.py and explicit.py."""
_FLAG = gl.constexpr(64)
"""Of the flags in additive.py."""


@gluon.jit
def tanh(x):
    """tanh by exp2, absolute error 1e-7: `tanh.approx` (5e-4 relative) times a softcap of 50 would shift scores by
    0.02."""
    return 1.0 - 2.0 / (1.0 + gl.exp2(x * 2.885390081777927))


@gluon.jit
def clamp(x, low, high):
    return gl.minimum(gl.maximum(x, low), high)


@gluon.jit
def blocks_up_to_limit(row0, ROWS: gl.constexpr, seq_q, seq_k, band_high, BLOCK_N: gl.constexpr):
    """How many blocks of keys some of the rows `[row0, row0 + ROWS)` see, and how many all of them see whole."""
    end = gl.minimum(row0 + ROWS, seq_q) + band_high
    return gl.cdiv(clamp(end, 0, seq_k), BLOCK_N), clamp(row0 + band_high + 1, 0, seq_k) // BLOCK_N


@gluon.jit
def key_blocks(row0, seq_q, seq_k, band_low, band_high, ranges, T: gl.constexpr):
    """Blocks of keys for the tile of queries at `row0`: `[first, last)`, of which `[clear_first, clear_last)` need no
    mask.

    At least one block, though every key of it may be hidden: the pipeline has no empty tile.
    """
    BLOCK_M: gl.constexpr = T.block_m
    BLOCK_N: gl.constexpr = T.block_n
    if T.by_data:
        entry = ranges + (row0 // BLOCK_M) * 4
        first = gl.load(entry)
        last = gl.load(entry + 1)
        clear_first = gl.load(entry + 2)
        clear_last = gl.load(entry + 3)
    else:
        first = row0 * 0
        last = gl.cdiv(seq_k, BLOCK_N)
        clear_first = first
        clear_last = last
        if T.masked:
            last, clear_last = blocks_up_to_limit(row0, BLOCK_M, seq_q, seq_k, band_high, BLOCK_N)
            if T.left_limit:
                last_row = gl.minimum(row0 + BLOCK_M, seq_q) - 1
                first = gl.maximum(row0 + band_low, 0) // BLOCK_N
                clear_first = gl.cdiv(gl.maximum(last_row + band_low, 0), BLOCK_N)
        last = gl.maximum(last, first + 1)
    clear_last = clamp(clear_last, first, last)
    return first, last, clamp(clear_first, first, clear_last), clear_last


@gluon.jit
def query_tiles(block, seq_q, seq_k, band_low, band_high, ranges, T: gl.constexpr):
    """Tiles of queries that see a block of keys: `[first, last)`, of which `[clear_first, clear_last)` need no mask.
    May be empty."""
    BLOCK_M: gl.constexpr = T.block_m
    BLOCK_N: gl.constexpr = T.block_n
    if T.by_data:
        entry = ranges + block * 4
        first = gl.load(entry)
        last = gl.load(entry + 1)
        clear_first = gl.load(entry + 2)
        clear_last = gl.load(entry + 3)
    else:
        first = block * 0
        last = gl.cdiv(seq_q, BLOCK_M)
        clear_first = first
        clear_last = last
        if T.masked:
            key0 = block * BLOCK_N
            tiles = last
            first = gl.minimum(gl.maximum(key0 - band_high, 0) // BLOCK_M, tiles)
            clear_first = gl.cdiv(gl.maximum(key0 + BLOCK_N - 1 - band_high, 0), BLOCK_M)
            if T.left_limit:
                last = clamp((gl.maximum(key0 + BLOCK_N - band_low, 0) + BLOCK_M - 1) // BLOCK_M, first, tiles)
                clear_last = gl.maximum(key0 - band_low + 1, 0) // BLOCK_M
            if key0 + BLOCK_N > seq_k:  # keys past the end, which every query must hide
                clear_first = last
    clear_first = clamp(clear_first, first, last)
    return first, last, clear_first, clamp(clear_last, clear_first, last)


@gluon.jit
def key_limits(rows, seq_k, band_low, band_high, row_low, row_high, T: gl.constexpr):
    """The interval of keys `[low, high)` of each row of `rows`, in the layout of `rows`. Rows past the end may get
    any interval."""
    if T.by_rows:
        return gl.load(row_low + rows), gl.load(row_high + rows)
    else:
        return rows + band_low, gl.minimum(rows + (band_high + 1), seq_k)


@gluon.jit
def where_marked(s, word, bit):
    """`s` where `word` has `bit`, elsewhere -inf. In assembly, two instructions a score: LLVM would compare by vectors,
    whose results the target packs into an integer and takes out again, six."""
    ASM: gl.constexpr = (
        "{ .reg .pred seen; .reg .b32 found; and.b32 found, $2, $3; setp.ne.s32 seen, found, 0; "
        "selp.f32 $0, $1, 0fFF800000, seen; }"
    )
    s, word = gl.broadcast(s, word)
    s, bit = gl.broadcast(s, bit)
    return gl.inline_asm_elementwise(ASM, "=f,f,r,r", [s, word, bit], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def marked_run(start, end):
    """An int32 with the bits `[start, end)` set; none if there are none."""
    ASM: gl.constexpr = "bmsk.clamp.b32 $0, $1, $2;"
    length = gl.maximum(end - start, 0)
    return gl.inline_asm_elementwise(ASM, "=r,r,r", [start, length], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def own_columns(limit, pair, EIGHTS: gl.constexpr):
    """How many of a thread's columns of a row, the `pair` of every eight, come before column `limit`."""
    limit = clamp(limit, 0, EIGHTS * 8)
    return (limit >> 3) * 2 + clamp((limit & 7) - pair * 2, 0, 2)


@gluon.jit
def hide_outside(s, low, high, LEFT_LIMIT: gl.constexpr):
    """Set the scores of the columns outside `[low, high)` to -inf; `low`, `high`: of each row of `s`, relative to its
    first column. `s`: an accumulator of wgmma, of up to 128 columns.

    A thread holds two neighbours of every eight columns of a row, four threads share the row. So what a thread sees of
    it is a run of its own columns, and one word says which.
    """
    ROWS: gl.constexpr = s.shape[0]
    EIGHTS: gl.constexpr = s.shape[1] // 8
    gl.static_assert(EIGHTS <= 16)
    parts = s.reshape([ROWS, EIGHTS, 4, 2])
    LAYOUT: gl.constexpr = parts.type.layout
    OF_ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    eight = gl.arange(0, EIGHTS, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))[None, :, None, None]
    pair = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))[None, None, :, None]
    side = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))[None, None, None, :]
    end = own_columns(gl.convert_layout(high, OF_ROW, assert_trivial=True)[:, None, None, None], pair, EIGHTS)
    start = end * 0
    if LEFT_LIMIT:
        start = own_columns(gl.convert_layout(low, OF_ROW, assert_trivial=True)[:, None, None, None], pair, EIGHTS)
    index = eight * 2 + side  # known when this is compiled, and so is the bit
    parts = where_marked(parts, marked_run(start, end), (index * 0 + 1) << index)
    return gl.convert_layout(parts.reshape(s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def words_of_row(length):
    """Words of a row of bits (explicit.py); `length`: of the sequence along it."""
    return (gl.cdiv(length, _PADDED) + 1) * (_PADDED // 32)


@gluon.jit
def bits_of_plane(bits, plane, own_length, other_length):
    """The bits of one plane (explicit.py)."""
    return bits + plane.to(gl.int64) * (gl.cdiv(own_length, _PADDED) * _PADDED) * words_of_row(other_length)


@gluon.jit
def hide_by_bits(s, bits, own, own_length, other0, other_length):
    """Set scores whose bit is 0 to -inf. `bits`: int32 words of a plane, a row of them for each token `own` along the
    first axis of `s`; the second axis begins at token `other0`."""
    OTHER: gl.constexpr = s.shape[1]
    SCORES: gl.constexpr = s.type.layout
    gl.static_assert(OTHER % 32 == 0)
    last = gl.cdiv(own_length, _PADDED) * _PADDED - 1
    row = bits + gl.minimum(own, last).to(gl.int64) * words_of_row(other_length) + other0 // 32
    other = gl.arange(0, OTHER, gl.SliceLayout(0, SCORES))[None, :]
    word = gl.zeros(s.shape, gl.int32, SCORES)
    for i in gl.static_range(OTHER // 32):  # which word a score needs is known when this is compiled
        word = gl.where(other // 32 == i, gl.load(row + i)[:, None], word)
    return gl.where(((word >> (other % 32)) & 1) != 0, s, float("-inf"))


@gluon.jit
def values_of_plane(values, plane, own_length, other_length):
    """The numbers of one plane (additive.py)."""
    own_units = gl.cdiv(own_length, _PADDED) * (_PADDED // 16)
    other_units = gl.cdiv(other_length, _PADDED) * (_PADDED // 16)
    return values + plane.to(gl.int64) * own_units * other_units * 256


@gluon.jit
def extra_of_plane(extra, plane, seq_q, own_length, other_length):
    """The shifts of one plane, behind them its flags (additive.py)."""
    flags = gl.cdiv(own_length, _PADDED) * gl.cdiv(other_length, _PADDED) * ((_PADDED // _FLAG) * (_PADDED // _FLAG))
    return extra + plane.to(gl.int64) * (gl.cdiv(seq_q, _PADDED) * _PADDED + flags)


@gluon.jit
def has_numbers(s, extra, own0, other0, seq_q, other_length):
    """Whether the mask has numbers for the tile of scores `s`, which begins at the tokens `own0` and `other0`. `extra`:
    of the plane."""
    width = gl.cdiv(other_length, _PADDED) * (_PADDED // _FLAG)
    flag = extra + gl.cdiv(seq_q, _PADDED) * _PADDED + (own0 // _FLAG * width + other0 // _FLAG)
    some = gl.load(flag)
    for i in gl.static_range(s.shape[0] // _FLAG):
        for j in gl.static_range(s.shape[1] // _FLAG):
            if i + j > 0:
                some = some | gl.load(flag + (i * width + j))
    return some != 0


@gluon.jit
def add_numbers(s, values, shifts, own0, other0, other_length, scale):
    """Add the mask's numbers to a tile of scores in units of `scale`. `values`: of the plane; `shifts`: of the queries,
    broadcasting to `s`."""
    # In natural units: base 2 would take finfo.min to -inf. A difference of that size may become -inf.
    natural = scale * 0.6931471805599453
    numbers = numbers_of_tile(s, values, own0, other0, other_length)
    return (s * natural + numbers - shifts) * (1.0 / natural)


@gluon.jit
def numbers_of_tile(s, values, own0, other0, other_length):
    """The mask's numbers of the tile of scores `s`, in its layout: a thread's 8 of a unit of 16 x 16 pairs are
    neighbours."""
    LAYOUT: gl.constexpr = s.type.layout
    OWN: gl.constexpr = s.shape[0] // 16
    OTHER: gl.constexpr = s.shape[1] // 16
    UNITS: gl.constexpr = gl.BlockedLayout([1, 1, 1, 8], [1, 1, 32, 1], [OWN, 1, 1, 1], [3, 2, 1, 0])
    gl.static_assert(gl.num_warps() == OWN)
    own = gl.arange(0, OWN, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, UNITS))))[:, None, None, None]
    other = gl.arange(0, OTHER, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, UNITS))))[None, :, None, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, UNITS))))[None, None, :, None]
    i = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, UNITS))))[None, None, None, :]
    width = gl.cdiv(other_length, _PADDED) * (_PADDED // 16)
    first = values + (own0 // 16).to(gl.int64) * width * 256 + other0 * 16
    # The constant part by itself, so that it is no address of its own.
    found = gl.load(first + (own * width * 256 + lane * 8 + i) + other * 256)
    # Of the accumulator of wgmma: rows g and g + 8 of a warp's 16, columns 2 c and 2 c + 1 of every 8; lane 4 g + c.
    parts = found.reshape([OWN, OTHER, 8, 4, 2, 2, 2]).permute((0, 5, 2, 1, 4, 3, 6))
    return gl.convert_layout(parts.reshape(s.shape), LAYOUT, assert_trivial=True).to(gl.float32)


@gluon.jit
def hide_other_segments(s, labels, batch, rows_stride, rows, keys, seq_q, seq_k, ROWS_FIRST: gl.constexpr):
    """Set scores between different segments to -inf, where labels must be compared at all (rows.py).

    `rows`, `keys`: indices along the two axes of `s`, rows along the first one if ROWS_FIRST.
    """
    padded_rows = gl.cdiv(seq_q, _PADDED) * _PADDED
    width = _LABELS_HEAD + padded_rows + gl.cdiv(seq_k, _PADDED) * _PADDED
    labels += gl.where(rows_stride > 0, batch, 0) * width
    if gl.load(labels) != 0:
        of_row = gl.load(labels + _LABELS_HEAD + gl.minimum(rows, padded_rows - 1))
        of_key = gl.load(labels + _LABELS_HEAD + padded_rows + gl.minimum(keys, seq_k - 1))
        if ROWS_FIRST:
            s = gl.where(of_row[:, None] == of_key[None, :], s, float("-inf"))
        else:
            s = gl.where(of_key[:, None] == of_row[None, :], s, float("-inf"))
    return s
