"""One vocabulary for the many spellings of an operation.

`x.view`, `torch.reshape` and `aten._unsafe_view` are all `view`; `operator.mul`, `torch.mul`, `Tensor.mul` and
`aten.mul.Tensor` are all `mul`. Everything above this file speaks of an operation by its canonical name only.
"""

from __future__ import annotations

import inspect
import math
import operator
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import sympy
import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from . import trial

Size: TypeAlias = "int | sympy.Expr"
"""A tensor size: a number, or the symbol's expression in a graph with dynamic shapes. Comparing two of them adds no
guard.
"""

_ALIASES = {
    "_unsafe_view": "view",
    "reshape": "view",
    "view_as": "view",
    "reshape_as": "view",
    "flatten": "view",
    "unflatten": "view",
    "ravel": "view",
    "concat": "cat",
    "concatenate": "cat",
    "true_divide": "div",
    "truediv": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "negative": "neg",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "moveaxis": "movedim",
    "split_with_sizes": "split",
    "broadcast_to": "expand",
    "expand_as": "expand",
    "linalg_vector_norm": "vector_norm",
    "_conj": "conj",
    "conj_physical": "conj",
    "matmul": "matmul",
    "bmm": "matmul",
    "mm": "matmul",
    "__matmul__": "matmul",
    "tile": "repeat",
    "ger": "outer",
    "float_power": "pow",
    "and_": "bitwise_and",  # operator.and_ and operator.or_: the underscore is no mark of writing
    "or_": "bitwise_or",
    "__and__": "bitwise_and",
    "__or__": "bitwise_or",
    "__invert__": "bitwise_not",
    "invert": "bitwise_not",
    "inv": "bitwise_not",
    "not_": "logical_not",
}

CASTS = frozenset(
    "to _to_copy float half bfloat16 double type_as type contiguous clone detach alias cfloat cdouble "
    "convert_element_type lift_fresh_copy checkpoint_name cuda cpu".split()
)
"""Operations that keep every value (up to rounding) and every axis."""

MOVEMENTS = frozenset(
    "view transpose permute t mT numpy_T movedim unsqueeze squeeze getitem split chunk unbind tensor_split "
    "narrow select slice expand".split()
)
"""Operations that only rearrange or select elements of their first argument."""

_IN_PLACE_OPERATORS = {
    operator.iadd: "add",
    operator.isub: "sub",
    operator.imul: "mul",
    operator.itruediv: "div",
    operator.ipow: "pow",
}

_OTHER_IN_PLACE = frozenset(
    getattr(operator, name) for name in "ifloordiv imod iand ior ixor ilshift irshift imatmul delitem".split()
)

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

_IN_PLACE_METHODS = {f"__{function.__name__}__": name for function, name in _IN_PLACE_OPERATORS.items()}
_OTHER_IN_PLACE_METHODS = frozenset(f"__{function.__name__}__" for function in _OTHER_IN_PLACE)

_WRITES_IN_BODIES = frozenset(
    "tag_activation_checkpoint wrap wrap_activation_checkpoint flex_attention flex_attention_backward "
    "autograd_function_apply auto_functionalized auto_functionalized_v2 checkpoint".split()
)
"""Operators that write what the graphs write that they are given. Others may write all they read."""


_CALLS = ("call_function", "call_method")

_ATTRIBUTES = {"mT": "mT", "T": "numpy_T"}
"""Attributes that are operations: `x.T` is captured as `aten.numpy_T` from torch 2.14 on, before as `getattr`."""


def operation(node: fx.Node) -> str:
    """Canonical name of what `node` does; for nodes that call nothing, their kind (`placeholder`, `get_attr`, ...)."""
    if node.target is getattr:
        return _ATTRIBUTES.get(str(node.args[1]), "getattr")
    return _name(node.op, node.target) if node.op in _CALLS else node.op


def first_argument(node: fx.Node) -> Any:
    """The first argument of `node`; None where it is given by name, or there is none."""
    return node.args[0] if node.args else None


_SHAPE_OF_FIRST = frozenset(
    "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty new_tensor size dim".split()
)
_SHAPE_OF_SECOND = frozenset("expand_as view_as reshape_as type_as to".split())


def reads_no_numbers(reader: fx.Node, node: fx.Node) -> bool:
    """Whether `reader` asks `node`, a tensor, for its shape, dtype, strides or device only: `ones_like(node)`,
    `x.expand_as(node)`. What computes the numbers of `node` is dead once nobody else reads them.
    """
    name = str(reader.target) if reader.op == "call_method" else _raw_name(reader.op, reader.target)
    place = 0 if name in _SHAPE_OF_FIRST else 1 if name in _SHAPE_OF_SECOND else None
    if place is None or len(reader.args) <= place or reader.args[place] is not node:
        return False
    others = (*reader.args[:place], *reader.args[place + 1 :], *reader.kwargs.values())
    return all(leaf is not node for leaf in tree_leaves(others))


@lru_cache(maxsize=8192)
def _raw_name(op: str, target: Any) -> str:
    """The name of one of PyTorch's own functions, as it is spelled; '' for others."""
    if op != "call_function":
        return ""
    if isinstance(target, torch._ops.OpOverload):
        return str(target._opname) if target.namespace == "aten" else ""
    return str(getattr(target, "__name__", "")) if _is_of_pytorch(target) else ""


@lru_cache(maxsize=8192)
def _name(op: str, target: Any) -> str:
    if op == "call_method":
        return _ALIASES.get(str(target), str(target))
    if op == "call_function":
        return _function_name(target)
    return op


def _function_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        name = target._opname if target.namespace in ("aten", "prims") else str(target)
    elif _is_of_pytorch(target):
        name = getattr(target, "__name__", str(target))
    else:
        name = f"{target.__module__}.{getattr(target, '__name__', target)}"
    return _ALIASES.get(name, name)


def _is_of_pytorch(target: Any) -> bool:
    """Whether a function is PyTorch's or Python's own: a user's `add` may be anything."""
    if type(target).__module__ == "torch._dynamo.utils":
        return False  # a function or method of NumPy's, in Dynamo's wrapper
    module = getattr(target, "__module__", None) or "builtins"
    if isinstance(target, torch._ops.OpOverloadPacket):
        return module in ("torch._ops.aten", "torch._ops.prims")
    return module.split(".")[0] in ("torch", "_operator", "operator", "builtins", "math")


@lru_cache(maxsize=8192)
def is_foreign(target: Any) -> bool:
    """Whether a function, or an operator of a library, is neither PyTorch's nor Python's nor ours."""
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
        return packet._qualified_op_name.split("::")[0] not in ("aten", "prims", "prim", "fusion_pass")
    return _is_of_a_user(target)


def in_place(node: fx.Node) -> str | None:
    """For a node that writes its first argument by arithmetic (`add_`, `+=`): the canonical name of the arithmetic."""
    return _arithmetic(node.op, node.target)


def _arithmetic(op: str, target: Any) -> str | None:
    if op == "call_function" and target in _IN_PLACE_OPERATORS:
        return _IN_PLACE_OPERATORS[target]
    name = _name(op, target)
    if name in _IN_PLACE_METHODS:
        return _IN_PLACE_METHODS[name]
    if name.endswith("_") and not name.endswith("__") and name != "copy_":
        return _ALIASES.get(name[:-1], name[:-1])
    return None


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The argument nodes whose memory `node` may write."""
    op, target = node.op, node.target
    if op not in _CALLS:
        return list(node.all_input_nodes) if op == "call_module" else []
    if op == "call_function" and _is_of_a_user(target):
        return _written_when_tried(node)
    kwargs = node.kwargs
    if len(node.args) <= _harmless_arguments(op, target) and not ("out" in kwargs or "inplace" in kwargs):
        return []  # which most calls are
    out, inplace = _given(node, "out"), _given(node, "inplace")
    if out is None and inplace is None and _writes_nothing(op, target):
        return []
    written = (
        []
        if out is None
        else [n for n in node.all_input_nodes if n in (out if isinstance(out, tuple | list) else [out])]
    )
    written += _written_undeclared(node)
    if overloads := _overloads(target):
        return written + [n for overload in overloads for n in _written_by_schema(node, overload)]
    if isinstance(target, torch._ops.HigherOrderOperator):
        return _written_in_bodies(node) if target._name in _WRITES_IN_BODIES else list(node.all_input_nodes)
    if _writes_first(op, target) or inplace not in (None, False):
        first = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
        written += [first] if isinstance(first, fx.Node) else list(node.all_input_nodes)
    return written


@lru_cache(maxsize=8192)
def _is_of_a_user(target: Any) -> bool:
    """Whether nothing is known of a function (`torch.compiler.allow_in_graph`)."""
    declared = torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch._ops.HigherOrderOperator
    return not isinstance(target, declared) and not _is_of_pytorch(target)


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
    name = _name("call_function", target)
    if name not in _UNDECLARED_WRITES:
        return []
    overload = target if isinstance(target, torch._ops.OpOverload) else getattr(torch.ops.aten, name).default
    return [a.name for a in overload._schema.arguments if not a.kwarg_only]


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
    if op == "call_function" and _name(op, target) in _UNDECLARED_WRITES:
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
    name = _name(op, target)
    return (
        name in ("setitem", "__setitem__", "copy_")
        or name in _OTHER_IN_PLACE_METHODS
        or _arithmetic(op, target) is not None
        or (op == "call_function" and target in _OTHER_IN_PLACE)
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
            by_position = position < len(node.args) and not argument.kwarg_only
            value = node.args[position] if by_position else node.kwargs.get(argument.name)
            values = value if isinstance(value, tuple | list) else [value]
            written += [v for v in values if isinstance(v, fx.Node)]
    return written


def _written_in_bodies(node: fx.Node) -> list[fx.Node]:
    """What the graphs write that `node`, as activation checkpointing, is given and calls with the rest."""
    inputs = [n for n in node.all_input_nodes if n.op != "get_attr"]
    bodies = [_module(n) for n in node.all_input_nodes if n.op == "get_attr" and fake(n) is None]
    written = [n for body in bodies if body is not None for call in body.graph.nodes for n in written_arguments(call)]
    if not written:
        return []
    memory = {memory_of(n) for n in written}
    places = [n for body in bodies if body is not None for n in body.graph.nodes if n.op == "placeholder"]
    if None in memory or len(bodies) != 1 or len(places) != len(node.args) - 1:
        return inputs
    given = zip(node.args[1:], places, strict=True)
    return [n for n, place in given if isinstance(n, fx.Node) and memory_of(place) in memory]


def _module(node: fx.Node) -> fx.GraphModule | None:
    """The graph that a `get_attr` node stands for."""
    module: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        module = getattr(module, name, None)
    return module if isinstance(module, fx.GraphModule) else None


def memory_of(node: fx.Node) -> int | None:
    """Identity of the memory behind `node`; None for nodes that hold no tensor."""
    tensor = fake_tensor(node)
    if tensor is None:
        return None
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def fake(node: fx.Node) -> Any:
    """The fake value recorded for `node` (Dynamo: `example_value`; export and AOTAutograd: `val`), or None."""
    return node.meta["example_value"] if "example_value" in node.meta else node.meta.get("val")


def fake_tensor(node: object) -> torch.Tensor | None:
    """The fake tensor of `node`, or None when it is no node or not tensor-valued."""
    value = fake(node) if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether a tensor of `wide` can hold every number of one of `narrow`. Of floating-point numbers of eight bits,
    which PyTorch does not promote, only their own dtype is said to."""
    if any(dtype.is_floating_point and dtype.itemsize == 1 for dtype in (wide, narrow)):
        return wide == narrow
    return torch.promote_types(wide, narrow) == wide


def size(value: int | torch.SymInt) -> Size:
    """`value` as a number, or as an expression whose comparison adds no guard."""
    if isinstance(value, int):
        return value
    expression = value.node.expr
    return int(expression) if expression.is_number else expression


def sizes(tensor: torch.Tensor) -> tuple[Size, ...]:
    """The shape of a fake tensor."""
    return tuple([s if type(s) is int else size(s) for s in tensor.shape])


def layer_of(node: fx.Node) -> str:
    """Module path of `node` in the user's model, from `nn_module_stack`; '' when the graph has none."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    return _clean(path)


@lru_cache(maxsize=8192)
def _clean(path: str) -> str:
    """`L['self'].__dict__['_modules']['blocks'].0.attn` is `blocks.0.attn`; `L['model'].attn` is `model.attn`."""
    path = re.sub(r"^(?:L\['self'\]|L__self___|L\['fn'\]|L\['args'\]\[0\])", "", path)
    path = path.replace(".__dict__['_modules']", "").replace("._modules", "").replace("[slice(None, None, None)]", "")
    path = re.sub(r"^[LG](?=\[)", "", path)
    return re.sub(r"\['?(.*?)'?\]", r".\1", path).strip(".")
