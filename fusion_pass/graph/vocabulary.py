"""One vocabulary for the many spellings of an operation.

`x.view`, `torch.reshape` and `aten._unsafe_view` are all `view`; `operator.mul`, `torch.mul`, `Tensor.mul` and
`aten.mul.Tensor` are all `mul`. Everything above this file speaks of an operation by its canonical name only.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx
from torch.utils._pytree import tree_leaves

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
    # torch 2.11 captures `==` of tensors as a method.
    **{f"__{name}__": name for name in "eq ne lt le gt ge".split()},
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

_IN_PLACE_METHODS = {f"__{function.__name__}__": name for function, name in _IN_PLACE_OPERATORS.items()}

CALLS = ("call_function", "call_method")
"""The kinds of nodes that have an operation. What a `call_module` does is not known."""

_ATTRIBUTES = {"mT": "mT", "T": "numpy_T"}
"""Attributes that are operations: `x.T` is captured as `aten.numpy_T` from torch 2.14 on, before as `getattr`."""


def operation(node: fx.Node) -> str:
    """Canonical name of what `node` does; for nodes that call nothing, their kind (`placeholder`, `get_attr`, ...)."""
    if node.target is getattr:
        return _ATTRIBUTES.get(str(node.args[1]), "getattr")
    return canonical_name(node.op, node.target) if node.op in CALLS else node.op


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
def canonical_name(op: str, target: Any) -> str:
    """`operation` of a node with this `op` and `target`."""
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
def is_of_a_user(target: Any) -> bool:
    """Whether nothing is known of a function (`torch.compiler.allow_in_graph`)."""
    declared = torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch._ops.HigherOrderOperator
    return not isinstance(target, declared) and not _is_of_pytorch(target)


@lru_cache(maxsize=8192)
def is_foreign(target: Any) -> bool:
    """Whether a function, or an operator of a library, is neither PyTorch's nor Python's nor ours."""
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
        return packet._qualified_op_name.split("::")[0] not in ("aten", "prims", "prim", "fusion_pass")
    return is_of_a_user(target)


def in_place(node: fx.Node) -> str | None:
    """For a node that writes its first argument by arithmetic (`add_`, `+=`): the canonical name of the arithmetic."""
    return arithmetic_in_place(node.op, node.target)


def arithmetic_in_place(op: str, target: Any) -> str | None:
    """`in_place` of a node with this `op` and `target`."""
    if op == "call_function" and target in _IN_PLACE_OPERATORS:
        return _IN_PLACE_OPERATORS[target]
    name = canonical_name(op, target)
    if name in _IN_PLACE_METHODS:
        return _IN_PLACE_METHODS[name]
    if name.endswith("_") and not name.endswith("__") and name != "copy_":
        return _ALIASES.get(name[:-1], name[:-1])
    return None


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


def reordered_axes(name: str, args: Sequence[object], rank: int) -> list[int] | None:
    """For each axis of the result of operation `name`, with `args` behind the tensor, the axis it was; None unless it
    reorders axes and does nothing else.
    """
    if name in ("t", "numpy_T"):
        return list(range(rank))[::-1]
    if name == "mT":
        name, args = "transpose", (-1, -2)
    if name == "permute" and len(args) == 1 and isinstance(args[0], tuple | list):
        args = args[0]
    axes = [axis % rank for axis in args if isinstance(axis, int)]
    if len(axes) != len(args):
        return None
    if name == "permute" and len(axes) == rank:
        return axes
    if name == "transpose" and len(axes) == 2:
        order = list(range(rank))
        order[axes[0]], order[axes[1]] = axes[1], axes[0]
        return order
    return None


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
