"""Reading index arithmetic from a graph: the formula (`index_terms.Element`) of a node that builds a mask.

An operation that is not modelled, floating-point arithmetic on data, and memory written in a way that is not modelled
give an `Entry`: a look-up in a tensor whose contents are data. That is always right; it only says less.

Integers are int32 or int64 and are taken not to overflow: the numbers are positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from fusion_pass.graph.effects import Effects
from fusion_pass.graph.vocabulary import (
    MOVEMENTS,
    Size,
    fake,
    fake_tensor,
    in_place,
    operation,
    size,
    sizes,
    written_arguments,
)

from . import index_terms as terms
from .heads import number
from .index_terms import Element, Entry, Formula, Linear, Number, Select, Unknown, Unreadable

_INTEGERS = (torch.int32, torch.int64)
_MAX_DEPTH = 200


@dataclass(frozen=True)
class Run:
    """What equal segment ids prove: between two equal ids along `axis`, `entry` advances by `step` a token.

    `segment = cumsum(entry[t] - entry[t - 1] != step)` counts the breaks. Equal counts mean no break in between, so the
    entries differ by `step` times the distance. `entry` is written with the axes of the segment tensor.
    """

    entry: Entry
    axis: int
    step: int


class IndexReader:
    """Formulas of the nodes of one graph. Valid as long as the graph does not change."""

    def __init__(self, effects: Effects) -> None:
        self.effects = effects
        self.runs: dict[tuple[fx.Node, fx.Node | None], Run] = {}
        self._memo: dict[tuple[fx.Node, fx.Node | None], Element] = {}
        self._depth = 0

    def read(self, node: fx.Node, reader: fx.Node) -> Element:
        """The formula of an element of `node` as `reader` sees it, in the axes of `node`."""
        return self._version(node, self.effects.last_write(node, reader))

    def _version(self, node: fx.Node, write: fx.Node | None) -> Element:
        key = (node, write)
        if key not in self._memo:
            if self._depth > _MAX_DEPTH:
                return opaque(node, write)
            self._depth += 1
            try:
                self._memo[key] = self._evaluate(node, write)
            except Unreadable:
                self._memo[key] = opaque(node, write)
            finally:
                self._depth -= 1
        return self._memo[key]

    def _evaluate(self, node: fx.Node, write: fx.Node | None) -> Element:
        if write is not None:
            # After an in-place operation on all of `node`, its contents are that operation's result.
            if in_place(write) is None or write.args[0] is not node or self.effects.last_write(node, write) is not None:
                raise Unreadable("a write that is not modelled")
            return self._version(write, None)
        if node.op not in ("call_function", "call_method"):
            raise Unreadable(node.op)
        name = in_place(node) or operation(node)
        if written_arguments(node) and (in_place(node) is None or in_place(node) in MOVEMENTS):
            raise Unreadable("writes its arguments, or their shape")
        operator = _OPERATORS.get(name)
        if operator is None:
            raise Unreadable(f"{name} is not modelled")
        try:
            bound = inspect.signature(operator).bind(self, node, *node.args, **node.kwargs)
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
    return terms.atom(entry) if tensor.dtype in _INTEGERS else Unknown(entry)


def _finished(node: fx.Node, element: Element) -> Element:
    """`element` brought to the shape and dtype that the graph records for `node`."""
    shape, dtype = sizes(_tensor(node)), _tensor(node).dtype
    element = terms.at(element, {len(shape) - d: terms.constant(0) for d, n in enumerate(shape) if n == 1})
    return cast_to(element, dtype)


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
        elif dtype in _INTEGERS:
            if isinstance(leaf, Linear):
                return leaf
            if terms.is_formula(leaf):
                return terms.select(cast(Formula, leaf), terms.constant(1), terms.constant(0))
        elif dtype.is_floating_point:
            if isinstance(leaf, Linear) and not leaf.terms and isinstance(leaf.constant, int):
                leaf = Number(float(leaf.constant))
            if isinstance(leaf, Number):
                return Number(float(torch.tensor(leaf.value, dtype=torch.float64).to(dtype)))
            if terms.is_formula(leaf):
                return terms.select(cast(Formula, leaf), Number(1.0), Number(0.0))
        raise Unreadable("a conversion that is not modelled")

    return terms.each_case(convert, element)


def _tensor(node: Any) -> torch.Tensor:
    tensor = fake_tensor(node)
    if tensor is None:
        raise Unreadable("no tensor")
    return tensor


def _rank(node: Any) -> int:
    return _tensor(node).dim()


def _size(value: Any) -> Size:
    """A size or bound: a number, or the expression of a symbol."""
    if isinstance(value, fx.Node):
        value = fake(value)
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise Unreadable("not a known integer")
    return size(value)


def _integer(value: Any) -> int:
    known = _size(value)
    if not isinstance(known, int):
        raise Unreadable("not a known integer")
    return known


# --- operations -------------------------------------------------------------------------------------------------------

_Operator = Callable[..., Element]
_OPERATORS: dict[str, _Operator] = {}


def _operator(*names: str) -> Callable[[_Operator], _Operator]:
    """Register a function of (reader, node, *the node's own arguments) under canonical names."""

    def register(function: _Operator) -> _Operator:
        _OPERATORS.update(dict.fromkeys(names, function))
        return function

    return register


@_operator("arange")
def _arange(reader: IndexReader, node: fx.Node, *bounds: Any, **kwargs: Any) -> Element:
    if _tensor(node).dtype not in _INTEGERS:
        raise Unreadable("positions that are not integers")
    named = [kwargs[name] for name in ("start", "end", "step") if name in kwargs]
    values = [*bounds, *named]
    start = _size(values[0]) if len(values) > 1 else 0
    step = _integer(values[2]) if len(values) > 2 else 1
    return terms.plus(terms.constant(start), terms.axis(1), step)


@_operator("zeros", "zeros_like", "new_zeros")
def _zeros(reader: IndexReader, node: fx.Node, *args: Any, **kwargs: Any) -> Element:
    return Number(0.0) if _tensor(node).dtype.is_floating_point else _exact(node, 0)


@_operator("ones", "ones_like", "new_ones")
def _ones(reader: IndexReader, node: fx.Node, *args: Any, **kwargs: Any) -> Element:
    return Number(1.0) if _tensor(node).dtype.is_floating_point else _exact(node, 1)


def _exact(node: fx.Node, value: int) -> Element:
    return terms.Truth(bool(value)) if _tensor(node).dtype == torch.bool else terms.constant(value)


@_operator("full", "full_like")
def _full(reader: IndexReader, node: fx.Node, _: Any = None, fill_value: Any = None, **kwargs: Any) -> Element:
    return reader.argument(fill_value, node)


@_operator("new_full")
def _new_full(reader: IndexReader, node: fx.Node, _: Any, size: Any, fill_value: Any, **kwargs: Any) -> Element:
    return reader.argument(fill_value, node)


@_operator("scalar_tensor", "tensor")
def _scalar(reader: IndexReader, node: fx.Node, value: Any, **kwargs: Any) -> Element:
    return reader.argument(value, node)


@_operator(
    "to", "_to_copy", "float", "half", "bfloat16", "double", "bool", "int", "long", "type", "type_as",
    "contiguous", "clone", "detach", "alias", "convert_element_type", "lift_fresh_copy", "cuda", "cpu", "expand",
)  # fmt: skip
def _same(reader: IndexReader, node: fx.Node, x: Any, *args: Any, **kwargs: Any) -> Element:
    element = reader.argument(x, node)
    if (_tensor(x).dtype, _tensor(node).dtype) == (torch.int64, torch.int32) and not _of_axes_only(element):
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

    @_operator(name)
    def run(reader: IndexReader, node: fx.Node, x: Any, other: Any, *, alpha: Any = 1) -> Element:
        if alpha != 1:
            raise Unreadable("alpha")
        a, b = reader.argument(x, node), reader.argument(other, node)
        if terms.is_formula(a) and terms.is_formula(b):
            raise Unreadable("arithmetic on two truth values")
        return terms.each_case(combine, _counted(a), _counted(b))


def _counted(element: Element) -> Element:
    """A truth value as 1 or 0."""
    return cast_to(element, torch.int64) if terms.is_formula(element) else element


def _float(leaf: Element) -> float:
    if isinstance(leaf, Number):
        return leaf.value
    if isinstance(leaf, Linear) and not leaf.terms and isinstance(leaf.constant, int):
        return float(leaf.constant)
    raise Unreadable("floating-point arithmetic on data")


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


@_operator("neg")
def _negative(reader: IndexReader, node: fx.Node, x: Any) -> Element:
    return terms.each_case(
        lambda a: terms.times(a, -1) if isinstance(a, Linear) else Number(-_float(a)), reader.argument(x, node)
    )


@_operator("floordiv", "floor_divide")
def _floor_divide(reader: IndexReader, node: fx.Node, x: Any, other: Any) -> Element:
    return terms.each_case(lambda a: terms.quotient(_linear(a), _integer(other)), reader.argument(x, node))


@_operator("div")
def _divide(reader: IndexReader, node: fx.Node, x: Any, other: Any, *, rounding_mode: Any = None) -> Element:
    if rounding_mode != "floor":
        raise Unreadable("a quotient that is no integer")
    return _floor_divide(reader, node, x, other)


@_operator("abs", "absolute")
def _absolute(reader: IndexReader, node: fx.Node, x: Any) -> Element:
    return terms.each_case(lambda a: terms.magnitude(_linear(a)), reader.argument(x, node))


def _linear(element: Element) -> Linear:
    if not isinstance(element, Linear):
        raise Unreadable("not an integer")
    return element


def _comparison(name: str, integers: Callable[[Linear], Formula], floats: Callable[[float], bool]) -> None:
    """`integers` and `floats` say what `x ? y` means for `x - y`."""

    def compare(x: Element, y: Element) -> Element:
        if isinstance(x, Linear) and isinstance(y, Linear):
            return integers(terms.plus(x, y, -1))
        a, b = _float(x), _float(y)
        return terms.Truth(floats(a - b if a != b else 0.0))

    @_operator(name, f"__{name}__")
    def run(reader: IndexReader, node: fx.Node, x: Any, other: Any) -> Element:
        return terms.each_case(compare, _counted(reader.argument(x, node)), _counted(reader.argument(other, node)))


_comparison("le", terms.at_most_zero, lambda d: d <= 0)
_comparison("lt", lambda d: terms.at_most_zero(terms.plus(d, terms.constant(1))), lambda d: d < 0)
_comparison("ge", lambda d: terms.at_most_zero(terms.times(d, -1)), lambda d: d >= 0)
_comparison("gt", lambda d: terms.at_most_zero(terms.plus(terms.constant(1), d, -1)), lambda d: d > 0)
_comparison("eq", terms.is_zero, lambda d: d == 0)
_comparison("ne", lambda d: terms.negation(terms.is_zero(d)), lambda d: d != 0)


# --- operations: logic and choice ---


@_operator("bitwise_and", "logical_and")
def _and(reader: IndexReader, node: fx.Node, x: Any, other: Any) -> Element:
    return terms.every([_truth(reader, node, x), _truth(reader, node, other)])


@_operator("bitwise_or", "logical_or")
def _or(reader: IndexReader, node: fx.Node, x: Any, other: Any) -> Element:
    return terms.some([_truth(reader, node, x), _truth(reader, node, other)])


@_operator("bitwise_not", "logical_not")
def _not(reader: IndexReader, node: fx.Node, x: Any) -> Element:
    return terms.negation(_truth(reader, node, x))


def _truth(reader: IndexReader, node: fx.Node, x: Any) -> Formula:
    element = reader.argument(x, node)
    if not terms.is_formula(element):
        raise Unreadable("logic on numbers")
    return cast(Formula, element)


@_operator("where")
def _where(reader: IndexReader, node: fx.Node, condition: Any, x: Any, y: Any) -> Element:
    if node.op == "call_method":  # x.where(condition, y)
        condition, x = x, condition
    return _choice(reader, node, condition, x, y)


@_operator("masked_fill")
def _masked_fill(reader: IndexReader, node: fx.Node, x: Any, mask: Any, value: Any) -> Element:
    return _choice(reader, node, mask, value, x)


def _choice(reader: IndexReader, node: fx.Node, condition: Any, yes: Any, no: Any) -> Element:
    dtype = _tensor(node).dtype
    chosen = [cast_to(reader.argument(x, node), dtype) for x in (yes, no)]
    return terms.select(_truth(reader, node, condition), *chosen)


@_operator("tril")
def _tril(reader: IndexReader, node: fx.Node, x: Any, diagonal: Any = 0) -> Element:
    return _triangle(reader, node, x, terms.at_most_zero(_beyond(diagonal)))


@_operator("triu")
def _triu(reader: IndexReader, node: fx.Node, x: Any, diagonal: Any = 0) -> Element:
    return _triangle(reader, node, x, terms.at_most_zero(terms.times(_beyond(diagonal), -1)))


def _beyond(diagonal: Any) -> Linear:
    """Distance of a column from a diagonal."""
    return terms.plus(terms.plus(terms.axis(1), terms.axis(2), -1), terms.constant(_size(diagonal)), -1)


def _triangle(reader: IndexReader, node: fx.Node, x: Any, kept: Formula) -> Element:
    dtype = _tensor(node).dtype
    return terms.select(
        kept,
        cast_to(reader.argument(x, node), dtype),
        cast_to(Number(0.0) if dtype.is_floating_point else terms.constant(0), dtype),
    )


# --- operations: movement ---


def _moved(reader: IndexReader, node: fx.Node, x: Any, places: Sequence[Linear | None]) -> Element:
    """`x` with its axis `d` read at `places[d]`, a formula in the axes of `node`; None: an axis of one element."""
    rank = _rank(x)
    table = {rank - d: terms.constant(0) if place is None else place for d, place in enumerate(places)}
    return terms.at(reader.argument(x, node), table)


def _axes(node: fx.Node) -> list[Linear]:
    """The axes of `node`, in order."""
    rank = _rank(node)
    return [terms.axis(rank - d) for d in range(rank)]


@_operator("unsqueeze")
def _unsqueeze(reader: IndexReader, node: fx.Node, x: Any, dim: Any) -> Element:
    places = _axes(node)
    del places[_integer(dim) % len(places)]
    return _moved(reader, node, x, places)


@_operator("view", "squeeze")
def _view(reader: IndexReader, node: fx.Node, x: Any, *args: Any, **kwargs: Any) -> Element:
    if any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values())):
        raise Unreadable("a bit cast")
    return _moved(reader, node, x, _reshaped(sizes(_tensor(x)), sizes(_tensor(node))))


def _reshaped(before: Sequence[Size], after: Sequence[Size]) -> list[Linear | None]:
    """Places of a view that only adds or takes away axes of one element."""
    kept = [d for d, n in enumerate(after) if n != 1]
    if [n for n in before if n != 1] != [after[d] for d in kept]:
        raise Unreadable("a view that splits or joins axes")
    following = iter(kept)
    return [None if n == 1 else terms.axis(len(after) - next(following)) for n in before]


@_operator("permute")
def _permute(reader: IndexReader, node: fx.Node, x: Any, *dims: Any) -> Element:
    order = dims[0] if len(dims) == 1 and isinstance(dims[0], tuple | list) else dims
    axes, places = _axes(node), cast(list[Linear | None], [None] * _rank(node))
    for position, dim in enumerate(order):
        places[_integer(dim) % len(axes)] = axes[position]
    return _moved(reader, node, x, places)


@_operator("transpose")
def _transpose(reader: IndexReader, node: fx.Node, x: Any, dim0: Any, dim1: Any) -> Element:
    places = _axes(node)
    a, b = _integer(dim0) % len(places), _integer(dim1) % len(places)
    places[a], places[b] = places[b], places[a]
    return _moved(reader, node, x, places)


@_operator("t")
def _t(reader: IndexReader, node: fx.Node, x: Any) -> Element:
    return _moved(reader, node, x, _axes(node)[::-1])


@_operator("getattr")
def _attribute(reader: IndexReader, node: fx.Node, x: Any, name: str) -> Element:
    if name in ("T", "mT") and _rank(x) == 2:
        return _t(reader, node, x)
    raise Unreadable(f"attribute {name}")


@_operator("repeat")
def _repeat(reader: IndexReader, node: fx.Node, x: Any, *counts: Any) -> Element:
    repeats = counts[0] if len(counts) == 1 and isinstance(counts[0], tuple | list) else counts
    shape = sizes(_tensor(x))
    if any(n != 1 and count != 1 for n, count in zip(reversed(shape), reversed(repeats), strict=False)):
        raise Unreadable("a repeated axis of more than one element")
    return reader.argument(x, node)


@_operator("select")
def _select(reader: IndexReader, node: fx.Node, x: Any, dim: Any, index: Any) -> Element:
    shape = sizes(_tensor(x))
    d = _integer(dim) % len(shape)
    places = cast(list[Linear | None], _axes(node))
    places.insert(d, terms.constant(_start(index, shape[d])))
    return _moved(reader, node, x, places)


@_operator("slice")
def _slice(
    reader: IndexReader, node: fx.Node, x: Any, dim: Any = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Element:
    shape, places = sizes(_tensor(x)), _axes(node)
    d = _integer(dim) % len(shape)
    places[d] = _strided(slice(start, end, step), shape[d], places[d])
    return _moved(reader, node, x, places)


@_operator("narrow")
def _narrow(reader: IndexReader, node: fx.Node, x: Any, dim: Any, start: Any, length: Any) -> Element:
    return _slice(reader, node, x, dim, start)


def _start(value: Any, length: Size) -> Size:
    """An index or the start of a slice; a negative one counts from the end."""
    start = _size(value)
    if not isinstance(start, int):
        if not start.is_nonnegative:
            raise Unreadable("an index of unknown sign")
        return start
    if start >= 0:
        return start
    if isinstance(length, int):
        return max(0, length + start)
    raise Unreadable("an index from the end of an unknown length")


def _strided(part: slice, length: Size, axis: Linear) -> Linear:
    step = 1 if part.step is None else _integer(part.step)
    start = 0 if part.start is None else _start(part.start, length)
    return terms.plus(terms.constant(start), axis, step)


@_operator("index")
def _index(reader: IndexReader, node: fx.Node, x: Any, indices: Any) -> Element:
    return _getitem(reader, node, x, tuple(slice(None) if i is None else i for i in indices))


@_operator("getitem")
def _getitem(reader: IndexReader, node: fx.Node, x: Any, index: Any) -> Element:
    shape = sizes(_tensor(x))
    parts = list(index) if isinstance(index, tuple | list) else [index]
    taken = sum(part is not None and part is not Ellipsis for part in parts)
    if Ellipsis in [p for p in parts if not isinstance(p, fx.Node)]:
        where = next(i for i, p in enumerate(parts) if p is Ellipsis)
        parts[where : where + 1] = [slice(None)] * (len(shape) - taken)
    else:
        parts += [slice(None)] * (len(shape) - taken)
    gathers = [i for i, p in enumerate(parts) if isinstance(p, fx.Node) and fake_tensor(p) is not None]
    if gathers and gathers != list(range(gathers[0], gathers[-1] + 1)):
        raise Unreadable("gathers at separate places")
    gathered = max((_rank(parts[i]) for i in gathers), default=0)
    rank, places, position = _rank(node), cast(list[Linear | None], []), 0
    for i, part in enumerate(parts):
        if part is None:
            position += 1
        elif i in gathers:
            # The gathered axes stand, together, where the first index stood; in each index they are its last ones.
            places.append(_gather(reader, node, part, rank - position - gathered))
            position += gathered if i == gathers[-1] else 0
        elif isinstance(part, slice):
            places.append(_strided(part, shape[len(places)], terms.axis(rank - position)))
            position += 1
        else:
            places.append(terms.constant(_start(part, shape[len(places)])))
    return _moved(reader, node, x, places)


def _gather(reader: IndexReader, node: fx.Node, index: fx.Node, behind: int) -> Linear:
    """The position an index tensor names, in the axes of `node`, `behind` of which stand right of the gathered ones."""
    element = reader.argument(index, node)
    if not isinstance(element, Linear) or not terms.not_negative(element):
        raise Unreadable("an index that may count from the end")
    return cast(Linear, terms.at(element, {n: terms.axis(n + behind) for n in range(1, _rank(index) + 1)}))


# --- operations: along an axis ---


@_operator("diff")
def _diff(
    reader: IndexReader, node: fx.Node, x: Any, n: Any = 1, dim: Any = -1, prepend: Any = None, append: Any = None
) -> Element:
    rank = _rank(node)
    number = rank - _integer(dim) % rank
    if n != 1 or append is not None:
        raise Unreadable("a difference other than that of neighbours")
    here = terms.axis(number)
    element = reader.argument(x, node)

    def difference(later: Element, earlier: Element) -> Element:
        return terms.each_case(lambda a, b: terms.plus(_linear(a), _linear(b), -1), later, earlier)

    if prepend is None:
        return difference(terms.at(element, {number: terms.plus(here, terms.constant(1))}), element)
    if sizes(_tensor(prepend))[rank - number] != 1:
        raise Unreadable("more than one element in front")
    first = difference(terms.at(element, {number: terms.constant(0)}), reader.argument(prepend, node))
    others = difference(element, terms.at(element, {number: terms.plus(here, terms.constant(-1))}))
    return terms.select(terms.is_zero(here), first, others)


@_operator("cumsum")
def _cumsum(reader: IndexReader, node: fx.Node, x: Any, dim: Any, *, dtype: Any = None) -> Element:
    rank = _rank(node)
    number = rank - _integer(dim) % rank
    element = _counted(reader.argument(x, node))
    if isinstance(element, Linear) and not element.terms and isinstance(element.constant, int):
        return terms.times(terms.plus(terms.axis(number), terms.constant(1)), element.constant)
    if isinstance(element, Select) and (element.yes, element.no) == (terms.constant(1), terms.constant(0)):
        run = _run(element.condition, number)
        if run is not None:
            reader.runs[node, None] = run
    raise Unreadable("a sum of data")


def _run(broken: Formula, number: int) -> Run | None:
    """`Run` for a count of `broken`, if a position that is not broken continues a run (the first may be either)."""
    first = terms.negation(terms.is_zero(terms.axis(number)))
    conditions = terms.conjuncts(broken) - {first}
    condition = next(iter(conditions)) if len(conditions) == 1 else None
    if not isinstance(condition, terms.Not) or not isinstance(condition.formula, terms.IsZero):
        return None
    linear = condition.formula.linear
    pairs = dict(linear.terms)
    if len(pairs) != 2 or not all(isinstance(term, Entry) for term in pairs) or not isinstance(linear.constant, int):
        return None
    for later, earlier in (list(pairs), list(pairs)[::-1]):
        assert isinstance(later, Entry)
        back = {number: terms.plus(terms.axis(number), terms.constant(-1))}
        shifted = terms.at(terms.atom(later), back)
        if (
            shifted == terms.atom(earlier)
            and number in terms.axes_in(later)
            and pairs[later] == -pairs[earlier]
            and abs(pairs[later]) == 1
        ):
            return Run(later, number, -linear.constant * pairs[later])
    return None
