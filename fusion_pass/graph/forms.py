"""Forms: how a node is written, apart from which nodes it reads, as a number. Comparing two nodes is comparing numbers.

Most of the cost of recognising a layer that repeats an earlier one is here: a form is taken once for each node of a
graph, by whoever asks first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import fx

from .vocabulary import CALLS

Form: TypeAlias = tuple[int, tuple[fx.Node, ...]]
"""A number, equal for two nodes that differ in their inputs at most, and the inputs in order of appearance."""

_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})
"""Types of most literals, which are compared by their values. Others are the same only as one object."""


class Forms(dict[fx.Node, Form]):
    """The forms of one graph's nodes, each taken when it is first asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[tuple[object, ...], int] = {}

    def __missing__(self, node: fx.Node) -> Form:
        inputs: list[fx.Node] = []
        op, kwargs = node.op, node.kwargs
        args: tuple[Any, ...] = node.args
        key: list[object] = [op, node.target if op in CALLS else None, len(args)]
        for argument in args:  # as `_write` does, without a call for the usual ones
            kind = type(argument)
            if kind is fx.Node:
                key.append(kind)
                inputs.append(argument)
            elif kind in _PLAIN:
                key += (kind, argument)
            else:
                _write((argument,), key, inputs)
        if kwargs:
            key.append(tuple(kwargs))
            _write(kwargs.values(), key, inputs)
        form = self[node] = self._numbers.setdefault(tuple(key), len(self._numbers)), tuple(inputs)
        return form


def _write(arguments: Iterable[Any], key: list[object], inputs: list[fx.Node]) -> None:
    """Append `arguments` to `key` as values to compare, each behind its type so that no two are written alike; their
    nodes go to `inputs`."""
    for argument in arguments:
        kind = type(argument)
        if kind is fx.Node:
            key.append(fx.Node)
            inputs.append(argument)
        elif kind in _PLAIN:
            key += (kind, argument)
        elif isinstance(argument, tuple | list):
            key += (list, len(argument))
            _write(argument, key, inputs)
        elif isinstance(argument, dict):
            key += (dict, tuple(argument))
            _write(argument.values(), key, inputs)
        elif kind is slice:
            key.append(slice)
            _write((argument.start, argument.stop, argument.step), key, inputs)
        else:
            key += (kind, id(argument))
