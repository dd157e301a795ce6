"""A write to a part of a tensor, on one token: `x[..., :n] = y`, `x.unbind(1)[0].copy_(y)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from . import lanes
from .lanes import Opaque, Path, Promote, Source, Value


def overwrite(before: Value, address: Callable[[Value], Value], new: Value) -> Value:
    """`before` with `address(before)`, a view of it, set to `new`.

    Which axes are addressed in part is found by addressing a value whose axes are all labels: exactly those ask to
    become lanes.
    """
    probe = Source("probe", before.shape, frozenset(range(before.rank)))
    whole: set[int] = set()
    while True:
        try:
            place = address(_labelled(probe, whole))
        except Promote as request:
            more = {axis for _, axis in request.wanted}
        else:
            if 0 in place.shape:
                return before
            new = lanes.broadcast(new, max(place.rank, new.rank))
            if new.rank != place.rank:
                raise Opaque("a write of more axes than there are")
            axes = {a: path[1] for a, path in enumerate(place.axes[probe]) if path is not None and path[0] == "axis"}
            more = {d for a, d in axes.items() if new.lanes(a)}
            if not more:
                break
        if more <= whole or not all(isinstance(before.shape[d], int) for d in more):
            raise Opaque("a write that is not modelled")
        whole |= more
    for d in whole:
        before = lanes.need_lanes(before, d)
    labels = _moved_labels(new, axes, before)
    shape = [max(a, b) for a, b in zip(before.data.shape[:2], new.data.shape[:2], strict=True)] + list(
        before.data.shape[2:]
    )
    kind = np.result_type(before.data, new.data)
    data = np.array(np.broadcast_to(before.data, shape), dtype=kind)
    view = address(Value(before.shape, data, {})).data
    if not np.shares_memory(view, data) or not view.flags.writeable:
        raise Opaque("a write through a copy")
    view[...] = new.data
    written = Value(before.shape, data, labels)
    return Value(before.shape, data, lanes.join_axes([before, written]))


def _labelled(probe: Source, whole: set[int]) -> Value:
    """A tensor whose axes are labels, but for those of `whole`."""
    data = np.empty((1, 1, *(n if d in whole else 1 for d, n in enumerate(probe.shape))))
    paths = tuple(None if d in whole or n == 1 else ("axis", d) for d, n in enumerate(probe.shape))
    return Value(probe.shape, data, {probe: paths})


def _moved_labels(new: Value, axes: Mapping[int, int], before: Value) -> dict[Source, tuple[Path, ...]]:
    """The labels of `new`, whose axis a is written along axis `axes[a]` of `before`."""
    labels: dict[Source, tuple[Path, ...]] = {}
    for source, paths in new.axes.items():
        moved: list[Path] = [None] * before.rank
        for a, path in enumerate(paths):
            if path is not None and a not in axes:
                lanes.promote([new], a)
            if path is not None:
                moved[axes[a]] = path
        labels[source] = tuple(moved)
    for d in range(before.rank):
        if before.lanes(d) and any(paths[d] is not None for paths in labels.values()):
            raise Opaque("a write of an outer axis into lanes")
    return labels
