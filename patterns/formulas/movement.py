"""Movement of tensors, as formulas: an element of a view is an element of its argument at another position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from fusion_pass.graph.vocabulary import Size, fake_tensor, sizes

from . import terms as terms
from .box import not_negative
from .operations import Reader, integer, operator, rank_of, size_of, tensor_of
from .terms import Element, Linear, Unreadable


def _moved(reader: Reader, node: fx.Node, x: Any, places: Sequence[Linear | None]) -> Element:
    """`x` with its axis `d` read at `places[d]`, a formula in the axes of `node`; None: an axis of one element."""
    rank = rank_of(x)
    table = {rank - d: terms.constant(0) if place is None else place for d, place in enumerate(places)}
    return terms.at(reader.argument(x, node), table)


def _axes(node: fx.Node) -> list[Linear]:
    """The axes of `node`, in order."""
    rank = rank_of(node)
    return [terms.axis(rank - d) for d in range(rank)]


@operator("unsqueeze")
def _unsqueeze(reader: Reader, node: fx.Node, x: Any, dim: Any) -> Element:
    places = _axes(node)
    del places[integer(dim) % len(places)]
    return _moved(reader, node, x, places)


@operator("view", "squeeze")
def _view(reader: Reader, node: fx.Node, x: Any, *args: Any, **kwargs: Any) -> Element:
    if any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values())):
        raise Unreadable("a bit cast")
    return _moved(reader, node, x, _reshaped(sizes(tensor_of(x)), sizes(tensor_of(node))))


def _reshaped(before: Sequence[Size], after: Sequence[Size]) -> list[Linear | None]:
    """Places of a view that only adds or takes away axes of one element."""
    kept = [d for d, n in enumerate(after) if n != 1]
    if [n for n in before if n != 1] != [after[d] for d in kept]:
        raise Unreadable("a view that splits or joins axes")
    following = iter(kept)
    return [None if n == 1 else terms.axis(len(after) - next(following)) for n in before]


@operator("permute")
def _permute(reader: Reader, node: fx.Node, x: Any, *dims: Any) -> Element:
    order = dims[0] if len(dims) == 1 and isinstance(dims[0], tuple | list) else dims
    axes, places = _axes(node), cast(list[Linear | None], [None] * rank_of(node))
    for position, dim in enumerate(order):
        places[integer(dim) % len(axes)] = axes[position]
    return _moved(reader, node, x, places)


@operator("transpose")
def _transpose(reader: Reader, node: fx.Node, x: Any, dim0: Any, dim1: Any) -> Element:
    places = _axes(node)
    a, b = integer(dim0) % len(places), integer(dim1) % len(places)
    places[a], places[b] = places[b], places[a]
    return _moved(reader, node, x, places)


@operator("t", "numpy_T")
def _t(reader: Reader, node: fx.Node, x: Any, *attribute: str) -> Element:
    return _moved(reader, node, x, _axes(node)[::-1])


@operator("mT")
def _matrices_transposed(reader: Reader, node: fx.Node, x: Any, *attribute: str) -> Element:
    return _transpose(reader, node, x, -1, -2)


@operator("repeat")
def _repeat(reader: Reader, node: fx.Node, x: Any, *counts: Any) -> Element:
    repeats = counts[0] if len(counts) == 1 and isinstance(counts[0], tuple | list) else counts
    shape = sizes(tensor_of(x))
    if any(n != 1 and count != 1 for n, count in zip(reversed(shape), reversed(repeats), strict=False)):
        raise Unreadable("a repeated axis of more than one element")
    return reader.argument(x, node)


@operator("select")
def _select(reader: Reader, node: fx.Node, x: Any, dim: Any, index: Any) -> Element:
    shape = sizes(tensor_of(x))
    d = integer(dim) % len(shape)
    places = cast(list[Linear | None], _axes(node))
    places.insert(d, terms.constant(_start(index, shape[d])))
    return _moved(reader, node, x, places)


@operator("slice")
def _slice(
    reader: Reader, node: fx.Node, x: Any, dim: Any = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Element:
    shape, places = sizes(tensor_of(x)), _axes(node)
    d = integer(dim) % len(shape)
    places[d] = _strided(slice(start, end, step), shape[d], places[d])
    return _moved(reader, node, x, places)


@operator("narrow")
def _narrow(reader: Reader, node: fx.Node, x: Any, dim: Any, start: Any, length: Any) -> Element:
    return _slice(reader, node, x, dim, start)


def _start(value: Any, length: Size) -> Size:
    """An index or the start of a slice; a negative one counts from the end."""
    start = size_of(value)
    if not isinstance(start, int):
        if not start.is_nonnegative:
            raise Unreadable("an index of unknown sign")
        return start
    if start >= 0:
        return start
    if isinstance(length, int):
        return max(0, length + start)
    raise Unreadable("an index from the end of an unknown length")


def _strided(part: slice, length: Size, axis: Linear) -> Linear:
    step = 1 if part.step is None else integer(part.step)
    start = 0 if part.start is None else _start(part.start, length)
    return terms.plus(terms.constant(start), axis, step)


@operator("index")
def _index(reader: Reader, node: fx.Node, x: Any, indices: Any) -> Element:
    return _getitem(reader, node, x, tuple(slice(None) if i is None else i for i in indices))


@operator("getitem")
def _getitem(reader: Reader, node: fx.Node, x: Any, index: Any) -> Element:
    if isinstance(index, list):
        raise Unreadable("places of one axis in a list")
    shape = sizes(tensor_of(x))
    parts = list(index) if isinstance(index, tuple) else [index]
    taken = sum(part is not None and part is not Ellipsis for part in parts)
    if Ellipsis in [p for p in parts if not isinstance(p, fx.Node)]:
        where = next(i for i, p in enumerate(parts) if p is Ellipsis)
        parts[where : where + 1] = [slice(None)] * (len(shape) - taken)
    else:
        parts += [slice(None)] * (len(shape) - taken)
    gathers = [i for i, p in enumerate(parts) if isinstance(p, fx.Node) and fake_tensor(p) is not None]
    if gathers and gathers != list(range(gathers[0], gathers[-1] + 1)):
        raise Unreadable("gathers at separate places")
    gathered = max((rank_of(parts[i]) for i in gathers), default=0)
    rank, places, position = rank_of(node), cast(list[Linear | None], []), 0
    for i, part in enumerate(parts):
        if part is None:
            position += 1
        elif i in gathers:
            # The gathered axes stand, together, where the first index stood; in each index they are its last ones.
            places.append(_gather(reader, node, part, rank - position - gathered))
            position += gathered if i == gathers[-1] else 0
        elif isinstance(part, slice):
            places.append(_strided(part, shape[len(places)], terms.axis(rank - position)))
            position += 1
        else:
            places.append(terms.constant(_start(part, shape[len(places)])))
    return _moved(reader, node, x, places)


def _gather(reader: Reader, node: fx.Node, index: fx.Node, behind: int) -> Linear:
    """The position an index tensor names, in the axes of `node`, `behind` of which stand right of the gathered ones."""
    element = reader.argument(index, node)
    if not isinstance(element, Linear) or not not_negative(element):
        raise Unreadable("an index that may count from the end")
    return cast(Linear, terms.at(element, {n: terms.axis(n + behind) for n in range(1, rank_of(index) + 1)}))
