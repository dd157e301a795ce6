"""Small random changes of a captured graph, the kind a wrong matcher would not notice."""

from __future__ import annotations

import copy
import operator
import random

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

_SWAPS = {
    operator.add: (operator.sub, operator.mul),
    operator.sub: (operator.add,),
    operator.mul: (operator.add, operator.truediv),
    torch.rsqrt: (torch.sqrt, torch.reciprocal),
}


def mutated(module: fx.GraphModule, seed: int) -> fx.GraphModule | None:
    """A copy of `module` with one to three changes and fresh fake values; None if the changes do not fit together."""
    rng = random.Random(seed)
    module = copy.deepcopy(module)
    graph = module.graph
    for _ in range(rng.choice((1, 1, 2, 3))):
        nodes = [n for n in graph.nodes if n.op in ("call_function", "call_method") and "scaled_dot" not in n.name]
        _MUTATIONS[rng.randrange(len(_MUTATIONS))](graph, rng.choice(nodes), rng)
    try:
        graph.lint()
        _propagate(module)
    except Exception:
        return None
    module.recompile()
    return module


def _swap_operation(graph: fx.Graph, node: fx.Node, rng: random.Random) -> None:
    if node.target in _SWAPS:
        node.target = rng.choice(_SWAPS[node.target])


def _swap_arguments(graph: fx.Graph, node: fx.Node, rng: random.Random) -> None:
    if len(node.args) > 1 and isinstance(node.args[1], fx.Node):
        node.args = (node.args[1], node.args[0], *node.args[2:])


def _other_argument(graph: fx.Graph, node: fx.Node, rng: random.Random) -> None:
    for argument in node.all_input_nodes:
        value = argument.meta.get("example_value")
        if not isinstance(value, torch.Tensor):
            continue
        earlier = []
        for other in graph.nodes:
            if other is node:
                break
            fake = other.meta.get("example_value")
            if (
                other is not argument
                and isinstance(fake, torch.Tensor)
                and fake.shape == value.shape
                and fake.dtype == value.dtype
            ):
                earlier.append(other)
        if earlier and rng.random() < 0.7:
            node.replace_input_with(argument, rng.choice(earlier))
            return


def _change_number(graph: fx.Graph, node: fx.Node, rng: random.Random) -> None:
    def change(a: object) -> object:
        if isinstance(a, slice):
            return slice(*(change(x) for x in (a.start, a.stop, a.step)))
        if isinstance(a, bool) or rng.random() < 0.5:
            return a
        if isinstance(a, int):
            return a + rng.choice((-1, 1, 4, -4))
        return a * rng.choice((10.0, 0.5, -1.0)) if isinstance(a, float) else a

    node.args = fx.node.map_aggregate(node.args, change)


def _write(graph: fx.Graph, node: fx.Node, rng: random.Random) -> None:
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dim() < 2:
        return
    later = [n for n in graph.nodes if n > node and n.op != "output"]
    place = rng.choice([node, *later[:40]])
    with graph.inserting_after(place):
        kind = rng.randrange(3)
        if kind == 0:
            graph.call_method("mul_", (node, 1.5))
        elif kind == 1:
            graph.call_function(operator.setitem, (node, (Ellipsis, slice(None, rng.choice((1, 3)))), 0.25))
        else:
            graph.call_function(operator.setitem, (node, (slice(None), slice(0, 1)), 0.25))


def _insert(graph: fx.Graph, node: fx.Node, rng: random.Random) -> None:
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.dim():
        return
    with graph.inserting_after(node):
        new = rng.choice(
            (
                lambda: graph.call_method("roll", (node, 1, rng.randrange(value.dim()))),
                lambda: graph.call_method("flip", (node, (rng.randrange(value.dim()),))),
                lambda: graph.call_function(torch.clamp, (node, -0.5, 0.5)),
                lambda: graph.call_function(operator.mul, (node, -1.0)),
                lambda: graph.call_function(operator.mul, (node, node)),
                lambda: graph.call_function(operator.add, (node, 1e-3)),
                lambda: graph.call_method("abs", (node,)),
                lambda: graph.call_method("clone", (node,)),
            )
        )()
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


_MUTATIONS = (_swap_operation, _swap_arguments, _other_argument, _other_argument, _change_number, _write, _insert)


def _propagate(module: fx.GraphModule) -> None:
    """Fake values anew, so that shapes, dtypes and shared memory are those of the changed graph."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        env: dict[fx.Node, object] = {}
        for node in module.graph.nodes:
            if node.op == "placeholder":
                old = node.meta["example_value"]
                env[node] = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype)
            elif node.op == "output":
                continue
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
                function = node.target if node.op == "call_function" else getattr(args[0], node.target)
                env[node] = function(*(args if node.op == "call_function" else args[1:]), **kwargs)
            node.meta["example_value"] = env[node]
        del mode
