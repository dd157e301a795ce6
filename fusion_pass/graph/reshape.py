"""Reshapes, on one token: independent groups of axes, each of lanes, which are numbers, or of labels.

[B, S, H * D]  ->  [B, S, H, D]      lanes, split: the numbers are reshaped
[B, H, S, D]   ->  [B * H, S, D]     labels, merged: the paths of two axes become one that remembers both
and back                             the two paths again
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from . import lanes
from .lanes import Opaque, Path, Source, Value
from .vocabulary import Size


def view(value: Value, shape: Sequence[Size]) -> Value:
    """`value` with the axes `shape`. Raises `Opaque` where lanes and labels would be mixed, or sizes are not known."""
    shape = tuple(shape)
    groups = list(_groups(value.shape, shape))
    data_shape: list[int] = []
    axes: dict[Source, list[Path]] = {source: [] for source in value.axes}
    data = value.data
    for old, new in groups:
        news = [shape[d] for d in new]
        if any(value.lanes(d) for d in old):
            if any(value.outer(d) for d in old):
                outer = [d for d in old if value.outer(d)]
                lanes.promote([value], outer[0])
            for d in old:
                if value.data.shape[2 + d] != value.shape[d]:
                    data = np.repeat(data, lanes.length(value, d), axis=2 + d)
            data_shape += news
            for paths in axes.values():
                paths += [None] * len(new)
            continue
        data_shape += [1] * len(new)
        for source, paths in axes.items():
            paths += _regroup([(value.axes[source][d], value.shape[d]) for d in old], news)
    return Value(shape, data.reshape(data.shape[:2] + tuple(data_shape)), {s: tuple(p) for s, p in axes.items()})


def _groups(old: tuple[Size, ...], new: tuple[Size, ...]) -> Sequence[tuple[range, range]]:
    """Cut a reshape into the smallest groups of axes that are reshaped independently of each other."""
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    middle = _middle_groups(old, new, head, len(old) - tail, len(new) - tail)
    return [
        *((range(d, d + 1), range(d, d + 1)) for d in range(head)),
        *middle,
        *((range(len(old) - d, len(old) - d + 1), range(len(new) - d, len(new) - d + 1)) for d in range(tail, 0, -1)),
    ]


def _middle_groups(
    old: tuple[Size, ...], new: tuple[Size, ...], start: int, old_end: int, new_end: int
) -> Sequence[tuple[range, range]]:
    """The groups of the axes from `start` on: each ends as soon as the same number of elements is on both sides."""
    if lanes.product(old[start:old_end]) != lanes.product(new[start:new_end]):
        raise Opaque("reshape of unknown sizes")
    groups = []
    i = j = start
    while i < old_end or j < new_end:
        a, b = i, j
        while True:
            left, right = lanes.product(old[i:a]), lanes.product(new[j:b])
            if (a > i or b > j) and left == right:
                break
            may_be_less = not isinstance(left, int) or not isinstance(right, int) or left <= right
            if a < old_end and (b == new_end or may_be_less):
                a += 1
            elif b < new_end:
                b += 1
            else:
                raise Opaque("reshape of unknown sizes")
        groups.append((range(i, a), range(j, b)))
        i, j = a, b
    return groups


def _regroup(parts: list[tuple[Path, Size]], news: Sequence[Size]) -> list[Path]:
    """The paths of outer axes after a reshape of one group."""
    parts = [part for part in parts if part[1] != 1]
    if all(path is None for path, _ in parts):
        return [None] * len(news)
    long = [n for n in news if n != 1]
    if [n for _, n in parts] == long:
        paths = [path for path, _ in parts]
    elif len(long) == 1:
        paths = [_merge(parts)]
    elif len(parts) == 1:
        paths = _split(parts[0][0], long)
    else:
        raise Opaque("reshape of several outer axes")
    remaining = iter(paths)
    return [next(remaining) if n != 1 else None for n in news]


def _merge(parts: list[tuple[Path, Size]]) -> Path:
    """The path of the axis that `parts` become; that of an axis of which they are all parts, in order, is its own."""
    first = parts[0][0]
    if first is not None and first[0] == "part":
        whole_path: Path = first[1]
        whole_sizes = first[2]
        if parts == [(("part", whole_path, whole_sizes, i), n) for i, n in enumerate(whole_sizes)]:
            return whole_path
    return ("merge", tuple(parts))


def _split(path: Path, news: Sequence[Size]) -> list[Path]:
    """The paths of the axes `news` that one axis becomes; those that it was merged of are theirs again."""
    assert path is not None
    if path[0] == "merge" and [n for _, n in path[1]] == list(news):
        return [p for p, _ in path[1]]
    return [("part", path, tuple(news), i) for i in range(len(news))]
