"""Graphs for the tests of attention: capture, float64, and a site held against the graph that it replaces."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

import fusion_pass.kernels  # noqa: F401
from fusion_pass.graph.site import Operand, Refusal, Site, Step
from fusion_pass.graph.vocabulary import fake_tensor
from fusion_pass.patterns.attention.pattern import AttentionPattern

Captured = tuple[fx.GraphModule, list[Any]]

TOLERANCE = 1e-10
"""Relative, of float64 results."""


def capture(
    model: Callable[..., Any], *args: Any, dynamic: bool | None = None, grad: bool = True, **kwargs: Any
) -> list[Captured]:
    """The Dynamo graphs of one call that ran, with what they ran on."""
    graphs: list[Captured] = []

    def record(module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            graphs.append((module, [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in inputs]))
            return module.forward(*inputs)

        return run

    torch._dynamo.reset()
    with torch.set_grad_enabled(grad):
        torch.compile(model, backend=record, dynamic=dynamic)(*args, **kwargs)
    return graphs


def captured(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Captured:
    """The only Dynamo graph of one call."""
    (graph,) = capture(model, *args, **kwargs)
    return graph


def places(module: fx.GraphModule) -> list[Site | Refusal]:
    """What the pattern says about a graph."""
    return list(AttentionPattern().find(module.graph))


def site(module: fx.GraphModule) -> Site:
    """The only place of a graph, which is a site."""
    (place,) = places(module)
    assert isinstance(place, Site), place.reason
    return place


def refusal(module: fx.GraphModule) -> str:
    """The reason of the only place of a graph, which is a refusal."""
    (place,) = places(module)
    assert isinstance(place, Refusal), show(place)
    return place.reason


def arguments(place: Site) -> dict[str, Any]:
    """The call of a site as a reader sees it, without what is absent and without defaults."""
    defaults = {
        "causal": "none",
        "window_left": -1,
        "window_right": -1,
        "softcap": 0.0,
        "out_order": "bshd",
        "scale": None,
    }
    tensors = {name: _operand(operand) for name, operand in place.call.tensors.items() if operand is not None}
    options = {name: value for name, value in place.call.options.items() if value != defaults[name]}
    return {**tensors, **options}


def conditions(place: Site) -> dict[str, Any]:
    """Of the arguments, those that say which keys are seen."""
    found = arguments(place)
    return {
        name: found[name] for name in found if name not in ("q", "k", "v", "scale", "softcap", "sinks", "out_order")
    }


def heads(place: Site, name: str) -> int:
    """Number of heads of an operand of the call."""
    operand = place.call.tensors[name]
    assert operand is not None
    return int(move(fake_tensor(operand.node), operand.steps).shape[2])


def show(place: Site) -> str:
    """The site as text, for a snapshot."""
    given = ",\n".join(f"    {name}={value}" for name, value in arguments(place).items())
    (output,) = place.outputs
    return f"{output.node.name} = attention(\n{given},\n)[{output.index}]{_steps(output.steps)}"


def _operand(operand: Operand) -> str:
    return operand.node.name + _steps(operand.steps)


def _steps(steps: Sequence[Step]) -> str:
    return "".join(f".{step.method}({', '.join(map(str, step.args))})" for step in steps)


# --- numbers ----------------------------------------------------------------------------------------------------------


def in_float64(module: fx.GraphModule) -> fx.GraphModule:
    """A copy that computes in float64 wherever the model names a floating-point dtype."""
    module = copy.deepcopy(module)
    half = {torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.float16: torch.float64}
    for node in module.graph.nodes:
        node.args = pytree.tree_map(lambda a: half.get(a, a) if isinstance(a, torch.dtype) else a, node.args)
        node.kwargs = pytree.tree_map(lambda a: half.get(a, a) if isinstance(a, torch.dtype) else a, node.kwargs)
        if node.op == "call_method" and node.target in ("float", "half", "bfloat16"):
            node.target = "double"
    module.recompile()
    return module


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps the value of every node, as it was when the node was computed."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.values[n.name] = result
        return result


def values(module: fx.GraphModule, inputs: Sequence[Any]) -> dict[str, Any]:
    """The float64 value of every node."""
    recorder = _Recorder(in_float64(module))
    doubled = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            recorder.run(*doubled)
    finally:
        torch.set_default_dtype(usual)
    return recorder.values


def move(value: Any, steps: Sequence[Step]) -> Any:
    """`value` after the steps; casts stay in float64."""
    for step in steps:
        value = value if step.method == "to" else getattr(value, step.method)(*step.args)
    return value


def evaluate(place: Site, known: Mapping[str, Any]) -> torch.Tensor:
    """The site's call by the reference kernel in float64, brought to the shape of the node that it replaces."""
    tensors = {
        name: None if operand is None else move(known[operand.node.name], operand.steps)
        for name, operand in place.call.tensors.items()
    }
    for name in ("q", "k", "v"):
        tensors[name] = tensors[name].contiguous()
    options = {
        name: known[value.name] if isinstance(value, fx.Node) else value for name, value in place.call.options.items()
    }
    results = torch.ops.fusion_pass.attention(**tensors, **options, backend="reference")
    (output,) = place.outputs
    return move(results[output.index], output.steps)


def rows_that_see(place: Site, known: Mapping[str, Any]) -> torch.Tensor | None:
    """`[B, S, H, 1]`: the rows that see a key, for a call with a mask (docs/attention.md defines the others)."""
    options = dict(place.call.options)
    if place.call.tensors["mask"] is None:
        return None
    tensors = {
        name: None if operand is None else move(known[operand.node.name], operand.steps)
        for name, operand in place.call.tensors.items()
    }
    del tensors["sinks"]
    options["scale"] = 1.0
    _, lse = torch.ops.fusion_pass.attention(**tensors, **options, backend="reference")
    return (lse > float("-inf")).transpose(1, 2)[..., None]


def error(place: Site, known: Mapping[str, Any]) -> float:
    """Largest difference between the site and the node that it replaces, relative to the largest value."""
    (output,) = place.outputs
    expected, got = known[output.node.name], evaluate(place, known)
    assert got.shape == expected.shape
    seen = rows_that_see(place, known)
    if seen is not None:
        mask = move(seen, output.steps)
        expected, got = expected.where(mask, 0.0), got.where(mask, 0.0)
    return float((got - expected).abs().max() / expected.abs().max())


def check(module: fx.GraphModule, inputs: Sequence[Any]) -> list[Site | Refusal]:
    """Every site of a graph gives the numbers of what it replaces. Returns the places."""
    found = places(module)
    if any(isinstance(place, Site) for place in found):
        known = values(module, inputs)
        for place in found:
            if isinstance(place, Site):
                assert error(place, known) <= TOLERANCE, show(place)
    return found
