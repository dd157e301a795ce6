"""Norm + rotation on the vector cores, forward and backward.

Data flow. The grid is one program per vector core. Each takes a contiguous run of tokens, the first `tokens mod
programs` one more than the others, and goes through it `TOKENS` at a time. For these tokens the table rows are loaded
once, then the heads of each stream (q and k, or x) pass through the Unified Buffer in tiles `[TOKENS, HEADS, D]`:
load, to float32, norm, rotate, round once, store. A tile is loaded and stored whole and cut into its pair members
with `extract_slice` on chip, so memory is only touched in runs of `D` elements. Weights and biases of the one-row
kind stay on chip for the whole run.

Memory traffic a token, `H` heads in all streams, `e` bytes an element, `t` bytes a table entry, `T` entries, `M` rows
(3 for MRoPE, else 1), `V` copied heads:

    forward    2 (H + V) D e + 2 M T t
    backward   3 H D e + 2 V D e + 2 M T t        (without norm 2 H D e: x is not read)

The weight gradients are summed by each program into one row of its own, and the rows by one sum afterwards: the order
of the additions is fixed, so two runs give equal bits. Nothing is read back element by element from a tile on chip (a
race in the compiler was reported for that: vllm-ascend #16674); positions are scalars read from memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .extension import extract_slice, insert_slice


@triton.jit
def _token_range(tokens):
    """First token of this program and how many it has: the first `tokens mod programs` programs have one more."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    share = tokens // programs
    extra = tokens % programs
    return program * share + tl.minimum(program, extra), share + tl.where(program < extra, 1, 0)


@triton.jit
def _load(address, mask, MASKED: tl.constexpr):
    """Elements in float32, zero where the mask is off."""
    if MASKED:
        values = tl.load(address, mask=mask, other=0.0)
    else:
        values = tl.load(address)
    return values.to(tl.float32)


@triton.jit
def _store(address, values, mask, MASKED: tl.constexpr):
    """Round once and store."""
    if MASKED:
        tl.store(address, values.to(address.dtype.element_ty), mask=mask)
    else:
        tl.store(address, values.to(address.dtype.element_ty))


@triton.jit
def _table_row(table, positions, b, s, table_b, table_s, position_b, position_s, left,
               TOKENS: tl.constexpr, ENTRIES: tl.constexpr, GATHER: tl.constexpr):  # fmt: skip
    """[TOKENS, ENTRIES] of the row of cos or sin (T, H or W) that `table` and `positions` point at."""
    lane = tl.arange(0, ENTRIES)[None, :]
    if GATHER:
        position = tl.load(positions + b * position_b + s * position_s).to(tl.int64)
        values = _load(table + position * table_s + lane, None, False)
    else:
        token = tl.arange(0, TOKENS)[:, None]
        values = _load(table + b * table_b + s * table_s + token * table_s + lane, token < left, TOKENS > 1)
    return values


@triton.jit
def _table(table, positions, b, s, table_m, table_b, table_s, position_m, position_b, position_s, left,
           TOKENS: tl.constexpr, ENTRIES: tl.constexpr, PAIRS: tl.constexpr, GATHER: tl.constexpr,
           ADJACENT: tl.constexpr, MROPE: tl.constexpr, SECTION_T: tl.constexpr, SECTION_H: tl.constexpr,
           SECTION_W: tl.constexpr):  # fmt: skip
    """[TOKENS, ENTRIES] of cos or sin, each pair from the row that MRoPE gives it."""
    values = _table_row(table, positions, b, s, table_b, table_s, position_b, position_s, left,
                        TOKENS, ENTRIES, GATHER)  # fmt: skip
    if MROPE != "none":
        positions_h = positions
        positions_w = positions
        if GATHER:
            positions_h = positions + position_m
            positions_w = positions + 2 * position_m
        height = _table_row(table + table_m, positions_h, b, s, table_b, table_s, position_b, position_s, left,
                            TOKENS, ENTRIES, GATHER)  # fmt: skip
        width = _table_row(table + 2 * table_m, positions_w, b, s, table_b, table_s, position_b, position_s, left,
                           TOKENS, ENTRIES, GATHER)  # fmt: skip
        pair = tl.arange(0, ENTRIES)[None, :]
        if ENTRIES > PAIRS:
            if ADJACENT:
                pair = pair // 2
            else:
                pair = pair % PAIRS
        if MROPE == "sectioned":
            values = tl.where(pair < SECTION_T, values, tl.where(pair < SECTION_T + SECTION_H, height, width))
        else:
            is_height = (pair % 3 == 1) & (pair < 3 * SECTION_H)
            is_width = (pair % 3 == 2) & (pair < 3 * SECTION_W)
            values = tl.where(is_height, height, tl.where(is_width, width, values))
    return values


@triton.jit
def _split(x, START: tl.constexpr, PAIRS: tl.constexpr, ADJACENT: tl.constexpr):
    """The two members of every pair of `x` [TOKENS, HEADS, D]: [TOKENS, HEADS, PAIRS] each."""
    if ADJACENT:
        a = extract_slice(x, (0, 0, START), (x.shape[0], x.shape[1], PAIRS), (1, 1, 2))
        b = extract_slice(x, (0, 0, START + 1), (x.shape[0], x.shape[1], PAIRS), (1, 1, 2))
    else:
        a = extract_slice(x, (0, 0, START), (x.shape[0], x.shape[1], PAIRS), (1, 1, 1))
        b = extract_slice(x, (0, 0, START + PAIRS), (x.shape[0], x.shape[1], PAIRS), (1, 1, 1))
    return a, b


@triton.jit
def _join(x, a, b, START: tl.constexpr, PAIRS: tl.constexpr, ADJACENT: tl.constexpr):
    """`x` with its pair members replaced."""
    if ADJACENT:
        x = insert_slice(x, a, (0, 0, START), (x.shape[0], x.shape[1], PAIRS), (1, 1, 2))
        x = insert_slice(x, b, (0, 0, START + 1), (x.shape[0], x.shape[1], PAIRS), (1, 1, 2))
    else:
        x = insert_slice(x, a, (0, 0, START), (x.shape[0], x.shape[1], PAIRS), (1, 1, 1))
        x = insert_slice(x, b, (0, 0, START + PAIRS), (x.shape[0], x.shape[1], PAIRS), (1, 1, 1))
    return x


@triton.jit
def _factors(table, ENTRIES: tl.constexpr, PAIRS: tl.constexpr, ADJACENT: tl.constexpr):
    """The factor of each pair's first and second result, [TOKENS, 1, PAIRS]: equal unless the table has one a lane."""
    table = table[:, None, :]
    first = table
    second = table
    if ENTRIES > PAIRS:
        first, second = _split(table, 0, PAIRS, ADJACENT)
    return first, second


@triton.jit
def _rotate(x, cos, sin, ENTRIES: tl.constexpr, START: tl.constexpr, PAIRS: tl.constexpr, READ: tl.constexpr,
            WRITE: tl.constexpr):  # fmt: skip
    """`R x`."""
    if PAIRS > 0:
        cos_a, cos_b = _factors(cos, ENTRIES, PAIRS, WRITE)
        sin_a, sin_b = _factors(sin, ENTRIES, PAIRS, WRITE)
        a, b = _split(x, START, PAIRS, READ)
        x = _join(x, a * cos_a - b * sin_a, b * cos_b + a * sin_b, START, PAIRS, WRITE)
    return x


@triton.jit
def _rotate_transposed(g, cos, sin, ENTRIES: tl.constexpr, START: tl.constexpr, PAIRS: tl.constexpr,
                       READ: tl.constexpr, WRITE: tl.constexpr):  # fmt: skip
    """`R' g`, the transpose and not the inverse: a table with one entry a lane need not be a rotation."""
    if PAIRS > 0:
        cos_a, cos_b = _factors(cos, ENTRIES, PAIRS, WRITE)
        sin_a, sin_b = _factors(sin, ENTRIES, PAIRS, WRITE)
        a, b = _split(g, START, PAIRS, WRITE)
        g = _join(g, a * cos_a + b * sin_b, b * cos_b - a * sin_a, START, PAIRS, READ)
    return g


@triton.jit
def _standardise(x, eps, D: tl.constexpr, NORM: tl.constexpr):
    """`xhat` and its factor `r` [TOKENS, HEADS, 1]."""
    if NORM == "layer":
        x = x - (tl.sum(x, 2) / D)[:, :, None]
    r = (1.0 / tl.sqrt(tl.sum(x * x, 2) / D + eps))[:, :, None]
    return x * r, r


@triton.jit
def _parameter_row(parameter, D: tl.constexpr, KIND: tl.constexpr, PLUS: tl.constexpr):
    """A weight or bias shared by all heads, [1, 1, D] in float32; unused zeros for the other kinds."""
    if KIND == "row":
        values = tl.load(parameter + tl.arange(0, D)).to(tl.float32) + PLUS
    else:
        values = tl.zeros((D,), tl.float32)
    return values[None, None, :]


@triton.jit
def _parameter(row, parameter, group_head, head, left, D: tl.constexpr, KIND: tl.constexpr, PLUS: tl.constexpr,
               MASKED: tl.constexpr):  # fmt: skip
    """The weight or bias of a tile of heads, broadcastable to [TOKENS, TILE, D]; `head` is [1, TILE, 1]."""
    if KIND == "heads":
        row = _load(parameter + (group_head + head) * D + tl.arange(0, D)[None, None, :], head < left, MASKED) + PLUS
    return row


@triton.jit
def _forward_stream(x, y, weight, bias, weight_row, bias_row, x_g, x_h, x_s, y_h, y_s, cos, sin, eps, left,
                    GROUPS: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr,
                    D: tl.constexpr, NORM: tl.constexpr, NORM_FIRST: tl.constexpr, WEIGHT: tl.constexpr,
                    BIAS: tl.constexpr, PLUS: tl.constexpr, ENTRIES: tl.constexpr, START: tl.constexpr,
                    PAIRS: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr):  # fmt: skip
    """All heads of one stream for TOKENS tokens; `x` and `y` point at the first token."""
    CUT: tl.constexpr = HEADS % TILE != 0
    MASKED: tl.constexpr = TOKENS > 1 or CUT
    token = tl.arange(0, TOKENS)[:, None, None]
    lane = tl.arange(0, D)[None, None, :]
    for group in range(GROUPS):
        for first in range(0, HEADS, TILE):
            head = first + tl.arange(0, TILE)[None, :, None]
            mask = (token < left) & (head < HEADS)
            values = _load(x + group * x_g + head * x_h + token * x_s + lane, mask, MASKED)
            if not NORM_FIRST:
                values = _rotate(values, cos, sin, ENTRIES, START, PAIRS, READ, WRITE)
            if NORM != "none":
                values, _ = _standardise(values, eps, D, NORM)
                if WEIGHT != "none":
                    values = values * _parameter(weight_row, weight, group * HEADS, head, HEADS, D, WEIGHT, PLUS, CUT)
                if BIAS != "none":
                    values = values + _parameter(bias_row, bias, group * HEADS, head, HEADS, D, BIAS, 0.0, CUT)
            if NORM_FIRST:
                values = _rotate(values, cos, sin, ENTRIES, START, PAIRS, READ, WRITE)
            _store(y + (group * HEADS + head) * y_h + token * y_s + lane, values, mask, MASKED)


@triton.jit
def _copy_stream(x, y, x_h, x_s, y_h, y_s, left, HEADS: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr,
                 D: tl.constexpr):  # fmt: skip
    """V, moved as it is."""
    CUT: tl.constexpr = TOKENS > 1 or HEADS % TILE != 0
    token = tl.arange(0, TOKENS)[:, None, None]
    lane = tl.arange(0, D)[None, None, :]
    for first in range(0, HEADS, TILE):
        head = first + tl.arange(0, TILE)[None, :, None]
        mask = (token < left) & (head < HEADS)
        source = x + head * x_h + token * x_s + lane
        target = y + head * y_h + token * y_s + lane
        if CUT:
            tl.store(target, tl.load(source, mask=mask, other=0.0), mask=mask)
        else:
            tl.store(target, tl.load(source))


@triton.jit
def _backward_stream(grad, x, dx, weight, weight_row, dweight, dbias, g_h, g_s, x_g, x_h, x_s, d_g, d_h, d_s, cos, sin,
                     eps, left, GROUPS: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr,
                     D: tl.constexpr, NORM: tl.constexpr, NORM_FIRST: tl.constexpr, WEIGHT: tl.constexpr,
                     PLUS: tl.constexpr, ENTRIES: tl.constexpr, START: tl.constexpr, PAIRS: tl.constexpr,
                     READ: tl.constexpr, WRITE: tl.constexpr, NEEDS_X: tl.constexpr, NEEDS_WEIGHT: tl.constexpr,
                     NEEDS_BIAS: tl.constexpr):  # fmt: skip
    """All heads of one stream for TOKENS tokens; returns the sums `dweight` and `dbias` [D], grown by these tokens.

    With `g` the gradient of the norm's result: `dweight = sum g xhat`, `dbias = sum g`, and with `u = g weight` the
    norm's input gets `r (u - xhat mean(u xhat))`, LayerNorm `r (u - mean(u) - xhat mean(u xhat))` (Zhang and
    Sennrich, arXiv 1910.07467; Ba et al., arXiv 1607.06450).
    """
    CUT: tl.constexpr = HEADS % TILE != 0
    MASKED: tl.constexpr = TOKENS > 1 or CUT
    token = tl.arange(0, TOKENS)[:, None, None]
    lane = tl.arange(0, D)[None, None, :]
    for group in range(GROUPS):
        for first in range(0, HEADS, TILE):
            head = first + tl.arange(0, TILE)[None, :, None]
            mask = (token < left) & (head < HEADS)
            g = _load(grad + (group * HEADS + head) * g_h + token * g_s + lane, mask, MASKED)
            if NORM_FIRST:
                g = _rotate_transposed(g, cos, sin, ENTRIES, START, PAIRS, READ, WRITE)
            if NORM != "none":
                values = _load(x + group * x_g + head * x_h + token * x_s + lane, mask, MASKED)
                if not NORM_FIRST:
                    values = _rotate(values, cos, sin, ENTRIES, START, PAIRS, READ, WRITE)
                xhat, r = _standardise(values, eps, D, NORM)
                if MASKED:
                    # Lanes that do not exist have r = 1/sqrt(eps), which is infinite for eps = 0.
                    xhat = tl.where(mask, xhat, 0.0)
                if NEEDS_WEIGHT:
                    dweight += tl.sum(tl.sum(g * xhat, 0), 0)
                if NEEDS_BIAS:
                    dbias += tl.sum(tl.sum(g, 0), 0)
                if WEIGHT != "none":
                    g = g * _parameter(weight_row, weight, group * HEADS, head, HEADS, D, WEIGHT, PLUS, CUT)
                inner = g - xhat * (tl.sum(g * xhat, 2) / D)[:, :, None]
                if NORM == "layer":
                    inner = inner - (tl.sum(g, 2) / D)[:, :, None]
                g = inner * r
            if not NORM_FIRST:
                g = _rotate_transposed(g, cos, sin, ENTRIES, START, PAIRS, READ, WRITE)
            if NEEDS_X:
                _store(dx + group * d_g + head * d_h + token * d_s + lane, g, mask, MASKED)
    return dweight, dbias


@triton.jit
def _tables(cos, sin, positions, b, s, cos_m, cos_b, cos_s, sin_m, sin_b, sin_s, position_m, position_b, position_s,
            left, TOKENS: tl.constexpr, ENTRIES: tl.constexpr, PAIRS: tl.constexpr, GATHER: tl.constexpr,
            ADJACENT: tl.constexpr, CONJUGATE: tl.constexpr, MROPE: tl.constexpr, SECTION_T: tl.constexpr,
            SECTION_H: tl.constexpr, SECTION_W: tl.constexpr):  # fmt: skip
    """cos and sin of TOKENS tokens, [TOKENS, ENTRIES] each; zeros that nothing reads if there is no rotation."""
    if PAIRS > 0:
        c = _table(cos, positions, b, s, cos_m, cos_b, cos_s, position_m, position_b, position_s, left,
                   TOKENS, ENTRIES, PAIRS, GATHER, ADJACENT, MROPE, SECTION_T, SECTION_H, SECTION_W)  # fmt: skip
        n = _table(sin, positions, b, s, sin_m, sin_b, sin_s, position_m, position_b, position_s, left,
                   TOKENS, ENTRIES, PAIRS, GATHER, ADJACENT, MROPE, SECTION_T, SECTION_H, SECTION_W)  # fmt: skip
        if CONJUGATE:
            n = 0.0 - n
    else:
        c = tl.zeros((TOKENS, 1), tl.float32)
        n = c
    return c, n


@triton.jit
def forward_kernel(
    x0, y0, weight0, bias0, x0_b, x0_s, x0_g, x0_h, y0_b, y0_s, y0_h,
    x1, y1, weight1, bias1, x1_b, x1_s, x1_g, x1_h, y1_b, y1_s, y1_h,
    v, copy, v_b, v_s, v_h, copy_b, copy_s, copy_h,
    cos, sin, positions, cos_m, cos_b, cos_s, sin_m, sin_b, sin_s, position_m, position_b, position_s,
    tokens, sequence, eps,
    GROUPS0: tl.constexpr, HEADS0: tl.constexpr, TILE0: tl.constexpr, WEIGHT0: tl.constexpr, BIAS0: tl.constexpr,
    GROUPS1: tl.constexpr, HEADS1: tl.constexpr, TILE1: tl.constexpr, WEIGHT1: tl.constexpr, BIAS1: tl.constexpr,
    COPY_HEADS: tl.constexpr, COPY_TILE: tl.constexpr,
    TOKENS: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, NORM_FIRST: tl.constexpr, PLUS: tl.constexpr,
    ENTRIES: tl.constexpr, START: tl.constexpr, PAIRS: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr,
    CONJUGATE: tl.constexpr, GATHER: tl.constexpr, MROPE: tl.constexpr, SECTION_T: tl.constexpr,
    SECTION_H: tl.constexpr, SECTION_W: tl.constexpr,
):  # fmt: skip
    """Norm and rotation of one or two streams (`HEADS1` = 0: one), and the copy of V (`COPY_HEADS` = 0: none).

    Suffixes name strides: `_b` batch, `_s` token, `_g` group of heads (grouped packing), `_h` head, `_m` MRoPE row.
    TOKENS above 1 needs one batch (`sequence` = `tokens`). Weight and bias kinds: none, row (`[D]`), heads (`[H,
    D]`).
    """
    begin, count = _token_range(tokens)
    weight_row0 = _parameter_row(weight0, D, WEIGHT0, PLUS)
    bias_row0 = _parameter_row(bias0, D, BIAS0, 0.0)
    if HEADS1 > 0:
        weight_row1 = _parameter_row(weight1, D, WEIGHT1, PLUS)
        bias_row1 = _parameter_row(bias1, D, BIAS1, 0.0)
    for done in range(0, count, TOKENS):
        left = count - done
        b = ((begin + done) // sequence).to(tl.int64)
        s = ((begin + done) % sequence).to(tl.int64)
        c, n = _tables(cos, sin, positions, b, s, cos_m, cos_b, cos_s, sin_m, sin_b, sin_s, position_m, position_b,
                       position_s, left, TOKENS, ENTRIES, PAIRS, GATHER, WRITE, CONJUGATE, MROPE, SECTION_T, SECTION_H,
                       SECTION_W)  # fmt: skip
        _forward_stream(x0 + b * x0_b + s * x0_s, y0 + b * y0_b + s * y0_s, weight0, bias0, weight_row0, bias_row0,
                        x0_g, x0_h, x0_s, y0_h, y0_s, c, n, eps, left, GROUPS0, HEADS0, TILE0, TOKENS, D, NORM,
                        NORM_FIRST, WEIGHT0, BIAS0, PLUS, ENTRIES, START, PAIRS, READ, WRITE)  # fmt: skip
        if HEADS1 > 0:
            _forward_stream(x1 + b * x1_b + s * x1_s, y1 + b * y1_b + s * y1_s, weight1, bias1, weight_row1, bias_row1,
                            x1_g, x1_h, x1_s, y1_h, y1_s, c, n, eps, left, GROUPS1, HEADS1, TILE1, TOKENS, D, NORM,
                            NORM_FIRST, WEIGHT1, BIAS1, PLUS, ENTRIES, START, PAIRS, READ, WRITE)  # fmt: skip
        if COPY_HEADS > 0:
            _copy_stream(v + b * v_b + s * v_s, copy + b * copy_b + s * copy_s, v_h, v_s, copy_h, copy_s, left,
                         COPY_HEADS, COPY_TILE, TOKENS, D)  # fmt: skip


@triton.jit
def backward_kernel(
    grad0, x0, dx0, weight0, dweight0, dbias0, g0_b, g0_s, g0_h, x0_b, x0_s, x0_g, x0_h, d0_b, d0_s, d0_g, d0_h,
    grad1, x1, dx1, weight1, dweight1, dbias1, g1_b, g1_s, g1_h, x1_b, x1_s, x1_g, x1_h, d1_b, d1_s, d1_g, d1_h,
    v, copy, v_b, v_s, v_h, copy_b, copy_s, copy_h,
    cos, sin, positions, cos_m, cos_b, cos_s, sin_m, sin_b, sin_s, position_m, position_b, position_s,
    tokens, sequence, eps,
    GROUPS0: tl.constexpr, HEADS0: tl.constexpr, TILE0: tl.constexpr, WEIGHT0: tl.constexpr,
    NEEDS_X0: tl.constexpr, NEEDS_WEIGHT0: tl.constexpr, NEEDS_BIAS0: tl.constexpr,
    GROUPS1: tl.constexpr, HEADS1: tl.constexpr, TILE1: tl.constexpr, WEIGHT1: tl.constexpr,
    NEEDS_X1: tl.constexpr, NEEDS_WEIGHT1: tl.constexpr, NEEDS_BIAS1: tl.constexpr,
    COPY_HEADS: tl.constexpr, COPY_TILE: tl.constexpr,
    TOKENS: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, NORM_FIRST: tl.constexpr, PLUS: tl.constexpr,
    ENTRIES: tl.constexpr, START: tl.constexpr, PAIRS: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr,
    CONJUGATE: tl.constexpr, GATHER: tl.constexpr, MROPE: tl.constexpr, SECTION_T: tl.constexpr,
    SECTION_H: tl.constexpr, SECTION_W: tl.constexpr,
):  # fmt: skip
    """The gradients of one or two streams (`HEADS1` = 0: one), and the copy of V's gradient into its place.

    `dweight` and `dbias` are [programs, D] in float32: each program writes the sum over its tokens into its own row.
    """
    begin, count = _token_range(tokens)
    weight_row0 = _parameter_row(weight0, D, WEIGHT0, PLUS)
    weight_sum0 = tl.zeros((D,), tl.float32)
    bias_sum0 = tl.zeros((D,), tl.float32)
    if HEADS1 > 0:
        weight_row1 = _parameter_row(weight1, D, WEIGHT1, PLUS)
        weight_sum1 = tl.zeros((D,), tl.float32)
        bias_sum1 = tl.zeros((D,), tl.float32)
    for done in range(0, count, TOKENS):
        left = count - done
        b = ((begin + done) // sequence).to(tl.int64)
        s = ((begin + done) % sequence).to(tl.int64)
        c, n = _tables(cos, sin, positions, b, s, cos_m, cos_b, cos_s, sin_m, sin_b, sin_s, position_m, position_b,
                       position_s, left, TOKENS, ENTRIES, PAIRS, GATHER, WRITE, CONJUGATE, MROPE, SECTION_T, SECTION_H,
                       SECTION_W)  # fmt: skip
        weight_sum0, bias_sum0 = _backward_stream(
            grad0 + b * g0_b + s * g0_s, x0 + b * x0_b + s * x0_s, dx0 + b * d0_b + s * d0_s, weight0, weight_row0,
            weight_sum0, bias_sum0, g0_h, g0_s, x0_g, x0_h, x0_s, d0_g, d0_h, d0_s, c, n, eps, left, GROUPS0, HEADS0,
            TILE0, TOKENS, D, NORM, NORM_FIRST, WEIGHT0, PLUS, ENTRIES, START, PAIRS, READ, WRITE, NEEDS_X0,
            NEEDS_WEIGHT0, NEEDS_BIAS0)  # fmt: skip
        if HEADS1 > 0:
            weight_sum1, bias_sum1 = _backward_stream(
                grad1 + b * g1_b + s * g1_s, x1 + b * x1_b + s * x1_s, dx1 + b * d1_b + s * d1_s, weight1, weight_row1,
                weight_sum1, bias_sum1, g1_h, g1_s, x1_g, x1_h, x1_s, d1_g, d1_h, d1_s, c, n, eps, left, GROUPS1,
                HEADS1, TILE1, TOKENS, D, NORM, NORM_FIRST, WEIGHT1, PLUS, ENTRIES, START, PAIRS, READ, WRITE, NEEDS_X1,
                NEEDS_WEIGHT1, NEEDS_BIAS1)  # fmt: skip
        if COPY_HEADS > 0:
            _copy_stream(v + b * v_b + s * v_s, copy + b * copy_b + s * copy_s, v_h, v_s, copy_h, copy_s, left,
                         COPY_HEADS, COPY_TILE, TOKENS, D)  # fmt: skip
    row = tl.program_id(0) * D + tl.arange(0, D)
    if NEEDS_WEIGHT0:
        tl.store(dweight0 + row, weight_sum0)
    if NEEDS_BIAS0:
        tl.store(dbias0 + row, bias_sum0)
    if HEADS1 > 0:
        if NEEDS_WEIGHT1:
            tl.store(dweight1 + row, weight_sum1)
        if NEEDS_BIAS1:
            tl.store(dbias1 + row, bias_sum1)
