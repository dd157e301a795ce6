"""Numbers that stand in a graph: as they are, as a symbol whose present value Dynamo can guard, or in a tensor."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fusion_pass.graph.effects import Effects
from fusion_pass.graph.vocabulary import CASTS, fake, fake_tensor, operation


def number(value: object) -> float | None:
    """`value` as a number, None if it is none.

    With dynamic shapes Dynamo makes floats of the model graph inputs. Such a number becomes its present value, guarded:
    another one compiles again.
    """
    if isinstance(value, fx.Node):
        value = fake(value)
    if isinstance(value, bool) or not isinstance(value, int | float | torch.SymFloat):
        return None
    try:
        return float(value)
    except GuardOnDataDependentSymNode:
        return None


def constant(effects: Effects, value: object) -> float | None:
    """A number, also one that the graph holds as a floating-point tensor of one number, rounded to its dtype."""
    tensor = fake_tensor(value)
    if not isinstance(value, fx.Node) or tensor is None:
        return number(value)
    if effects.writes(value) or not value.args or not tensor.is_floating_point():
        return None
    name = operation(value)
    at = {"tensor": 0, "scalar_tensor": 0, "full": 1}.get(name)
    if name in CASTS:
        found = constant(effects, value.args[0])
    else:
        found = number(value.args[at]) if at is not None and len(value.args) > at else None
    return None if found is None else float(torch.tensor(found, dtype=tensor.dtype))


def number_times(node: fx.Node, name: str) -> tuple[fx.Node, float] | None:
    """(x, c) for `c * x`, `x / c` with a known number c. `name`: what `node` does."""
    if name not in ("mul", "div") or len(node.args) != 2 or node.kwargs:
        return None
    x, c = node.args
    if name == "mul" and fake_tensor(x) is None:
        x, c = c, x
    factor = number(c)
    if not isinstance(x, fx.Node) or fake_tensor(x) is None or not factor:
        return None
    return x, factor if name == "mul" else 1.0 / factor
