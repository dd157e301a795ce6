"""Control flow in a graph that trains: is the gradient of a call laid out as `cond`, `while_loop` and `scan` expect it?

These compare the strides of gradients: of one branch with those of the other, of one step with those of the next. The
gradient of a value mostly has the value's own strides, and models count on it without knowing. That of a fused call has
those its kernels write. So where a gradient goes on to control flow, a call is made only if both are the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from fusion_pass.graph.fake_mode import evaluating
from fusion_pass.graph.vocabulary import fake
from fusion_pass.layout import same_layout
from fusion_pass.plan import Planned, Unplannable

_COMPARING = frozenset({"cond", "while_loop", "scan", "associative_scan"})


class ControlFlow:
    """Of one captured module and the graphs that it calls, before any rewrite."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._behind: set[fx.Node] = set()
        """Nodes inside of control flow, and what is computed from its results: their gradients meet it."""
        if _has_control_flow(module):
            self._walk(module, inside=False, seen=set())

    def check(self, plan: Planned) -> None:
        """Raises `Unplannable` if a gradient of the planned call meets control flow in other strides than the value's
        own."""
        met = {name: plan.tensors[name] for name in plan.tensors if plan.tensors[name].node in self._behind}
        met = {name: moved for name, moved in met.items() if fake(moved.node).requires_grad}
        if not met or not any(fake(result.replaces).requires_grad for result in plan.results):
            return
        for name, gradient in _gradients(plan, list(met)).items():
            if gradient is not None and not same_layout(gradient, met[name].value):
                node = met[name].node.name
                raise Unplannable(
                    f"The gradient of {node!r} goes on to control flow (cond, while_loop, scan), which compares the "
                    f"strides of gradients, and it would not have those of {node!r}."
                )

    def _walk(self, module: fx.GraphModule, *, inside: bool, seen: set[tuple[int, bool]]) -> None:
        if (id(module), inside) in seen:
            return
        seen.add((id(module), inside))
        for node in module.graph.nodes:
            if inside or _compares(node) or not self._behind.isdisjoint(node.all_input_nodes):
                self._behind.add(node)
            for body in _bodies(module, node):
                self._walk(body, inside=node in self._behind, seen=seen)


def _gradients(plan: Planned, names: list[str]) -> dict[str, torch.Tensor | None]:
    """Fake gradients of the call's arguments `names`, if those of its results have the results' strides."""
    mode = fake(plan.site.outputs[0].node).fake_mode
    with evaluating(mode), torch.enable_grad():
        tensors = {name: moved.value.detach() for name, moved in plan.tensors.items()}
        inputs = [tensors[name].requires_grad_() for name in names]
        value = plan.target(**tensors, **plan.options)
        indices = sorted({result.index for result in plan.results})
        results = [value[index] for index in indices] if isinstance(value, tuple) else [value]
        gradients = torch.autograd.grad(results, inputs, [torch.empty_like(x) for x in results], allow_unused=True)
    return dict(zip(names, gradients, strict=True))


def _has_control_flow(module: fx.GraphModule) -> bool:
    """Whether `module` or a graph that it calls has some."""
    for node in module.graph.find_nodes(op="get_attr"):
        body = getattr(module, str(node.target), None)
        if isinstance(body, fx.GraphModule) and (any(map(_compares, node.users)) or _has_control_flow(body)):
            return True
    return False


def _compares(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target._name in _COMPARING


def _bodies(module: fx.GraphModule, node: fx.Node) -> Iterator[fx.GraphModule]:
    """The graphs that `node`, a higher-order operator, calls."""
    for read in node.all_input_nodes:
        child = getattr(module, str(read.target), None) if read.op == "get_attr" else None
        if isinstance(child, fx.GraphModule):
            yield child
