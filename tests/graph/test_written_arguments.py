"""Which arguments of a call are written, however the call says so; and what a dtype holds."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from fusion_pass.graph.vocabulary import holds
from fusion_pass.graph.writes import written_arguments

aten = torch.ops.aten
LIBRARY = torch.library.Library("fusion_pass_written", "DEF")
LIBRARY.define("part(Tensor(a) table) -> Tensor(a)")
LIBRARY.define("part.into(Tensor table, *, Tensor(a!) out) -> Tensor(a!)")

Build = Callable[[fx.Graph, fx.Node, fx.Node, fx.Node], fx.Node]


def function(target: Any, *given: Any, **named: Any) -> Build:
    """A call of `target`; the letters a, b and c among its arguments are tensors."""
    return _call("call_function", target, given, named)


def method(target: str, *given: Any, **named: Any) -> Build:
    return _call("call_method", target, given, named)


def _call(op: str, target: Any, given: Any, named: Any) -> Build:
    def build(graph: fx.Graph, *tensors: fx.Node) -> fx.Node:
        letters = dict(zip("abc", tensors, strict=True))

        def filled(x: Any) -> Any:
            if isinstance(x, list | tuple):
                return type(x)(filled(part) for part in x)
            return letters.get(x, x) if isinstance(x, str) else x

        return graph.create_node(op, target, filled(given), {name: filled(x) for name, x in named.items()})

    return build


CALLS: dict[str, tuple[Build, str]] = {
    "add": (function(torch.add, "a", "b"), ""),
    "add, out": (function(torch.add, "a", "b", out="c"), "c"),
    "max, two outs": (function(torch.max, "a", 0, out=("b", "c")), "bc"),
    "add_": (method("add_", "a", "b"), "a"),
    "copy_": (method("copy_", "a", other="b"), "a"),
    "relu_ by name": (function(torch.relu_, input="a"), "a"),
    "relu_ of self": (function(torch.relu_, self="a"), "a"),
    "+=": (function(operator.iadd, "a", "b"), "a"),
    "|=": (function(operator.ior, "a", "b"), "a"),
    "del": (function(operator.delitem, "a", 0), "a"),
    "x[0] =": (function(operator.setitem, "a", 0, "b"), "a"),
    "__setitem__": (method("__setitem__", "a", 0, "b"), "a"),
    "__imul__": (method("__imul__", "a", "b"), "a"),
    "__ixor__": (method("__ixor__", "a", "b"), "a"),
    "__mul__": (method("__mul__", "a", "b"), ""),
    "&": (function(operator.and_, "a", "b"), ""),
    "not": (function(operator.not_, "a"), ""),
    "relu": (function(F.relu, "a", False), ""),
    "relu in place": (function(F.relu, "a", True), "a"),
    "relu in place, by name": (function(F.relu, input="a", inplace=True), "a"),
    "relu in place if a tensor says so": (function(F.relu, "a", "b"), "a"),
    "dropout in place": (function(F.dropout, "a", 0.5, True, True), "a"),
    "dropout": (function(F.dropout, "a", 0.5, True), ""),
    "each of a list": (function(torch._foreach_add_, ["a", "b"], 1), "ab"),
    "aten.add_": (function(aten.add_.Tensor, "a", "b"), "a"),
    "aten.add_ by name": (function(aten.add_.Tensor, self="a", other="b"), "a"),
    "aten.add_, any overload": (function(aten.add_, "a", "b"), "a"),
    "aten.add.out": (function(aten.add.out, "a", "b", out="c"), "c"),
    "aten.add, any overload": (function(aten.add, "a", "b"), ""),
    "aten, each of a list": (function(aten._foreach_add_.Scalar, ["a", "b"], 1), "ab"),
    "view of a library's, any overload": (function(torch.ops.fusion_pass_written.part, "a"), ""),
    "view of a library's, into another": (function(torch.ops.fusion_pass_written.part, "a", out="b"), "b"),
    "unknown operator of graphs": (function(torch.ops.higher_order.scan, "a", ["b"], "c"), "abc"),
    "checkpoint of nothing known": (function(torch.ops.higher_order.tag_activation_checkpoint, "a", "b"), ""),
    "module": (lambda graph, a, b, c: graph.call_module("layer", (a,), {"other": b}), "ab"),
    "returned": (lambda graph, a, b, c: graph.output((a, b)), ""),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_a_call_writes(name: str) -> None:
    build, expected = CALLS[name]
    graph = fx.Graph()
    tensors = [graph.placeholder(letter) for letter in "abc"]
    written = written_arguments(build(graph, *tensors))
    assert {node.name for node in written} == set(expected)


def checkpointed(bodies: list[torch.nn.Module], owned: bool = True, spare: bool = False) -> list[str]:
    """What a checkpointed region writes of its arguments a and b, and of the buffer `table`.
    `owned`: the graph is that of a module.
    """
    graph = fx.Graph()
    root = torch.nn.Module()
    for number, body in enumerate(bodies):
        root.add_module(f"body_{number}", body)
    root.register_buffer("table", torch.ones(2))
    given = [graph.create_node("get_attr", f"body_{number}") for number in range(len(bodies))]
    a, b, table = graph.placeholder("a"), graph.placeholder("b"), graph.create_node("get_attr", "table")
    table.meta["example_value"] = torch.ones(2)
    others = (a, b, table, *((1,) * spare))
    call = graph.call_function(torch.ops.higher_order.tag_activation_checkpoint, (*given, *others))
    if owned:
        fx.GraphModule(root, graph)
        (call,) = graph.find_nodes(op="call_function", target=call.target)
    return sorted(node.name for node in written_arguments(call))


def body(writes: bool, tensors: int = 3, known: bool = True) -> fx.GraphModule:
    """A region of some tensors that writes to the second of them, or to none. `known`: the view it writes through has a
    shape.
    """
    graph = fx.Graph()
    places = [graph.placeholder(f"x{number}") for number in range(tensors)]
    for place in places:
        place.meta["example_value"] = torch.ones(2)
    view = graph.call_method("view", (places[1], 2))
    if known:
        view.meta["example_value"] = places[1].meta["example_value"].view(2)
    graph.output(graph.call_method("mul_" if writes else "mul", (view, 2)))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_what_a_region_writes() -> None:
    assert checkpointed([body(False)]) == []
    assert checkpointed([body(True)]) == ["b"]


def test_region_of_which_too_little_is_known() -> None:
    """It may write to all that it is given."""
    everything = ["a", "b", "table"]
    assert checkpointed([body(True, known=False)]) == everything
    assert checkpointed([body(True, 2), body(False, 2)]) == everything
    assert checkpointed([body(True)], spare=True) == everything
    assert checkpointed([torch.nn.Identity()]) == everything
    assert checkpointed([body(False)], owned=False) == everything


@pytest.mark.parametrize(
    ("wide", "narrow", "expected"),
    [
        (torch.float32, torch.float32, True),
        (torch.float32, torch.bfloat16, True),
        (torch.bfloat16, torch.float32, False),
        (torch.bfloat16, torch.float16, False),
        (torch.float16, torch.bfloat16, False),
        (torch.float64, torch.int64, True),
        (torch.int64, torch.int8, True),
        (torch.float32, torch.float8_e4m3fn, False),
        (torch.float8_e4m3fn, torch.float8_e4m3fn, True),
        (torch.float8_e5m2, torch.float8_e4m3fn, False),
        (torch.complex64, torch.float32, True),
    ],
)
def test_what_a_dtype_holds(wide: torch.dtype, narrow: torch.dtype, expected: bool) -> None:
    assert holds(wide, narrow) == expected
