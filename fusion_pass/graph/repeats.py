"""Layers repeat: what was found out about one place of a graph holds for every place built the same way.

A place is compared with an earlier one node by node, from its root upwards through everything the reader can evaluate
and downwards through what reads it. There is no wrong hit: either every node has exactly one counterpart with the same
operation, literals, shape, strides, dtype, writes and order, or the places are different. Nodes that both places share
(the rotary tables of the model) are their own counterparts and are not followed further.

The first comparison that succeeds is kept as steps (`_Walk`), which the layers behind follow: they check the same, with
no search. Where a step fails, the nodes are compared one by one again.

What a node is, apart from which nodes it reads, is its form (`forms.py`), a number. The shape, strides and dtype of
what is followed need no look: they follow from the operation, its literals and the same of its inputs, unless autocast
changes in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import fx

from .effects import Effects
from .forms import Form
from .region import downstream, modelled
from .vocabulary import CALLS, fake, size

T = TypeVar("T")

Mapping = dict[fx.Node, fx.Node]

_ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast

_READERS = 40


@dataclass
class _Place(Generic[T]):
    root: fx.Node
    readers: tuple[fx.Node, ...]
    verdict: T
    walk: _Walk | None = None
    """Known once another place was found to be built like this one."""


@dataclass(frozen=True)
class _Walk:
    """A comparison that succeeded, as steps to repeat with the next place. All that the place shares with that other
    one, it has to share with the next."""

    line: Sequence[fx.Node]
    """The root, its readers, then the inputs of each node in the order of `steps`."""
    users: Sequence[int]
    """How many users the root and its readers have."""
    steps: Sequence[tuple[int, int]]
    """(index in the line, number of the form) of every node that is not shared, where it is met first."""
    shared: Sequence[tuple[int, fx.Node]]
    """(index in the line, node) of those that are."""
    in_order: Sequence[fx.Node]
    """The nodes of the line in the order of the graph."""

    @classmethod
    def of(cls, starts: Sequence[fx.Node], forward: Mapping, forms: _Forms, order: dict[fx.Node, int]) -> _Walk:
        line, seen = list(starts), set[fx.Node]()
        steps, shared = [], []
        for index, node in enumerate(line):  # which grows on the way
            if node in seen:
                continue
            seen.add(node)
            if forward[node] is node:
                shared.append((index, node))
            else:
                kind, inputs = forms[node]
                steps.append((index, kind))
                line += inputs
        users = [len(node.users) for node in starts]
        return cls(line, users, steps, shared, sorted(seen, key=order.__getitem__))

    def repeated(self, starts: Sequence[fx.Node], forms: _Forms, order: dict[fx.Node, int]) -> Mapping | None:
        """The counterparts at the place with the root and the readers `starts`; None if any step goes elsewhere."""
        if [len(node.users) for node in starts] != self.users:
            return None
        line = list(starts)
        for index, kind in self.steps:
            other, inputs = forms[line[index]]
            if other != kind:
                return None
            line += inputs
        for index, node in self.shared:
            if line[index] is not node:
                return None
        forward = dict(zip(self.line, line, strict=True))
        if [forward[node] for node in self.line] != line or len(set(line)) != len(forward):
            return None  # not one counterpart for each
        positions = [order[forward[node]] for node in self.in_order]
        return forward if positions == sorted(positions) else None


class _Forms(dict[fx.Node, Form]):
    """The forms of nodes as a comparison needs them: what is not followed has its facts in the place of arguments and
    inputs."""

    def __init__(self, effects: Effects, followed: Callable[[fx.Node], bool]) -> None:
        super().__init__()
        self._written = effects.written_forms
        self._modes_change = bool(effects.graph.find_nodes(op="call_function", target=_ENTER_AUTOCAST))
        self._followed = followed
        self._follows: dict[int, bool] = {}
        self._kinds: dict[object, int] = {}

    def __missing__(self, node: fx.Node) -> Form:
        form = self._written[node]
        follows = self._follows.get(form[0])
        if follows is None:  # which holds for every node that is written like this one
            follows = self._follows[form[0]] = self._followed(node)
        if not follows or self._modes_change:
            own = form[0] if follows else (node.op, node.target if node.op in CALLS else None)
            key = own, facts(fake(node))
            form = -1 - self._kinds.setdefault(key, len(self._kinds)), form[1] if follows else ()
        self[node] = form
        return form


class Repeats(Generic[T]):
    """Verdicts by place. Valid as long as the graph does not change.

    `followed`: through which nodes a verdict may depend on what they read; a place ends at the others.
    """

    def __init__(self, effects: Effects, followed: Callable[[fx.Node], bool] = modelled) -> None:
        self._effects = effects
        self._followed = followed
        self._forms = _Forms(effects, followed)
        self._known: dict[object, list[_Place[T]]] = {}

    def lookup(self, root: fx.Node) -> tuple[T, Mapping] | None:
        """The verdict on a place that is built like the one at `root`, and the counterpart of each of its nodes."""
        places = self._known.get(self._key(root), ())
        readers = self._readers(root) if places else ()
        for place in places:
            if len(place.readers) == len(readers):
                mapping = self._compared(place, [root, *readers])
                if mapping is not None:
                    return place.verdict, mapping
        return None

    def add(self, root: fx.Node, verdict: T) -> None:
        """Remember `verdict` for `root`."""
        place = _Place(root, self._readers(root), verdict)
        self._known.setdefault(self._key(root), []).append(place)

    def _key(self, root: fx.Node) -> object:
        return self._forms[root][0], len(root.users)

    def _readers(self, root: fx.Node) -> tuple[fx.Node, ...]:
        start = root
        writes = [n for n in root.all_input_nodes if root in self._effects.writes(n)]
        if writes:
            start = self._effects.origin_of(writes[0])
        return tuple(downstream(start, _READERS, modelled))

    def _compared(self, place: _Place[T], starts: Sequence[fx.Node]) -> Mapping | None:
        """The counterpart of each node of `place`, where a root and its readers are `starts`; None if they differ."""
        order = self._effects.order
        if place.walk is not None:
            mapping = place.walk.repeated(starts, self._forms, order)
            if mapping is not None:
                return mapping
        own = [place.root, *place.readers]
        mapping = self._counterparts(list(zip(own, starts, strict=True)))
        if mapping is not None and not self._effects.any_writes:
            place.walk = _Walk.of(own, mapping, self._forms, order)
        return mapping

    def _counterparts(self, queue: list[tuple[fx.Node, fx.Node]]) -> Mapping | None:
        """For each node that matters to one place, the one in its stead at the other; None if the places differ.
        `queue`: the roots and their readers."""
        if any(len(a.users) != len(b.users) for a, b in queue):
            return None
        forms, any_writes = self._forms, self._effects.any_writes
        forward: Mapping = {}
        taken: set[fx.Node] = set()
        while queue:
            a, b = queue.pop()
            known = forward.get(a)
            if known is not None or b in taken:
                if known is not b:
                    return None
                continue
            forward[a] = b
            taken.add(b)
            if a is not b:
                (kind, inputs), (other, others) = forms[a], forms[b]
                if kind != other:
                    return None
                queue += zip(inputs, others, strict=True)
            if any_writes and not self._follow_writes(a, b, queue):
                return None
        return forward if self._same_order(forward) else None

    def _follow_writes(self, a: fx.Node, b: fx.Node, queue: list[tuple[fx.Node, fx.Node]]) -> bool:
        """Whether the memory of `a` and `b` is written equally often; the writes are counterparts, and so are the
        allocations."""
        writes, others = self._effects.writes(a), self._effects.writes(b)
        if len(writes) != len(others):
            return False
        if writes:
            origins = [self._effects.origin_of(node) for node in (a, b)]
            queue += [*zip(writes, others, strict=True), (origins[0], origins[1])]
        return True

    def _same_order(self, forward: Mapping) -> bool:
        order, last = self._effects.order, -1
        for _, position in sorted([(order[a], order[b]) for a, b in forward.items()]):
            if position <= last:
                return False
            last = position
        return True


def facts(value: Any) -> object:
    """Everything of a fake value that a reading can depend on; two values for which it is equal are alike."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, _numbers(value.shape), _numbers(value.stride())
    if isinstance(value, tuple | list):
        return tuple, *map(facts, value)
    if isinstance(value, int | float | bool):
        return type(value), value
    if isinstance(value, torch.SymInt):
        return type(value), size(value)
    return (type(value),)


def _numbers(values: Sequence[int | torch.SymInt]) -> Sequence[object]:
    for value in values:
        if type(value) is not int:
            return tuple(map(size, values))
    return values
