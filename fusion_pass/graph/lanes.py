"""What a tensor of a graph is, worked out on one token: the lanes are numbers, the outer axes are labels.

A graph is evaluated with every *outer* axis (batch, sequence) collapsed to size one and every *lane* axis (anything
cut from the feature axis) kept whole. An opaque producer, a *source* (a projection, a parameter, an unknown
operation), gets random float64 lanes; from there on every operation runs on real numbers. Two nodes whose lanes agree
on independent random draws are the same function of the same sources (Schwartz 1980, Zippel 1979): the spelling does
not matter.

`data` has two more axes in front: [world, draw, *axes]. Every source differs between worlds; only the tensor under
study differs between draws.

What collapsing loses is which place along an outer axis is read. `axes` keeps it: for each source a value depends on,
the source axis that each axis of the value runs along. An operation that would read one source along two different
paths has no such description and becomes a new source.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from .vocabulary import Size

WORLDS = 2
MAX_ELEMENTS = 1 << 21

Array: TypeAlias = "np.ndarray[Any, Any]"
Path: TypeAlias = "tuple[Any, ...] | None"
"""How one axis of a value runs over a source: ("axis", k) is source axis k in order; ("merge", ...) and ("part", ...)
come from reshapes.
None: the value does not vary with the source along this axis."""


class Opaque(Exception):
    """The operation, or this use of it, is outside the model."""


class Mixed(Opaque):
    """Lanes of one argument meet an outer axis of another that cannot become lanes."""


class Promote(Exception):
    """An outer axis must be treated as lanes for the evaluation to go on; the evaluation starts again with that
    known.
    """

    def __init__(self, wanted: Sequence[tuple[Source, int]]) -> None:
        super().__init__()
        self.wanted = tuple(wanted)


@dataclass(frozen=True)
class Source:
    """An opaque producer. `key` identifies what it computes; equal sources hold the same numbers."""

    key: Hashable
    shape: tuple[Size, ...] = field(compare=False)
    promotable: frozenset[int] = frozenset()
    """Outer axes that may be turned into lanes."""


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor on one token (see the head of this file). `data.shape[2 + d]` is `shape[d]` on a lane axis, else 1."""

    shape: tuple[Size, ...]
    data: Array = field(repr=False)
    axes: Mapping[Source, tuple[Path, ...]]

    @property
    def rank(self) -> int:
        return len(self.shape)

    def lanes(self, axis: int) -> bool:
        """Whether `axis` is kept whole."""
        return bool(self.data.shape[2 + axis] > 1)

    def outer(self, axis: int) -> bool:
        """Whether the value varies along `axis` in a way only the labels know."""
        return any(paths[axis] is not None for paths in self.axes.values())

    def axis(self, axis: int) -> int:
        """`axis` counted from the front."""
        return axis % max(self.rank, 1)


def number(x: complex) -> Value:
    """A Python number."""
    return Value((), np.full((1, 1), x), {})


def product(shape: Sequence[Size]) -> Size:
    """Number of elements."""
    total: Size = 1
    for s in shape:
        total = total * s
    return total


def promote(values: Sequence[Value], axis: int) -> None:
    """Raise `Promote` for all that runs along `axis`, outer in one of `values` at least, or `Opaque` if that cannot be
    lanes.
    """
    wanted = []
    for value in values:
        for source, paths in value.axes.items():
            path = paths[axis]
            if path is None:
                continue
            if path[1] not in source.promotable:  # nor is that of a reshape or of rows
                raise Opaque("an outer axis is used as a feature axis")
            wanted.append((source, path[1]))
    raise Promote(wanted)


def need_lanes(value: Value, axis: int) -> Value:
    """`value` with `axis` free of labels and kept whole."""
    if value.outer(axis):
        promote([value], axis)
    return whole(value, axis)


def whole(value: Value, axis: int) -> Value:
    """`value`, on whose `axis` it has no labels, with that axis written out."""
    if value.data.shape[2 + axis] == value.shape[axis]:
        return value
    n = length(value, axis)
    shape = list(value.data.shape)
    shape[2 + axis] = n
    return Value(value.shape, np.broadcast_to(value.data, shape), value.axes)


def length(value: Value, axis: int) -> int:
    """Length of an axis that is to be lanes."""
    n = value.shape[axis]
    if not isinstance(n, int):
        raise Opaque("a symbolic axis is used as a feature axis")
    return n


# --- arithmetic -------------------------------------------------------------------------------------------------------


def broadcast(value: Value, rank: int) -> Value:
    """`value` with axes of size one in front."""
    extra = rank - value.rank
    if extra == 0:
        return value
    data = value.data.reshape(value.data.shape[:2] + (1,) * extra + value.data.shape[2:])
    return Value((1,) * extra + value.shape, data, {s: (None,) * extra + p for s, p in value.axes.items()})


def elementwise(function: Callable[..., Array], *values: Value) -> Value:
    """`function` of broadcast values."""
    rank = max(v.rank for v in values)
    values = tuple(broadcast(v, rank) for v in values)
    lanes = {axis for v in values for axis, n in enumerate(v.data.shape[2:]) if n > 1}
    outer = {axis for v in values for paths in v.axes.values() for axis, path in enumerate(paths) if path is not None}
    if mixed := lanes & outer:
        axis = min(mixed)
        try:
            promote(values, axis)
        except Opaque as reason:
            raise Mixed(str(reason)) from None
    data = function(*(v.data for v in values))
    if not np.isfinite(data.sum()):
        raise Opaque("not finite on random lanes")
    if data.size > MAX_ELEMENTS:
        raise Opaque("too many lanes")
    return Value(_broadcast_shape([v.shape for v in values]), data, join_axes(values))


def _broadcast_shape(shapes: Sequence[tuple[Size, ...]]) -> tuple[Size, ...]:
    if all(shape == shapes[0] for shape in shapes):
        return shapes[0]
    return tuple(next((s for s in column if s != 1), 1) for column in zip(*shapes, strict=True))


def join_axes(values: Sequence[Value]) -> dict[Source, tuple[Path, ...]]:
    """The sources of several values of one rank; each must be read along one path only."""
    joined: dict[Source, tuple[Path, ...]] = {}
    for value in values:
        for source, paths in value.axes.items():
            if joined.setdefault(source, paths) != paths:
                raise Opaque("one tensor is read along two different axes or places")
    return joined


def seal(value: Value, random: Callable[[Hashable, int], Array]) -> Value:
    """`value` with the lanes of its axes before the last turned into labels.

    Along a sealed axis only a random combination of its places is kept, the same one for all axes of that length. It
    is linear, so two lanes are equal (or opposite) after sealing exactly when they are at every place, also between
    two sealed values.
    """
    axes = dict(value.axes)
    data = value.data
    for ordinal, d in enumerate(d for d in range(value.rank - 1) if value.lanes(d)):
        n = value.data.shape[2 + d]
        key = ("sealed", n, ordinal)
        factors = random(key, n).reshape(WORLDS, 1, *(n if k == d else 1 for k in range(value.rank)))
        data = (data * factors).sum(axis=2 + d, keepdims=True)
        axes[Source(key, (n,))] = tuple(("axis", 0) if k == d else None for k in range(value.rank))
    return value if data is value.data else Value(value.shape, data, axes)


# --- data movement ----------------------------------------------------------------------------------------------------


def permute(value: Value, order: Sequence[int]) -> Value:
    """Axes in another order."""
    order = [value.axis(d) for d in order]
    data = value.data.transpose([0, 1, *(2 + d for d in order)])
    return Value(
        tuple(value.shape[d] for d in order), data, {s: tuple(p[d] for d in order) for s, p in value.axes.items()}
    )


def expand(value: Value, shape: Sequence[Size]) -> Value:
    """Axes of size one stretched: nothing varies along them, so only the shape changes."""
    value = broadcast(value, len(shape))
    for old, new in zip(value.shape, shape, strict=True):
        if old not in (1, new):
            raise Opaque("expand")
    return Value(tuple(shape), value.data, value.axes)


def drop_axis(value: Value, axis: int) -> Value:
    """`value` without an axis along which it does not vary."""
    if value.lanes(axis) or value.outer(axis):
        raise Opaque("squeeze of an axis that varies")
    keep = [d for d in range(value.rank) if d != axis]
    data = value.data.reshape([n for i, n in enumerate(value.data.shape) if i != 2 + axis])
    return Value(
        tuple(value.shape[d] for d in keep), data, {s: tuple(p[d] for d in keep) for s, p in value.axes.items()}
    )


def add_axis(value: Value, axis: int) -> Value:
    """`value` with an axis of size one before `axis`."""
    data = np.expand_dims(value.data, 2 + axis)
    shape = (*value.shape[:axis], 1, *value.shape[axis:])
    return Value(shape, data, {s: (*p[:axis], None, *p[axis:]) for s, p in value.axes.items()})


def slice_lanes(value: Value, axis: int, start: int | None, stop: int | None, step: int | None) -> Value:
    """Part of an axis. A whole-axis slice is allowed on every axis."""
    n = value.shape[axis]
    if start in (None, 0) and step in (None, 1) and (stop is None or stop == n or (isinstance(n, int) and stop >= n)):
        return value
    if not isinstance(n, int):
        raise Opaque("part of a symbolic axis")
    length = len(range(*slice(start, stop, step).indices(n)))
    shape = (*value.shape[:axis], length, *value.shape[axis + 1 :])
    if not value.outer(axis) and not value.lanes(axis):
        return Value(shape, value.data, value.axes)
    value = need_lanes(value, axis)
    return Value(shape, value.data[(slice(None),) * (2 + axis) + (slice(start, stop, step),)], value.axes)


def select_lane(value: Value, axis: int, index: int) -> Value:
    """One place of an axis."""
    if value.outer(axis):
        promote([value], axis)
    data = value.data[(slice(None),) * (2 + axis) + (index if value.lanes(axis) else 0,)]
    keep = [d for d in range(value.rank) if d != axis]
    return Value(
        tuple(value.shape[d] for d in keep), data, {s: tuple(p[d] for d in keep) for s, p in value.axes.items()}
    )


def take_lanes(value: Value, axis: int, places: Sequence[int]) -> Value:
    """Places of an axis in a given order, also repeated."""
    shape = (*value.shape[:axis], len(places), *value.shape[axis + 1 :])
    if not value.outer(axis) and not value.lanes(axis):
        return Value(shape, value.data, value.axes)
    value = need_lanes(value, axis)
    return Value(shape, np.take(value.data, places, axis=2 + axis), value.axes)


def cat(values: Sequence[Value], axis: int) -> Value:
    """Concatenate along a lane axis."""
    if any(v.outer(axis) for v in values):
        promote(values, axis)
    values = [whole(v, axis) for v in values]
    total: Size = sum(v.shape[axis] for v in values)
    shapes = [[n if d != 2 + axis else -1 for d, n in enumerate(v.data.shape)] for v in values]
    common = [max(column) for column in zip(*shapes, strict=True)]
    for d in range(values[0].rank):
        if d != axis and any(v.outer(d) for v in values) and any(v.lanes(d) for v in values):
            promote(values, d)
    parts = [np.broadcast_to(v.data, [v.data.shape[d] if n == -1 else n for d, n in enumerate(common)]) for v in values]
    shape = _broadcast_shape([(*v.shape[:axis], *v.shape[axis + 1 :]) for v in values])
    return Value((*shape[:axis], total, *shape[axis:]), np.concatenate(parts, axis=2 + axis), join_axes(values))


def reduce(
    value: Value, axes: Sequence[int], keepdim: bool, function: Callable[[Array, tuple[int, ...]], Array]
) -> Value:
    """`function` over lane axes."""
    axes = sorted({value.axis(d) for d in axes})
    for d in axes:
        value = need_lanes(value, d)
    data = function(value.data, tuple(2 + d for d in axes))
    if not np.isfinite(data).all():
        raise Opaque("not finite on random lanes")
    value = Value(tuple(1 if d in axes else n for d, n in enumerate(value.shape)), data, value.axes)
    if not keepdim:
        for d in reversed(axes):
            value = drop_axis(value, d)
    return value
