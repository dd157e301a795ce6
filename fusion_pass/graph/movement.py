"""Operations that move numbers and compute none: casts, views, pieces, joins, complex parts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from . import lanes, reshape
from .lanes import Array, Opaque, Value, elementwise
from .operations import Context, handler, integer, shape_of, sizes_argument, tensor
from .vocabulary import CASTS, fake_tensor, operation

# --- casts ------------------------------------------------------------------------------------------------------------


def check_cast(old: torch.dtype, new: torch.dtype) -> None:
    """Raise `Opaque` unless numbers of `old` are the same in `new`, up to rounding that is not meant."""
    if torch.bool in (old, new) or old.is_complex != new.is_complex:
        raise Opaque("a cast between kinds of numbers, or of truth values")
    if old == new:
        return
    if any(dtype.is_floating_point and dtype.itemsize == 1 for dtype in (old, new)):
        raise Opaque("a cast to floating-point numbers of eight bits, whose rounding is meant, or from them")
    if old.is_floating_point and not new.is_floating_point:
        raise Opaque("cast to integers")


def _cast(context: Context, node: fx.Node, x: Value, *args: Any, **kwargs: Any) -> Value:
    new, old = fake_tensor(node), fake_tensor(node.args[0] if node.args else None)
    if new is None or old is None:
        raise Opaque("cast of an unknown tensor")
    check_cast(old.dtype, new.dtype)
    return x


for _name in CASTS:
    handler(_name)(_cast)


@handler("resolve_conj", "resolve_neg")
def _keep(context: Context, node: fx.Node, x: Value) -> Value:
    return x


# --- views and pieces -------------------------------------------------------------------------------------------------


@handler("view", "squeeze", "unsqueeze")
def _view(context: Context, node: fx.Node, x: Value, *args: Any, **kwargs: Any) -> Value:
    if any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values())):
        raise Opaque("bit cast")
    name = operation(node)
    if name == "unsqueeze":
        dim = integer(args[0] if args else kwargs.get("dim"))
        return lanes.add_axis(x, dim % (x.rank + 1))
    return reshape.view(x, shape_of(node))


@handler("permute")
def _permute(context: Context, node: fx.Node, x: Value, *dims: Any) -> Value:
    return lanes.permute(x, [integer(d) for d in sizes_argument(dims)])


@handler("transpose")
def _transpose(context: Context, node: fx.Node, x: Value, dim0: int, dim1: int) -> Value:
    order = list(range(x.rank))
    a, b = x.axis(integer(dim0)), x.axis(integer(dim1))
    order[a], order[b] = order[b], order[a]
    return lanes.permute(x, order)


@handler("t", "numpy_T")
def _t(context: Context, node: fx.Node, x: Value, *attribute: str) -> Value:
    return lanes.permute(x, list(range(x.rank))[::-1])


@handler("mT")
def _matrices_transposed(context: Context, node: fx.Node, x: Value, *attribute: str) -> Value:
    return _transpose(context, node, x, -1, -2)


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
    return _rows(node, x, index) if isinstance(index, Value) else basic_index(x, node.args[1])


def _rows(node: fx.Node, x: Value, index: Value) -> Value:
    """`x[index]`, the rows of a computed table at a tensor of positions. What varied from row to row varies along the
    axes of `index`, in a way that only the same index makes. (Rows of a tensor that is a source are one again.)"""
    positions = fake_tensor(node.args[1])
    if positions is None or positions.dtype not in (torch.int32, torch.int64):
        raise Opaque("an index that is no tensor of positions")
    if x.lanes(0) or any(index.lanes(d) for d in range(index.rank)) or not 1 <= index.rank <= 2:
        raise Opaque("positions along lanes")
    if all(n == 1 for n in index.shape) or any((node.args[0], None) == source.key for source in x.axes):
        raise Opaque("rows of a source")
    which = index.data.tobytes(), frozenset(index.axes.items())
    axes: dict[lanes.Source, tuple[lanes.Path, ...]] = {}
    for source, (first, *rest) in x.axes.items():
        places = range(index.rank)
        axes[source] = (*(first and ("row", first, which, d) if index.shape[d] != 1 else None for d in places), *rest)
    data = x.data.reshape(x.data.shape[:2] + (1,) * index.rank + x.data.shape[3:])
    return Value((*index.shape, *x.shape[1:]), data, axes)


def basic_index(x: Value, index: Any) -> Value:
    """`x[index]` for integers, slices, None and Ellipsis."""
    entries = list(index) if isinstance(index, tuple) else [index]
    for entry in entries:
        if not (entry is None or entry is Ellipsis or isinstance(entry, slice)):
            integer(entry)  # a list of places is none
    used = sum(entry is not None and entry is not Ellipsis for entry in entries)
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
    n = x.shape[axis]
    first = integer(start) % max(n, 1) if isinstance(n, int) else integer(start)
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
    if shape_of(node)[axis] == x.shape[axis]:
        end = None
    return lanes.slice_lanes(x, axis, _bound(start), _bound(end), _bound(step))


def _pieces(x: Value, axis: int, bounds: Sequence[int]) -> list[Value]:
    x = lanes.need_lanes(x, axis)
    return [lanes.slice_lanes(x, axis, a, b, None) for a, b in itertools.pairwise(bounds)]


@handler("chunk")
def _chunk(context: Context, node: fx.Node, x: Value, chunks: int, dim: int = 0) -> list[Value]:
    axis = x.axis(integer(dim))
    n = lanes.length(x, axis)
    if n == 0:
        return [x] * integer(chunks)
    return _pieces(x, axis, [*range(0, n, -(-n // integer(chunks))), n])


@handler("split")
def _split(context: Context, node: fx.Node, x: Value, split_size: Any, dim: int = 0) -> list[Value]:
    axis = x.axis(integer(dim))
    n = lanes.length(x, axis)
    if isinstance(split_size, tuple | list):
        return _pieces(x, axis, [0, *np.cumsum([integer(s) for s in split_size]).tolist()])
    return [x] if n == 0 else _pieces(x, axis, [*range(0, n, integer(split_size)), n])


@handler("tensor_split")
def _tensor_split(context: Context, node: fx.Node, x: Value, indices: Any, dim: int = 0) -> list[Value]:
    axis = x.axis(integer(dim))
    n = lanes.length(x, axis)
    if isinstance(indices, tuple | list):
        return _pieces(x, axis, [0, *(integer(i) for i in indices), n])
    if n % integer(indices):
        raise Opaque("uneven tensor_split")
    if n == 0:
        return [x] * indices
    return _pieces(x, axis, list(range(0, n + 1, n // indices)))


@handler("unbind")
def _unbind(context: Context, node: fx.Node, x: Value, dim: int = 0) -> list[Value]:
    axis = x.axis(integer(dim))
    return [lanes.select_lane(x, axis, i) for i in range(lanes.length(x, axis))]


@handler("cat")
def _cat(context: Context, node: fx.Node, xs: Sequence[Value], dim: int = 0) -> Value:
    if not all(isinstance(x, Value) for x in xs):
        raise Opaque("cat of something unknown")
    parts = [x for x in xs if 0 not in x.shape]
    if not parts:
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
    return lanes.take_lanes(x, axis, np.repeat(np.arange(lanes.length(x, axis)), integer(repeats)).tolist())


@handler("repeat")
def _repeat(context: Context, node: fx.Node, x: Value, *repeats: Any) -> Value:
    counts = sizes_argument(repeats)
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
            x = lanes.take_lanes(x, axis, np.tile(np.arange(lanes.length(x, axis)), integer(count)).tolist())
    return x


@handler("roll")
def _roll(context: Context, node: fx.Node, x: Value, shifts: Any, dims: Any = None) -> Value:
    shift, dim = (v[0] if isinstance(v, tuple | list) and len(v) == 1 else v for v in (shifts, dims))
    axis = x.axis(integer(dim))
    return lanes.take_lanes(x, axis, np.roll(np.arange(lanes.length(x, axis)), integer(shift)).tolist())


@handler("flip")
def _flip(context: Context, node: fx.Node, x: Value, *dims: Any) -> Value:
    for dim in sizes_argument(dims):
        axis = x.axis(integer(dim))
        x = lanes.take_lanes(x, axis, np.arange(lanes.length(x, axis))[::-1].tolist())
    return x


# --- complex numbers --------------------------------------------------------------------------------------------------


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
    raise Opaque(f"attribute {name}")
