"""The `reference` back end: ATen, any device, any float dtype, formulas written for reading.

Forward, for one head x of one token, with R the rotation, r = 1 / sqrt(mean(x^2) + eps) (LayerNorm: of x - mean(x)):

    norm first:  n = x r w + b,  y = R n            norm last:  z = R x,  y = z r(z) w + b

Backward, given dy (Zhang and Sennrich 2019, arXiv 1910.07467, for RMSNorm; Ba et al. 2016, arXiv 1607.06450, for
LayerNorm):

    g = R' dy (norm first) or dy,   dw = sum g xhat,   db = sum g,   u = g w,
    d  = r (u - xhat mean(u xhat)), LayerNorm: d = r (u - mean(u) - xhat mean(u xhat)),   dx = d (norm first) or R' d

R' is the transpose of R. The tables may hold one entry a lane, so R need not be orthogonal and R' is not the
opposite rotation.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .options import Options
from .registry import NORM_ROPE_OPS, Kernel
from .streams import Copy, Gradients, GradStream, Stream, Tables, arithmetic_dtype

KERNELS = (
    Kernel(
        name="reference",
        ops=NORM_ROPE_OPS,
        load=lambda: importlib.import_module(__name__),
        available=lambda: None,
    ),
)


class Rotation(NamedTuple):
    """One factor a pair and lane, [B, S, 1, R/2]: y_a = a cos_a - b sin_a, y_b = b cos_b + a sin_b."""

    cos_a: Tensor
    cos_b: Tensor
    sin_a: Tensor
    sin_b: Tensor


def forward(streams: Sequence[Stream], tables: Tables | None, options: Options, copy: Copy | None = None) -> None:
    """Fill `out` of every stream (see `streams.Backend`)."""
    for stream in streams:
        dtype = arithmetic_dtype(stream.x.dtype, stream.out.dtype)
        x = stream.x.to(dtype).reshape(stream.out.shape)
        rotation = _rotation(tables, options, x) if tables is not None else None
        if options.norm_first:
            y = _rotate(_normalised(x, stream.weight, stream.bias, options), rotation, options)
        else:
            y = _normalised(_rotate(x, rotation, options), stream.weight, stream.bias, options)
        stream.out.copy_(y)
    if copy is not None:
        copy.out.copy_(copy.x)


def backward(
    streams: Sequence[GradStream],
    tables: Tables | None,
    options: Options,
    copy: Copy | None = None,
    needs_tables: bool = False,
) -> Gradients:
    """Fill `dx` of every stream and return the other gradients (see `streams.Backend`)."""
    result = Gradients([], [])
    for stream in streams:
        dx_dtype = stream.grad.dtype if stream.dx is None else stream.dx.dtype
        dtype = arithmetic_dtype(stream.grad.dtype, dx_dtype, stream.grad.dtype if stream.x is None else stream.x.dtype)
        grad = stream.grad.to(dtype)
        x = None if stream.x is None else stream.x.to(dtype).reshape(grad.shape)
        rotation = _rotation(tables, options, grad) if tables is not None else None
        if options.norm_first:
            inner = _rotate_transposed(grad, rotation, options)
            dx, dweight, dbias = _norm_backward(inner, x, stream, options)
        else:
            rotated = None if x is None else _rotate(x, rotation, options)
            inner, dweight, dbias = _norm_backward(grad, rotated, stream, options)
            dx = _rotate_transposed(inner, rotation, options)
        if stream.dx is not None:
            stream.dx.copy_(dx.view(stream.dx.shape))
        result.weights.append(dweight)
        result.biases.append(dbias)
        if needs_tables:
            assert x is not None
            assert tables is not None
            if options.norm_first:
                before, after = _normalised(x, stream.weight, stream.bias, options), grad
            else:
                before, after = x, inner
            dcos, dsin = _table_gradients(before, after, tables.cos.shape[-1], options)
            result.cos = dcos if result.cos is None else result.cos + dcos
            result.sin = dsin if result.sin is None else result.sin + dsin
    if copy is not None:
        copy.out.copy_(copy.x)
    return result


def select_tables(tables: Tables, options: Options, batch: int, sequence: int) -> tuple[Tensor, Tensor]:
    """cos and sin of every token, [B, S, T]: gathered by position, and of the MRoPE rows the one that each pair
    reads."""
    mrope = options.mrope_layout != "none"
    if tables.positions is None:
        cos = tables.table_view(tables.cos, batch, sequence, mrope)
        sin = tables.table_view(tables.sin, batch, sequence, mrope)
    else:
        index = tables.positions_view(batch, sequence, mrope).long()
        # Advanced indexing wraps negative positions around; a position outside the table is an error here.
        if index.device.type == "cpu" and index.numel() and (index.min() < 0 or index.max() >= tables.cos.shape[0]):
            raise IndexError(
                f"positions go from {int(index.min())} to {int(index.max())}, but the table has "
                f"{tables.cos.shape[0]} rows; build a longer table or correct the positions."
            )
        cos, sin = tables.cos[index], tables.sin[index]
    if not mrope:
        return cos[0], sin[0]
    rows = torch.tensor(options.mrope_rows(), device=cos.device)
    if cos.shape[-1] == options.rotary_dim:
        rows = rows.repeat_interleave(2) if options.writes_adjacent else rows.repeat(2)
    index = rows.expand(1, batch, sequence, -1)
    return cos.gather(0, index)[0], sin.gather(0, index)[0]


def _rotation(tables: Tables, options: Options, x: Tensor) -> Rotation:
    cos, sin = (t.to(x.dtype).unsqueeze(2) for t in select_tables(tables, options, x.shape[0], x.shape[1]))
    if options.conjugate:
        sin = -sin
    if cos.shape[-1] == options.rotary_dim // 2:
        return Rotation(cos, cos, sin, sin)
    # One entry a lane: counted in the lanes of the result.
    return Rotation(*_pairs(cos, options.writes_adjacent), *_pairs(sin, options.writes_adjacent))


def _pairs(x: Tensor, adjacent: bool) -> tuple[Tensor, Tensor]:
    """The two members of every pair, [..., R] -> 2 x [..., R/2]."""
    if adjacent:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _unpairs(a: Tensor, b: Tensor, adjacent: bool) -> Tensor:
    """The inverse of `_pairs`."""
    return torch.stack((a, b), -1).flatten(-2) if adjacent else torch.cat((a, b), -1)


def _rotated_lanes(x: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    return x.tensor_split((options.rotary_start, options.rotary_start + options.rotary_dim), -1)  # type: ignore[return-value]


def _rotate(x: Tensor, rotation: Rotation | None, options: Options) -> Tensor:
    if rotation is None:
        return x
    head, rotated, tail = _rotated_lanes(x, options)
    a, b = _pairs(rotated, options.reads_adjacent)
    y_a = a * rotation.cos_a - b * rotation.sin_a
    y_b = b * rotation.cos_b + a * rotation.sin_b
    return torch.cat((head, _unpairs(y_a, y_b, options.writes_adjacent), tail), -1)


def _rotate_transposed(g: Tensor, rotation: Rotation | None, options: Options) -> Tensor:
    if rotation is None:
        return g
    head, rotated, tail = _rotated_lanes(g, options)
    g_a, g_b = _pairs(rotated, options.writes_adjacent)
    a = g_a * rotation.cos_a + g_b * rotation.sin_b
    b = g_b * rotation.cos_b - g_a * rotation.sin_a
    return torch.cat((head, _unpairs(a, b, options.reads_adjacent), tail), -1)


def _table_gradients(x: Tensor, grad: Tensor, entries: int, options: Options) -> tuple[Tensor, Tensor]:
    """Gradients of cos and sin per token, [B, S, T], from the rotation's input and the gradient of its result."""
    a, b = _pairs(_rotated_lanes(x, options)[1], options.reads_adjacent)
    g_a, g_b = _pairs(_rotated_lanes(grad, options)[1], options.writes_adjacent)
    sign = -1 if options.conjugate else 1
    cos_a, cos_b = (g_a * a).sum(2), (g_b * b).sum(2)
    sin_a, sin_b = (g_a * b).sum(2) * -sign, (g_b * a).sum(2) * sign
    if entries == options.rotary_dim // 2:
        return cos_a + cos_b, sin_a + sin_b
    return _unpairs(cos_a, cos_b, options.writes_adjacent), _unpairs(sin_a, sin_b, options.writes_adjacent)


def _axes(options: Options) -> tuple[int, ...]:
    return (-1,) if options.norm_scope == "head" else (-2, -1)


def _standardised(x: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """xhat and r."""
    assert options.eps is not None
    if options.norm == "layer":
        x = x - x.mean(_axes(options), keepdim=True)
    r = torch.rsqrt(x.square().mean(_axes(options), keepdim=True) + options.eps)
    return x * r, r


def _scale(weight: Tensor | None, x: Tensor, options: Options) -> Tensor | None:
    """The norm's factor, [D] or [H, D], in x's dtype."""
    if weight is None:
        return None
    weight = _per_lane(weight, x)
    return weight + 1 if options.norm == "rms_one_plus" else weight


def _per_lane(value: Tensor, x: Tensor) -> Tensor:
    value = value.to(x.dtype)
    return value if value.shape == x.shape[-1:] else value.reshape(x.shape[-2:])


def _normalised(x: Tensor, weight: Tensor | None, bias: Tensor | None, options: Options) -> Tensor:
    if options.norm == "none":
        return x
    y, _ = _standardised(x, options)
    scale = _scale(weight, x, options)
    if scale is not None:
        y = y * scale
    return y if bias is None else y + _per_lane(bias, x)


def _norm_backward(
    g: Tensor, x: Tensor | None, stream: GradStream, options: Options
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of the norm's input, weight and bias from the gradient `g` of its result."""
    if options.norm == "none":
        return g, None, None
    assert x is not None
    xhat, r = _standardised(x, options)
    dweight = _sum_to(g * xhat, stream.weight) if stream.needs_weight else None
    dbias = _sum_to(g, stream.bias) if stream.needs_bias else None
    scale = _scale(stream.weight, x, options)
    u = g if scale is None else g * scale
    axes = _axes(options)
    dx = u - xhat * (u * xhat).mean(axes, keepdim=True)
    if options.norm == "layer":
        dx = dx - u.mean(axes, keepdim=True)
    return dx * r, dweight, dbias


def _sum_to(per_head: Tensor, parameter: Tensor | None) -> Tensor:
    """Sum [B, S, H, D] over the axes the parameter is shared by."""
    assert parameter is not None
    one_row = parameter.shape == per_head.shape[-1:]
    return per_head.sum((0, 1, 2) if one_row else (0, 1)).view(parameter.shape).to(parameter.dtype)
