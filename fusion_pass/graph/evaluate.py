"""Evaluates nodes of a graph on one token (see `lanes.py`), lazily, each at the version of memory that its reader sees.

root = Evaluator(effects)         every opaque node is a source
study = root.study(node, draws)   the same, but `node` has the given lanes: what follows responds to them
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import fx

from . import arithmetic, lanes, movement, operations  # registers the operations  # noqa: F401
from .depth import Depth
from .effects import Effects
from .lanes import WORLDS, Array, Mixed, Opaque, Promote, Source, Value
from .overwrite import overwrite
from .vocabulary import CALLS, CASTS, MOVEMENTS, Size, fake, fake_tensor, in_place, operation, sizes
from .writes import written_arguments

T = TypeVar("T")

_SEED = 0x5EED
_MAX_LANES = 1 << 16
_PROMOTABLE = 512
"""Longest outer axis that may become lanes (a head_dim, a number of heads)."""


class Escaped(Exception):
    """The studied tensor is read by something outside the model, so its effect on the rest is unknown."""


class Evaluator:
    """Values of the nodes of one graph."""

    def __init__(self, effects: Effects, generator: np.random.Generator | None = None) -> None:
        self.effects = effects
        self._memo: dict[tuple[fx.Node, fx.Node | None], Any] = {}
        self._generator = generator or np.random.default_rng(_SEED)
        self._draws: dict[Hashable, Array] = {}
        self._sources: dict[Hashable, Value] = {}
        self._promoted: dict[Hashable, set[int]] = {}
        self._depth = Depth()
        self.scalars: dict[Hashable, tuple[Value, float | fx.Node]] = {}
        """Run-time scalars and small literals met so far: their stand-in numbers, and what they stand for."""

    def value(self, node: fx.Node) -> Any:
        """What `node` computes: a `Value`, or a list of them for `split` and its like."""
        return self._version(node, None)

    def read(self, node: fx.Node, at: fx.Node) -> Any:
        """What `at` sees when it reads `node`."""
        return self._version(node, self.effects.last_write(node, at))

    def opaque(self, node: fx.Node) -> bool:
        """Whether `node` is a source: what it is computed from is not seen through it."""
        value = self.value(node)
        return not isinstance(value, Value) or any(source.key == (node, None) for source in value.axes)

    def sealed(self, node: fx.Node, at: fx.Node) -> Any:
        """What `at` sees when it reads `node`, with only the last axis as lanes (see `lanes.seal`)."""
        value = self.read(node, at)
        if not isinstance(value, Value):
            return value
        return lanes.seal(value, lambda key, n: self.random(key, (WORLDS, n)))

    def study(self, node: fx.Node, draws: Callable[[Array], Array], outer: bool = False) -> Study:
        """An evaluator in which `node` is a source with lanes `draws(random)`. `outer`: no axis but its last may
        become lanes.
        """
        return Study(self, node, draws, outer)

    def settle(self, attempt: Callable[[], T]) -> T:
        """Run `attempt`, again for every outer axis that turns out to be used as lanes."""
        for _ in range(12):
            try:
                with np.errstate(all="ignore"):
                    return attempt()
            except Promote as request:
                for source, axis in request.wanted:
                    self._promoted.setdefault(source.key, set()).add(axis)
                self._memo.clear()
                self._sources.clear()
        raise Opaque("outer axes and lanes cannot be told apart")

    def random(self, key: Hashable, shape: tuple[int, ...], complex_: bool = False) -> Array:
        """Numbers of either sign and of size 0.5 to 1.5 that belong to `key`."""
        if key not in self._draws:
            x = self._generator.uniform(-1, 1, shape)
            x += np.copysign(0.5, x)
            self._draws[key] = x + 1j * self._generator.uniform(0.5, 1.5, shape) if complex_ else x
        return self._draws[key]

    # What a handler may ask (operations.Context).

    def scalar(self, literal: float) -> Value:
        """The stand-in for a small literal."""
        return self._scalar(("literal", literal), literal)

    def filler(self, node: fx.Node) -> Value:
        """Uninitialised memory: numbers that nothing else has, the same for every token."""
        shape = operations.shape_of(node)
        last = shape[-1] if shape and isinstance(shape[-1], int) and shape[-1] <= _MAX_LANES else 1
        return Value(
            shape,
            self.random(("filler", node, last), (WORLDS, 1, *(1,) * (len(shape) - 1), last)[: 2 + len(shape)]),
            {},
        )

    def _scalar(self, key: Hashable, meaning: float | fx.Node) -> Value:
        if key not in self.scalars:
            self.scalars[key] = (Value((), np.abs(self.random(key, (WORLDS, 1))), {}), meaning)
        return self.scalars[key][0]

    # --- versions of memory -------------------------------------------------------------------------------------------

    def _version(self, node: fx.Node, write: fx.Node | None) -> Any:
        """`node` after `write`, the last write to its memory that counts; None: as it was computed."""
        key = (node, write)
        if key not in self._memo:
            if self._depth.full:
                return self._opaque(node, write)
            self._depth.now += 1
            try:
                self._memo[key] = self._checked(
                    node, self._plain(node) if write is None else self._written(node, write)
                )
            except Opaque:
                self._memo[key] = self._opaque(node, write)
            finally:
                self._depth.now -= 1
        return self._memo[key]

    def _checked(self, node: fx.Node, value: Any) -> Any:
        tensor = fake_tensor(node)
        if isinstance(value, Value) and tensor is not None and value.shape != sizes(tensor):
            raise Opaque("the model of this operation gives another shape")
        return value

    def _plain(self, node: fx.Node) -> Any:
        if node.op not in CALLS:
            raise Opaque(node.op)
        if written_arguments(node):
            target = node.args[0] if node.args else None
            if isinstance(target, fx.Node) and self.effects.storage(target) == self.effects.storage(node):
                return self._version(target, node)
            raise Opaque("writes its arguments")
        if isinstance(fake(node), float | torch.SymFloat):
            return self._scalar(("run time", node), node)
        name = operation(node)
        if name not in operations.HANDLERS:
            raise Opaque(f"{name} is not modelled")
        return operations.apply(self, node, name, self._arguments(node.args, node), self._arguments(node.kwargs, node))

    def _arguments(self, argument: Any, reader: fx.Node) -> Any:
        if isinstance(argument, fx.Node):
            value = fake(argument)
            if isinstance(value, torch.SymFloat | float):
                return self._scalar(("run time", argument), argument)
            return argument if isinstance(value, torch.SymInt | int) else self.read(argument, reader)
        if isinstance(argument, tuple | list):
            return [self._arguments(a, reader) for a in argument]
        if isinstance(argument, dict):
            return {key: self._arguments(a, reader) for key, a in argument.items()}
        return argument

    def _written(self, node: fx.Node, write: fx.Node) -> Any:
        storage = self.effects.storage(node)
        assert storage is not None
        origin = self.effects.origin[storage]
        if node is not origin:
            parent = self._viewed(node)
            if written_arguments(node):
                return self._version(parent, write)
            args = [self._version(parent, write), *self._arguments(node.args[1:], node)]
            return operations.apply(self, node, operation(node), args, self._arguments(node.kwargs, node))
        before = self.effects.last_write(origin, write)
        return self._scatter(origin, self._version(origin, before), write)

    def _viewed(self, node: fx.Node) -> fx.Node:
        """The node that `node` is a view of (or, for an in-place operation, the result of)."""
        parent = node.args[0] if node.args else None
        if not isinstance(parent, fx.Node) or self.effects.storage(parent) != self.effects.storage(node):
            raise Opaque("a view of unknown origin")
        if not written_arguments(node) and operation(node) not in MOVEMENTS | CASTS:
            raise Opaque("a view that is not modelled")
        return parent

    def _scatter(self, origin: fx.Node, before: Value, write: fx.Node) -> Value:
        """`before` with the part that `write` addresses replaced."""
        target, new = write.args[0], self._new_contents(write)
        if not isinstance(target, fx.Node):
            raise Opaque("a write to something unknown")
        chain: list[fx.Node] = []
        while target is not origin:
            if not written_arguments(target):
                chain.insert(0, target)
            target = self._viewed(target)

        def address(value: Value) -> Value:
            for step in chain:
                args = [value, *self._arguments(step.args[1:], step)]
                value = operations.apply(self, step, operation(step), args, self._arguments(step.kwargs, step))
            return movement.basic_index(value, write.args[1]) if operation(write) == "setitem" else value

        return overwrite(before, address, new)

    def _new_contents(self, write: fx.Node) -> Value:
        name = operation(write)
        if name in ("setitem", "copy_"):
            place = 2 if name == "setitem" else 1
            given = write.args[place] if len(write.args) > place else write.kwargs.get("other", write.kwargs.get("src"))
            written, memory = fake_tensor(given), fake_tensor(write.args[0])
            if memory is None or (written is None and not memory.is_floating_point()):
                raise Opaque("a number in memory of another kind")
            if written is not None:
                movement.check_cast(written.dtype, memory.dtype)
            return operations.tensor(self._arguments(given, write))
        changed_by = in_place(write)
        if changed_by is None:
            raise Opaque("a write that is not modelled")
        args = self._arguments(write.args, write)
        return operations.tensor(operations.apply(self, write, changed_by, args, self._arguments(write.kwargs, write)))

    # --- sources ------------------------------------------------------------------------------------------------------

    def _opaque(self, node: fx.Node, write: fx.Node | None) -> Any:
        """`node` after `write` as a source, or as a list of them."""
        value = fake(node)
        if isinstance(value, tuple | list):
            return [
                self._tensor_source((node, write, i), v) if isinstance(v, torch.Tensor) else None
                for i, v in enumerate(value)
            ]
        if not isinstance(value, torch.Tensor):
            return None
        return self._tensor_source((node, write), value, creates=operation(node) in ("arange", "linspace"))

    def _tensor_source(self, key: Hashable, tensor: torch.Tensor, creates: bool = False) -> Value:
        if key in self._sources:
            return self._sources[key]
        shape = sizes(tensor)
        features = (tensor.is_floating_point() or tensor.is_complex()) and not creates
        promotable = {
            k for k, n in enumerate(shape) if isinstance(n, int) and n <= (_PROMOTABLE if len(shape) == 1 else 8)
        }
        self._sources[key] = self._make_source(key, shape, features, promotable, tensor.is_complex())
        return self._sources[key]

    def _make_source(
        self,
        key: Hashable,
        shape: tuple[Size, ...],
        features: bool,
        promotable: set[int],
        complex_: bool = False,
        draws: Callable[[Array], Array] | None = None,
    ) -> Value:
        kept = set(self._promoted.get(key, ()))
        if features and shape and isinstance(shape[-1], int) and shape[-1] <= _MAX_LANES:
            kept.add(len(shape) - 1)
        data = self.random(
            (key, frozenset(kept)), (WORLDS, 1, *(n if k in kept else 1 for k, n in enumerate(shape))), complex_
        )
        source = Source(key, shape, frozenset(promotable - kept))
        paths = tuple(None if k in kept or n == 1 else ("axis", k) for k, n in enumerate(shape))
        return Value(shape, data if draws is None else draws(data), {source: paths})


class Study(Evaluator):
    """The response of a graph to one tensor. Everything that does not depend on it comes from the root evaluator."""

    def __init__(self, root: Evaluator, node: fx.Node, draws: Callable[[Array], Array], outer: bool) -> None:
        super().__init__(root.effects, root._generator)
        self._root = root
        self._depth = root._depth
        self._seals = False
        self._draws, self._promoted, self.scalars = root._draws, root._promoted, root.scalars
        self.node = node
        self.start = root.effects.order[node]
        self._dependent: dict[tuple[fx.Node, fx.Node | None], bool] = {(node, None): True}
        self._drawn = draws
        self._outer = outer
        if fake_tensor(node) is None:
            raise Opaque("only a tensor can be studied")

    @cached_property
    def studied(self) -> Value:
        """The studied tensor. Many a study only asks what depends on it, which takes no numbers."""
        shape = operations.shape_of(self.node)
        short = {k for k, n in enumerate(shape) if isinstance(n, int) and n <= _PROMOTABLE}
        promotable = set() if self._outer else short
        return self._make_source(("studied", self.node, self._outer), shape, True, promotable, draws=self._drawn)

    @cached_property
    def source(self) -> Source:
        """The one source of the studied tensor."""
        (source,) = self.studied.axes
        return source

    def depends(self, node: fx.Node, write: fx.Node | None = None) -> bool:
        """Whether `node` (after `write`) depends on the studied tensor."""
        key = (node, write)
        if key in self._dependent:
            return self._dependent[key]
        path = [(key, self._read_by(*key))]  # not by recursion: it may be long
        while path:
            reader, rest = path[-1]
            read = next((other for other in rest if self._dependent.get(other) is not False), None)
            if read is None:
                self._dependent[reader] = False
                path.pop()
            elif read in self._dependent:
                self._dependent.update((reader, True) for reader, _ in path)
                break
            else:
                path.append((read, self._read_by(*read)))
        return self._dependent[key]

    def _read_by(self, node: fx.Node, write: fx.Node | None) -> Iterator[tuple[fx.Node, fx.Node | None]]:
        """What `node` (after `write`) is computed from, in the versions that are read; nothing, where that is older
        than the studied tensor."""
        order = self.effects.order
        if max(order[node], order[node if write is None else write]) <= self.start:
            return
        writes = [] if write is None else [write, *(w for w in self.effects.writes(node) if order[w] < order[write])]
        for reader in (node, *writes):
            for n in reader.all_input_nodes:
                yield n, self.effects.last_write(n, reader)

    def _version(self, node: fx.Node, write: fx.Node | None) -> Any:
        if node is self.node and write is None:
            return self.studied
        return super()._version(node, write) if self.depends(node, write) else self._root._version(node, write)

    def _plain(self, node: fx.Node) -> Any:
        try:
            return super()._plain(node)
        except Mixed:
            # A table known place by place along the sequence meets the studied tensor, whose sequence is a label.
            self._seals = True
            try:
                return super()._plain(node)
            finally:
                self._seals = False

    def read(self, node: fx.Node, at: fx.Node) -> Any:
        write = self.effects.last_write(node, at)
        if self._seals and not self.depends(node, write):
            return self._root.sealed(node, at)
        return self._version(node, write)

    def _opaque(self, node: fx.Node, write: fx.Node | None) -> Any:
        raise Escaped(node.name)
