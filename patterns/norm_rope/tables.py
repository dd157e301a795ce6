"""Finds the node to pass as an operand: the one whose lanes are the numbers wanted.

Becomes     an `Operand`: the node and the movement that turns it into the operator's shape.
Requires    the numbers are lanes of one node, along one of its axes at even spacing; every axis on which the node
            varies is the batch or the sequence axis of the rotated tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_pass.graph.evaluate import Evaluator
from fusion_pass.graph.lanes import Value
from fusion_pass.graph.site import Operand, Step
from fusion_pass.graph.vocabulary import CASTS, MOVEMENTS, fake_tensor, operation

from ..refused import Refused
from .facts import Array
from .rotary import TOLERANCE, equal

_FOLLOWED = MOVEMENTS | CASTS | set("neg add repeat_interleave repeat view_as_real complex real imag".split())
"""What a table is looked for behind."""

_IN_PIECES = frozenset({"split", "chunk", "unbind"})
"""Operations whose result is no tensor but several."""


def candidates(frontier: Iterable[fx.Node]) -> list[fx.Node]:
    """Nodes read by a region, then what they are views or casts of, nearest first."""
    found = dict.fromkeys(frontier)
    queue = list(found)
    while queue:
        node = queue.pop(0)
        if operation(node) not in _FOLLOWED:
            continue
        for parent in node.all_input_nodes:
            fresh = parent not in found and fake_tensor(parent) is not None
            if fresh or operation(parent) in _IN_PIECES:
                found.setdefault(parent)
                queue.append(parent)
    return [node for node in found if fake_tensor(node) is not None]


def find(
    root: Evaluator,
    wanted: Array,
    nodes: Sequence[fx.Node],
    at: fx.Node,
    roles: Sequence[Value],
    order: Sequence[int | None],
) -> Operand | None:
    """The first of `nodes` that holds `wanted` ([WORLDS, T]) as read at `at`, as an operand of shape `[*order, T]`.

    `order` lists the axes of the rotated tensor that the operand's axes must follow, None for an axis of size one;
    `roles` are values on the rotated tensor whose labels say what runs along which of its axes.
    """
    for node in nodes:
        for value in dict.fromkeys((root.read(node, at), root.sealed(node, at))):
            try:
                found = _as_operand(node, value, wanted, roles, order) if isinstance(value, Value) else None
            except Refused:
                continue
            if found is not None:
                return found
    return None


def _as_operand(
    node: fx.Node, value: Value, wanted: Array, roles: Sequence[Value], order: Sequence[int | None]
) -> Operand | None:
    value, steps = _as_real(node, value)
    place = locate(value.data[:, 0], wanted)
    if place is None:
        return None
    targets = axis_targets(value, roles)
    lane_axis, start, step, fixed = place
    current: list[int | str] = []
    for d in range(value.rank):
        axis, target = len(current), "lanes" if d == lane_axis else targets[d]
        if d == lane_axis:
            steps += spaced(axis, start, step, wanted.shape[1], value.shape[d])
        if target is None or d in fixed:
            steps.append(Step("select", (axis, fixed.get(d, 0))))
        else:
            current.append(target)
    return Operand(node, (*steps, *arranged(node, current, [*order, "lanes"])))


def _as_real(node: fx.Node, value: Value) -> tuple[Value, list[Step]]:
    """Complex numbers with one more axis, `[..., T, 2]`, real and imaginary, and the steps to it; real ones as they
    are.
    """
    if not np.iscomplexobj(value.data):
        return value, []
    tensor = fake_tensor(node)
    assert tensor is not None
    if tensor.requires_grad:
        raise Refused(f"{node.name!r} requires a gradient, and seen as real numbers it passes none on.")
    steps = [
        *([Step("resolve_conj")] if tensor.is_conj() else []),
        # The last axis is seen as pairs, so its entries must lie side by side.
        *([] if statically_known_true(tensor.stride(-1) == 1) else [Step("contiguous")]),
        Step("view", (tensor.real.dtype,)),
        Step("unflatten", (-1, (value.shape[-1], 2))),
    ]
    axes = {source: (*paths, None) for source, paths in value.axes.items()}
    return Value((*value.shape, 2), np.stack([value.data.real, value.data.imag], -1), axes), steps


def arranged(node: fx.Node, current: Sequence[int | str], wanted: Sequence[int | str | None]) -> list[Step]:
    """The steps from the axes `current` of an operand made of `node` to the axes `wanted`, of which None and what is
    not in `current` have size one. Raises `Refused` if `current` has an axis that is not wanted.
    """
    present = [axis for axis in wanted if axis is not None and axis in current]
    # No graph is known that gets here: `axes.roles_of` takes no axis along which a table varies for the heads.
    if sorted(map(str, present)) != sorted(map(str, current)):
        raise Refused(f"{node.name!r} varies along an axis that is neither batch nor sequence.")
    moves = [] if present == list(current) else [Step("permute", tuple(current.index(axis) for axis in present))]
    return moves + [Step("unsqueeze", (i,)) for i, axis in enumerate(wanted) if axis is None or axis not in current]


def spaced(axis: int, start: int, step: int, length: int, n: object) -> list[Step]:
    """Every `step`-th place of `axis` from `start`."""
    if step == 1:
        return [] if start == 0 and length == n else [Step("narrow", (axis, start, length))]
    offset = start % step
    first = start - offset
    narrow = [] if first == 0 and length * step == n else [Step("narrow", (axis, first, length * step))]
    return [*narrow, Step("unflatten", (axis, (length, step))), Step("select", (axis + 1, offset))]


def locate(data: Array, wanted: Array) -> tuple[int, int, int, dict[int, int]] | None:
    """Where `wanted` ([WORLDS, T]) lies in `data` ([WORLDS, *axes]): (axis, start, step, {other axis: place})."""
    shape = data.shape[1:]
    flat = data.reshape(len(data), -1)
    length = wanted.shape[1]
    if flat.shape[1] < length:
        return None
    if equal(flat[:, :length], wanted) and shape[-1] >= length:
        return len(shape) - 1, 0, 1, {d: 0 for d, n in enumerate(shape[:-1]) if n > 1}
    order = np.argsort(flat[0], kind="stable")
    at = np.searchsorted(flat[0][order], wanted[0] - TOLERANCE * (1 + abs(wanted[0])))
    if (at >= len(order)).any():
        return None
    # Equal numbers lie next to each other; the stable sort gives the first place of each.
    places = order[at]
    if not equal(flat[:, places], wanted):
        return None
    index = np.unravel_index(places, shape)
    varying = [d for d, i in enumerate(index) if (i != i[0]).any()]
    if len(varying) != 1:
        if varying or length != 1:
            return None
        varying = [len(shape) - 1]
    axis = varying[0]
    step = int(index[axis][1] - index[axis][0]) if length > 1 else 1
    start = int(index[axis][0])
    if step < 1 or (index[axis] != start + step * np.arange(length)).any():
        return None
    if step > 1 and (start - start % step) + length * step > shape[axis]:
        return None
    return axis, start, step, {d: int(i[0]) for d, i in enumerate(index) if d != axis and shape[d] > 1}


def axis_targets(value: Value, roles: Sequence[Value]) -> list[int | None]:
    """For each axis of `value`, the axis of the rotated tensor along which the same places of the same sources lie."""
    targets: list[int | None] = [None] * value.rank
    for source, paths in value.axes.items():
        known = next((r.axes[source] for r in roles if source in r.axes), None)
        if any(p is not None for p in paths) and known is None:
            raise Refused("varies with something the rotated tensor does not depend on")
        for axis, path in enumerate(paths):
            if path is None:
                continue
            assert known is not None
            matches = [e for e, p in enumerate(known) if p == path]
            if len(matches) != 1 or targets[axis] not in (None, matches[0]):
                raise Refused("an axis is not an axis of the rotated tensor")
            targets[axis] = matches[0]
    return targets
