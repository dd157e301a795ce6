"""Plan: everything about one site that can fail, decided before the graph is touched.

    Site ──▶ operands as fake tensors ──▶ kernel ──▶ results as fake tensors ──▶ Planned
                                            │                 │
                                            └── Unplannable ──┘   a sentence for the report

The nodes a rewrite will insert are evaluated here on fake tensors, so `rewrite.py` only edits, and a site is
rewritten whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx
from torch._C._functorch import is_batchedtensor, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusion_pass.config import FusionConfig
from fusion_pass.errors import FusionError
from fusion_pass.graph.fake_mode import evaluating
from fusion_pass.graph.gradients import GRAD_MODE, Stops
from fusion_pass.graph.repeats import facts
from fusion_pass.graph.site import Call, Literal, Operand, Output, Site, Step, changed
from fusion_pass.graph.vocabulary import fake, fake_tensor, operation, reads_no_numbers, reordered_axes
from fusion_pass.graph.writes import written_arguments
from fusion_pass.kernels import registry
from fusion_pass.layout import first_layout_reader, returned_detached, same_layout, same_size, steps_to_layout

OUTSIDE_KERNEL = "custom"
"""What a report names as the kernel of an operator that the kernel registry does not know (a third party's)."""


class Unplannable(Exception):
    """Why a site cannot be rewritten, as the sentence a user will read."""


@dataclass(frozen=True)
class Moved:
    """A node seen through steps, with the fake value after each step."""

    node: fx.Node
    steps: tuple[Step, ...]
    values: tuple[torch.Tensor, ...]
    """`values[0]` is the node's own value, `values[i]` the one after `steps[i - 1]`."""

    @property
    def value(self) -> torch.Tensor:
        """The value the operator sees."""
        return self.values[-1]


@dataclass(frozen=True)
class Result:
    """Result `index` of the call, moved by `steps`, takes the place of `replaces`. `values` as in `Moved`."""

    replaces: fx.Node
    index: int
    steps: tuple[Step, ...]
    values: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Planned:
    """A site that can be rewritten: what to insert, after which node, and which kernel will run."""

    site: Site
    target: torch._ops.OpOverload
    tensors: Mapping[str, Moved]
    options: Mapping[str, Literal]
    kernel: str
    value: Any
    """The call's fake result: a tensor or a tuple of tensors."""
    results: tuple[Result, ...]
    after: fx.Node


class Repeats:
    """Plans made for one graph, so that a site like an earlier one, in the next layer, is not evaluated again.

    A repeated plan shares the fake values *between* the nodes it inserts with the earlier one. The values that others
    read, those of the results, are always its own.
    """

    def __init__(self) -> None:
        self._plans: dict[object, Planned] = {}

    def plan(
        self, site: Site, operands: Mapping[str, Operand], options: Mapping[str, Literal], after: fx.Node
    ) -> Planned | None:
        """The plan of an earlier site, moved to this one, if what was evaluated for it is the same here."""
        earlier = self._plans.get(_signature(site, operands, options))
        if earlier is None:
            return None
        tensors = {
            name: Moved(operand.node, operand.steps, (fake(operand.node), *earlier.tensors[name].values[1:]))
            for name, operand in operands.items()
        }
        results = tuple(
            Result(output.node, result.index, result.steps, (*result.values[:-1], fake(output.node)))
            for output, result in zip(site.outputs, earlier.results, strict=True)
        )
        return changed(earlier, site=site, tensors=tensors, results=results, after=after)

    def keep(self, plan: Planned, operands: Mapping[str, Operand], options: Mapping[str, Literal]) -> None:
        """Remember `plan`, unless it depends on who reads its results (see `layout.py`) and not on its signature
        alone."""
        if all(same_layout(result.values[-1], fake(result.replaces)) for result in plan.results):
            self._plans[_signature(plan.site, operands, options)] = plan


def _signature(site: Site, operands: Mapping[str, Operand], options: Mapping[str, Literal]) -> object:
    """Everything that the evaluation of a site depends on."""

    def described(place: Operand | Output) -> tuple[object, ...]:
        value = fake(place.node)
        return place.steps, facts(value), value.requires_grad

    return (
        site.call.namespace,
        site.call.name,
        tuple([(name, type(o), tuple(o) if isinstance(o, list) else o) for name, o in options.items()]),
        tuple([(name, *described(operand)) for name, operand in operands.items()]),
        tuple([(output.index, *described(output), returned_detached(output.node)) for output in site.outputs]),
    )


def plan_site(
    site: Site, config: FusionConfig, renamed: Mapping[fx.Node, fx.Node], repeats: Repeats, stops: Stops
) -> Planned:
    """The plan of `site`, or `Unplannable`. `renamed` maps nodes that earlier rewrites replaced to their replacements;
    `stops` are those of the graph before all rewrites.

    Raises `FusionError` when `config.kernels` names kernels and none of them can serve the site.
    """
    operands = {name: _direct(_current(operand, renamed)) for name, operand in site.call.tensors.items() if operand}
    for node in (*(operand.node for operand in operands.values()), *(output.node for output in site.outputs)):
        if node._erased:
            raise Unplannable(f"{node.name!r}, which the call needs, became part of another fusion.")
        if not isinstance(fake(node), FakeTensor):
            raise Unplannable(_why_not_evaluated(node))
    _check_single_reader(site)
    nodes = [operand.node for operand in operands.values()]
    after = _insertion_point(site, nodes)
    if (reason := stops.reason(site.region, nodes, after)) is not None:
        raise Unplannable(f"The gradients of the call would not be those of the model: {reason}")
    options = {name: _literal(site, name, option) for name, option in site.call.options.items()}
    plan = repeats.plan(site, operands, options, after)
    if plan is None:
        plan = _evaluated(site, operands, options, config, after)
        repeats.keep(plan, operands, options)
    return plan


def _why_not_evaluated(node: fx.Node) -> str:
    """Why a call that reads or replaces `node` cannot be evaluated on fake tensors."""
    value = fake(node)
    if isinstance(value, torch.Tensor) and is_functorch_wrapped_tensor(value):
        if is_batchedtensor(value):
            return f"{node.name!r} is inside torch.func.vmap, for which the operators have no batching rule."
        return (
            f"{node.name!r} is inside torch.func.grad, vjp or jvp, which the operators are not made for; "
            "backward() through the compiled function is fused."
        )
    if isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value):
        return f"{node.name!r} is a {type(value).__name__}, a tensor made of others, which the operators do not take."
    return f"The graph carries no shape information (no fake value) for {node.name!r}."


def _evaluated(
    site: Site,
    operands: Mapping[str, Operand],
    options: Mapping[str, Literal],
    config: FusionConfig,
    after: fx.Node,
) -> Planned:
    target = _overload(site.call)
    chosen = dict(options)
    with _evaluating(site):
        tensors = {name: _move(operand) for name, operand in operands.items()}
        if (config.deterministic or torch.are_deterministic_algorithms_enabled()) and _takes(target, "deterministic"):
            chosen["deterministic"] = True
        kernel = _choose_kernel(site, target, tensors, chosen, config)
        if kernel != OUTSIDE_KERNEL:
            chosen["backend"] = kernel
        value = target(**{name: moved.value for name, moved in tensors.items()}, **chosen)
        results = tuple(_result(site, output, value) for output in site.outputs)
    return Planned(site, target, tensors, chosen, kernel, value, results, after)


def _overload(call: Call) -> torch._ops.OpOverload:
    if call.namespace == "fusion_pass":
        import fusion_pass.kernels  # registers the operators  # noqa: F401
    packet = getattr(getattr(torch.ops, call.namespace), call.name, None)
    if packet is None or not hasattr(packet, "default"):
        raise Unplannable(f"The operator {call.namespace}::{call.name} is not registered.")
    overload = packet.default
    assert isinstance(overload, torch._ops.OpOverload)
    return overload


def _takes(target: torch._ops.OpOverload, argument: str) -> bool:
    return any(a.name == argument for a in target._schema.arguments)


def _current(operand: Operand, renamed: Mapping[fx.Node, fx.Node]) -> Operand:
    node = operand.node
    if node not in renamed:
        return operand
    while node in renamed:
        node = renamed[node]
    return Operand(node, operand.steps)


def _direct(operand: Operand) -> Operand:
    """`operand` without a transposition that its first step takes back, as between a site and the next one: both the
    transposition and what it is taken back to are views, so they hold the same numbers at any time."""
    while operand.steps and _takes_back(operand.steps[0], operand.node):
        operand = Operand(cast(fx.Node, operand.node.args[0]), operand.steps[1:])
    return operand


def _takes_back(step: Step, node: fx.Node) -> bool:
    if operation(node) not in ("transpose", "permute") or node.kwargs or fake_tensor(node.args[0]) is None:
        return False
    rank = fake(node).dim()
    there, back = reordered_axes(operation(node), node.args[1:], rank), reordered_axes(step.method, step.args, rank)
    return there is not None and back is not None and [there[axis] for axis in back] == list(range(rank))


def _check_single_reader(site: Site) -> None:
    """A value that the fused call does not produce must have no reader outside the site."""
    replaced = {output.node for output in site.outputs}
    inside = site.region | replaced
    for node in site.region - replaced:
        reader = next((user for user in node.users if user not in inside and not reads_no_numbers(user, node)), None)
        if reader is not None:
            raise Unplannable(
                f"{node.name!r} is computed inside the site and also read outside it, by {reader.name!r}."
            )


def _insertion_point(site: Site, operands: list[fx.Node]) -> fx.Node:
    """The node after which the call goes: behind all it reads, before every reader of what it replaces.

    Normally the anchor. When a result is read before the anchor (q is used before k is finished), the call moves up
    to that reader, provided nothing writes to memory on the way.
    """
    replaced = {output.node for output in site.outputs}
    readers = [user for node in replaced for user in node.users if user not in site.region and user not in replaced]
    after = site.anchor
    if readers and min(readers) < after:
        after = min(readers).prev
        if any(written_arguments(node) and node not in site.region for node in _between(after, site.anchor)):
            raise Unplannable(
                f"{min(readers).name!r} reads a result before the site ends, and memory is written in between."
            )
    late = [node for node in operands if after < node]
    if late:
        raise Unplannable(
            f"{late[0].name!r}, which the call reads, is computed only after a result of the site is read."
        )
    first = min(replaced | {after})
    if any(node.target in GRAD_MODE for node in _between(first, max(replaced | {after}))):
        raise Unplannable("The grad mode changes inside the site.")
    return after


def _between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    """The nodes behind `first` up to and including `last`."""
    node = first
    while node is not last:
        node = node.next
        yield node


@contextmanager
def _evaluating(site: Site) -> Iterator[None]:
    """Evaluate on fake tensors, without building an autograd graph; any failure makes the site unplannable."""
    try:
        # The mode of the graph's own values: while a backend runs, the current tracing context has another one already.
        with evaluating(fake(site.outputs[0].node).fake_mode), torch.no_grad():
            yield
    except (Unplannable, FusionError):
        raise
    except Exception as error:
        message = str(error).strip().split("\n")[0] or type(error).__name__
        raise Unplannable(f"{site.call.name} does not take these arguments: {message}") from error


def _move(operand: Operand) -> Moved:
    return Moved(operand.node, operand.steps, _through(operand.steps, fake(operand.node)))


def _through(steps: tuple[Step, ...], value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    values = [value]
    for step in steps:
        values.append(getattr(values[-1], step.method)(*step.args))
    return tuple(values)


def _literal(site: Site, name: str, option: Literal | fx.Node) -> Literal:
    """A scalar the graph computes becomes its value, guarded: another value at run time recompiles.

    Under `dynamic=True` Dynamo turns a float attribute of a module (eps) into a graph input read by `.item()`. A
    symbolic eps would reach every kernel as a run-time argument and has no benefit; `float()` of the symbolic value
    records the guard.
    """
    if not isinstance(option, fx.Node):
        return option
    value = fake(option)
    try:
        if isinstance(value, torch.SymFloat | float):
            return float(value)
        if isinstance(value, torch.SymInt | int):
            return int(value)
    except GuardOnDataDependentSymNode:
        pass
    raise Unplannable(f"{name} of {site.call.name} is {option.name!r}, which is known only at run time.")


def _choose_kernel(
    site: Site,
    target: torch._ops.OpOverload,
    tensors: Mapping[str, Moved],
    options: Mapping[str, Literal],
    config: FusionConfig,
) -> str:
    if not _takes(target, "backend"):
        return OUTSIDE_KERNEL
    present = {name: moved.value for name, moved in tensors.items()}
    request = registry.Request(
        op=site.call.name,
        device=next(iter(present.values())).device,
        dtypes={name: value.dtype for name, value in present.items()},
        shapes={name: tuple(_known_size(size) for size in value.shape) for name, value in present.items()},
        options=options,
        training=any(fake(output.node).requires_grad for output in site.outputs),
    )
    choice = registry.choose(request, allow_reference=config.allow_reference, only=config.kernels)
    if choice.kernel is not None:
        return choice.kernel.name
    if config.kernels is not None:
        asked = ", ".join(config.kernels)
        raise FusionError(
            f"kernels={asked} was asked for, but cannot serve {site.fusion} of {site.layer!r}: {choice.sentence()}"
        )
    raise Unplannable(f"No kernel for {request.device.type}: {choice.sentence()}")


def _known_size(size: int | torch.SymInt) -> int | None:
    return size if isinstance(size, int) else None


def _result(site: Site, output: Output, value: Any) -> Result:
    fresh = value if isinstance(value, torch.Tensor) else value[output.index]
    values = _through(output.steps, fresh)
    original = fake(output.node)
    got = values[-1]
    for what in ("dtype", "device"):
        if getattr(got, what) != getattr(original, what):
            raise Unplannable(
                f"{output.node.name!r} has {what} {getattr(original, what)}, the call gives {getattr(got, what)}."
            )
    if not same_size(got, original):
        raise Unplannable(f"{output.node.name!r} has shape {list(original.shape)}, the call gives {list(got.shape)}.")
    steps = output.steps
    if not same_layout(got, original) and (reader := first_layout_reader(output.node, got, site.region)) is not None:
        extra = steps_to_layout(original)
        if extra is None:
            raise Unplannable(
                f"{reader.name!r} depends on the strides of {output.node.name!r}, which the call cannot give."
            )
        steps, values = (*steps, *extra), (*values, *_through(extra, got)[1:])
    if steps and returned_detached(output.node):
        steps, values = (*steps, Step("clone")), (*values, values[-1].clone())
    if not original.requires_grad and any(fake(o.node).requires_grad for o in site.outputs):
        # All results of a call have a gradient if one has: a q whose weights are frozen, of a call that rotates k too.
        steps, values = (*steps, Step("detach")), (*values, values[-1].detach())
    for given in values:  # any of them may become the operand of another site
        given.requires_grad_(original.requires_grad)
    return Result(output.node, output.index, steps, values)
