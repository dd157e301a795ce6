"""What a call writes to: the arguments whose memory a node may change.

A schema declares it, or a name (`add_`, `out=`, `+=`). Some writes are declared nowhere: those of `F.embedding` with
`max_norm` are listed here, the graphs that a higher-order operator is given are looked into, and a function of the
user's is tried once (`trial.py`). What is not known is taken to write to all that it reads.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from . import trial
from .vocabulary import CALLS, arithmetic_in_place, canonical_name, fake, is_of_a_user, memory_of, operation

_OTHER_IN_PLACE = frozenset(
    getattr(operator, name) for name in "ifloordiv imod iand ior ixor ilshift irshift imatmul delitem".split()
)

_OTHER_IN_PLACE_METHODS = frozenset(f"__{function.__name__}__" for function in _OTHER_IN_PLACE)

_UNDECLARED_WRITES: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "embedding": ("max_norm", ("weight",)),
    "embedding_bag": ("max_norm", ("weight", "input")),  # which it exchanges when they come in the old order
    "batch_norm": ("training", ("running_mean", "running_var")),
    "native_batch_norm": ("training", ("running_mean", "running_var")),
    "cudnn_batch_norm": ("training", ("running_mean", "running_var")),
    "miopen_batch_norm": ("training", ("running_mean", "running_var")),
    "instance_norm": (None, ("running_mean", "running_var")),
}
"""Writes that neither a name nor a schema tells: the argument that asks for them (None: always), what is written."""

_WRITES_IN_BODIES = frozenset(
    "tag_activation_checkpoint wrap wrap_activation_checkpoint flex_attention flex_attention_backward "
    "autograd_function_apply auto_functionalized auto_functionalized_v2 checkpoint".split()
)
"""Operators that write what the graphs write that they are given. Others may write all they read."""


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The argument nodes whose memory `node` may write."""
    op, target = node.op, node.target
    if op not in CALLS:
        return list(node.all_input_nodes) if op == "call_module" else []
    if op == "call_function" and is_of_a_user(target):
        return _written_when_tried(node)
    kwargs = node.kwargs
    if len(node.args) <= _harmless_arguments(op, target) and not ("out" in kwargs or "inplace" in kwargs):
        return []  # which most calls are
    out, inplace = _given(node, "out"), _given(node, "inplace")
    if out is None and inplace is None and _writes_nothing(op, target):
        return []
    outs = out if isinstance(out, tuple | list) else [out]
    written = [n for n in node.all_input_nodes if n in outs]
    written += _written_undeclared(node)
    if overloads := _overloads(target):
        return written + [n for overload in overloads for n in _written_by_schema(node, overload)]
    if isinstance(target, torch._ops.HigherOrderOperator):
        return _written_in_bodies(node) if target._name in _WRITES_IN_BODIES else list(node.all_input_nodes)
    if _writes_first(op, target) or inplace not in (None, False):
        first = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
        written += [first] if isinstance(first, fx.Node) else list(node.all_input_nodes)
    return written


_tried: WeakKeyDictionary[fx.Node, list[bool]] = WeakKeyDictionary()
"""For each leaf of a call's arguments whether it is written: the call is tried once."""


def _written_when_tried(node: fx.Node) -> list[fx.Node]:
    leaves = tree_leaves((node.args, node.kwargs))
    inputs = node.all_input_nodes
    # Of those in a slice a trial does not tell, and without values there is none.
    if not all(n in leaves for n in inputs) or any(fake(n) is None for n in inputs):
        return list(inputs)
    if node not in _tried or len(_tried[node]) != len(leaves):
        args, kwargs = fx.map_arg((node.args, node.kwargs), fake)
        flags = trial.written(node.target, args, kwargs)  # type: ignore[arg-type]
        _tried[node] = flags if len(flags) == len(leaves) else [True] * len(leaves)
    return [leaf for leaf, writes in zip(leaves, _tried[node], strict=True) if writes and isinstance(leaf, fx.Node)]


def _given(node: fx.Node, name: str) -> Any:
    """The argument `name` of a call, by name or by position: `F.relu(x, True)`."""
    if name in node.kwargs:
        return node.kwargs[name]
    position = _position(node.target, name) if len(node.args) > 1 and node.op == "call_function" else None
    return node.args[position] if position is not None and position < len(node.args) else None


@lru_cache(maxsize=8192)
def _position(target: Any, name: str) -> int | None:
    """Where `target` takes the argument `name` by position; None where it does not."""
    names = _parameters(target)
    return names.index(name) if name in names else None


def _parameters(target: Any) -> list[str]:
    """The arguments that `target` takes by position, as far as anybody asks: those of Python functions, and of the
    operations of `_UNDECLARED_WRITES`."""
    if inspect.isfunction(target):
        return list(inspect.signature(target).parameters)
    name = canonical_name("call_function", target)
    if name not in _UNDECLARED_WRITES:
        return []
    return [a.name for a in getattr(torch.ops.aten, name).default._schema.arguments]


@lru_cache(maxsize=8192)
def _harmless_arguments(op: str, target: Any) -> float:
    """How many positional arguments a call of `target` may have and still write to none of them, given neither `out`
    nor `inplace` by name; negative when it writes in any case."""
    if not _writes_nothing(op, target):
        return -1
    positions = [_position(target, name) for name in ("out", "inplace")] if op == "call_function" else []
    return min((position for position in positions if position is not None), default=math.inf)


@lru_cache(maxsize=8192)
def _writes_nothing(op: str, target: Any) -> bool:
    """Whether no call of `target` without `out` and `inplace` writes to an argument, whatever the arguments are."""
    if op == "call_function" and canonical_name(op, target) in _UNDECLARED_WRITES:
        return False
    if overloads := _overloads(target):
        arguments = [a for overload in overloads for a in overload._schema.arguments]
        return not any(a.alias_info is not None and a.alias_info.is_write for a in arguments)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return False
    return not _writes_first(op, target)


def _overloads(target: Any) -> Sequence[torch._ops.OpOverload]:
    """The operators that a call of `target` may run: of a packet (`torch.ops.library.name`) any of its overloads."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, name) for name in target.overloads()]  # type: ignore[no-untyped-call]
    return [target] if isinstance(target, torch._ops.OpOverload) else []


def _writes_first(op: str, target: Any) -> bool:
    """Whether `target`, a function or the name of a method, is one that writes its first argument."""
    name = canonical_name(op, target)
    return (
        name in ("setitem", "__setitem__", "copy_")
        or name in _OTHER_IN_PLACE_METHODS
        or arithmetic_in_place(op, target) is not None
        or target in _OTHER_IN_PLACE
    )


def _written_undeclared(node: fx.Node) -> list[fx.Node]:
    asks, names = _UNDECLARED_WRITES.get(operation(node), (None, ()))
    if asks is not None and any(_given(node, asks) is no for no in (None, False)):
        return []
    return [value for name in names if isinstance(value := _given(node, name), fx.Node)]


def _written_by_schema(node: fx.Node, target: torch._ops.OpOverload) -> list[fx.Node]:
    written = []
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            values = value if isinstance(value, tuple | list) else [value]
            written += [v for v in values if isinstance(v, fx.Node)]
    return written


def _written_in_bodies(node: fx.Node) -> list[fx.Node]:
    """What the graphs write that `node`, as activation checkpointing, is given and calls with the rest."""
    bodies = [n for n in node.all_input_nodes if n.op == "get_attr" and fake(n) is None]
    inputs = [n for n in node.all_input_nodes if n not in bodies]
    graphs = [module.graph for module in map(_module, bodies) if module is not None]
    if len(graphs) < len(bodies):
        return inputs  # what cannot be looked into may write all
    written = [n for graph in graphs for call in graph.nodes for n in written_arguments(call)]
    if not written:
        return []
    memory = {memory_of(n) for n in written}
    places = [n for graph in graphs for n in graph.nodes if n.op == "placeholder"]
    if None in memory or len(graphs) != 1 or len(places) != len(node.args) - 1:
        return inputs
    given = zip(node.args[1:], places, strict=True)
    return [n for n, place in given if isinstance(n, fx.Node) and memory_of(place) in memory]


def _module(node: fx.Node) -> fx.GraphModule | None:
    """The graph that a `get_attr` node stands for."""
    module: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        module = getattr(module, name, None)
    return module if isinstance(module, fx.GraphModule) else None
