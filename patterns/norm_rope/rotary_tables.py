"""Cosines and sines of one rotation, as operands of the call.

Matches     the tensors of the graph that hold them, along `[batch, sequence, lanes]`; and where each pair picks one of
            three rows of positions, those rows (`mrope.py`).
Requires    cosines and sines of one angle a pair, where the graph computes them. Tables that are graph inputs are taken
            as they are.
Becomes     `cos`, `sin`, `conjugate`, `mrope_layout` and `mrope_section`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fusion_pass.graph.evaluate import Evaluator
from fusion_pass.graph.region import between, frontier, upstream
from fusion_pass.graph.site import Operand
from fusion_pass.graph.vocabulary import operation

from ..refused import Refused
from . import mrope, tables
from .axes import Roles
from .facts import Rotation
from .rotary import equal


@dataclass(frozen=True)
class RotaryTables:
    """Operands `[B or 1, S or 1, T]`, or `[3, B or 1, S or 1, T]` of which each pair picks a row."""

    cos: Operand
    sin: Operand
    conjugate: bool
    """`sin` holds minus the sines of the rotation."""
    mrope_layout: str = "none"
    mrope_section: tuple[int, ...] = ()
    note: str = ""
    """What a report says of rows that are selected before the call."""


def tables_of(root: Evaluator, rotation: Rotation, roles: Roles) -> RotaryTables:
    """The tables of `rotation`, whose axes are `roles`. Raises `Refused` if the graph has none for a call to read."""
    region = between(root.study(rotation.start, lambda x: x), rotation.end)
    nodes = tables.candidates(frontier(root.effects, region, rotation.start))
    order = [roles.batch, roles.sequence]
    values = [rotation.response]
    cos = tables.find(root, rotation.cos, nodes, rotation.end, values, order)
    if cos is None:
        raise Refused("No tensor of the graph holds the cosines of the rotation along [batch, sequence, lanes].")
    for sign in (1, -1):
        sin = tables.find(root, sign * rotation.sin, nodes, rotation.end, values, order)
        if sin is not None:
            break
    else:
        raise Refused("No tensor of the graph holds the sines of the rotation along [batch, sequence, lanes].")
    _check_angles(root, rotation, cos, sin)
    if rotation.cos.shape[1] * 2 != rotation.rotary_dim:
        return RotaryTables(cos, sin, sign < 0)
    wanted = (rotation.cos, sign * rotation.sin)
    rows = mrope.rows(root, wanted, (cos, sin), rotation.end, values, order)
    if rows is not None:
        return RotaryTables(rows.cos, rows.sin, sign < 0, rows.layout, rows.section)
    return RotaryTables(cos, sin, sign < 0, note=mrope.note(root, rotation.cos, cos, rotation.end))


def _check_angles(root: Evaluator, rotation: Rotation, cos: Operand, sin: Operand) -> None:
    """Raise `Refused` unless the tables can be cosines and sines of one angle a pair."""
    computed = [name for name in (_trigonometry(root, cos.node), _trigonometry(root, sin.node)) if name]
    if rotation.cos.shape[1] == rotation.rotary_dim and computed:
        raise Refused(
            "The tables are computed in the graph, and their entries for the two lanes of a pair are not seen to be "
            "equal; by two different angles it would be no rotation."
        )
    if len(computed) < 2:
        return
    if computed[0] == {"sin"} and computed[1] == {"cos"}:
        raise Refused("cos and sin are exchanged: the tensor in the place of the cosines is computed by sin.")
    if any(isinstance(s.key, tuple) and s.key[0] == "sealed" for s in rotation.response.axes):
        return
    square = rotation.cos**2 + rotation.sin**2
    if not equal(square, square[:, :1] * (square * 0 + 1)):
        raise Refused("The tables are not cosines and sines of one angle: cos^2 + sin^2 differs between lanes.")


def _trigonometry(root: Evaluator, node: fx.Node) -> set[str]:
    names = {operation(n) for n in [node, *upstream(root.effects, node)]}
    return names & {"cos", "sin", "polar", "exp"}
