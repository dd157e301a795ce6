"""Formulas of a position: what an element of an index or mask tensor is, for every position at once.

A mask of a model is built from `arange`, comparisons and look-ups. Each of its elements is then one and the same
formula of its position, such as `j - i <= 0` (causal), and the formula says what the mask is for every length, without
a single S x S tensor.

    Element  Linear | Formula | Number | Select | Unknown          one element of a tensor
    Linear   constant + sum of integer * atom                      an integer; constants may hold the symbols of sizes
    atom     Axis | Entry | Quotient | Magnitude                   coordinate, data, floor division, absolute value
    Formula  Truth | AtMostZero | IsZero | Fact | Not | All | Any  a truth value

Axes are counted from the right, from 1: a tensor broadcast against another keeps its formula as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import sympy
from torch import fx

from fusion_pass.graph.vocabulary import Size


class Unreadable(Exception):
    """An operation on formulas whose result is none."""


# --- integers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """The position along the `number`-th axis from the right; 1 is the last."""

    number: int


@dataclass(frozen=True)
class Entry:
    """An element of a tensor whose contents are data. `version`: the last write to it that the reader sees."""

    node: fx.Node
    version: fx.Node | None
    index: tuple[Linear, ...]


@dataclass(frozen=True)
class Quotient:
    """`numerator // divisor`, rounded down."""

    numerator: Linear
    divisor: int


@dataclass(frozen=True)
class Magnitude:
    """`abs(argument)`."""

    argument: Linear


Atom: TypeAlias = "Axis | Entry | Quotient | Magnitude"


@dataclass(frozen=True)
class Linear:
    """`constant` + the sum of coefficient * atom over `terms`."""

    terms: frozenset[tuple[Atom, int]]
    constant: Size


def constant(value: Size) -> Linear:
    """The integer `value`."""
    return Linear(frozenset(), value)


def atom(term: Atom) -> Linear:
    """The integer that `term` stands for."""
    return Linear(frozenset({(term, 1)}), 0)


def axis(number: int) -> Linear:
    """The position along an axis."""
    return atom(Axis(number))


def plus(a: Linear, b: Linear, factor: int = 1) -> Linear:
    """`a + factor * b`."""
    coefficients = dict(a.terms)
    for term, coefficient in b.terms:
        coefficients[term] = coefficients.get(term, 0) + factor * coefficient
    terms = frozenset((term, coefficient) for term, coefficient in coefficients.items() if coefficient)
    return Linear(terms, simplified(a.constant + factor * b.constant))


def times(a: Linear, factor: int) -> Linear:
    """`factor * a`."""
    return plus(constant(0), a, factor)


def quotient(a: Linear, divisor: int) -> Linear:
    """`a // divisor` for a positive divisor."""
    if divisor < 1:
        raise Unreadable("division by a number that is not positive")
    if divisor == 1:
        return a
    if not a.terms and isinstance(a.constant, int):
        return constant(a.constant // divisor)
    return atom(Quotient(a, divisor))


def simplified(value: Size) -> Size:
    """A sum of sizes in one form, as a number where it has no symbol."""
    if isinstance(value, int):
        return value
    value = sympy.expand(value)
    return int(value) if value.is_number else value


# --- truth values -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """Always, or never."""

    value: bool


@dataclass(frozen=True)
class AtMostZero:
    """`linear <= 0`."""

    linear: Linear


@dataclass(frozen=True)
class IsZero:
    """`linear == 0`."""

    linear: Linear


@dataclass(frozen=True)
class Fact:
    """An element of a boolean tensor whose contents are data."""

    entry: Entry


@dataclass(frozen=True)
class Not:
    """`formula` does not hold."""

    formula: IsZero | Fact


@dataclass(frozen=True)
class All:
    """All of `formulas` hold; more than one."""

    formulas: frozenset[Formula]


@dataclass(frozen=True)
class Any:
    """At least one of `formulas` holds; more than one."""

    formulas: frozenset[Formula]


Formula: TypeAlias = "Truth | AtMostZero | IsZero | Fact | Not | All | Any"

TRUE, FALSE = Truth(True), Truth(False)
_FORMULAS = (Truth, AtMostZero, IsZero, Fact, Not, All, Any)


def is_formula(value: object) -> bool:
    """Whether `value` is a Formula."""
    return isinstance(value, _FORMULAS)


def at_most_zero(a: Linear) -> Formula:
    """`a <= 0`. An absolute value is opened into its two cases."""
    for term, coefficient in a.terms:
        if isinstance(term, Magnitude):
            rest = plus(a, atom(term), -coefficient)
            cases = [at_most_zero(plus(rest, term.argument, sign * coefficient)) for sign in (1, -1)]
            return every(cases) if coefficient > 0 else some(cases)
    if not a.terms and isinstance(a.constant, int):
        return Truth(a.constant <= 0)
    return AtMostZero(a)


def is_zero(a: Linear) -> Formula:
    """`a == 0`; `a` and `-a` give the same formula."""
    if not a.terms and isinstance(a.constant, int):
        return Truth(a.constant == 0)
    if not a.terms:
        return IsZero(a)
    leading = min(a.terms, key=lambda pair: order(pair[0]))
    return IsZero(a if leading[1] > 0 else times(a, -1))


def order(part: Atom | Linear | IsZero) -> str:
    """A text to sort by, the same for equal parts."""
    match part:
        case IsZero(linear):
            return order(linear)
        case Linear(terms, value):
            return " ".join(sorted(f"{coefficient} {order(term)}" for term, coefficient in terms)) + f" {value}"
        case Axis(number):
            return f"axis {number}"
        case Entry(node, version, index):
            return f"entry {node} {version} {[order(i) for i in index]}"
        case Quotient(numerator, divisor):
            return f"quotient {order(numerator)} {divisor}"
        case Magnitude(argument):
            return f"magnitude {order(argument)}"


def negation(formula: Formula) -> Formula:
    """The opposite, with `Not` only in front of what has no opposite of its own."""
    match formula:
        case Truth(value):
            return Truth(not value)
        case AtMostZero(linear):
            return at_most_zero(plus(constant(1), linear, -1))
        case IsZero() | Fact():
            return Not(formula)
        case Not(inner):
            return inner
        case All(formulas):
            return some(negation(f) for f in formulas)
        case Any(formulas):
            return every(negation(f) for f in formulas)


def every(formulas: Iterable[Formula]) -> Formula:
    """All of `formulas` hold."""
    parts: set[Formula] = set()
    for formula in formulas:
        parts |= formula.formulas if isinstance(formula, All) else {formula}
    parts.discard(TRUE)
    if FALSE in parts or any(negation(part) in parts for part in parts):
        return FALSE
    if not parts:
        return TRUE
    return parts.pop() if len(parts) == 1 else All(frozenset(parts))


def some(formulas: Iterable[Formula]) -> Formula:
    """At least one of `formulas` holds."""
    parts: set[Formula] = set()
    for formula in formulas:
        parts |= formula.formulas if isinstance(formula, Any) else {formula}
    parts.discard(FALSE)
    if TRUE in parts or any(negation(part) in parts for part in parts):
        return TRUE
    if not parts:
        return FALSE
    return parts.pop() if len(parts) == 1 else Any(frozenset(parts))


def conjuncts(formula: Formula) -> frozenset[Formula]:
    """The conditions that hold together; none for the formula that always holds."""
    if formula == TRUE:
        return frozenset()
    return formula.formulas if isinstance(formula, All) else frozenset({formula})


# --- elements ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Number:
    """A known floating-point number, rounded to the tensor's dtype."""

    value: float


@dataclass(frozen=True)
class Select:
    """`yes` where `condition` holds, `no` elsewhere."""

    condition: Formula
    yes: Element
    no: Element


@dataclass(frozen=True)
class Unknown:
    """A floating-point number that is data."""

    entry: Entry


Element: TypeAlias = "Linear | Formula | Number | Select | Unknown"

MAX_CASES = 16
"""Leaves of one `Select` tree; a mask with more is data."""


def select(condition: Formula, yes: Element, no: Element) -> Element:
    """`yes if condition else no`."""
    if condition == TRUE or yes == no:
        return yes
    if condition == FALSE:
        return no
    if is_formula(yes) and is_formula(no):
        return some([every([condition, yes]), every([negation(condition), no])])  # type: ignore[list-item]
    return Select(condition, yes, no)


def leaves(element: Element) -> int:
    """Number of cases of an element."""
    return leaves(element.yes) + leaves(element.no) if isinstance(element, Select) else 1


def each_case(function: Callable[..., Element], *elements: Element) -> Element:
    """`function` of the elements, case by case."""
    for position, element in enumerate(elements):
        if isinstance(element, Select):
            before, after = elements[:position], elements[position + 1 :]
            result = select(
                element.condition,
                each_case(function, *before, element.yes, *after),
                each_case(function, *before, element.no, *after),
            )
            if leaves(result) > MAX_CASES:
                raise Unreadable("too many cases")
            return result
    return function(*elements)


def at(element: Element, places: Mapping[int, Linear]) -> Element:
    """`element` read at another position: axis `n` becomes `places[n]`; an axis that is not in `places` stays."""
    match element:
        case Linear():
            return _linear_at(element, places)
        case Number() | Truth():
            return element
        case Unknown(entry):
            return Unknown(_entry_at(entry, places))
        case Select(condition, yes, no):
            return select(at(condition, places), at(yes, places), at(no, places))  # type: ignore[arg-type]
        case AtMostZero(linear):
            return at_most_zero(_linear_at(linear, places))
        case IsZero(linear):
            return is_zero(_linear_at(linear, places))
        case Fact(entry):
            return Fact(_entry_at(entry, places))
        case Not(formula):
            return negation(at(formula, places))  # type: ignore[arg-type]
        case All(formulas):
            return every(at(f, places) for f in formulas)  # type: ignore[misc]
        case Any(formulas):
            return some(at(f, places) for f in formulas)  # type: ignore[misc]


def _linear_at(linear: Linear, places: Mapping[int, Linear]) -> Linear:
    result = constant(linear.constant)
    for term, coefficient in linear.terms:
        match term:
            case Axis(number):
                moved = places.get(number, atom(term))
            case Entry():
                moved = atom(_entry_at(term, places))
            case Quotient(numerator, divisor):
                moved = quotient(_linear_at(numerator, places), divisor)
            case Magnitude(argument):
                moved = magnitude(_linear_at(argument, places))
        result = plus(result, moved, coefficient)
    return result


def magnitude(a: Linear) -> Linear:
    """`abs(a)`."""
    if not a.terms and isinstance(a.constant, int):
        return constant(abs(a.constant))
    return atom(Magnitude(a))


def _entry_at(entry: Entry, places: Mapping[int, Linear]) -> Entry:
    return Entry(entry.node, entry.version, tuple(_linear_at(i, places) for i in entry.index))


def axes_in(value: Linear | Entry) -> frozenset[int]:
    """The axes that a formula's value depends on."""
    found: set[int] = set()
    parts = [Linear(frozenset({(value, 1)}), 0)] if isinstance(value, Entry) else [value]
    while parts:
        for term, _ in parts.pop().terms:
            match term:
                case Axis(number):
                    found.add(number)
                case Entry(index=index):
                    parts.extend(index)
                case Quotient(numerator, _):
                    parts.append(numerator)
                case Magnitude(argument):
                    parts.append(argument)
    return frozenset(found)
