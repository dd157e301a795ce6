"""Operations that compute numbers: elementwise functions, sums, small products, norms, and tensors of constants."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from . import lanes
from .lanes import Array, Opaque, Value, elementwise
from .operations import Context, axes_of, handler, integer, shape_of, sizes_argument, tensor
from .vocabulary import Size, fake_tensor, first_argument, operation

SMALL_LITERAL = 1e-2
"""Literals up to this size that are added to a tensor are taken for an eps."""

_VANISHING = 1e-6
"""A sum with a part that is smaller than this, relative to the other, may look like the sum without it."""

# --- elementwise ------------------------------------------------------------------------------------------------------


def _numeric(node: fx.Node) -> None:
    result = fake_tensor(node)
    if result is not None and result.dtype == torch.bool:
        raise Opaque("logic")
    for argument in node.all_input_nodes:
        fake = fake_tensor(argument)
        if fake is not None and fake.dtype == torch.bool:
            raise Opaque("arithmetic on truth values")
        if fake is not None and fake.is_floating_point() and result is not None and not _holds_fractions(result):
            raise Opaque("fractions cut to integers")


def _holds_fractions(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _unary(*names: str) -> Callable[[Callable[[Array], Array]], None]:
    def register(function: Callable[[Array], Array]) -> None:
        def run(context: Context, node: fx.Node, x: Value) -> Value:
            _numeric(node)
            return elementwise(function, tensor(x))

        handler(*names)(run)

    return register


_unary("neg")(np.negative)
_unary("square")(np.square)
_unary("reciprocal")(np.reciprocal)
_unary("sqrt")(np.sqrt)
_unary("rsqrt")(lambda x: 1 / np.sqrt(x))
_unary("cos")(np.cos)
_unary("sin")(np.sin)
_unary("exp")(np.exp)
_unary("real")(np.real)
_unary("imag")(np.imag)
_unary("conj")(np.conj)


@handler("mul")
def _mul(context: Context, node: fx.Node, x: Any, other: Any) -> Value:
    _numeric(node)
    return elementwise(np.multiply, tensor(x), tensor(other))


@handler("add")
def _add(context: Context, node: fx.Node, x: Any, other: Any, alpha: Any = 1) -> Value:
    _numeric(node)
    return elementwise(_sum_of_two, _addend(context, x), _scaled(_addend(context, other), alpha))


def _sum_of_two(a: Array, b: Array) -> Array:
    small, large = sorted((abs(a), abs(b)), key=lambda x: float(x.max(initial=0)))
    if large.size and 0 < small.max(initial=0) < _VANISHING * large.min():
        raise Opaque("an addend that vanishes in rounding")
    return np.asarray(a + b)


def _addend(context: Context, x: Any) -> Value:
    if isinstance(x, float) and 0 < x <= SMALL_LITERAL:
        return context.scalar(x)
    return tensor(x)


def _scaled(x: Value, factor: Any) -> Value:
    return x if factor == 1 else elementwise(np.multiply, x, tensor(factor))


@handler("sub")
def _sub(context: Context, node: fx.Node, x: Any, other: Any, alpha: Any = 1) -> Value:
    _numeric(node)
    return elementwise(lambda a, b: _sum_of_two(a, -b), tensor(x), _scaled(tensor(other), alpha))


@handler("rsub")
def _rsub(context: Context, node: fx.Node, x: Any, other: Any, alpha: Any = 1) -> Value:
    return _sub(context, node, other, x, alpha)


@handler("addcmul")
def _addcmul(context: Context, node: fx.Node, x: Any, tensor1: Any, tensor2: Any, value: Any = 1) -> Value:
    _numeric(node)
    return elementwise(
        lambda a, b, c, v: _sum_of_two(a, v * (b * c)), tensor(x), tensor(tensor1), tensor(tensor2), tensor(value)
    )


@handler("div")
def _div(context: Context, node: fx.Node, x: Any, other: Any, rounding_mode: Any = None) -> Value:
    _numeric(node)
    if rounding_mode is not None:
        raise Opaque("rounding division")
    return elementwise(np.divide, tensor(x), tensor(other))


@handler("pow")
def _pow(context: Context, node: fx.Node, x: Any, exponent: Any) -> Value:
    _numeric(node)
    return elementwise(_power, tensor(x), tensor(exponent))


def _power(x: Array, exponent: Array) -> Array:
    if exponent.size == 1 and exponent.flat[0] == 2:
        return x * x
    return np.asarray(np.power(x.astype(np.result_type(x, np.float64)), exponent))


@handler("mean")
def _mean(
    context: Context, node: fx.Node, x: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Value:
    _numeric(node)
    return lanes.reduce(x, axes_of(x, dim), keepdim, lambda a, axes: a.mean(axis=axes, keepdims=True))


@handler("sum")
def _sum(context: Context, node: fx.Node, x: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    _numeric(node)
    return lanes.reduce(x, axes_of(x, dim), keepdim, lambda a, axes: a.sum(axis=axes, keepdims=True))


@handler("var")
def _var(
    context: Context,
    node: fx.Node,
    x: Value,
    dim: Any = None,
    unbiased: Any = None,
    keepdim: bool = False,
    correction: Any = None,
) -> Value:
    ddof = integer(correction) if correction is not None else 0 if unbiased is False else 1
    return lanes.reduce(x, axes_of(x, dim), keepdim, lambda a, axes: a.var(axis=axes, keepdims=True, ddof=ddof))


@handler("norm", "vector_norm")
def _norm(
    context: Context,
    node: fx.Node,
    x: Value,
    p: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    dtype: Any = None,
    ord: Any = 2,
) -> Value:
    if p not in (2, "fro") or ord != 2 or dim is None:
        raise Opaque("a norm other than the Euclidean one")
    return lanes.reduce(x, axes_of(x, dim), keepdim, lambda a, axes: np.sqrt((a * a).sum(axis=axes, keepdims=True)))


def is_projection(length: Size) -> bool:
    """Whether a product that sums over `length` lanes is a projection, whose result is a source: over more than the
    lanes of a small rotation matrix."""
    return not isinstance(length, int) or length > 4


def _short(length: Size) -> None:
    if is_projection(length):
        raise Opaque("a projection")


@handler("matmul")
def _matmul(context: Context, node: fx.Node, x: Value, other: Value) -> Value:
    if x.rank < 2 or other.rank < 2:
        raise Opaque("matrix times vector")
    _short(x.shape[-1])
    left, right = lanes.add_axis(x, x.rank), lanes.add_axis(other, other.rank - 2)
    terms = elementwise(np.multiply, left, right)
    return lanes.reduce(terms, [terms.rank - 2], False, lambda a, axes: a.sum(axis=axes, keepdims=True))


@handler("outer")
def _outer(context: Context, node: fx.Node, x: Value, vec2: Value) -> Value:
    return elementwise(np.multiply, lanes.add_axis(x, 1), vec2)


def _spelled(names: list[str], result: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """The letters of an einsum's operands and result with letters for `...`; of fewer axes those are the last."""
    unused = [letter for letter in string.ascii_letters if letter not in "".join(names)]
    counts = [rank - len(name) + 3 if "..." in name else 0 for name, rank in zip(names, ranks, strict=True)]
    most = "".join(unused[: max(counts)])
    words = [name.replace("...", most[len(most) - n :]) for name, n in zip(names, counts, strict=True)]
    return words, result.replace("...", most)


@handler("einsum")
def _einsum(context: Context, node: fx.Node, equation: Any, *operands: Any) -> Value:
    if not isinstance(equation, str):
        raise Opaque("einsum of axes in lists")
    values = sizes_argument(operands)
    inputs, _, result = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    if not result or len(names) != len(values):
        raise Opaque("einsum")
    names, result = _spelled(names, result, [value.rank for value in values])
    letters = result + "".join(sorted(set("".join(names)) - set(result)))
    aligned = []
    for value, word in zip(values, names, strict=True):
        if len(set(word)) != len(word):
            raise Opaque("einsum of a diagonal")
        value = lanes.permute(value, sorted(range(len(word)), key=lambda d: letters.index(word[d])))
        for axis, letter in enumerate(letters):
            if letter not in word:
                value = lanes.add_axis(value, axis)
        aligned.append(value)
    terms = elementwise(lambda *arrays: np.prod(np.broadcast_arrays(*arrays), axis=0), *aligned)
    summed = range(len(result), len(letters))
    for axis in summed:
        _short(terms.shape[axis])
    return lanes.reduce(terms, summed, False, lambda a, axes: a.sum(axis=axes, keepdims=True)) if summed else terms


# --- normalisation ----------------------------------------------------------------------------------------------------


@handler("rms_norm")
def _rms_norm(
    context: Context, node: fx.Node, x: Value, normalized_shape: Any, weight: Any = None, eps: Any = None
) -> Value:
    if eps is None:
        fake = fake_tensor(first_argument(node))
        if fake is None or fake.dtype not in (torch.float32, torch.float64):
            raise Opaque("rms_norm without eps: the default in low precision depends on the torch version")
        eps = torch.finfo(fake.dtype).eps
    axes = list(range(x.rank - len(normalized_shape), x.rank))
    square = lanes.reduce(x, axes, True, lambda a, d: (a * a).mean(axis=d, keepdims=True))
    y = elementwise(lambda a, m, e: a / np.sqrt(m + e), x, square, _addend(context, eps))
    return y if weight is None else elementwise(np.multiply, y, tensor(weight))


@handler("layer_norm")
def _layer_norm(
    context: Context,
    node: fx.Node,
    x: Value,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: Any = 1e-5,
    cudnn_enable: Any = None,
) -> Value:
    axes = list(range(x.rank - len(normalized_shape), x.rank))
    mean = lanes.reduce(x, axes, True, lambda a, d: a.mean(axis=d, keepdims=True))
    variance = lanes.reduce(x, axes, True, lambda a, d: a.var(axis=d, keepdims=True))
    y = elementwise(lambda a, m, v, e: (a - m) / np.sqrt(v + e), x, mean, variance, _addend(context, eps))
    y = y if weight is None else elementwise(np.multiply, y, tensor(weight))
    return y if bias is None else elementwise(np.add, y, tensor(bias))


# --- constants --------------------------------------------------------------------------------------------------------


def _constant(context: Context, node: fx.Node, fill: float) -> Value:
    _whole(node, np.asarray(fill))
    shape, number = shape_of(node), _addend(context, float(fill))
    return Value(shape, number.data.reshape((-1, 1) + (1,) * len(shape)), {})


def _whole(node: fx.Node, numbers: Array) -> None:
    result = fake_tensor(node)
    if result is None or not (result.is_floating_point() or np.array_equal(numbers, np.trunc(numbers))):
        raise Opaque("fractions cut to integers")


@handler("zeros", "zeros_like", "new_zeros")
def _zeros(context: Context, node: fx.Node, *args: Any, **kwargs: Any) -> Value:
    return _constant(context, node, 0)


@handler("ones", "ones_like", "new_ones")
def _ones(context: Context, node: fx.Node, *args: Any, **kwargs: Any) -> Value:
    return _constant(context, node, 1)


@handler("full", "full_like", "new_full")
def _full(context: Context, node: fx.Node, x: Any, *args: Any, **kwargs: Any) -> Value:
    fill = kwargs.get("fill_value", args[0 if operation(node) != "new_full" else 1] if args else None)
    if isinstance(fill, bool) or not isinstance(fill, int | float):
        raise Opaque("full of an unknown number")
    return _constant(context, node, fill)


@handler("tensor", "as_tensor")
def _tensor(context: Context, node: fx.Node, data: Any, **kwargs: Any) -> Value:
    try:
        numbers = np.asarray(data, dtype=np.float64)
    except (TypeError, ValueError):
        raise Opaque("tensor of unknown numbers") from None
    if numbers.size == 1:
        return _constant(context, node, numbers.item())
    _whole(node, numbers)
    return Value(numbers.shape, numbers.reshape((1, 1, *numbers.shape)), {})


@handler("empty", "empty_like", "new_empty")
def _empty(context: Context, node: fx.Node, *args: Any, **kwargs: Any) -> Value:
    return context.filler(node)


@handler("dropout")
def _dropout(
    context: Context, node: fx.Node, x: Value, p: Any = 0.5, training: Any = True, inplace: Any = False
) -> Value:
    if p == 0 or training is False:
        return x
    raise Opaque("dropout")
