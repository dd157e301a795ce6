"""Where gradients stop: at `detach`, and in what is computed under `no_grad` or `inference_mode`.

Autograd differentiates a fused call as a whole: each operand that requires a gradient gets the gradient of all that the
call computes. In the model a part of that may have none:

    x * rsqrt(mean(x.detach()^2) + eps)        the norm's factor counts as a constant
    rotate(x, cos, sin.detach())               so does the sine, where the call reads `sin` itself

The fake values say it: a result that requires no gradient though one of its inputs does is a *stop*. A site is left
alone if a stop lies inside it or between it and an operand, or if it reads something whose gradient no operand takes.
So it is where the graph itself takes gradients (`torch.autograd.grad`, with Dynamo's `trace_autograd_ops`) that can be
differentiated again, which no operator has, or those of what a call reads, on whose strides the graph may count.
The detached maximum of a row that is about to meet its softmax is no stop: there is no gradient that it could stop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from .region import modelled
from .vocabulary import CALLS, CASTS, MOVEMENTS, fake, fake_tensor, in_place, operation, sizes

_ENTER_INFERENCE = torch.autograd.grad_mode._enter_inference_mode
_EXIT_INFERENCE = torch.autograd.grad_mode._exit_inference_mode

GRAD_MODE = frozenset({torch._C._set_grad_enabled, torch.set_grad_enabled, _ENTER_INFERENCE, _EXIT_INFERENCE})
"""What changes the grad mode in a graph."""

_OF_SHAPES = frozenset(
    "zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full".split()
)
"""Results that have no gradient in any mode: they take a tensor for its shape."""


class Stops:
    """The stops of one graph. Valid for the nodes that it had when this was made."""

    def __init__(self, graph: fx.Graph) -> None:
        self._found: set[fx.Node] = set()
        self._off: set[fx.Node] = set()
        self._gradients = graph.find_nodes(op="call_function", target=torch.autograd.grad)
        self._products = {n for n in graph.nodes if operation(n) in ("matmul", "einsum")} if self._gradients else set()
        segments = list(_segments(graph))
        if len(segments) == 1 and not any(map(_detaches, graph.nodes)):
            return  # as in most graphs
        modes = [_begins_enabled(nodes) if enabled is None else enabled for nodes, enabled in segments]
        if not any(modes):
            return
        for (nodes, _), enabled in zip(segments, modes, strict=True):
            stops = (n for n in nodes if (not enabled or _detaches(n)) and _stops(n))
            self._found.update(n for n in stops if not _shifts_rows(n))
            self._off.update(() if enabled else nodes)

    def reason(self, region: frozenset[fx.Node], operands: Collection[fx.Node], after: fx.Node) -> str | None:
        """Why a call of `operands` behind `after` has other gradients than the `region` in whose place it comes; None
        if it has not."""
        if (taken := next((node for node in self._gradients if after < node), None)) is not None:
            inputs, again = _inputs_and_whether_again(*taken.args, **taken.kwargs)
            towards = {n for n in tree_leaves(inputs) if isinstance(n, fx.Node)}
            if again is not False or not all(towards.isdisjoint(_up_to(self._products, n)) for n in operands):
                return f"{taken.name!r} takes, in the graph, a second gradient or that of what the call reads."
        if not self._found:
            return None
        if after in self._off:
            recorded = next((n for n in region - self._off if _requires_grad(n)), None)
            return None if recorded is None else f"{recorded.name!r} has one, and the site ends under no_grad."
        inside = min(self._found.intersection(region), default=None)
        if inside is not None:
            return f"{inside.name!r}, inside the site, stops the gradient."
        ends = frozenset(operands)
        for read in {n for node in region for n in node.all_input_nodes} - region - ends:
            way = list(_up_to(ends, read))
            stop = next((node for node in way if node in self._found and node not in ends), None)
            if stop is not None and not ends.isdisjoint(_up_to((), stop)):
                return f"{stop.name!r}, between the site and what the call reads, stops the gradient."
            if _requires_grad(read) and not any(node in ends and _requires_grad(node) for node in way):
                return f"{read.name!r} requires a gradient that no operand of the call takes."
        return None


def _inputs_and_whether_again(
    outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: Any = None, create_graph: Any = False, **_: Any
) -> tuple[Any, Any]:
    """Of the arguments of `torch.autograd.grad`: what is differentiated by, and `create_graph`."""
    return inputs, create_graph


def _segments(graph: fx.Graph) -> Iterator[tuple[list[fx.Node], bool | None]]:
    """The nodes between two changes of the grad mode, and that mode; None where it is not known."""
    nodes: list[fx.Node] = []
    enabled: bool | None = None
    outside: dict[object, bool | None] = {}  # what the end of an inference mode brings back
    for node in graph.nodes:
        nodes.append(node)
        if node.target not in GRAD_MODE:
            continue
        yield nodes, enabled
        argument = node.args[0] if node.args else None
        if node.target is _EXIT_INFERENCE:
            mode = outside.get(argument)
        else:
            mode = argument if isinstance(argument, bool) else None
        if node.target is _ENTER_INFERENCE:
            outside[node] = enabled
            mode = None if mode is None else not mode
        nodes, enabled = [], mode
    yield nodes, enabled


def _begins_enabled(nodes: Iterable[fx.Node]) -> bool:
    """Whether gradients are recorded where a graph begins: a result that requires one tells. Without any, a result that
    has none of what requires one (in a graph that records, `x.data` and random numbers like x are such too)."""
    calls = [node for node in nodes if node.op in CALLS]
    if any(operation(node) not in MOVEMENTS and _requires_grad(node) for node in calls):
        return True
    return not any(map(_stops, calls))


def _stops(node: fx.Node) -> bool:
    """Whether the result passes no gradient on where none is recorded, and what it is computed from has one.

    The result itself does not say it: a view made under `no_grad` requires a gradient as its base does.
    """
    if node.op not in CALLS:
        return False
    if in_place(node) == "detach":
        return True
    name = operation(node)
    # A second tensor gives a cast its dtype or a view its shape.
    read: Iterable[Any] = node.args[:1] if name in MOVEMENTS | CASTS else node.all_input_nodes
    return name not in _OF_SHAPES and any(
        isinstance(argument, fx.Node) and _requires_grad(argument) for argument in read
    )


def _detaches(node: fx.Node) -> bool:
    return node.op in CALLS and operation(node) in ("detach", "detach_")


def _shifts_rows(node: fx.Node) -> bool:
    """Whether a detached tensor, one number a row, is only taken from rows of which the softmax is taken next: that
    does not see it, so the gradient that is stopped is zero."""
    reader = _only_reader(node)
    if not _detaches(node) or reader is None or operation(reader) != "sub" or reader.args[1:] != (node,):
        return False
    rows, shift = fake_tensor(reader), fake_tensor(node)
    softmax = _only_reader(reader)
    while softmax is not None and operation(softmax) in CASTS:
        softmax = _only_reader(softmax)
    if softmax is None or rows is None or shift is None or operation(softmax) not in ("softmax", "_softmax"):
        return False
    dim = softmax.args[1] if len(softmax.args) > 1 else softmax.kwargs.get("dim")
    if not isinstance(dim, int):
        return False
    from_the_right = rows.dim() - dim % rows.dim()
    return from_the_right > shift.dim() or sizes(shift)[-from_the_right] == 1


def _only_reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _requires_grad(node: fx.Node) -> bool:
    return any(x.requires_grad for x in _tensors(node))


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    value = fake(node)
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)] if isinstance(value, tuple | list) else []


def _up_to(ends: Collection[fx.Node], node: fx.Node) -> Iterator[fx.Node]:
    """`node` and what it is computed from by modelled operations, not beyond `ends`."""
    queue, seen = [node], {node}
    for current in queue:
        yield current
        if current not in ends and modelled(current):
            fresh = [n for n in current.all_input_nodes if n not in seen]
            seen.update(fresh)
            queue += fresh
