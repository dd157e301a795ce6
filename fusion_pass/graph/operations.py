"""The operations the reader understands, each as a function on `Value`s.

A handler gets the context (the node and its shape), then the node's arguments with tensors replaced by values. It
raises `Opaque` for a use it does not model; the result of the node is then a new source. Only analytic functions are
listed: on random numbers `abs(x)` and `x` can agree, so piecewise functions (`abs`, `relu`, `clamp`, `where`,
comparisons) stay opaque.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import fx

from . import lanes
from .lanes import Array, Opaque, Value, elementwise, number
from .vocabulary import CASTS, Size, fake_tensor, operation, sizes


class Context(Protocol):
    """What a handler may ask of the evaluator."""

    def scalar(self, literal: float) -> Value:
        """A small literal that is added to a variance (eps), blown up to a random number that stands for it."""
        ...

    def filler(self, node: fx.Node) -> Value:
        """Uninitialised memory: unknown lanes."""
        ...


Handler = Callable[..., Any]
H = TypeVar("H", bound=Handler)
HANDLERS: dict[str, Handler] = {}

SMALL_LITERAL = 1e-2
"""Literals up to this size that are added to a tensor are taken for an eps."""


def handler(*names: str) -> Callable[[H], H]:
    """Register a handler under canonical names."""

    def register(function: H) -> H:
        for name in names:
            HANDLERS[name] = function
        return function

    return register


def apply(context: Context, node: fx.Node, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The value of operation `name` on evaluated arguments."""
    if name not in HANDLERS:
        raise Opaque(f"{name} is not modelled")
    if kwargs:
        kwargs = {_KEYWORDS.get(key, key): value for key, value in kwargs.items()}
    try:
        return HANDLERS[name](context, node, *args, **kwargs)
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise
        raise Opaque(f"{name}: {error}") from None  # arguments that the handler does not take


_KEYWORDS = {"axis": "dim", "self": "x", "input": "x", "tensors": "xs"}


def tensor(x: Any) -> Value:
    """An argument that is a tensor or a number."""
    if isinstance(x, Value):
        return x
    if isinstance(x, bool | str) or not isinstance(x, int | float | complex):
        raise Opaque("an argument is neither a tensor nor a number")
    return number(x)


def integer(x: Any) -> int:
    """An argument that is a known integer."""
    if isinstance(x, bool) or not isinstance(x, int):
        raise Opaque("an argument is not a known integer")
    return x


def axes_of(value: Value, dim: Any) -> list[int]:
    """The `dim` argument of a reduction."""
    if dim is None or dim == []:
        return list(range(value.rank))
    return [value.axis(integer(d)) for d in (dim if isinstance(dim, tuple | list) else [dim])]


def shape_of(node: fx.Node) -> tuple[Size, ...]:
    """The recorded shape of `node`."""
    fake = fake_tensor(node)
    if fake is None:
        raise Opaque("no shape")
    return sizes(fake)


def _sizes_argument(args: tuple[Any, ...]) -> Sequence[Any]:
    return args[0] if len(args) == 1 and isinstance(args[0], tuple | list) else args


# --- casts ----------------------------------------------------------------------------------------------------------
# -----------------


def _cast(context: Context, node: fx.Node, x: Value, *args: Any, **kwargs: Any) -> Value:
    new, old = fake_tensor(node), fake_tensor(node.args[0] if node.args else None)
    if new is None or old is None:
        raise Opaque("cast of an unknown tensor")
    if old.dtype == torch.bool or new.dtype == torch.bool or old.is_complex() != new.is_complex():
        raise Opaque("cast between kinds of numbers")
    if old.dtype != new.dtype and not (new.is_floating_point() or new.is_complex()) and old.is_floating_point():
        raise Opaque("cast to integers")
    return x


for _name in CASTS:
    handler(_name)(_cast)


@handler("conj_physical")
def _keep(context: Context, node: fx.Node, x: Value) -> Value:
    return x


# --- data movement
# -------------------------------------------------------------------------------------------------------------------


@handler("view", "squeeze", "unsqueeze")
def _view(context: Context, node: fx.Node, x: Value, *args: Any, **kwargs: Any) -> Value:
    if any(isinstance(a, torch.dtype) for a in args):
        raise Opaque("bit cast")
    name = operation(node)
    if name == "unsqueeze":
        dim = integer(args[0] if args else kwargs.get("dim"))
        return lanes.add_axis(x, dim % (x.rank + 1))
    return lanes.view(x, shape_of(node))


@handler("permute")
def _permute(context: Context, node: fx.Node, x: Value, *dims: Any) -> Value:
    return lanes.permute(x, [integer(d) for d in _sizes_argument(dims)])


@handler("transpose")
def _transpose(context: Context, node: fx.Node, x: Value, dim0: int, dim1: int) -> Value:
    order = list(range(x.rank))
    a, b = x.axis(integer(dim0)), x.axis(integer(dim1))
    order[a], order[b] = order[b], order[a]
    return lanes.permute(x, order)


@handler("t")
def _t(context: Context, node: fx.Node, x: Value) -> Value:
    return lanes.permute(x, list(range(x.rank))[::-1])


@handler("movedim")
def _movedim(context: Context, node: fx.Node, x: Value, source: Any, destination: Any) -> Value:
    a, b = x.axis(integer(source)), x.axis(integer(destination))
    order = [d for d in range(x.rank) if d != a]
    order.insert(b, a)
    return lanes.permute(x, order)


@handler("expand")
def _expand(context: Context, node: fx.Node, x: Value, *shape: Any, **kwargs: Any) -> Value:
    return lanes.expand(x, shape_of(node))


@handler("getitem")
def _getitem(context: Context, node: fx.Node, x: Any, index: Any) -> Any:
    if isinstance(x, tuple | list):
        return x[integer(index)]
    return basic_index(x, index)


def basic_index(x: Value, index: Any) -> Value:
    """`x[index]` for integers, slices, None and Ellipsis."""
    entries = list(index) if isinstance(index, tuple | list) else [index]
    for entry in entries:
        if not (entry is None or entry is Ellipsis or isinstance(entry, slice)):
            integer(entry)
    used = sum(entry is not None and entry is not Ellipsis for entry in entries)
    if used > x.rank:
        raise Opaque("too many indices")
    if Ellipsis not in entries:
        entries.append(Ellipsis)
    at = entries.index(Ellipsis)
    entries[at : at + 1] = [slice(None)] * (x.rank - used)
    axis = 0
    for entry in entries:
        if entry is None:
            x = lanes.add_axis(x, axis)
            axis += 1
        elif isinstance(entry, slice):
            x = lanes.slice_lanes(x, axis, *(_bound(b) for b in (entry.start, entry.stop, entry.step)))
            axis += 1
        else:
            x = lanes.select_lane(x, axis, entry)
    return x


def _bound(b: Any) -> int | None:
    return None if b is None else integer(b)


@handler("narrow")
def _narrow(context: Context, node: fx.Node, x: Value, dim: int, start: int, length: int) -> Value:
    axis = x.axis(integer(dim))
    first = integer(start) % x.shape[axis] if isinstance(x.shape[axis], int) else integer(start)
    return lanes.slice_lanes(x, axis, first, first + integer(length), None)


@handler("select")
def _select(context: Context, node: fx.Node, x: Value, dim: int, index: int) -> Value:
    return lanes.select_lane(x, x.axis(integer(dim)), integer(index))


@handler("slice")
def _slice(
    context: Context,
    node: fx.Node,
    x: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value:
    axis = x.axis(integer(dim))
    if end is not None and shape_of(node)[axis] == x.shape[axis]:
        end = None
    return lanes.slice_lanes(x, axis, _bound(start), _bound(end), _bound(step))


def _pieces(x: Value, axis: int, bounds: Sequence[int]) -> list[Value]:
    x = lanes.need_lanes(x, axis)
    return [lanes.slice_lanes(x, axis, a, b, None) for a, b in itertools.pairwise(bounds)]


def _length(x: Value, axis: int) -> int:
    n = x.shape[axis]
    if not isinstance(n, int):
        raise Opaque("split of a symbolic axis")
    return n


@handler("chunk")
def _chunk(context: Context, node: fx.Node, x: Value, chunks: int, dim: int = 0) -> list[Value]:
    axis = x.axis(integer(dim))
    n = _length(x, axis)
    return _pieces(x, axis, [*range(0, n, -(-n // integer(chunks))), n])


@handler("split")
def _split(context: Context, node: fx.Node, x: Value, split_size: Any, dim: int = 0) -> list[Value]:
    axis = x.axis(integer(dim))
    n = _length(x, axis)
    if isinstance(split_size, tuple | list):
        return _pieces(x, axis, [0, *np.cumsum([integer(s) for s in split_size]).tolist()])
    return _pieces(x, axis, [*range(0, n, integer(split_size)), n])


@handler("tensor_split")
def _tensor_split(context: Context, node: fx.Node, x: Value, indices: Any, dim: int = 0) -> list[Value]:
    axis = x.axis(integer(dim))
    n = _length(x, axis)
    if isinstance(indices, tuple | list):
        return _pieces(x, axis, [0, *(integer(i) for i in indices), n])
    if n % integer(indices):
        raise Opaque("uneven tensor_split")
    return _pieces(x, axis, list(range(0, n + 1, n // indices)))


@handler("unbind")
def _unbind(context: Context, node: fx.Node, x: Value, dim: int = 0) -> list[Value]:
    axis = x.axis(integer(dim))
    return [lanes.select_lane(x, axis, i) for i in range(_length(x, axis))]


@handler("cat")
def _cat(context: Context, node: fx.Node, xs: Sequence[Value], dim: int = 0) -> Value:
    if not all(isinstance(x, Value) for x in xs):
        raise Opaque("cat of something unknown")
    parts = [x for x in xs if 0 not in x.shape]
    if not parts or len({x.rank for x in parts}) != 1:
        raise Opaque("cat of nothing")
    return lanes.cat(parts, parts[0].axis(integer(dim)))


@handler("stack")
def _stack(context: Context, node: fx.Node, xs: Sequence[Value], dim: int = 0) -> Value:
    axis = integer(dim) % (tensor(xs[0]).rank + 1)
    return lanes.cat([lanes.add_axis(tensor(x), axis) for x in xs], axis)


@handler("repeat_interleave")
def _repeat_interleave(
    context: Context, node: fx.Node, x: Value, repeats: int, dim: Any = None, output_size: Any = None
) -> Value:
    axis = x.axis(integer(dim))
    return lanes.take_lanes(x, axis, np.repeat(np.arange(_length(x, axis)), integer(repeats)).tolist())


@handler("repeat")
def _repeat(context: Context, node: fx.Node, x: Value, *repeats: Any) -> Value:
    counts = _sizes_argument(repeats)
    x = lanes.broadcast(x, max(len(counts), x.rank))
    shape = shape_of(node)
    for axis, (count, before, after) in enumerate(
        zip([1] * (x.rank - len(counts)) + list(counts), x.shape, shape, strict=True)
    ):
        if count == 1:
            continue
        if before == 1 or not (x.outer(axis) or x.lanes(axis)):
            x = Value((*x.shape[:axis], after, *x.shape[axis + 1 :]), x.data, x.axes)
        else:
            x = lanes.take_lanes(x, axis, np.tile(np.arange(_length(x, axis)), integer(count)).tolist())
    return x


@handler("roll")
def _roll(context: Context, node: fx.Node, x: Value, shifts: Any, dims: Any = None) -> Value:
    shift, dim = (v[0] if isinstance(v, tuple | list) and len(v) == 1 else v for v in (shifts, dims))
    axis = x.axis(integer(dim))
    return lanes.take_lanes(x, axis, np.roll(np.arange(_length(x, axis)), integer(shift)).tolist())


@handler("flip")
def _flip(context: Context, node: fx.Node, x: Value, *dims: Any) -> Value:
    for dim in _sizes_argument(dims):
        axis = x.axis(integer(dim))
        x = lanes.take_lanes(x, axis, np.arange(_length(x, axis))[::-1].tolist())
    return x


# --- complex numbers
# -----------------------------------------------------------------------------------------------------------------


@handler("view_as_complex")
def _view_as_complex(context: Context, node: fx.Node, x: Value) -> Value:
    x = lanes.need_lanes(x, x.rank - 1)
    re, im = (lanes.select_lane(x, x.rank - 1, i) for i in (0, 1))
    return elementwise(_make_complex, re, im)


@handler("view_as_real")
def _view_as_real(context: Context, node: fx.Node, x: Value) -> Value:
    return _stack(context, node, [elementwise(np.real, x), elementwise(np.imag, x)], x.rank)


@handler("complex")
def _complex(context: Context, node: fx.Node, real: Value, imag: Value) -> Value:
    return elementwise(_make_complex, real, imag)


@handler("polar")
def _polar(context: Context, node: fx.Node, abs: Value, angle: Value) -> Value:
    return elementwise(lambda r, a: r * np.exp(1j * a), abs, angle)


def _make_complex(re: Array, im: Array) -> Array:
    return re + 1j * im


@handler("getattr")
def _getattr(context: Context, node: fx.Node, x: Value, name: str) -> Value:
    if name in ("real", "imag"):
        return elementwise(np.real if name == "real" else np.imag, x)
    if name in ("T", "mT") and x.rank >= 2:
        return _transpose(context, node, x, -1, -2)
    raise Opaque(f"attribute {name}")


# --- arithmetic -----------------------------------------------------------------------------------------------------
# -----------------


def _numeric(node: fx.Node) -> None:
    result = fake_tensor(node)
    if result is not None and result.dtype == torch.bool:
        raise Opaque("logic")
    for argument in node.all_input_nodes:
        fake = fake_tensor(argument)
        if fake is not None and fake.dtype == torch.bool:
            raise Opaque("arithmetic on truth values")


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
    return elementwise(np.add, _addend(context, x), _scaled(_addend(context, other), alpha))


def _addend(context: Context, x: Any) -> Value:
    if isinstance(x, float) and 0 < x <= SMALL_LITERAL:
        return context.scalar(x)
    return tensor(x)


def _scaled(x: Value, factor: Any) -> Value:
    return x if factor == 1 else elementwise(np.multiply, x, tensor(factor))


@handler("sub")
def _sub(context: Context, node: fx.Node, x: Any, other: Any, alpha: Any = 1) -> Value:
    _numeric(node)
    return elementwise(np.subtract, tensor(x), _scaled(tensor(other), alpha))


@handler("rsub")
def _rsub(context: Context, node: fx.Node, x: Any, other: Any, alpha: Any = 1) -> Value:
    return _sub(context, node, other, x, alpha)


@handler("addcmul")
def _addcmul(context: Context, node: fx.Node, x: Any, tensor1: Any, tensor2: Any, value: Any = 1) -> Value:
    _numeric(node)
    return elementwise(lambda a, b, c, v: a + v * (b * c), tensor(x), tensor(tensor1), tensor(tensor2), tensor(value))


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


def _short(length: Size) -> None:
    """A sum over more than the lanes of a small rotation matrix is a projection, whose result is a source."""
    if not isinstance(length, int) or length > 4:
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


@handler("einsum")
def _einsum(context: Context, node: fx.Node, equation: str, *operands: Any) -> Value:
    values = _sizes_argument(operands)
    inputs, _, result = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    letters = result + "".join(sorted(set(inputs) - set(result) - {","}))
    if "." in equation or not result or len(names) != len(values):
        raise Opaque("einsum")
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


# --- normalisation
# -------------------------------------------------------------------------------------------------------------------


@handler("rms_norm")
def _rms_norm(
    context: Context, node: fx.Node, x: Value, normalized_shape: Any, weight: Any = None, eps: Any = None
) -> Value:
    if eps is None:
        fake = fake_tensor(node.args[0])
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


# --- constants ------------------------------------------------------------------------------------------------------
# -----------------


def _constant(node: fx.Node, fill: float) -> Value:
    shape = shape_of(node)
    return Value(shape, np.full((1, 1) + (1,) * len(shape), float(fill)), {})


@handler("zeros", "zeros_like", "new_zeros")
def _zeros(context: Context, node: fx.Node, *args: Any, **kwargs: Any) -> Value:
    return _constant(node, 0)


@handler("ones", "ones_like", "new_ones")
def _ones(context: Context, node: fx.Node, *args: Any, **kwargs: Any) -> Value:
    return _constant(node, 1)


@handler("full", "full_like", "new_full")
def _full(context: Context, node: fx.Node, x: Any, *args: Any, **kwargs: Any) -> Value:
    fill = kwargs.get("fill_value", args[0 if operation(node) != "new_full" else 1] if args else None)
    if isinstance(fill, bool) or not isinstance(fill, int | float):
        raise Opaque("full of an unknown number")
    return _constant(node, fill)


@handler("tensor", "as_tensor")
def _tensor(context: Context, node: fx.Node, data: Any, **kwargs: Any) -> Value:
    try:
        numbers = np.asarray(data, dtype=np.float64)
    except (TypeError, ValueError):
        raise Opaque("tensor of unknown numbers") from None
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
