"""Multimodal rotary embedding (Wang et al. 2024, arXiv 2409.12191): each pair reads the table of one of three
positions, T, H or W.

Matches     tables whose lane j is lane j of row r(j) of a `[3, B, S, T]` tensor, with r sectioned or interleaved.
Requires    that the rows are picked in the layer itself (transformers 4.57): then the operator reads the rows and the
            picking goes away. Where the model picks them once for all layers (transformers 5), the picked tables are
            the cheaper operand and stay.
Becomes     `mrope_layout`, `mrope_section` and three-row tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from fusion_pass.graph.evaluate import Evaluator
from fusion_pass.graph.lanes import Value
from fusion_pass.graph.region import upstream
from fusion_pass.graph.site import Operand, Step
from fusion_pass.graph.vocabulary import fake_tensor, layer_of, operation, sizes

from .facts import Array, Refused
from .rotary import equal
from .tables import axis_targets, spaced


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


def _rows_of(
    root: Evaluator, wanted: Array, picked: Operand, at: fx.Node, roles: Sequence[Value], order: Sequence[int | None]
) -> tuple[list[int], Operand] | None:
    here = layer_of(at)
    if layer_of(picked.node) != here or not _picks(root, picked.node, here):
        return None
    for node in upstream(root.effects, picked.node):
        tensor = fake_tensor(node)
        if tensor is None or tensor.dim() < 3 or sizes(tensor)[0] != 3:
            continue
        value = root.read(node, at)
        if isinstance(value, Value) and value.lanes(0) and value.lanes(value.rank - 1):
            try:
                found = _match(node, value, wanted, roles, order)
            except Refused:
                continue
            if found is not None:
                return found
    return None


def _picks(root: Evaluator, node: fx.Node, layer: str) -> bool:
    """Whether a concatenation or a write in `layer` stands between `node` and the rows."""
    return any(
        operation(n) in ("cat", "setitem", "stack", "where") and layer_of(n) == layer
        for n in [node, *upstream(root.effects, node)]
    )


def _match(
    node: fx.Node, value: Value, wanted: Array, roles: Sequence[Value], order: Sequence[int | None]
) -> tuple[list[int], Operand] | None:
    pairs, lanes = wanted.shape[1], value.data.shape[-1]
    data = value.data[:, 0].reshape(len(wanted), 3, -1)
    if data.shape[2] != lanes or np.iscomplexobj(data):
        return None
    for step in (1, 2):
        if (pairs - 1) * step >= lanes:
            continue
        table = data[:, :, : pairs * step : step]
        chosen = [next((r for r in range(3) if equal(table[:, r, j], wanted[:, j])), -1) for j in range(pairs)]
        if -1 not in chosen and len(set(chosen)) > 1:
            return chosen, _operand(node, value, pairs, step, roles, order)
    return None


def _operand(
    node: fx.Node, value: Value, pairs: int, step: int, roles: Sequence[Value], order: Sequence[int | None]
) -> Operand:
    targets = axis_targets(value, roles)
    last = value.rank - 1
    steps: list[Step] = list(spaced(last, 0, step, pairs, value.shape[last]))
    kept: list[int] = []
    axis = 1
    for d in range(1, last):
        target = targets[d]
        if target is None:
            steps.append(Step("select", (axis, 0)))
        else:
            kept.append(target)
            axis += 1
    wanted = [o for o in order if o in kept and o is not None]
    if sorted(wanted) != sorted(kept):
        raise Refused(f"{node.name!r} varies along an axis that is neither batch nor sequence.")
    if wanted != kept:
        steps.append(Step("permute", (0, *(1 + kept.index(o) for o in wanted), len(kept) + 1)))
    steps += [Step("unsqueeze", (1 + i,)) for i, o in enumerate(order) if o is None or o not in kept]
    return Operand(node, tuple(steps))
