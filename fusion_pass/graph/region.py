"""Neighbourhoods in a graph: what lies between two nodes, and what such a region reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import fx

from .effects import Effects
from .evaluate import Study
from .operations import HANDLERS
from .vocabulary import CALLS, fake_tensor, operation
from .writes import written_arguments


def modelled(node: fx.Node) -> bool:
    """Whether the reader knows what `node` does (otherwise a region ends there)."""
    if node.op not in CALLS:
        return False
    return operation(node) in HANDLERS or bool(written_arguments(node))


def inputs(effects: Effects, node: fx.Node) -> list[fx.Node]:
    """What `node` reads: its arguments, and the writes it sees through them."""
    found = dict.fromkeys(node.all_input_nodes)
    for argument in node.all_input_nodes:
        for write in effects.writes(argument):
            if effects.order[argument] < effects.order[write] < effects.order[node]:
                found.setdefault(write)
    return list(found)


def upstream(
    effects: Effects, node: fx.Node, through: Callable[[fx.Node], bool] = modelled, limit: int = 80
) -> Iterator[fx.Node]:
    """Nodes `node` is computed from by operations that `through` accepts, and those where that ends, latest first."""
    queue, seen = [node], {node}
    while queue and len(seen) < limit:
        queue.sort(key=effects.order.__getitem__)
        current = queue.pop()
        if current is not node:
            yield current
        if current is node or through(current):
            for parent in inputs(effects, current):
                if parent not in seen:
                    seen.add(parent)
                    queue.append(parent)


def downstream(node: fx.Node, limit: int, through: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Readers of `node` and of what they compute, as far as `through` lets, in breadth-first order."""
    found: dict[fx.Node, None] = {}
    queue = [node]
    while queue and len(found) < limit:
        for user in queue.pop(0).users:
            if user not in found:
                found[user] = None
                if through(user):
                    queue.append(user)
    return list(found)


def between(study: Study, end: fx.Node) -> frozenset[fx.Node]:
    """Every node through which `end` depends on the studied node, `end` included."""
    found: set[fx.Node] = set()
    queue = [end]
    while queue:
        node = queue.pop()
        if node in found or node is study.node or study.effects.order[node] <= study.start:
            continue
        dependent = study.depends(node) or any(study.depends(n) for n in inputs(study.effects, node))
        if dependent:
            found.add(node)
            queue += inputs(study.effects, node)
    return frozenset(found)


def frontier(effects: Effects, region: frozenset[fx.Node], start: fx.Node) -> list[fx.Node]:
    """What `region` reads that is neither in it nor `start`, latest first."""
    read = {n for node in region for n in node.all_input_nodes if n not in region and n is not start}
    return sorted((n for n in read if fake_tensor(n) is not None), key=effects.order.__getitem__, reverse=True)
