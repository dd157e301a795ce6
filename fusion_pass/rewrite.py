"""Rewrite: the only step that changes a graph. A `Planned` site has been checked and evaluated already; this file
only edits."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, cast

from torch import fx

from fusion_pass.graph.site import Step
from fusion_pass.graph.vocabulary import written_arguments
from fusion_pass.plan import Moved, Planned

_INHERITED_META = ("nn_module_stack", "source_fn_stack", "stack_trace", "fwd_nn_module_stack", "custom")
"""What a new node takes over from the site's anchor: where in the user's model it stands."""


def apply(plan: Planned) -> dict[fx.Node, fx.Node]:
    """Put the planned call into its graph and take the site's nodes out. Returns which node replaces which."""
    editor = _Editor(plan)
    arguments: dict[str, Any] = {name: editor.moved(moved) for name, moved in plan.tensors.items()}
    arguments.update({name: value for name, value in plan.options.items() if value is not None})
    call = editor.function(plan.target, (), arguments, plan.value)
    replaced = {}
    for result in plan.results:
        node = call
        if isinstance(plan.value, tuple):
            node = editor.function(operator.getitem, (call, result.index), {}, result.values[0])
        node = editor.chain(node, result.steps, result.values)
        node.meta[editor.key] = result.values[-1]
        result.replaces.replace_all_uses_with(node, delete_user_cb=lambda user: user not in plan.site.region)
        replaced[result.replaces] = node
    _erase_dead([*plan.site.region, *replaced])
    return replaced


class _Editor:
    """Inserts nodes one behind the other, each with its fake value and the anchor's provenance."""

    def __init__(self, plan: Planned) -> None:
        self.graph = plan.site.anchor.graph
        self.last = plan.after
        # Where a graph keeps fake values: Dynamo's in `example_value`, an exported one's in `val`.
        self.key = "example_value" if "example_value" in plan.site.anchor.meta else "val"
        self.meta = {name: plan.site.anchor.meta[name] for name in _INHERITED_META if name in plan.site.anchor.meta}

    def function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> fx.Node:
        with self.graph.inserting_after(self.last):
            return self._placed(self.graph.call_function(target, args, kwargs), value)

    def chain(self, node: fx.Node, steps: Iterable[Step], values: Iterable[Any]) -> fx.Node:
        for step, value in zip(steps, list(values)[1:], strict=True):
            with self.graph.inserting_after(self.last):
                node = self._placed(
                    self.graph.call_method(step.method, (node, *cast(tuple[Any, ...], step.args))), value
                )
        return node

    def moved(self, moved: Moved) -> fx.Node:
        return self.chain(moved.node, moved.steps, moved.values)

    def _placed(self, node: fx.Node, value: Any) -> fx.Node:
        node.meta.update(self.meta)
        node.meta[self.key] = value
        self.last = node
        return node


def _erase_dead(nodes: Iterable[fx.Node]) -> None:
    """Erase those of `nodes` that nobody reads any more, and what only they read, as far as it is free of side effects.

    `Graph.eliminate_dead_code` is not an option: it takes an in-place method call of a Dynamo graph for pure.
    """
    region = set(nodes)
    queue = sorted(region, reverse=True)
    while queue:
        node = queue.pop(0)
        if node.users or node._erased or (node not in region and (node.is_impure() or written_arguments(node))):
            continue
        inputs = node.all_input_nodes
        node.graph.erase_node(node)
        queue.extend(parent for parent in inputs if not parent.users)
