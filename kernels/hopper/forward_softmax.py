"""Online softmax of the forward, and the product with what O was found to lack.

P and its sums are relative to a reference, any number near the largest score of a row: a factor of both that cancels.
It is the maximum of the blocks so far, and O is multiplied when that grows; with `T.rescale_above` in a branch, which a
warp takes only if a reference of its 16 rows has moved. Where `T.rescale_above` is more than 0 a reference moves only
when the maximum has left it so far behind, in exponents of 2 (FlashAttention-4 does so on Blackwell, `softmax.py` of
flash-attn-4 4.0.0b36): P is then up to 2^8, in formats whose relative precision is that of 1. What a row becomes
depends on its own scores only.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .forward_state import hide_keys, of_out
from .scores import tanh


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
def finite(reference, MASKED: gl.constexpr):
    """The reference to subtract: 0 for a row that has seen no key, whose -inf would make NaN of -inf - -inf."""
    if MASKED:
        return gl.where(reference == float("-inf"), 0.0, reference)
    else:
        return reference


@gluon.jit
def first_probabilities(s, block, rows, p, T: gl.constexpr):
    """Of a tile's first block: (P, reference, sums)."""
    s = scores(s, block, rows, p, T, T.masked)
    reference = gl.max(s, 1)
    shift = finite(reference, T.masked) * p.scale
    probabilities = gl.exp2(s * p.scale - shift[:, None])
    return probabilities, reference, row_sums(probabilities)


@gluon.jit
def soften(s, reference, total, p, T: gl.constexpr, MASKED: gl.constexpr):
    """Probabilities of a block's scores, and what becomes of the references and sums of the rows: (P, reference, total,
    the factor that O lacks)."""
    moved = gl.maximum(reference, gl.max(s, 1))
    if T.rescale_above > 0.0:
        # Of a row that saw no key so far: inf if it does now, NaN, which is not above, if not.
        moved = gl.where((moved - reference) * p.scale > T.rescale_above, moved, reference)
    shift = finite(moved, MASKED)
    factor = gl.exp2((reference - shift) * p.scale)
    probabilities = gl.exp2(s * p.scale - (shift * p.scale)[:, None])
    of_total = gl.convert_layout(factor, gl.SliceLayout(1, total.type.layout), assert_trivial=True)[:, None]
    return probabilities, moved, total * of_total + row_sums(probabilities), factor


@gluon.constexpr_function
def _rescale_asm(n):
    """`n` elements times their factors, unless all factors of the warp are 1. In the accumulator of wgmma a thread
    holds two rows, two neighbours of each in turn."""
    lines = [".reg .pred moved;", f"setp.neu.f32 moved, ${2 * n}, 0f3F800000;"]
    lines += [f"setp.neu.or.f32 moved, ${2 * n + 2}, 0f3F800000, moved;"]
    lines += ["vote.sync.any.pred moved, moved, 0xffffffff;"]
    lines += [f"mov.f32 ${i}, ${n + i};" for i in range(n)]
    lines += ["@!moved bra KEPT;", *(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n)), "KEPT:"]
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def _rescale_constraints(n):
    return ",".join(["=f"] * n + ["f"] * (2 * n))


@gluon.jit
def rescaled(acc, factor, T: gl.constexpr):
    """O times a factor for every row."""
    acc, factor = gl.broadcast(acc, of_out(factor, T))
    if T.rescale_above >= 0.0:
        N: gl.constexpr = T.v_dim // 2
        ASM: gl.constexpr = _rescale_asm(N)
        CONSTRAINTS: gl.constexpr = _rescale_constraints(N)
        return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [acc, factor], dtype=gl.float32, is_pure=True, pack=N)
    else:
        return acc * factor
