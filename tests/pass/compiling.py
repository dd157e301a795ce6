"""Helpers: compile without generating kernels, and count operators in the graphs that result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

import fusion_pass


def eager(module: fx.GraphModule, example_inputs: Any) -> Any:
    """An inner compiler without kernels: AOTAutograd (real functionalisation and backward graph), run eagerly."""
    from torch._dynamo.backends.debugging import aot_eager_default_partitioner

    return aot_eager_default_partitioner(module, example_inputs)


def recomputing(module: fx.GraphModule, example_inputs: Any) -> Any:
    """`eager` with Inductor's partitioner, whose backward computes again what is cheap: for one model of each operator,
    because it takes almost a third of AOTAutograd's time."""
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager(module, example_inputs)


def as_it_is(module: fx.GraphModule, example_inputs: Any) -> Any:
    """An inner compiler that compiles nothing: PyTorch's autograd runs the rewritten graph node by node."""
    return module.forward


class CountingCompiler:
    """`eager`, counting the operators of the forward and the backward graph."""

    def __init__(self) -> None:
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()

    def __call__(self, module: fx.GraphModule, example_inputs: Any) -> Any:
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def counting(counter: Counter[str]) -> Callable[..., Any]:
            def compile_graph(graph: fx.GraphModule, _: Any) -> Any:
                counter.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
                return make_boxed_func(graph.forward)

            return compile_graph

        return aot_autograd(fw_compiler=counting(self.forward), bw_compiler=counting(self.backward))(
            module, example_inputs
        )


def backend(**settings: Any) -> fusion_pass.FusionBackend:
    """The `fusion_pass` backend with `eager` in the place of Inductor."""
    return fusion_pass.FusionBackend(fusion_pass.FusionConfig(**settings), inner=eager)


def capture(function: Callable[..., Any], *args: Any, dynamic: bool | None = None, **kwargs: Any) -> fx.GraphModule:
    """The Dynamo graph of `function(*args, **kwargs)`."""
    graphs: list[fx.GraphModule] = []

    def keep(module: fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    torch.compile(function, backend=keep, fullgraph=True, dynamic=dynamic)(*args, **kwargs)
    (graph,) = graphs
    return graph
