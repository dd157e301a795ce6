"""When two readings are the q and the k of one call: everything that the operator has only once must be the same for
both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fusion_pass.graph.effects import Effects
from fusion_pass.graph.evaluate import Evaluator
from fusion_pass.graph.lanes import Opaque, Value
from fusion_pass.graph.site import Operand
from fusion_pass.graph.vocabulary import fake, fake_tensor

from .reading import Reading
from .rotary import equal

_SHARED = (
    "head_dim",
    "rotary_dim",
    "rotary_start",
    "pairing",
    "conjugate",
    "norm_first",
    "norm_scope",
    "out_order",
    "out_dtype",
    "mrope_layout",
    "mrope_section",
)


@dataclass(frozen=True)
class Pair:
    """The readings of q and k of one attention."""

    q: Reading
    k: Reading


def difference(a: Reading, b: Reading) -> str | None:
    """The first property that one call cannot have for both; None if there is none. (A different eps is the caller's
    to refuse.)
    """
    for name in _SHARED:
        if getattr(a, name) != getattr(b, name):
            return name
    if (a.norm is None) != (b.norm is None):
        return "norm"
    if a.norm is not None and b.norm is not None and a.norm.kind != b.norm.kind:
        return "norm"
    x, y = fake_tensor(a.source), fake_tensor(b.source)
    if x is None or y is None or x.dtype != y.dtype:
        return "dtype"
    return None


def same_scalar(a: float | fx.Node, b: float | fx.Node) -> bool:
    """Whether two scalars are one value, for certain.

    Under `dynamic=True` the eps of q's norm and that of k's are two graph inputs, equal or not as the model's
    attributes have it. `float()` of their symbolic values compares them as they are now and has Dynamo guard both:
    other values compile another graph.
    """
    if a == b:
        return True
    values = [fake(scalar) if isinstance(scalar, fx.Node) else scalar for scalar in (a, b)]
    try:
        x, y = (float(value) if isinstance(value, torch.SymFloat | float | int) else None for value in values)
    except GuardOnDataDependentSymNode:
        return False
    return x is not None and x == y


def same_tables(effects: Effects, a: Reading, b: Reading) -> bool:
    """Whether both are rotated by the same tables, if need be by different nodes that hold the same numbers."""
    return _same(effects, a, a.cos, b, b.cos) and _same(effects, a, a.sin, b, b.sin)


def _same(effects: Effects, a: Reading, x: Operand, b: Reading, y: Operand) -> bool:
    if x == y:
        return True
    if x.steps != y.steps:
        return False
    root = Evaluator(effects)

    def compare() -> bool:
        left, right = root.read(x.node, a.end), root.read(y.node, b.end)
        return (
            isinstance(left, Value)
            and isinstance(right, Value)
            and left.axes == right.axes
            and equal(left.data, right.data)
        )

    try:
        return root.settle(compare)
    except Opaque:
        return False
