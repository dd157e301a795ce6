"""Small questions about one node of a graph, answered conservatively."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_VALUE_KEYS = ("example_value", "val")
"""Where a Dynamo graph and an ATen graph keep the fake value of a node."""

_IN_PLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in (
        "iadd",
        "isub",
        "imul",
        "itruediv",
        "ifloordiv",
        "imod",
        "ipow",
        "iand",
        "ior",
        "ixor",
        "ilshift",
        "irshift",
    )
) | {operator.setitem, operator.delitem, operator.imatmul}

_GRAD_MODE = frozenset({torch._C._set_grad_enabled, torch.set_grad_enabled})


def fake_value(node: fx.Node) -> Any:
    """The fake value recorded for `node`, or None."""
    for key in _VALUE_KEYS:
        if key in node.meta:
            return node.meta[key]
    return None


def value_key(graph: fx.Graph) -> str:
    """The meta key in use in `graph`: `val` after export or AOTAutograd, `example_value` in a Dynamo graph."""
    return "val" if any("val" in node.meta for node in graph.nodes) else "example_value"


def may_write(node: fx.Node) -> bool:
    """Whether `node` may write to memory that another node reads. Unknown callables count as writers."""
    if "out" in node.kwargs and node.kwargs["out"] is not None:
        return True
    if node.op == "call_method":
        return _is_in_place_name(str(node.target)) or node.target == "__setitem__"
    if node.op == "call_module":
        return True
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    return node.target in _IN_PLACE_OPERATORS or _is_in_place_name(getattr(node.target, "__name__", "_"))


def sets_grad_mode(node: fx.Node) -> bool:
    """Whether nodes after `node` run under another grad mode than those before it."""
    return node.op == "call_function" and node.target in _GRAD_MODE


def _is_in_place_name(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")
