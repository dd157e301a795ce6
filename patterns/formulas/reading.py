"""Reading index arithmetic from a graph: the formula (`terms.Element`) of a node that builds a mask.

An operation that is not modelled, floating-point arithmetic on data, and memory written in a way that is not modelled
give an `Entry`: a look-up in a tensor whose contents are data. That is always right; it only says less.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from fusion_pass.graph.depth import Depth
from fusion_pass.graph.effects import Effects
from fusion_pass.graph.vocabulary import MOVEMENTS, fake, fake_tensor, in_place, operation, size, sizes
from fusion_pass.graph.writes import written_arguments

from ..literals import number
from . import movement, runs, terms  # the first two register their operations  # noqa: F401
from .operations import INTEGERS, OPERATORS, Run, cast_to, tensor_of
from .terms import Element, Entry, Number, Unknown, Unreadable

_signature = lru_cache(maxsize=1024)(inspect.signature)


class IndexReader:
    """Formulas of the nodes of one graph. Valid as long as the graph does not change."""

    def __init__(self, effects: Effects) -> None:
        self.effects = effects
        self.runs: dict[tuple[fx.Node, fx.Node | None], Run] = {}
        self._memo: dict[tuple[fx.Node, fx.Node | None], Element] = {}
        self._depth = Depth()

    def read(self, node: fx.Node, reader: fx.Node) -> Element:
        """The formula of an element of `node` as `reader` sees it, in the axes of `node`."""
        return self._version(node, self.effects.last_write(node, reader))

    def _version(self, node: fx.Node, write: fx.Node | None) -> Element:
        key = (node, write)
        if key not in self._memo:
            if self._depth.full:
                return opaque(node, write)
            self._depth.now += 1
            try:
                self._memo[key] = self._evaluate(node, write)
            except Unreadable:
                self._memo[key] = opaque(node, write)
            finally:
                self._depth.now -= 1
        return self._memo[key]

    def _evaluate(self, node: fx.Node, write: fx.Node | None) -> Element:
        if write is not None:
            # After an in-place operation on all of `node`, its contents are that operation's result.
            if in_place(write) is None or write.args[0] is not node:
                raise Unreadable("a write that is not modelled")
            return self._version(write, None)
        name = in_place(node) or operation(node)
        if written_arguments(node) and (in_place(node) is None or in_place(node) in MOVEMENTS):
            raise Unreadable("writes its arguments, or their shape")
        operator = OPERATORS.get(name)
        if operator is None:
            raise Unreadable(f"{name} is not modelled")
        try:
            bound = _signature(operator).bind(self, node, *node.args, **node.kwargs)
        except TypeError as error:
            raise Unreadable(str(error)) from None
        return _finished(node, operator(*bound.args, **bound.kwargs))

    def argument(self, value: Any, reader: fx.Node) -> Element:
        """An argument of `reader` that is a tensor or a number."""
        if isinstance(value, fx.Node):
            if fake_tensor(value) is not None:
                return self.read(value, reader)
            value = fake(value)
        if isinstance(value, bool):
            return terms.Truth(value)
        if isinstance(value, int | torch.SymInt):
            return terms.constant(size(value))
        known = number(value)
        if known is not None:
            return Number(known)
        raise Unreadable("an argument is neither a tensor nor a known number")


def opaque(node: fx.Node, write: fx.Node | None) -> Element:
    """The element of a tensor that is data: a look-up at its own position."""
    tensor = fake_tensor(node)
    if tensor is None:
        raise Unreadable("no tensor")
    shape = sizes(tensor)
    index = tuple(terms.constant(0) if n == 1 else terms.axis(len(shape) - d) for d, n in enumerate(shape))
    entry = Entry(node, write, index)
    if tensor.dtype == torch.bool:
        return terms.Fact(entry)
    return terms.atom(entry) if tensor.dtype in INTEGERS else Unknown(entry)


def _finished(node: fx.Node, element: Element) -> Element:
    """`element` brought to the shape and dtype that the graph records for `node`."""
    shape, dtype = sizes(tensor_of(node)), tensor_of(node).dtype
    element = terms.at(element, {len(shape) - d: terms.constant(0) for d, n in enumerate(shape) if n == 1})
    return cast_to(element, dtype)
