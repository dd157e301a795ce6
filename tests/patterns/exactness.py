"""The property behind every test of the patterns: a site's call computes what the graph computes, in float64.

The graph is run with all its casts widened to float64; at the site's anchor the call runs on the values that the
nodes hold then, with the `reference` kernel, and is compared with the values of the nodes it would replace.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

import fusion_pass.kernels  # registers the operators  # noqa: F401
from fusion_pass.graph.site import Operand, Refusal, Site, Step
from fusion_pass.patterns.norm_rope.pattern import NormRope

TOLERANCE = 1e-10

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
_WIDE_METHODS = {"float": "double", "half": "double", "bfloat16": "double", "cfloat": "cdouble"}


def capture(
    function: Callable[..., Any], *args: Any, dynamic: bool | None = None, **kwargs: Any
) -> tuple[fx.GraphModule, list[Any]]:
    """The Dynamo graph of one call of `function`, the whole of it in one graph, and the inputs that graph gets."""
    captured: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(*actual: Any) -> Any:
            captured.append((module, list(actual)))
            return module.forward(*actual)

        return run

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*args, **kwargs)
    (result,) = captured
    return result


def find(module: fx.GraphModule) -> tuple[list[Site], list[Refusal]]:
    """Sites and refusals of the norm + rotation pattern in a graph."""
    found = list(NormRope().find(module.graph))
    return [x for x in found if isinstance(x, Site)], [x for x in found if isinstance(x, Refusal)]


def sites_of(function: Callable[..., Any], *args: Any, dynamic: bool | None = None, **kwargs: Any) -> list[Site]:
    """The sites in `function`, each checked to be exact; a refusal fails."""
    module, inputs = capture(function, *args, dynamic=dynamic, **kwargs)
    sites, refusals = find(module)
    assert not refusals, [r.reason for r in refusals]
    assert_exact(module, inputs, sites)
    return sites


def reasons_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    """Why `function` has no site; sites that are found beside refusals are checked to be exact."""
    module, inputs = capture(function, *args, **kwargs)
    sites, refusals = find(module)
    assert_exact(module, inputs, sites)
    return [r.reason for r in refusals]


def assert_exact(module: fx.GraphModule, inputs: Sequence[Any], sites: Sequence[Site]) -> None:
    """Fail unless every site's call gives the numbers of the graph in float64, to `TOLERANCE`."""
    for site, error in errors(module, inputs, sites):
        assert error <= TOLERANCE, f"{site.fusion} at {site.anchor}: relative error {error:.3g}"


def errors(module: fx.GraphModule, inputs: Sequence[Any], sites: Sequence[Site]) -> list[tuple[Site, float]]:
    """The largest relative error of each site's call; infinite where the graph itself gives no finite numbers."""
    wide = copy.deepcopy(module)
    twins = dict(zip(module.graph.nodes, wide.graph.nodes, strict=True))
    _widen(wide)
    run = _Run(wide, {twins[s.anchor]: s for s in sites}, twins)
    with torch.no_grad():
        run.run(*(_double(x) for x in inputs), enable_io_processing=False)
    assert len(run.found) == len(sites)
    return run.found


def _double(x: Any) -> Any:
    return x.detach().to(_WIDE.get(x.dtype, x.dtype)).clone() if isinstance(x, torch.Tensor) else x


def _widen(module: fx.GraphModule) -> None:
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        parent, _, leaf = name.rpartition(".")
        owner = module.get_submodule(parent)
        delattr(owner, leaf)
        owner.register_buffer(leaf, _double(tensor))
    for node in module.graph.nodes:
        if node.op == "call_method" and node.target in _WIDE_METHODS:
            node.target = _WIDE_METHODS[node.target]
        node.args = fx.node.map_aggregate(node.args, lambda a: _WIDE.get(a, a) if isinstance(a, torch.dtype) else a)
        node.kwargs = fx.node.map_aggregate(node.kwargs, lambda a: _WIDE.get(a, a) if isinstance(a, torch.dtype) else a)
        if (
            node.target in (torch.arange, torch.empty, torch.zeros, torch.ones, torch.full)
            and "dtype" not in node.kwargs
        ):
            tensor = node.meta["example_value"]
            if tensor.is_floating_point():
                node.kwargs = {**node.kwargs, "dtype": torch.float64}
    module.recompile()


class _Run(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, anchors: dict[fx.Node, Site], twins: dict[fx.Node, fx.Node]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.anchors, self.twins = anchors, twins
        self.found: list[tuple[Site, float]] = []
        self.outputs = {twins[o.node] for s in anchors.values() for o in s.outputs}
        self.born: dict[fx.Node, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.env[n] = result
        if n in self.outputs:
            self.born[n] = result.clone()
        if n in self.anchors:
            self.found.append((self.anchors[n], self._error(self.anchors[n])))
        return result

    def _error(self, site: Site) -> float:
        tensors = {name: self._operand(o) for name, o in site.call.tensors.items() if o is not None}
        options: dict[str, Any] = {}
        for name, option in site.call.options.items():
            options[name] = self.env[self.twins[option]] if isinstance(option, fx.Node) else option
        options["out_dtype"] = torch.float64
        result = getattr(torch.ops.fusion_pass, site.call.name)(**tensors, **options, backend="reference")
        worst = 0.0
        for output in site.outputs:
            got = moved(result[output.index] if isinstance(result, tuple | list) else result, output.steps)
            expected = self.born[self.twins[output.node]]
            assert got.shape == expected.shape, (got.shape, expected.shape)
            if not expected.isfinite().all():
                return float("inf")
            error = float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
            worst = error if error != error else max(worst, error)
        return worst

    def _operand(self, operand: Operand) -> torch.Tensor:
        return moved(self.env[self.twins[operand.node]].clone(), operand.steps)


def moved(x: torch.Tensor, steps: Sequence[Step]) -> torch.Tensor:
    """`x` through the steps of an operand or an output."""
    for step in steps:
        args = tuple(_WIDE.get(a, a) if isinstance(a, torch.dtype) else a for a in step.args)
        x = getattr(x, step.method)(*args)
    return x
