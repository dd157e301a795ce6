"""Strides: does it matter that a replaced value is laid out differently, and what restores the old layout.

Strides are not part of a value, but a reader can depend on them: `view` fails on some, `as_strided` reads through
them, and a caller sees those of a graph output. Whether one does is found by evaluating the readers on fake tensors
with the new strides until the strides are the old ones again. What is found holds for every size of the graph, and
finding it adds no guard.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true
from torch.utils._pytree import tree_leaves

from fusion_pass.graph.site import Step
from fusion_pass.graph.vocabulary import fake, is_foreign, memory_of
from fusion_pass.graph.writes import written_arguments

_READS_STRIDES = frozenset(
    {"as_strided", "as_strided_scatter", "stride", "is_contiguous", "storage_offset", "untyped_storage", "data_ptr"}
)

_LIMIT = 64
"""Readers evaluated before the answer is 'depends': a layout that travels this far ends at the graph's output
anyway."""


def same_size(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the shapes are known to be equal for every value of their symbols."""
    return a.dim() == b.dim() and all(statically_known_true(x == y) for x, y in zip(a.shape, b.shape, strict=True))


def same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether tensors of equal shape have equal strides, on the axes longer than one."""
    return all(
        statically_known_true(size == 1) or statically_known_true(x == y)
        for size, x, y in zip(a.shape, a.stride(), b.stride(), strict=True)
    )


def first_layout_reader(node: fx.Node, value: torch.Tensor, inside: frozenset[fx.Node]) -> fx.Node | None:
    """The first reader of `node`, direct or through others, that depends on its strides when it becomes `value`; None
    if none does.

    Nodes of `inside` are not readers: they go away.
    """
    values: dict[fx.Node, Any] = {node: value}
    queue = sorted(user for user in node.users if user not in inside)
    seen = set(queue)
    while queue:
        reader = heapq.heappop(queue)
        if len(seen) > _LIMIT or _depends_by_nature(reader) or _may_count_on(reader, values):
            return reader
        try:
            with _for_every_size(values[node].fake_mode.shape_env):
                value = _evaluate(reader, values)
        except Exception:  # a view that the new strides do not allow, no fake implementation, an answer for some sizes
            return reader
        original = fake(reader)
        if _same_everywhere(value, original):
            continue
        if (
            not isinstance(value, torch.Tensor)
            or not isinstance(original, torch.Tensor)
            or not same_size(value, original)
        ):
            return reader
        values[reader] = value
        for user in reader.users:
            if user not in seen:
                seen.add(user)
                heapq.heappush(queue, user)
    return None


def steps_to_layout(original: torch.Tensor) -> tuple[Step, ...] | None:
    """Steps that copy a tensor into the strides of `original`; None unless those are known to be a dense permutation.

    Nothing is asked of a symbolic stride that would fix it to the number of this call.
    """
    order = _order_in_memory(original)
    if order is None or not _is_dense(original.permute(order)):
        return None
    inverse = [order.index(axis) for axis in range(original.dim())]
    return (Step("permute", tuple(order)), Step("contiguous"), Step("permute", tuple(inverse)))


def _order_in_memory(tensor: torch.Tensor) -> list[int] | None:
    """The axes from the longest stride to the shortest, as they are in this call; None if that is not known."""
    strides = [stride if isinstance(stride, int) else stride.node.hint for stride in tensor.stride()]
    if None in strides:
        return None
    return sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], axis))


def _is_dense_here(tensor: torch.Tensor) -> bool:
    """Whether it is a dense permutation with the numbers of this call, or those are not known."""
    order = _order_in_memory(tensor)
    sizes = [size if isinstance(size, int) else size.node.hint for size in tensor.shape]
    if order is None or None in sizes:
        return True
    expected = 1
    for axis in reversed(order):
        stride = tensor.stride(axis)
        if sizes[axis] != 1 and (stride if isinstance(stride, int) else stride.node.hint) != expected:
            return False
        expected *= sizes[axis]
    return True


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether it is contiguous for every value of its symbols."""
    expected: int | torch.SymInt = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not (statically_known_true(size == 1) or statically_known_true(stride == expected)):
            return False
        expected = expected * size
    return True


def returned_detached(node: fx.Node) -> bool:
    """Whether the graph returns, of the memory of `node`, both what has a gradient and what is detached from it.

    AOTAutograd (of torch 2.13 at least) returns the latter as a view of all that memory. Of a tensor of its own that is
    the same; `(x * 2).transpose(1, 2)` returned beside its `detach()` comes back in two shapes. So a call's result that
    takes the place of such a tensor is to be no view.
    """
    (output,) = node.graph.find_nodes(op="output")
    memory = memory_of(node)
    gradients = {fake(n).requires_grad for n in output.all_input_nodes if memory_of(n) == memory}
    return len(gradients) == 2


def _depends_by_nature(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op == "output" or bool(written_arguments(node)) or name.split(".")[0] in _READS_STRIDES


def _may_count_on(reader: fx.Node, changed: dict[fx.Node, Any]) -> bool:
    """Whether an operator of somebody else's reads a tensor that was dense and is to have other strides: its kernel may
    count on them. On those of a part of a packed tensor, which are not dense, none is taken to count. A tensor that is
    dense in this call, though nothing proves it for others, may be counted on too; then the site is left alone."""
    if not is_foreign(reader.target):
        return False
    before = (leaf for node in reader.all_input_nodes if node in changed for leaf in _tensors(fake(node)))
    return any(_is_dense_here(tensor) for tensor in before)


def _evaluate(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    def load(argument: fx.Node) -> Any:
        return values[argument] if argument in values else fake(argument)

    args, kwargs = fx.map_arg((node.args, node.kwargs), load)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op == "call_function" and callable(node.target):
        return node.target(*args, **kwargs)
    raise NotImplementedError(node.op)


class _SomeSizes(Exception):
    """What an evaluation asked of symbolic sizes is not known: it holds for some, those of this call among them."""


@contextmanager
def _for_every_size(symbols: ShapeEnv | None) -> Iterator[None]:
    """Evaluate what holds for every size: where a guard would be needed, `_SomeSizes` is raised instead.

    A guard would cost the user a compilation, and an answer without its guard would be taken for others than it holds
    for.
    """
    if symbols is None:
        yield
        return
    asked: list[object] = []

    def known(expression: Any, *args: Any, **kwargs: Any) -> Any:
        value = symbols._maybe_evaluate_static(expression)
        if value is None:
            asked.append(expression)
            raise _SomeSizes(str(expression))
        return value

    own = vars(symbols)
    own["evaluate_expr"] = known
    try:
        yield
    finally:
        del own["evaluate_expr"]
    if asked:  # and the exception was caught on its way
        raise _SomeSizes(str(asked[0]))


def _same_everywhere(value: Any, original: Any) -> bool:
    got, had = _tensors(value), _tensors(original)
    return len(got) == len(had) > 0 and all(
        x.dtype == y.dtype and same_size(x, y) and same_layout(x, y) for x, y in zip(got, had, strict=True)
    )


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
