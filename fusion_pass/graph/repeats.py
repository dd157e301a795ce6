"""Layers repeat: what was found out about one place of a graph holds for every place built the same way.

A place is compared with an earlier one node by node, from its root upwards through everything the reader can evaluate
and downwards through what reads it. Nothing is hashed, so there is no wrong hit: either every node has exactly one
counterpart with the same operation, literals, shape, strides, dtype, writes and order, or the places are different.
Nodes that both places share (the rotary tables of the model) are their own counterparts and are not followed further.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import fx

from .effects import Effects
from .region import downstream, modelled
from .vocabulary import fake, size, sizes

T = TypeVar("T")

Mapping = dict[fx.Node, fx.Node]
Facts = dict[fx.Node, object]

_READERS = 40
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})
"""Types of most literals, which need no look inside."""


class Repeats(Generic[T]):
    """Verdicts by place."""

    def __init__(self, effects: Effects) -> None:
        self._effects = effects
        self._facts: Facts = {}
        self._known: dict[object, list[tuple[fx.Node, T]]] = {}

    def lookup(self, root: fx.Node) -> tuple[T, Mapping] | None:
        """The verdict on a place that is built like the one at `root`, and the counterpart of each of its nodes."""
        for earlier, verdict in self._known.get(self._kind(root), ()):
            mapping = counterparts(self._effects, self._facts, earlier, root)
            if mapping is not None:
                return verdict, mapping
        return None

    def add(self, root: fx.Node, verdict: T) -> None:
        """Remember `verdict` for `root`."""
        self._known.setdefault(self._kind(root), []).append((root, verdict))

    @staticmethod
    def _kind(root: fx.Node) -> object:
        return root.target, len(root.all_input_nodes), len(root.users)


def counterparts(effects: Effects, known: Facts, old: fx.Node, new: fx.Node) -> Mapping | None:
    """For each node that matters to the place at `old`, the one in its stead at `new`; None if the places differ.

    `known` holds the facts of nodes compared before, of the same graph.
    """
    comparison = _Comparison(effects, known)
    if not comparison.pair(old, new):  # what tells most places apart, before anything else is looked at
        return None
    readers = [_readers(effects, root) for root in (old, new)]
    if len(readers[0]) != len(readers[1]):
        return None
    pairs = [(old, new), *zip(*readers, strict=True)]
    if not all(comparison.pair(a, b) for a, b in pairs) or not comparison.run():
        return None
    order = effects.order
    places = sorted((order[a], order[b]) for a, b in comparison.forward.items())
    if any(x[1] >= y[1] for x, y in itertools.pairwise(places)):
        return None
    if any(len(a.users) != len(b.users) for a, b in pairs):
        return None
    return comparison.forward


def _readers(effects: Effects, root: fx.Node) -> list[fx.Node]:
    start = root
    writes = [n for n in root.all_input_nodes if root in effects.writes(n)]
    if writes:
        storage = effects.storage(writes[0])
        assert storage is not None
        start = effects.origin[storage]
    return downstream(start, _READERS, modelled)


class _Comparison:
    def __init__(self, effects: Effects, known: Facts) -> None:
        self.effects = effects
        self.known = known
        self.forward: Mapping = {}
        self.backward: Mapping = {}
        self.queue: list[tuple[fx.Node, fx.Node]] = []

    def pair(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether `b` can be the counterpart of `a`, as far as is known now."""
        if a in self.forward or b in self.backward:
            return self.forward.get(a) is b and self.backward.get(b) is a
        self.forward[a], self.backward[b] = b, a
        writes = self.effects.writes(a), self.effects.writes(b)
        if a is not b:
            if (
                a.op != b.op
                or (a.op in ("call_function", "call_method") and a.target != b.target)
                or self.facts(a) != self.facts(b)
            ):
                return False
            self.queue.append((a, b))
        elif not writes[0]:
            return True
        if len(writes[0]) != len(writes[1]):
            return False
        return all(self.pair(x, y) for x, y in zip(*writes, strict=True)) and self._pair_origins(a, b, bool(writes[0]))

    def _pair_origins(self, a: fx.Node, b: fx.Node, written: bool) -> bool:
        if not written:
            return True
        x, y = self.effects.storage(a), self.effects.storage(b)
        return x is not None and y is not None and self.pair(self.effects.origin[x], self.effects.origin[y])

    def facts(self, node: fx.Node) -> object:
        """`facts` of what `node` computes."""
        if node not in self.known:
            self.known[node] = facts(fake(node))
        return self.known[node]

    def run(self) -> bool:
        """Follow the arguments of every pair."""
        while self.queue:
            a, b = self.queue.pop()
            known = modelled(a)
            if known != modelled(b):
                return False
            if known and not (self.same(a.args, b.args) and self.same(a.kwargs, b.kwargs)):
                return False
        return True

    def same(self, a: Any, b: Any) -> bool:
        """Whether two arguments are equal, nodes up to their counterparts."""
        if isinstance(a, fx.Node):
            return isinstance(b, fx.Node) and self.pair(a, b)
        if type(a) in _PLAIN:
            return type(a) is type(b) and bool(a == b)
        if isinstance(a, tuple | list):
            return isinstance(b, tuple | list) and len(a) == len(b) and all(map(self.same, a, b))
        if isinstance(a, dict):
            return isinstance(b, dict) and a.keys() == b.keys() and all(self.same(a[k], b[k]) for k in a)
        if isinstance(a, slice):
            return isinstance(b, slice) and self.same([a.start, a.stop, a.step], [b.start, b.stop, b.step])
        return type(a) is type(b) and bool(a == b)


def facts(value: Any) -> object:
    """Everything of a fake value that a reading can depend on; two values for which it is equal are alike."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.dtype, value.device, sizes(value), _numbers(value.stride())
    if isinstance(value, tuple | list):
        return tuple, *map(facts, value)
    if isinstance(value, int | float | bool):
        return type(value), value
    return (type(value),)


def _numbers(values: Sequence[int | torch.SymInt]) -> tuple[object, ...]:
    return tuple([v if type(v) is int else size(v) for v in values])
