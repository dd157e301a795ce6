"""What an operation of a graph does to formulas: for each that builds masks, a function on `terms.Element`s.

A function gets the reader, the node and the node's own arguments. It raises `Unreadable` for what is not modelled.

Integers are int32 or int64 and are taken not to overflow: the numbers are positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import fx

from fusion_pass.graph.vocabulary import Size, fake, fake_tensor, size

from . import terms as terms
from .terms import Element, Entry, Formula, Linear, Number, Unreadable

INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Run:
    """What equal segment ids prove: between two equal ids along `axis`, `entry` advances by `step` a token.

    `segment = cumsum(entry[t] - entry[t - 1] != step)` counts the breaks. Equal counts mean no break in between, so the
    entries differ by `step` times the distance. `entry` is written with the axes of the segment tensor.
    """

    entry: Entry
    axis: int
    step: int


class Reader(Protocol):
    """What an operation may ask of the reader (`reading.IndexReader`)."""

    runs: dict[tuple[fx.Node, fx.Node | None], Run]

    def argument(self, value: Any, reader: fx.Node) -> Element:
        """The formula of an argument of `reader` that is a tensor or a number."""
        ...


def cast_to(element: Element, dtype: torch.dtype) -> Element:
    """`element` converted to `dtype`, numbers rounded as a tensor of that dtype holds them."""

    def convert(leaf: Element) -> Element:
        if dtype == torch.bool:
            if terms.is_formula(leaf):
                return leaf
            if isinstance(leaf, Linear):
                return terms.negation(terms.is_zero(leaf))
            if isinstance(leaf, Number):
                return terms.Truth(leaf.value != 0)
        elif dtype in INTEGERS:
            if isinstance(leaf, Linear):
                return leaf
            if terms.is_formula(leaf):
                return terms.select(cast(Formula, leaf), terms.constant(1), terms.constant(0))
        elif dtype.is_floating_point:
            if isinstance(leaf, Linear) and not leaf.terms and isinstance(leaf.constant, int):
                leaf = Number(float(leaf.constant))
            if isinstance(leaf, Number):
                return Number(_rounded(leaf.value, dtype))
            if terms.is_formula(leaf):
                return terms.select(cast(Formula, leaf), Number(1.0), Number(0.0))
        raise Unreadable("a conversion that is not modelled")

    return terms.each_case(convert, element)


def tensor_of(node: Any) -> torch.Tensor:
    """The fake tensor of `node`."""
    tensor = fake_tensor(node)
    if tensor is None:
        raise Unreadable("no tensor")
    return tensor


def rank_of(node: Any) -> int:
    """Number of axes of a tensor node."""
    return tensor_of(node).dim()


def size_of(value: Any) -> Size:
    """A size or bound: a number, or the expression of a symbol."""
    if isinstance(value, fx.Node):
        value = fake(value)
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise Unreadable("not a known integer")
    return size(value)


def integer(value: Any) -> int:
    """A known integer."""
    known = size_of(value)
    if not isinstance(known, int):
        raise Unreadable("not a known integer")
    return known


# --- operations -------------------------------------------------------------------------------------------------------

_Operator = Callable[..., Element]
OPERATORS: dict[str, _Operator] = {}


def operator(*names: str) -> Callable[[_Operator], _Operator]:
    """Register a function of (reader, node, *the node's own arguments) under canonical names."""

    def register(function: _Operator) -> _Operator:
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return register


@operator("arange")
def _arange(reader: Reader, node: fx.Node, *bounds: Any, **kwargs: Any) -> Element:
    named = [kwargs[name] for name in ("start", "end", "step") if name in kwargs]
    values = [*bounds, *named]
    start = size_of(values[0]) if len(values) > 1 else 0
    step = integer(values[2]) if len(values) > 2 else 1
    return terms.plus(terms.constant(start), terms.axis(1), step)


@operator("zeros", "zeros_like", "new_zeros")
def _zeros(reader: Reader, node: fx.Node, *args: Any, **kwargs: Any) -> Element:
    return Number(0.0) if tensor_of(node).dtype.is_floating_point else _exact(node, 0)


@operator("ones", "ones_like", "new_ones")
def _ones(reader: Reader, node: fx.Node, *args: Any, **kwargs: Any) -> Element:
    return Number(1.0) if tensor_of(node).dtype.is_floating_point else _exact(node, 1)


def _exact(node: fx.Node, value: int) -> Element:
    return terms.Truth(bool(value)) if tensor_of(node).dtype == torch.bool else terms.constant(value)


@operator("full", "full_like")
def _full(reader: Reader, node: fx.Node, _: Any = None, fill_value: Any = None, **kwargs: Any) -> Element:
    return reader.argument(fill_value, node)


@operator("new_full")
def _new_full(reader: Reader, node: fx.Node, _: Any, size: Any, fill_value: Any, **kwargs: Any) -> Element:
    return reader.argument(fill_value, node)


@operator("scalar_tensor", "tensor")
def _scalar(reader: Reader, node: fx.Node, value: Any, **kwargs: Any) -> Element:
    return reader.argument(value, node)


@operator(
    "to", "_to_copy", "float", "half", "bfloat16", "double", "bool", "int", "long", "type", "type_as",
    "contiguous", "clone", "detach", "alias", "convert_element_type", "lift_fresh_copy", "cuda", "cpu", "expand",
)  # fmt: skip
def _same(reader: Reader, node: fx.Node, x: Any, *args: Any, **kwargs: Any) -> Element:
    element = reader.argument(x, node)
    if (tensor_of(x).dtype, tensor_of(node).dtype) == (torch.int64, torch.int32) and not _of_axes_only(element):
        raise Unreadable("data cut to 32 bits")
    return element


def _of_axes_only(element: Element) -> bool:
    return isinstance(element, Linear) and all(isinstance(term, terms.Axis) for term, _ in element.terms)


# --- operations: arithmetic and comparison ---


def _arithmetic(
    name: str, integers: Callable[[Linear, Linear], Element], floats: Callable[[float, float], float]
) -> None:
    def combine(x: Element, y: Element) -> Element:
        if isinstance(x, Linear) and isinstance(y, Linear):
            return integers(x, y)
        return Number(floats(_float(x), _float(y)))

    @operator(name)
    def run(reader: Reader, node: fx.Node, x: Any, other: Any, *, alpha: Any = 1) -> Element:
        if alpha != 1:
            raise Unreadable("alpha")
        a, b = reader.argument(x, node), reader.argument(other, node)
        return terms.each_case(combine, counted(a), counted(b))


def counted(element: Element) -> Element:
    """A truth value as 1 or 0."""
    return cast_to(element, torch.int64) if terms.is_formula(element) else element


def _float(leaf: Element) -> float:
    if isinstance(leaf, Number):
        return leaf.value
    if isinstance(leaf, Linear) and not leaf.terms and isinstance(leaf.constant, int):
        return float(leaf.constant)
    raise Unreadable("floating-point arithmetic on data")


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=torch.float64).to(dtype)) if dtype.is_floating_point else value


def _kind(argument: Any) -> torch.Tensor | int | float:
    """A tensor or a number of the type of an argument, as `torch.result_type` takes it."""
    value = fake(argument) if isinstance(argument, fx.Node) else argument
    if isinstance(value, torch.Tensor | bool):
        return value
    return 0.0 if isinstance(value, float | torch.SymFloat) else 0


def _product(x: Linear, y: Linear) -> Element:
    if y.terms or not isinstance(y.constant, int):
        x, y = y, x
    if y.terms or not isinstance(y.constant, int):
        raise Unreadable("a product of two unknowns")
    return terms.times(x, y.constant)


_arithmetic("add", terms.plus, lambda x, y: x + y)
_arithmetic("sub", lambda x, y: terms.plus(x, y, -1), lambda x, y: x - y)
_arithmetic("rsub", lambda x, y: terms.plus(y, x, -1), lambda x, y: y - x)
_arithmetic("mul", _product, lambda x, y: x * y)


@operator("neg")
def _negative(reader: Reader, node: fx.Node, x: Any) -> Element:
    return terms.each_case(
        lambda a: terms.times(a, -1) if isinstance(a, Linear) else Number(-_float(a)), reader.argument(x, node)
    )


@operator("floordiv", "floor_divide")
def _floor_divide(reader: Reader, node: fx.Node, x: Any, other: Any) -> Element:
    return terms.each_case(lambda a: terms.quotient(linear_of(a), integer(other)), reader.argument(x, node))


@operator("div")
def _divide(reader: Reader, node: fx.Node, x: Any, other: Any, *, rounding_mode: Any = None) -> Element:
    if rounding_mode != "floor":
        raise Unreadable("a quotient that is no integer")
    return _floor_divide(reader, node, x, other)


@operator("abs", "absolute")
def _absolute(reader: Reader, node: fx.Node, x: Any) -> Element:
    return terms.each_case(lambda a: terms.magnitude(linear_of(a)), reader.argument(x, node))


def linear_of(element: Element) -> Linear:
    """An element that is an integer."""
    if not isinstance(element, Linear):
        raise Unreadable("not an integer")
    return element


def _comparison(name: str, integers: Callable[[Linear], Formula], floats: Callable[[float], bool]) -> None:
    """`integers` and `floats` say what `x ? y` means for `x - y`."""

    def holds(a: float, b: float) -> bool:
        return floats(a - b if a != b else 0.0)

    @operator(name)
    def run(reader: Reader, node: fx.Node, x: Any, other: Any) -> Element:
        def compare(x_: Element, y_: Element) -> Element:
            if isinstance(x_, Linear) and isinstance(y_, Linear):
                return integers(terms.plus(x_, y_, -1))
            a, b = _float(x_), _float(y_)
            truth = holds(a, b)
            if holds(_rounded(a, dtype), _rounded(b, dtype)) != truth:
                raise Unreadable("a comparison with a number that the tensor's dtype does not hold")
            return terms.Truth(truth)

        dtype = torch.result_type(_kind(x), _kind(other))
        return terms.each_case(compare, counted(reader.argument(x, node)), counted(reader.argument(other, node)))


_comparison("le", terms.at_most_zero, lambda d: d <= 0)
_comparison("lt", lambda d: terms.at_most_zero(terms.plus(d, terms.constant(1))), lambda d: d < 0)
_comparison("ge", lambda d: terms.at_most_zero(terms.times(d, -1)), lambda d: d >= 0)
_comparison("gt", lambda d: terms.at_most_zero(terms.plus(terms.constant(1), d, -1)), lambda d: d > 0)
_comparison("eq", terms.is_zero, lambda d: d == 0)
_comparison("ne", lambda d: terms.negation(terms.is_zero(d)), lambda d: d != 0)


# --- operations: logic and choice ---


@operator("bitwise_and", "logical_and")
def _and(reader: Reader, node: fx.Node, x: Any, other: Any) -> Element:
    return terms.every([_truth(reader, node, x), _truth(reader, node, other)])


@operator("bitwise_or", "logical_or")
def _or(reader: Reader, node: fx.Node, x: Any, other: Any) -> Element:
    return terms.some([_truth(reader, node, x), _truth(reader, node, other)])


@operator("bitwise_not", "logical_not")
def _not(reader: Reader, node: fx.Node, x: Any) -> Element:
    return terms.negation(_truth(reader, node, x))


def _truth(reader: Reader, node: fx.Node, x: Any) -> Formula:
    element = reader.argument(x, node)
    if not terms.is_formula(element):
        raise Unreadable("logic on numbers")
    return cast(Formula, element)


@operator("where")
def _where(reader: Reader, node: fx.Node, condition: Any, x: Any, y: Any) -> Element:
    if node.op == "call_method":  # x.where(condition, y)
        condition, x = x, condition
    return _choice(reader, node, condition, x, y)


@operator("masked_fill")
def _masked_fill(reader: Reader, node: fx.Node, x: Any, mask: Any, value: Any) -> Element:
    return _choice(reader, node, mask, value, x)


def _choice(reader: Reader, node: fx.Node, condition: Any, yes: Any, no: Any) -> Element:
    dtype = tensor_of(node).dtype
    chosen = [cast_to(reader.argument(x, node), dtype) for x in (yes, no)]
    return terms.select(_truth(reader, node, condition), *chosen)


@operator("tril")
def _tril(reader: Reader, node: fx.Node, x: Any, diagonal: Any = 0) -> Element:
    return _triangle(reader, node, x, terms.at_most_zero(_beyond(diagonal)))


@operator("triu")
def _triu(reader: Reader, node: fx.Node, x: Any, diagonal: Any = 0) -> Element:
    return _triangle(reader, node, x, terms.at_most_zero(terms.times(_beyond(diagonal), -1)))


def _beyond(diagonal: Any) -> Linear:
    """Distance of a column from a diagonal."""
    return terms.plus(terms.plus(terms.axis(1), terms.axis(2), -1), terms.constant(size_of(diagonal)), -1)


def _triangle(reader: Reader, node: fx.Node, x: Any, kept: Formula) -> Element:
    dtype = tensor_of(node).dtype
    return terms.select(
        kept,
        cast_to(reader.argument(x, node), dtype),
        cast_to(Number(0.0) if dtype.is_floating_point else terms.constant(0), dtype),
    )
