"""The pieces of the norm + rotation kernels: load, rotate, normalise and store one tile of heads.

A tile is [BT tokens, BH heads, lanes], held as three tensors: the first and the second member of every rotated pair,
[BT, BH, L] each, and the lanes that pass through, [BT, BH, P]. L and P are padded to powers of two; what is beyond
is loaded as zero and never stored. So a rotation is arithmetic between two registers of one thread, whatever the
pairing: halves are two contiguous loads, adjacent pairs one contiguous load that is split.

Masks that cannot cut anything are constants, and Triton removes them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_mask(s0, S, h0, H: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, WHOLE_BLOCKS: tl.constexpr):
    """[BT, BH, 1]: the token and the head exist."""
    mask = tl.full([BT, BH, 1], 1, tl.int1)
    if not WHOLE_BLOCKS:
        mask = mask & ((s0 + tl.arange(0, BT)) < S)[:, None, None]
    if H % BH != 0:
        mask = mask & ((h0 + tl.arange(0, BH)) < H)[None, :, None]
    return mask


@triton.jit
def tile_pointers(
    X,
    stride_b,
    stride_s,
    stride_g,
    stride_h,
    batch,
    s0,
    h0,
    GROUP: tl.constexpr,
    VEC: tl.constexpr,
    WIDE: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    """[BT, BH, 1] pointers to lane 0 of every head of the tile.

    Strides arrive divided by VEC, so that the compiler sees how far the addresses are aligned. The tile's corner is
    a 64-bit scalar; offsets within a tile are 32-bit unless WIDE. GROUP > 0: head h stands at (h // GROUP) stride_g
    + (h % GROUP) stride_h.
    """
    corner = batch.to(tl.int64) * stride_b * VEC + s0.to(tl.int64) * stride_s * VEC
    token = tl.arange(0, BT)[:, None, None]
    head = tl.arange(0, BH)[None, :, None]
    if WIDE:
        token = token.to(tl.int64)
        head = head.to(tl.int64)
    if GROUP > 0:
        head = head + h0
        offset = (head // GROUP) * stride_g * VEC + (head % GROUP) * stride_h * VEC
    else:
        corner += h0.to(tl.int64) * stride_h * VEC
        offset = head * stride_h * VEC
    return X + corner + (token * stride_s * VEC + offset)


@triton.jit
def passing_lanes(R: tl.constexpr, START: tl.constexpr, P: tl.constexpr):
    """[1, 1, P]: the lanes outside [START, START + R)."""
    j = tl.arange(0, P)[None, None, :]
    if START == 0:
        lane = j + R
    else:
        lane = tl.where(j < START, j, j + R)
    return lane


@triton.jit
def load_lanes(
    pointers,
    mask,
    D: tl.constexpr,
    R: tl.constexpr,
    START: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    ADJACENT: tl.constexpr,
):
    """The pair members and the passing lanes of the heads at `pointers`, in the dtype of the memory."""
    if ADJACENT:
        i = tl.arange(0, 2 * L)[None, None, :]
        lanes = tl.load(pointers + (START + i), mask=mask & (i < R), other=0)
        a, b = tl.split(tl.reshape(lanes, [lanes.shape[0], lanes.shape[1], L, 2]))
    else:
        i = tl.arange(0, L)[None, None, :]
        a = tl.load(pointers + (START + i), mask=mask & (i < R // 2), other=0)
        b = tl.load(pointers + (START + R // 2 + i), mask=mask & (i < R // 2), other=0)
    rest = a
    if P > 0:
        lane = passing_lanes(R, START, P)
        rest = tl.load(pointers + lane, mask=mask & (lane < D), other=0)
    return a, b, rest


@triton.jit
def store_lanes(
    pointers,
    mask,
    a,
    b,
    rest,
    D: tl.constexpr,
    R: tl.constexpr,
    START: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    ADJACENT: tl.constexpr,
):
    """The inverse of `load_lanes`; rounds to the dtype of the memory."""
    dtype = pointers.dtype.element_ty
    if ADJACENT:
        i = tl.arange(0, 2 * L)[None, None, :]
        lanes = tl.reshape(tl.join(a.to(dtype), b.to(dtype)), [a.shape[0], a.shape[1], 2 * L])
        tl.store(pointers + (START + i), lanes, mask=mask & (i < R))
    else:
        i = tl.arange(0, L)[None, None, :]
        tl.store(pointers + (START + i), a.to(dtype), mask=mask & (i < R // 2))
        tl.store(pointers + (START + R // 2 + i), b.to(dtype), mask=mask & (i < R // 2))
    if P > 0:
        lane = passing_lanes(R, START, P)
        tl.store(pointers + lane, rest.to(dtype), mask=mask & (lane < D))


@triton.jit
def table_row(j, SECTION_T: tl.constexpr, SECTION_H: tl.constexpr, SECTION_W: tl.constexpr, MROPE: tl.constexpr):
    """The row of a MRoPE table that pair j reads."""
    if MROPE == "sectioned":
        row = tl.where(j < SECTION_T, 0, tl.where(j < SECTION_T + SECTION_H, 1, 2))
    else:
        row = j % 3
        size = tl.where(row == 0, SECTION_T, tl.where(row == 1, SECTION_H, SECTION_W))
        row = tl.where(j < 3 * size, row, 0)
    return row


@triton.jit
def load_tables(
    COS,
    SIN,
    POSITIONS,
    table_r,
    table_b,
    table_s,
    position_r,
    position_b,
    position_s,
    max_position,
    batch,
    s0,
    S,
    R: tl.constexpr,
    L: tl.constexpr,
    TABLE_VEC: tl.constexpr,
    LANE_STRIDE: tl.constexpr,
    PER_LANE: tl.constexpr,
    GATHER: tl.constexpr,
    MROPE: tl.constexpr,
    SECTION_T: tl.constexpr,
    SECTION_H: tl.constexpr,
    SECTION_W: tl.constexpr,
    WRITES_ADJACENT: tl.constexpr,
    CONJUGATE: tl.constexpr,
    WHOLE_BLOCKS: tl.constexpr,
    ACC: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    """cos and sin of both members of every pair, [BT, BH, L]: loaded already broadcast over the heads, which spares
    a layout conversion. They are to stay in the L2 for the other head tiles, and for the batch entries that share them,
    while the heads pass through (`evict_last`: 1 to 6 % at 16384 tokens in 4 entries).

    Strides arrive divided by TABLE_VEC (see `tile_pointers`). A position outside the table gives NaN: nothing beyond
    the table is read, and the mistake shows.
    """
    j = tl.arange(0, L)[None, None, :] + tl.zeros([BT, BH, 1], tl.int32)
    token = tl.arange(0, BT)[:, None, None]
    mask = j < R // 2
    if not WHOLE_BLOCKS:
        mask = mask & ((s0 + token) < S)
    row = tl.zeros([1, 1, 1], tl.int64)
    if MROPE != "none":
        row = table_row(j, SECTION_T, SECTION_H, SECTION_W, MROPE).to(tl.int64)
    inside = mask
    if GATHER:
        corner = batch.to(tl.int64) * position_b + s0.to(tl.int64) * position_s
        position = tl.load(POSITIONS + corner + (row * position_r + token * position_s), mask=mask, other=0).to(
            tl.int64
        )
        inside = (position >= 0) & (position < max_position)
        mask = mask & inside
        offset = position * table_s * TABLE_VEC
    else:
        corner = batch.to(tl.int64) * table_b * TABLE_VEC + s0.to(tl.int64) * table_s * TABLE_VEC
        COS += corner
        SIN += corner
        if MROPE == "none":
            offset = token * table_s * TABLE_VEC
        else:
            offset = row * table_r * TABLE_VEC + token * table_s * TABLE_VEC
    if PER_LANE:
        if WRITES_ADJACENT:
            first = offset + 2 * j * LANE_STRIDE
            second = first + LANE_STRIDE
        else:
            first = offset + j * LANE_STRIDE
            second = first + (R // 2) * LANE_STRIDE
        cos_a = tl.load(COS + first, mask=mask, other=0, eviction_policy="evict_last").to(ACC)
        cos_b = tl.load(COS + second, mask=mask, other=0, eviction_policy="evict_last").to(ACC)
        sin_a = tl.load(SIN + first, mask=mask, other=0, eviction_policy="evict_last").to(ACC)
        sin_b = tl.load(SIN + second, mask=mask, other=0, eviction_policy="evict_last").to(ACC)
    else:
        offset = offset + j * LANE_STRIDE
        cos_a = tl.load(COS + offset, mask=mask, other=0, eviction_policy="evict_last").to(ACC)
        sin_a = tl.load(SIN + offset, mask=mask, other=0, eviction_policy="evict_last").to(ACC)
        cos_b = cos_a
        sin_b = sin_a
    if GATHER:
        cos_a = tl.where(inside, cos_a, float("nan"))
        cos_b = tl.where(inside, cos_b, float("nan"))
    if CONJUGATE:
        sin_a = -sin_a
        sin_b = -sin_b
    return cos_a, cos_b, sin_a, sin_b


@triton.jit
def rotate(a, b, cos_a, cos_b, sin_a, sin_b):
    """R (a, b)."""
    return a * cos_a - b * sin_a, b * cos_b + a * sin_b


@triton.jit
def rotate_transposed(a, b, cos_a, cos_b, sin_a, sin_b):
    """R' (a, b): the transpose of `rotate`, also where the two members of a pair have different entries."""
    return a * cos_a + b * sin_b, b * cos_b - a * sin_a


@triton.jit
def row_sum(a, b, rest, P: tl.constexpr, HIDDEN: tl.constexpr):
    """Sum over the lanes of a head, [BT, BH, 1]; HIDDEN: over all heads of the token, [BT, 1, 1]."""
    total = tl.sum(a + b, 2)
    if P > 0:
        total += tl.sum(rest, 2)
    if HIDDEN:
        total = tl.sum(total, 1)[:, None]
    return total[:, :, None]


@triton.jit
def standardise(
    a,
    b,
    rest,
    mask,
    H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    START: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    NORM: tl.constexpr,
    HIDDEN: tl.constexpr,
    EPS: tl.constexpr,
):
    """xhat (three parts) and r = 1 / sqrt(mean(x^2) + eps); LayerNorm: of x - mean(x)."""
    N: tl.constexpr = H * D if HIDDEN else D
    if NORM == "layer":
        mean = row_sum(a, b, rest, P, HIDDEN) * (1.0 / N)
        pair = mask & (tl.arange(0, L)[None, None, :] < R // 2)
        a = tl.where(pair, a - mean, 0)
        b = tl.where(pair, b - mean, 0)
        if P > 0:
            rest = tl.where(mask & (passing_lanes(R, START, P) < D), rest - mean, 0)
    r = tl.rsqrt(row_sum(a * a, b * b, rest * rest, P, HIDDEN) * (1.0 / N) + EPS)
    # Where a head or token does not exist x is zero and, with eps = 0, r is infinite: keep NaN out of the sums over
    # heads and tokens.
    r = tl.where(mask, r, 0)
    return a * r, b * r, rest * r, r


@triton.jit
def norm_backward(
    ga,
    gb,
    grest,
    xa,
    xb,
    xrest,
    r,
    wa,
    wb,
    wrest,
    H: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    NORM: tl.constexpr,
    HIDDEN: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):
    """Gradient of the norm's input from the gradient g of its result, xhat and r."""
    N: tl.constexpr = H * D if HIDDEN else D
    if HAS_WEIGHT:
        ga = ga * wa
        gb = gb * wb
        grest = grest * wrest
    projection = row_sum(ga * xa, gb * xb, grest * xrest, P, HIDDEN) * (1.0 / N)
    da = ga - xa * projection
    db = gb - xb * projection
    drest = grest - xrest * projection
    if NORM == "layer":
        mean = row_sum(ga, gb, grest, P, HIDDEN) * (1.0 / N)
        da -= mean
        db -= mean
        drest -= mean
    return da * r, db * r, drest * r


@triton.jit
def load_parameter(
    W,
    h0,
    H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    START: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    ADJACENT: tl.constexpr,
    PER_HEAD: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    ACC: tl.constexpr,
    BH: tl.constexpr,
):
    """The norm's weight or bias as a tile [1, 1, lanes], or [1, BH, lanes] if every head has a row."""
    if PER_HEAD:
        head = h0 + tl.arange(0, BH)[None, :, None]
        a, b, rest = load_lanes(W + head * D, head < H, D, R, START, L, P, ADJACENT)
    else:
        a, b, rest = load_lanes(
            W + tl.zeros([1, 1, 1], tl.int32), tl.full([1, 1, 1], 1, tl.int1), D, R, START, L, P, ADJACENT
        )
    a = a.to(ACC)
    b = b.to(ACC)
    rest = rest.to(ACC)
    if PLUS_ONE:
        a += 1
        b += 1
        rest += 1
    return a, b, rest
