"""Rewrite: the only step that changes a graph. A `Planned` site has been checked and evaluated already; this file
only edits."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, cast

from torch import fx

from fusion_pass.graph.gradients import GRAD_MODE
from fusion_pass.graph.site import Step
from fusion_pass.graph.vocabulary import fake, operation
from fusion_pass.graph.writes import written_arguments
from fusion_pass.plan import Moved, Planned


class Views(dict[tuple[fx.Node, Step, int], fx.Node]):
    """Views of operands that were put into one graph, by what they are views of and where. The next site that reads the
    same tables takes them as they are, unless the grad mode changes in between: a view made under `no_grad` passes no
    gradient on."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__()
        self._changes = [node for mode in GRAD_MODE for node in graph.find_nodes(op="call_function", target=mode)]

    def part(self, node: fx.Node) -> int:
        """How many changes of the grad mode stand before what comes behind `node`."""
        return sum(not node < change for change in self._changes)


_VIEWS = frozenset("transpose permute unflatten unsqueeze squeeze select narrow".split())

_INHERITED_META = ("nn_module_stack", "source_fn_stack", "stack_trace", "fwd_nn_module_stack", "custom")
"""What a new node takes over from the site's anchor: where in the user's model it stands."""


def apply(plan: Planned, views: Views) -> dict[fx.Node, fx.Node]:
    """Put the planned call into its graph and take the site's nodes out. Returns which node replaces which."""
    with plan.site.anchor.graph.inserting_before(plan.after.next):
        replaced = _insert(plan, _Editor(plan, views))
    for result in plan.results:
        node = replaced[result.replaces]
        result.replaces.replace_all_uses_with(node, delete_user_cb=lambda user: user not in plan.site.region)
        assert all(node < user for user in node.users), f"{node.name} is read before it is computed"
    _erase_dead([*plan.site.region, *replaced])
    return replaced


def _insert(plan: Planned, editor: _Editor) -> dict[fx.Node, fx.Node]:
    tensors = {name: editor.operand(moved) for name, moved in plan.tensors.items()}
    options = {name: value for name, value in plan.options.items() if value is not None}
    call = editor.place("call_function", plan.target, plan.value)
    call.kwargs = {**tensors, **options}
    assert all(node < call for node in tensors.values()), f"{call.name} reads what is computed only later"
    replaced = {}
    for result in plan.results:
        node = call
        if isinstance(plan.value, tuple):
            node = editor.place("call_function", operator.getitem, result.values[0])
            node.args = (call, result.index)
        node = editor.chain(node, result.steps, result.values)
        node.meta[editor.key] = result.values[-1]
        replaced[result.replaces] = node
    return replaced


class _Editor:
    """Makes nodes at the graph's insertion point, each with its fake value and the anchor's provenance."""

    def __init__(self, plan: Planned, views: Views) -> None:
        self.views = views
        self.after = plan.after
        self.part = views.part(plan.after)
        anchor = plan.site.anchor
        self.graph = anchor.graph
        # Where a graph keeps fake values: Dynamo's in `example_value`, an exported one's in `val`.
        self.key = "example_value" if "example_value" in anchor.meta else "val"
        self.meta = {name: anchor.meta[name] for name in _INHERITED_META if name in anchor.meta}

    def place(self, op: str, target: Any, value: Any) -> fx.Node:
        """A node whose arguments the caller sets: given to `create_node` they are walked in search of symbolic sizes,
        which costs more than all the rest and which steps and options never hold."""
        node = self.graph.create_node(op, target, name=target if isinstance(target, str) else target.__name__)
        meta = node.meta
        meta.update(self.meta)
        meta[self.key] = value
        return node

    def operand(self, moved: Moved) -> fx.Node:
        """What the call reads."""
        node = self.first_of_its_kind(moved.node) if moved.steps else moved.node
        for step, value in zip(moved.steps, moved.values[1:], strict=True):
            view = self.views.get((node, step, self.part))
            if view is None or view._erased or self.after < view:
                view = self.chain(node, (step,), (None, value))
                if step.method in _VIEWS:
                    self.views[node, step, self.part] = view
            node = view
        return node

    def first_of_its_kind(self, node: fx.Node) -> fx.Node:
        """For `table.unsqueeze(1)`, which models write once a layer, that of an earlier site: they are views of one
        memory, and then what the operator wants of it is there too."""
        if operation(node) != "unsqueeze" or node.kwargs or len(node.args) != 2:
            return node
        table, axis = node.args
        if not isinstance(table, fx.Node) or type(axis) is not int or any(map(written_arguments, node.users)):
            return node
        place = table, Step("unsqueeze", (axis,)), self.views.part(node)
        first = self.views.get(place)
        if first is None or first._erased or self.after < first:
            self.views[place] = node
            return node
        return first if fake(first).requires_grad == fake(node).requires_grad else node

    def chain(self, node: fx.Node, steps: Iterable[Step], values: Sequence[Any]) -> fx.Node:
        """`node` through `steps`; `values` as in `Moved`."""
        for step, value in zip(steps, values[1:], strict=True):
            moved = self.place("call_method", step.method, value)
            moved.args = (node, *cast(tuple[Any, ...], step.args))
            node = moved
        return node


def _erase_dead(nodes: Iterable[fx.Node]) -> None:
    """Erase those of `nodes` that nobody reads any more, and what only they read, as far as it is free of side effects.

    `Graph.eliminate_dead_code` is not an option: it takes an in-place method call of a Dynamo graph for pure.
    """
    region = set(nodes)
    queue = [node for node in region if not node.users]
    for node in queue:  # grows on the way: what is read by others is looked at when the last of them is gone
        if node._erased or (node not in region and (node.is_impure() or written_arguments(node))):
            continue
        inputs = node.all_input_nodes
        node.graph.erase_node(node)
        queue += [parent for parent in inputs if not parent.users]
