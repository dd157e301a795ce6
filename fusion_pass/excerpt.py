"""Cut one planned site out of its graph: two small modules with the same inputs, the graph as written and the call
that replaces it.

What becomes an input. The activations of the call are cut where they enter: a site is right for any value there.
Everything else that the site reads (tables, positions, masks) may be tied to what the call reads, such as a
half-width cos to the full-width one made of it; it is computed from the graph's own inputs in both modules.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fusion_pass.graph.vocabulary import CALLS, fake
from fusion_pass.graph.writes import written_arguments
from fusion_pass.plan import OUTSIDE_KERNEL, Planned

ACTIVATIONS = frozenset({"q", "k", "v", "x", "qkv"})

_VIEWS = frozenset(
    "view reshape transpose permute unflatten flatten unsqueeze squeeze swapaxes contiguous "
    "chunk split unbind narrow select getitem __getitem__".split()
)


@dataclass(frozen=True)
class Excerpt:
    """`before(*inputs)` and `after(*inputs)` must agree. `inputs` are the fake values the real ones are modelled on."""

    before: fx.GraphModule
    after: fx.GraphModule
    names: tuple[str, ...]
    inputs: tuple[torch.Tensor, ...]
    differentiable: tuple[bool, ...]
    """Which inputs' gradients are to agree."""


def excerpt(plan: Planned) -> Excerpt:
    """The excerpt of a site that has not been rewritten yet."""
    cuts = _cuts(plan)
    wanted = [result.replaces for result in plan.results]
    read = [moved.node for moved in plan.tensors.values()]
    order = {node: index for index, node in enumerate(plan.site.anchor.graph.nodes)}
    before_nodes = sorted(_upstream(wanted, cuts), key=order.__getitem__)
    after_nodes = sorted(_upstream(read, cuts), key=order.__getitem__)
    leaves = [node for node in sorted({*before_nodes, *after_nodes}, key=order.__getitem__) if _is_leaf(node, cuts)]
    before = _module(leaves, before_nodes, lambda env, graph: [env[node] for node in wanted])
    after = _module(leaves, after_nodes, lambda env, graph: _emit(plan, env, graph))
    values = tuple(fake(node) for node in leaves)
    differentiable = tuple(
        value.is_floating_point() and value.requires_grad and (node in cuts or node in read)
        for node, value in zip(leaves, values, strict=True)
    )
    return Excerpt(before, after, tuple(node.name for node in leaves), values, differentiable)


def _cuts(plan: Planned) -> frozenset[fx.Node]:
    """The nodes to cut at: the producers of the activations, above the views that lead to the call."""
    own = plan.kernel != OUTSIDE_KERNEL
    return frozenset(_root(moved.node) for name, moved in plan.tensors.items() if not own or name in ACTIVATIONS)


def _root(node: fx.Node) -> fx.Node:
    while node.op in CALLS and _name(node) in _VIEWS and isinstance(node.args[0], fx.Node):
        parent = node.args[0]
        if not isinstance(fake(parent), torch.Tensor) and _name(parent) not in _VIEWS:
            break  # one of several results, such as that of another fused call
        node = parent
    return node


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", "")).split(".")[0]


def _is_leaf(node: fx.Node, cuts: frozenset[fx.Node]) -> bool:
    return node in cuts or node.op in ("placeholder", "get_attr")


def _upstream(nodes: Iterable[fx.Node], cuts: frozenset[fx.Node]) -> set[fx.Node]:
    """All that `nodes` are computed from, up to the leaves, with the writes to memory on the way."""
    found: set[fx.Node] = set()
    queue = list(nodes)
    last = max(queue)
    while queue:
        node = queue.pop()
        if node in found or _scalar(node) is not None:
            continue
        found.add(node)
        if _is_leaf(node, cuts):
            continue
        queue.extend(node.all_input_nodes)
        queue.extend(user for user in node.users if user < last and node in written_arguments(user))
    return found


def _scalar(node: fx.Node) -> int | float | None:
    """The value of a node that holds a number: at compile time the hint of its symbol."""
    value = fake(node)
    if isinstance(value, torch.SymInt | torch.SymFloat):
        return value.node.hint  # type: ignore[no-any-return]
    return value if isinstance(value, int | float) else None


def _module(leaves: list[fx.Node], nodes: list[fx.Node], outputs: Any) -> fx.GraphModule:
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {leaf: graph.placeholder(leaf.name) for leaf in leaves}

    def load(node: fx.Node) -> Any:
        return env[node] if node in env else _scalar(node)

    for node in nodes:
        if node in env:
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), load)
        env[node] = graph.create_node(node.op, node.target, args, kwargs, node.name)
    graph.output(tuple(outputs(env, graph)))
    return fx.GraphModule({}, graph)


def _emit(plan: Planned, env: dict[fx.Node, Any], graph: fx.Graph) -> list[fx.Node]:
    def chain(node: fx.Node, steps: Any) -> fx.Node:
        for step in steps:
            node = graph.call_method(step.method, (node, *step.args))
        return node

    tensors: dict[str, Any] = {name: chain(env[moved.node], moved.steps) for name, moved in plan.tensors.items()}
    options = {name: value for name, value in plan.options.items() if value is not None}
    call = graph.call_function(plan.target, (), {**tensors, **options})
    results = []
    for result in plan.results:
        node = graph.call_function(operator.getitem, (call, result.index)) if isinstance(plan.value, tuple) else call
        results.append(chain(node, result.steps))
    return results
