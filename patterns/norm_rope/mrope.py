"""Multimodal rotary embedding (Wang et al. 2024, arXiv 2409.12191): each pair reads the table of one of three
positions, T, H or W.

Matches     tables whose lane j is lane j of row r(j) of a `[3, B, S, T]` tensor, with r sectioned or interleaved.
Requires    that the rows are picked in the layer itself (transformers 4.57): then the operator reads the rows and the
            picking goes away. Where the model picks them once for all layers (transformers 5), the picked tables are
            the cheaper operand and stay.
Becomes     `mrope_layout`, `mrope_section` and three-row tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from fusion_pass.graph.evaluate import Evaluator
from fusion_pass.graph.lanes import Value
from fusion_pass.graph.region import upstream
from fusion_pass.graph.site import Operand, Step
from fusion_pass.graph.vocabulary import fake_tensor, layer_of, operation, sizes

from ..refused import Refused
from .facts import Array
from .rotary import TOLERANCE, equal
from .tables import arranged, axis_targets, spaced


@dataclass(frozen=True)
class Rows:
    """Three-row tables and how pairs pick a row."""

    layout: str
    section: tuple[int, ...]
    cos: Operand
    sin: Operand


def rows(
    root: Evaluator,
    wanted: tuple[Array, Array],
    picked: tuple[Operand, Operand],
    at: fx.Node,
    roles: Sequence[Value],
    order: Sequence[int | None],
) -> Rows | None:
    """The three-row form of the tables `picked`, which hold `wanted` (cos, sin: [WORLDS, T]) as read at `at`; None if
    there is none.

    `roles` and `order` as in `tables.find`.
    """
    found = [_rows_of(root, w, p, at, roles, order) for w, p in zip(wanted, picked, strict=True)]
    if found[0] is None or found[1] is None or found[0][0] != found[1][0]:
        return None
    form = layout_of(found[0][0])
    return None if form is None else Rows(*form, found[0][1], found[1][1])


def layout_of(chosen: Sequence[int]) -> tuple[str, tuple[int, ...]] | None:
    """(layout, section) by which pair j reads row `chosen[j]`; None for any other choice."""
    section = tuple(chosen.count(row) for row in range(3))
    if list(chosen) == [row for row, size in enumerate(section) for _ in range(size)]:
        return "sectioned", section
    if list(chosen) == [j % 3 if j < 3 * section[j % 3] else 0 for j in range(len(chosen))]:
        return "interleaved", section
    return None


def note(root: Evaluator, wanted: Array, picked: Operand, at: fx.Node) -> str:
    """What a report says of a table `picked` whose rows are selected before the call; '' if none are.

    Arguments as for `rows`.
    """
    tables = [value for _, value in _three_rows(root, picked.node, at) if _selects(value, wanted)]
    if not tables:
        return ""
    choices = (_choice(value, wanted) for value in tables)
    form = next((layout_of(choice[0]) for choice in choices if choice is not None), None)
    order = "in an order of its own" if form is None else f"{form[0]}, section {list(form[1])}"
    where = "in the layer" if _picks(root, picked.node, layer_of(at)) else "once for the model"
    return f"rows selected {where} ({order}); the call reads the selected tables"


def _selects(value: Value, wanted: Array) -> bool:
    """Whether every pair of `wanted` is a lane of some row of `value`, and no row has them all."""
    data = value.data[:, 0].reshape(len(value.data), 3, -1)
    if np.iscomplexobj(data):
        return False
    same: Array = np.less_equal(abs(data[..., None] - wanted[:, None, None]), TOLERANCE)
    held: Array = np.any(np.all(same, axis=0), axis=1)  # [row, pair]
    return bool(np.all(np.any(held, axis=0)) and not np.any(np.all(held, axis=1)))


def _rows_of(
    root: Evaluator, wanted: Array, picked: Operand, at: fx.Node, roles: Sequence[Value], order: Sequence[int | None]
) -> tuple[list[int], Operand] | None:
    here = layer_of(at)
    if layer_of(picked.node) != here or not _picks(root, picked.node, here):
        return None
    for node, value in _three_rows(root, picked.node, at):
        choice = _choice(value, wanted)
        if choice is not None:
            chosen, step = choice
            try:
                return chosen, _operand(node, value, wanted.shape[1], step, roles, order)
            except Refused:
                continue
    return None


def _three_rows(root: Evaluator, picked: fx.Node, at: fx.Node) -> Iterator[tuple[fx.Node, Value]]:
    """Tensors `[3, ..., lanes]` that `picked` is computed from, nearest first."""
    for node in upstream(root.effects, picked):
        tensor = fake_tensor(node)
        if tensor is None or tensor.dim() < 3 or sizes(tensor)[0] != 3:
            continue
        value = root.read(node, at)
        if isinstance(value, Value) and value.lanes(0) and value.lanes(value.rank - 1):
            yield node, value


def _picks(root: Evaluator, node: fx.Node, layer: str) -> bool:
    """Whether a concatenation or a write in `layer` stands between `node` and the rows."""
    return any(
        operation(n) in ("cat", "setitem", "stack", "where") and layer_of(n) == layer
        for n in [node, *upstream(root.effects, node)]
    )


def _choice(value: Value, wanted: Array) -> tuple[list[int], int] | None:
    """The row that each pair of `wanted` is taken from, and how many lanes of `value` a pair has; None if they are not
    lanes of more than one row.
    """
    pairs, lanes = wanted.shape[1], value.data.shape[-1]
    data = value.data[:, 0].reshape(len(value.data), 3, -1)
    if data.shape[2] != lanes or np.iscomplexobj(data):
        return None
    for step in (1, 2):
        if (pairs - 1) * step >= lanes:
            continue
        table = data[:, :, : pairs * step : step]
        chosen = [next((r for r in range(3) if equal(table[:, r, j], wanted[:, j])), -1) for j in range(pairs)]
        if -1 not in chosen and len(set(chosen)) > 1:
            return chosen, step
    return None


def _operand(
    node: fx.Node, value: Value, pairs: int, step: int, roles: Sequence[Value], order: Sequence[int | None]
) -> Operand:
    """`[3, *order, pairs]` of a node `[3, ..., lanes]`, of which a pair has `step` lanes."""
    targets = axis_targets(value, roles)
    last = value.rank - 1
    steps = spaced(last, 0, step, pairs, value.shape[last])
    current: list[int | str] = ["rows"]
    for target in targets[1:last]:
        if target is None:
            steps.append(Step("select", (len(current), 0)))
        else:
            current.append(target)
    return Operand(node, (*steps, *arranged(node, [*current, "lanes"], ["rows", *order, "lanes"])))
