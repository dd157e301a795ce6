"""Which axis is batch, sequence and heads, and the movement between a node and the operators' `[B, S, H, D]`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_pass.graph.evaluate import Evaluator
from fusion_pass.graph.lanes import Value
from fusion_pass.graph.site import Operand, Step
from fusion_pass.graph.vocabulary import Size, fake_tensor, sizes

from ..refused import Refused
from .facts import Rotation

ROLES = ("batch", "sequence", "heads")


@dataclass(frozen=True)
class Roles:
    """The outer axis of a node that plays each role; None where the node has no such axis."""

    batch: int | None
    sequence: int | None
    heads: int | None

    def order(self) -> list[str]:
        """Roles in the order of the node's axes."""
        known = [(axis, role) for role in ROLES if (axis := getattr(self, role)) is not None]
        return [role for _, role in sorted(known)]


def roles_of(root: Evaluator, rotation: Rotation) -> Roles:
    """Roles of the axes of `rotation.end`. Tables vary along batch and sequence only."""
    response = rotation.response
    outer = response.rank - 1
    varying = [axis for axis in range(outer) if _table_varies(rotation, axis)]
    if outer == 3:
        candidates = [axis for axis in (1, 2) if axis not in varying]
        if not candidates:
            raise Refused("The tables differ between heads; the operator takes one table for all heads.")
        heads = candidates[0] if len(candidates) == 1 else _heads_axis(root, rotation, candidates)
        if _lanes_at(root, rotation, 3 - heads) and not _lanes_at(root, rotation, heads):
            raise Refused("The tables differ between heads; the operator takes one table for all heads.")
        return Roles(0, 3 - heads, heads)
    if outer == 2:
        if varying == [0, 1]:
            return Roles(0, 1, None)
        if varying == [1]:
            return Roles(None, 1, 0) if _lanes_at(root, rotation, 0) else Roles(0, 1, None)
        if varying == [0]:
            return Roles(None, 0, 1)
    raise Refused(
        f"The rotated tensor has {response.rank} axes, {len(varying)} of them with a table of their own; "
        "the operator takes [batch, sequence, heads, head_dim]."
    )


def _table_varies(rotation: Rotation, axis: int) -> bool:
    response = rotation.response
    return any(
        paths[axis] is not None
        for source, paths in response.axes.items()
        if source.key != ("studied", rotation.start, True)
    )


def _lanes_at(root: Evaluator, rotation: Rotation, axis: int) -> bool:
    value = root.value(rotation.start)
    return isinstance(value, Value) and value.lanes(rotation.axes[axis])


def _heads_axis(root: Evaluator, rotation: Rotation, candidates: list[int]) -> int:
    for axis in candidates:
        if _lanes_at(root, rotation, axis):
            return axis
    short = [axis for axis in candidates if rotation.response.shape[axis] == 1]
    if len(short) == 1:
        return 3 - short[0]
    raise Refused("The axis of the heads cannot be told from the sequence axis: the tables vary along neither.")


def operand(node: fx.Node, origin: dict[str, int | None], heads: Size, head_dim: int) -> Operand:
    """`node` as `[B, S, H, D]`. `origin[role]` is its axis for that role; the last axis holds `heads` times
    `head_dim` lanes if heads have no axis.
    """
    tensor = fake_tensor(node)
    assert tensor is not None
    rank = tensor.dim()
    steps: list[Step] = []
    have = sorted((axis, role) for role, axis in origin.items() if axis is not None)
    names = [role for _, role in have]
    if len(names) != rank - 1:
        raise Refused(f"{node.name!r} has an axis of unknown role.")
    if "heads" not in names and sizes(tensor)[-1] != head_dim:
        steps.append(Step("unflatten", (-1, (heads, head_dim))))
        names.append("heads")
    steps += _arrange(names)
    return Operand(node, tuple(steps))


def _arrange(names: list[str]) -> list[Step]:
    """From axes of roles `names` (and lanes) to batch, sequence, heads (and lanes)."""
    steps = []
    wanted = [role for role in ROLES if role in names]
    if names != wanted:
        steps.append(_reorder([names.index(role) for role in wanted]))
    return steps + [Step("unsqueeze", (axis,)) for axis, role in enumerate(ROLES) if role not in names]


def result_steps(names: list[str]) -> tuple[Step, ...]:
    """From `[B, S, H, D]` to axes of roles `names` (and lanes)."""
    missing = [axis for axis, role in enumerate(ROLES) if role not in names]
    present = [role for role in ROLES if role in names]
    steps = [Step("select", (axis, 0)) for axis in reversed(missing)]
    if present != names:
        steps.append(_reorder([present.index(role) for role in names]))
    return tuple(steps)


def _reorder(outer: list[int]) -> Step:
    """Axes in front of the lanes, which stay the last."""
    return Step.reorder((*outer, len(outer)))


def memory_order(node: fx.Node, names: list[str]) -> str:
    """`out_order` that gives a result of roles `names` the strides of `node`."""
    tensor = fake_tensor(node)
    assert tensor is not None
    if "heads" not in names or "sequence" not in names:
        return "bshd"
    heads, sequence = tensor.stride(names.index("heads")), tensor.stride(names.index("sequence"))
    return "bhsd" if statically_known_true(heads > sequence) else "bshd"
