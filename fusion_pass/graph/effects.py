"""What is written where: memory shared between nodes, and the version of it that a reader sees.

Two nodes share memory when their fake tensors share a storage; that covers views, no-op casts and in-place results
alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property

from torch import fx

from .forms import Forms
from .vocabulary import CALLS, memory_of, operation
from .writes import written_arguments

_shared: ContextVar[dict[fx.Graph, Effects] | None] = ContextVar("shared effects", default=None)


@contextmanager
def graphs_at_rest() -> Iterator[None]:
    """While open, no graph changes: everybody who asks for the effects of one gets the same object."""
    token = _shared.set({})
    try:
        yield
    finally:
        _shared.reset(token)


class Effects:
    """Order, storages and writes of one graph. Built once; valid as long as the graph does not change."""

    @classmethod
    def of(cls, graph: fx.Graph) -> Effects:
        """The effects of `graph`: a new object, or inside `graphs_at_rest` the one for all."""
        shared = _shared.get()
        if shared is None:
            return cls(graph)
        if graph not in shared:
            shared[graph] = cls(graph)
        return shared[graph]

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.order = {node: position for position, node in enumerate(graph.nodes)}
        self._storage: dict[fx.Node, int | None] = {}
        self._writes: dict[int, list[fx.Node]] = {}
        self._writes_at: dict[int, list[int]] = {}
        self._last = -1
        self.written_forms = Forms()
        """How each node is written."""
        self.writers: list[fx.Node] = []
        """Nodes that may write to memory, in order."""
        for node, position in self.order.items():
            written = written_arguments(node)
            if not written:
                continue
            self.writers.append(node)
            for target in written:
                key = self.storage(target)
                if key is not None and (not self._writes.get(key) or self._writes[key][-1] is not node):
                    self._writes.setdefault(key, []).append(node)
                    self._writes_at.setdefault(key, []).append(position)
                    self._last = position

    @property
    def any_writes(self) -> bool:
        """Whether the graph writes to memory at all."""
        return bool(self._writes)

    def any_writes_behind(self, node: fx.Node) -> bool:
        """Whether any memory is written behind `node`."""
        return self._last > self.order[node]

    def doing(self, operations: Iterable[str]) -> list[fx.Node]:
        """The nodes that do one of `operations` (canonical names), in order."""
        found = [node for name in operations for node in self._by_operation.get(name, ())]
        return sorted(found, key=self.order.__getitem__)

    @cached_property
    def _by_operation(self) -> dict[str, list[fx.Node]]:
        by_target: dict[object, list[fx.Node]] = {}
        for node in self.order:
            by_target.setdefault((node.op, node.target), []).append(node)
        found: dict[str, list[fx.Node]] = {}
        for nodes in by_target.values():
            found.setdefault(operation(nodes[0]), []).extend(nodes)
        return found

    @cached_property
    def origin(self) -> dict[int, fx.Node]:
        """Storage -> the first node that has it: the allocation, of which all others are views."""
        origin: dict[int, fx.Node] = {}
        for node in self.order:
            key = self.storage(node)
            if key is not None:
                origin.setdefault(key, node)
        return origin

    @cached_property
    def _sharing(self) -> dict[int, list[fx.Node]]:
        """Storage -> the nodes that have it."""
        sharing: dict[int, list[fx.Node]] = {}
        for node in self.order:
            key = self.storage(node)
            if key is not None:
                sharing.setdefault(key, []).append(node)
        return sharing

    def reader_behind(self, region: Container[fx.Node], results: Container[fx.Node]) -> tuple[fx.Node, fx.Node] | None:
        """A write in `region` and a node outside of it that sees that write other than through `results`; None if there
        is none. Of memory that comes from outside the graph this is the caller, for whom its own node stands."""
        for write in self.writers:
            if write not in region:
                continue
            for key in {self.storage(target) for target in written_arguments(write)}:
                views_of_results = set[fx.Node]()
                for node in self._sharing.get(key, ()) if key is not None else ():
                    if node.op not in CALLS:
                        return write, node
                    if node in results or not views_of_results.isdisjoint(node.all_input_nodes):
                        views_of_results.add(node)
                        continue
                    for user in node.users:
                        if user not in region and self.order[user] > self.order[write]:
                            return write, user
        return None

    def origin_of(self, node: fx.Node) -> fx.Node:
        """The allocation that `node`, which holds a tensor, is a view of."""
        storage = self.storage(node)
        assert storage is not None
        return self.origin[storage]

    def storage(self, node: fx.Node) -> int | None:
        """Identity of the memory behind `node`; None for nodes that hold no tensor."""
        if node not in self._storage:
            self._storage[node] = memory_of(node)
        return self._storage[node]

    def writes(self, node: fx.Node) -> list[fx.Node]:
        """Every node that writes the memory behind `node`, in order."""
        if not self._writes:
            return []
        key = self.storage(node)
        return [] if key is None else self._writes.get(key, [])

    def last_write(self, node: fx.Node, before: fx.Node) -> fx.Node | None:
        """The write that `before` sees when it reads `node`; None if none came after `node` itself."""
        if not self._writes:
            return None
        key = self.storage(node)
        if key is None or key not in self._writes:
            return None
        index = bisect_left(self._writes_at[key], self.order[before])
        write = self._writes[key][index - 1] if index else None
        return write if write is not None and self.order[write] > self.order[node] else None

    def written_between(self, node: fx.Node, first: fx.Node, last: fx.Node) -> list[fx.Node]:
        """Writes to the memory behind `node` after `first`, up to and including `last`."""
        return [w for w in self.writes(node) if self.order[first] < self.order[w] <= self.order[last]]
