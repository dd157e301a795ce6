"""Queries, keys and values as the operator takes them: `[B, S, H, D]`, one key head for several query heads.

Models that share key heads repeat them first (`repeat_kv`: unsqueeze, expand, reshape; or `repeat_interleave`), put an
empty cache in front of them, or scale and upcast them. These nodes are folded away where that is exact:

    repeated heads         query head h reads key head h // groups, and no other map
    two axes of heads      key heads, and in each the query heads that read it: head h is (h // groups, h % groups)
    one axis of batch and heads    the rows of batch b are b * heads + h
    a cat with nothing     all but one part have no token
    an upcast              every value of the narrow dtype is a value of the wide one
    a factor               becomes part of the scale

Movements are folded only together with one of these: views cost nothing, and a movement may be the end of another site.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import fx

from fusion_pass.graph.effects import Effects
from fusion_pass.graph.site import Operand, Step
from fusion_pass.graph.vocabulary import CALLS, Size, fake_tensor, holds, operation, reordered_axes, size, sizes

from ..literals import number_times


@dataclass(frozen=True)
class Heads:
    """One of q, k, v. `order`: the axes of `node` that are batch, sequence, heads (None: one head) and head_dim."""

    node: fx.Node
    order: tuple[int, int, int | None, int]
    group: int | None = None
    """A second axis of heads, over those that share a head of the first."""
    merged: tuple[Size, int] | None = None
    """Batch and heads, where one axis holds both: that of the batch; `order` has none of heads then."""
    groups: int = 1
    """How often each head was repeated."""
    factor: float = 1.0
    folded: tuple[fx.Node, ...] = ()
    """The nodes between `node` and the attention, nearest the attention first."""

    @property
    def dtype(self) -> torch.dtype:
        return _tensor(self.node).dtype

    @property
    def batch(self) -> Size:
        return self._sizes[self.order[0]] if self.merged is None else self.merged[0]

    @property
    def tokens(self) -> Size:
        return self._sizes[self.order[1]]

    @property
    def heads(self) -> Size | None:
        """None where there is no axis of heads."""
        if self.merged is not None:
            return self.merged[1]
        if self.order[2] is None:
            return None
        heads = self._sizes[self.order[2]]
        return heads if self.group is None else heads * self._sizes[self.group]

    @property
    def head_dim(self) -> Size:
        return self._sizes[self.order[3]]

    @property
    def _sizes(self) -> tuple[Size, ...]:
        return sizes(_tensor(self.node))

    def operand(self, dtype: torch.dtype) -> Operand:
        """The steps to `[B, S, H, D]` in `dtype`."""
        batch, tokens, heads, lanes = self.order
        steps = []
        if self.merged is not None:
            steps.append(Step("unflatten", (batch, (-1, self.merged[1]))))
            heads = batch + 1
            tokens, lanes = (axis + (axis > batch) for axis in (tokens, lanes))
        order = [axis for axis in (batch, tokens, heads, self.group, lanes) if axis is not None]
        if order != sorted(order):
            steps.append(Step.reorder(order))
        if heads is None:
            steps.append(Step("unsqueeze", (2,)))
        if self.group is not None:
            steps.append(Step("flatten", (2, 3)))
        if self.dtype != dtype:
            steps.append(Step("to", (dtype,)))
        if size(_tensor(self.node).stride(self.order[3])) != 1:
            steps.append(Step("contiguous"))  # projected by a convolution: the operator reads lane by lane
        return Operand(self.node, tuple(steps))


def _tensor(node: object) -> torch.Tensor:
    tensor = fake_tensor(node)
    assert tensor is not None
    return tensor


def fold(effects: Effects, heads: Heads, reader: fx.Node, anchor: fx.Node, *, scaled: bool = False) -> Heads:
    """`heads` read as far upstream as is exact, for a call at `anchor` that takes the place of the read by `reader`.

    `scaled`: a factor may be taken out.
    """
    best = current = heads
    while True:
        parent = _parent(effects, current, reader, anchor, scaled)
        if parent is None:
            return best
        current = parent
        reader = current.folded[-1]
        if _said(current) != _said(best) or operation(reader) == "cat":
            best = current


def _said(heads: Heads) -> tuple[object, ...]:
    """What a fold makes simpler. Between two nodes that agree in it lie movements only."""
    return heads.groups, heads.factor, heads.dtype, heads.group is None, heads.merged is None


def _parent(effects: Effects, heads: Heads, reader: fx.Node, anchor: fx.Node, scaled: bool) -> Heads | None:
    """`heads` read one node further upstream, or None."""
    node = heads.node
    if node.op not in CALLS or effects.last_write(node, reader) is not None:
        return None
    found = _moved(heads) or _repeated(heads) or _unsplit(heads) or _joined_to_nothing(heads) or _upcast(heads)
    if found is None and scaled:
        found = _multiplied(heads)
    if found is None or effects.written_between(found.node, node, anchor):
        return None
    return replace(found, folded=(*heads.folded, *_between(node, found.node)))


def _between(node: fx.Node, parent: fx.Node) -> list[fx.Node]:
    """`node` and its first arguments up to `parent`."""
    chain = []
    while node is not parent:
        chain.append(node)
        node = _first(node)
    return chain


def _first(node: fx.Node) -> fx.Node:
    first = node.args[0] if node.args else None
    if operation(node) == "cat":
        first = next(part for part in cast(Sequence[fx.Node], first) if 0 not in _tensor(part).shape)
    if not isinstance(first, fx.Node):
        first = node.args[1]  # a number times it
    assert isinstance(first, fx.Node)
    return first


def _source(node: fx.Node) -> fx.Node | None:
    """The first argument, when it is a tensor."""
    first = node.args[0] if node.args else None
    return first if isinstance(first, fx.Node) and fake_tensor(first) is not None else None


def moved_axes(node: fx.Node) -> list[int] | None:
    """For a node that only reorders axes: which axis of its argument each of its axes is."""
    parent = _source(node)
    if parent is None:
        return None
    arguments = () if node.target is getattr else (*node.args[1:], *node.kwargs.values())
    return reordered_axes(operation(node), arguments, _tensor(parent).dim())


_MAY_KEEP_EVERYTHING = frozenset("contiguous clone view to _to_copy alias float type_as".split())


def keeps_everything(node: fx.Node) -> bool:
    """Whether `node` has the values, the shape and the dtype of its first argument."""
    parent = _source(node)
    if parent is None or operation(node) not in _MAY_KEEP_EVERYTHING:
        return False
    before, after = _tensor(parent), _tensor(node)
    return sizes(before) == sizes(after) and before.dtype == after.dtype and before.device == after.device


def _moved(heads: Heads) -> Heads | None:
    parent = _source(heads.node)
    axes = moved_axes(heads.node)
    if parent is not None and axes is not None:
        b, s, h, d = heads.order
        order = (axes[b], axes[s], None if h is None else axes[h], axes[d])
        return replace(heads, node=parent, order=order, group=None if heads.group is None else axes[heads.group])
    if parent is not None and keeps_everything(heads.node):
        return replace(heads, node=parent)
    return None


def _repeated(heads: Heads) -> Heads | None:
    node, axis = heads.node, heads.order[2]
    if axis is None or heads.group is not None:
        return None
    if operation(node) == "repeat_interleave":
        parent, repeats = _source(node), node.args[1] if len(node.args) > 1 else node.kwargs.get("repeats")
        dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
        if (
            parent is None
            or not isinstance(repeats, int)
            or not isinstance(dim, int)
            or dim % _tensor(node).dim() != axis
        ):
            return None
        return replace(heads, node=parent, groups=heads.groups * repeats)
    return _expanded(heads, axis)


def _expanded(heads: Heads, axis: int) -> Heads | None:
    """`x[:, :, None].expand(..., groups, ...).reshape(...)`: repeats stand behind the heads; h becomes h // groups."""
    expand = _source(heads.node)
    if operation(heads.node) != "view" or expand is None or operation(expand) != "expand":
        return None
    lone = _source(expand)
    parent = _source(lone) if lone is not None and operation(lone) in ("unsqueeze", "getitem", "view") else None
    if lone is None or parent is None:
        return None
    after, wide, thin, before = (sizes(_tensor(n)) for n in (heads.node, expand, lone, parent))
    groups = wide[axis + 1] if len(wide) == len(after) + 1 else None
    kept, rest = before[: axis + 1], before[axis + 1 :]
    if not isinstance(groups, int) or not isinstance(before[axis], int):
        return None
    if thin != (*kept, 1, *rest) or wide != (*kept, groups, *rest) or after != (*kept[:-1], kept[-1] * groups, *rest):
        return None
    if operation(lone) == "getitem" and not _inserts_one_axis(lone.args[1]):
        return None
    return replace(heads, node=parent, groups=heads.groups * groups)


def _unsplit(heads: Heads) -> Heads | None:
    """Axes of heads as they were before a view split, joined or added them, or a group was expanded from one."""
    parent = _source(heads.node)
    if parent is None:
        return None
    if heads.merged is not None:
        return _unmerged(heads, parent, heads.merged)
    if heads.group is None or heads.order[2] is None:
        return None
    return _unexpanded(heads, parent, heads.group) or _ungrouped(heads, parent, heads.order[2], heads.group)


def _unmerged(heads: Heads, parent: fx.Node, merged: tuple[Size, int]) -> Heads | None:
    """`[B, H, S, D]` that a view made `[B * H, S, D]`."""
    b, s, _, d = heads.order
    after = heads._sizes
    if operation(heads.node) != "view" or sizes(_tensor(parent)) != (*after[:b], *merged, *after[b + 1 :]):
        return None
    s, d = (axis + (axis > b) for axis in (s, d))
    return replace(heads, node=parent, order=(b, s, b + 1, d), merged=None)


def _unexpanded(heads: Heads, parent: fx.Node, group: int) -> Heads | None:
    """A group of heads that was expanded from one."""
    after = heads._sizes
    shared = after[group]
    if operation(heads.node) != "expand" or not isinstance(shared, int):
        return None
    if sizes(_tensor(parent)) != (*after[:group], 1, *after[group + 1 :]):
        return None
    return replace(heads, node=parent, groups=heads.groups * shared)


def _ungrouped(heads: Heads, parent: fx.Node, head: int, group: int) -> Heads | None:
    """One axis of heads that became two: by an axis of length one, or by a view that splits it into neighbours."""
    name, before, after = operation(heads.node), sizes(_tensor(parent)), heads._sizes
    added = after[group] == 1 and before == (*after[:group], *after[group + 1 :])
    inserted = name == "unsqueeze" or (name == "getitem" and _inserts_one_axis(heads.node.args[1]))
    split = group == head + 1 and before == (*after[:head], after[head] * after[group], *after[group + 1 :])
    if not (added and (inserted or name == "view")) and not (split and name == "view"):
        return None
    b, s, h, d = (axis - (axis > group) for axis in (heads.order[0], heads.order[1], head, heads.order[3]))
    return replace(heads, node=parent, order=(b, s, h, d), group=None)


def _inserts_one_axis(index: object) -> bool:
    """Whether an index takes everything and inserts axes only."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or part == slice(None, None, None) for part in parts)


def _joined_to_nothing(heads: Heads) -> Heads | None:
    if operation(heads.node) != "cat" or not heads.node.args or not isinstance(heads.node.args[0], tuple | list):
        return None
    parts = heads.node.args[0]
    dim = heads.node.args[1] if len(heads.node.args) > 1 else heads.node.kwargs.get("dim", 0)
    # Tokens only: lanes joined to none are the end of a rotation of all lanes, which is another site's.
    if not isinstance(dim, int) or dim % _tensor(heads.node).dim() != heads.order[1]:
        return None
    full = [part for part in parts if isinstance(part, fx.Node) and 0 not in _tensor(part).shape]
    return replace(heads, node=full[0]) if len(full) == 1 else None


def _upcast(heads: Heads) -> Heads | None:
    parent = _source(heads.node)
    if parent is None or operation(heads.node) not in ("to", "_to_copy", "float", "double", "type_as", "type"):
        return None
    narrow = _tensor(parent).dtype
    exact = narrow.is_floating_point and holds(heads.dtype, narrow)
    return replace(heads, node=parent) if exact and _tensor(parent).device == _tensor(heads.node).device else None


def _multiplied(heads: Heads) -> Heads | None:
    taken = number_times(heads.node, operation(heads.node))
    if taken is None or _tensor(taken[0]).dtype != heads.dtype:
        return None
    return replace(heads, node=taken[0], factor=heads.factor * taken[1])
