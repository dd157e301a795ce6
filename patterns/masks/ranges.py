"""How large the numbers of a tensor can be: an interval that holds all of them, whatever the inputs of the graph are.

A bias of the scores that is data (ALiBi: a slope for each head times the distance) does not bring back a key that a
mask hides by `finfo.min`, if it is bounded. What is not modelled, and what is written in place, has the range of its
dtype if that is of integers, and none if it is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, TypeAlias, cast

import torch
from torch import fx

from fusion_pass.graph.depth import Depth
from fusion_pass.graph.effects import Effects
from fusion_pass.graph.vocabulary import CALLS, CASTS, MOVEMENTS, Size, fake_tensor, operation, sizes

Range: TypeAlias = tuple[float, float]
"""The least and the largest number, both finite."""

_LONGEST = 2**40
"""No axis has more elements: of one byte each they are a terabyte."""

_ARITHMETIC: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "rsub": lambda a, b: b - a,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
}
"""Functions whose extremes over intervals are at corners."""

_FILLED = {"full": 1, "full_like": 1, "new_full": 2, "tensor": 0, "scalar_tensor": 0}
"""Where the number stands that a tensor is filled with."""


class Ranges:
    """Ranges of the tensors of one graph."""

    def __init__(self, effects: Effects) -> None:
        self._effects = effects
        self._memo: dict[fx.Node, Range | None] = {}
        self._depth = Depth()

    def of(self, value: object) -> Range | None:
        """The range of a tensor node, or of a number that is written in the graph; None if none is known."""
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value), float(value)
        if not isinstance(value, fx.Node) or fake_tensor(value) is None or self._depth.full:
            return None
        if value not in self._memo:
            self._depth.now += 1
            try:
                self._memo[value] = self._of_tensor(value)
            finally:
                self._depth.now -= 1
        return self._memo[value]

    def _of_tensor(self, node: fx.Node) -> Range | None:
        dtype = cast(torch.Tensor, fake_tensor(node)).dtype
        found = None if self._effects.writes(node) else self._of_call(node)
        if dtype == torch.bool:
            return 0.0, 1.0
        if dtype.is_floating_point:
            return found if found is not None and _within(found, torch.finfo(dtype)) else None
        if dtype.is_complex:
            return None
        if found is None or not _within(found, torch.iinfo(dtype)):
            return float(torch.iinfo(dtype).min), float(torch.iinfo(dtype).max)
        return found

    def _of_call(self, node: fx.Node) -> Range | None:
        rule = _RULES.get(operation(node))
        if rule is None or node.op not in CALLS:
            return None
        try:
            return rule(self, node, *node.args, **node.kwargs)
        except (TypeError, ValueError, OverflowError, ZeroDivisionError):
            return None  # arguments that the rule does not take, numbers that a float does not hold

    # --- rules, with the arguments of the operation ---

    def _moved(self, node: fx.Node, x: object, *_: object, **__: object) -> Range | None:
        before, after = fake_tensor(x), fake_tensor(node)
        found = self.of(x)
        if before is None or after is None or found is None or before.dtype == after.dtype:
            return found
        if operation(node) in MOVEMENTS:
            return None  # the bits as other numbers
        return found if after.is_floating_point() else (min(found[0], 0.0), max(found[1], 0.0))  # cut towards 0

    def _filled(self, node: fx.Node, *args: object, fill_value: object = None, **_: object) -> Range | None:
        place = _FILLED[operation(node)]
        return self.of(args[place] if place < len(args) else fill_value)

    def _zeros(self, node: fx.Node, *_: object, **__: object) -> Range | None:
        return 0.0, 0.0

    def _ones(self, node: fx.Node, *_: object, **__: object) -> Range | None:
        return 1.0, 1.0

    def _arange(self, node: fx.Node, *args: object, **others: object) -> Range | None:
        start, end = (0, *args) if len(args) == 1 else args  # with a step, or by name, it is not read
        if others.keys() & {"start", "end", "step"}:
            return None
        length = _length(sizes(cast(torch.Tensor, fake_tensor(node)))[0])
        if isinstance(start, int):
            return float(start), float(start) + length
        return (float(end) - length, float(end)) if isinstance(end, int) else None

    def _joined(self, node: fx.Node, parts: Sequence[object], *_: object, **__: object) -> Range | None:
        ranges = [self.of(part) for part in parts]
        known = [r for r in ranges if r is not None]
        return (min(r[0] for r in known), max(r[1] for r in known)) if known and len(known) == len(ranges) else None

    def _chosen(self, node: fx.Node, a: object, b: object, c: object) -> Range | None:
        return self._joined(node, (b if node.op == "call_function" else a, c))

    def _filled_where(self, node: fx.Node, x: object, _: object, value: object) -> Range | None:
        return self._joined(node, (x, value))

    def _cumsum(self, node: fx.Node, x: object, dim: int, **_: object) -> Range | None:
        found, shape = self.of(x), sizes(cast(torch.Tensor, fake_tensor(node)))
        length = _length(shape[dim])
        return None if found is None else (min(found[0], found[0] * length), max(found[1], found[1] * length))

    def _arithmetic(self, node: fx.Node, *args: object) -> Range | None:
        return self._corners(_ARITHMETIC[operation(node)], *args)

    def _div(self, node: fx.Node, a: object, b: object) -> Range | None:
        divisor = self.of(b)
        if divisor is None or divisor[0] <= 0 <= divisor[1]:
            return None
        return self._corners(lambda x, y: x / y, a, b)

    def _reciprocal(self, node: fx.Node, x: object) -> Range | None:
        return self._div(node, 1, x)

    def _pow(self, node: fx.Node, base: object, exponent: object) -> Range | None:
        found = self.of(base)
        return None if found is None or found[0] <= 0 else self._corners(math.pow, base, exponent)

    def _abs(self, node: fx.Node, x: object) -> Range | None:
        found = self.of(x)
        return None if found is None else (0.0, max(abs(found[0]), abs(found[1])))

    def _corners(self, function: Callable[..., float], *args: object) -> Range | None:
        ranges = [r for r in map(self.of, args) if r is not None]
        if len(ranges) != len(args):
            return None
        values = [function(*corner) for corner in product(*ranges)]
        return min(values), max(values)


_RULES: dict[str, Callable[..., Range | None]] = {
    **dict.fromkeys(CASTS | MOVEMENTS | {"repeat"}, Ranges._moved),
    **dict.fromkeys(_FILLED, Ranges._filled),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), Ranges._zeros),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), Ranges._ones),
    **dict.fromkeys(("cat", "stack"), Ranges._joined),
    **dict.fromkeys(_ARITHMETIC, Ranges._arithmetic),
    "arange": Ranges._arange,
    "where": Ranges._chosen,
    "masked_fill": Ranges._filled_where,
    "cumsum": Ranges._cumsum,
    "div": Ranges._div,
    "reciprocal": Ranges._reciprocal,
    "pow": Ranges._pow,
    "abs": Ranges._abs,
}


def _within(found: Range, info: Any) -> bool:
    """Whether a dtype holds these numbers; NaN is in no range."""
    return bool(info.min <= found[0] <= found[1] <= info.max)


def _length(size: Size) -> int:
    return size if isinstance(size, int) else _LONGEST
