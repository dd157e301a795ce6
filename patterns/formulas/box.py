"""What a formula says of a whole box of positions, `0 <= axis n < extent[n]`, whose lengths may be symbols.

Each integer has an interval there, and a condition that the interval decides goes: `j - i <= keys` always holds. Of a
symbol is known only that it is a size, a positive integer.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusion_pass.graph.vocabulary import Size

from . import terms as terms
from .terms import All, Any, AtMostZero, Atom, Axis, Entry, Formula, IsZero, Linear, Magnitude, Not, Quotient


def within(formula: Formula, extent: Mapping[int, Size]) -> Formula:
    """`formula` for positions with `0 <= axis n < extent[n]`: conditions that always or never hold go."""
    match formula:
        case AtMostZero(linear):
            return _decided(terms.at_most_zero(_narrowed(linear, extent)), extent)
        case IsZero(linear):
            return _decided(terms.is_zero(_narrowed(linear, extent)), extent)
        case Not(inner):
            return terms.negation(within(inner, extent))
        case All(formulas):
            return terms.every(within(f, extent) for f in formulas)
        case Any(formulas):
            return terms.some(within(f, extent) for f in formulas)
        case _:
            return formula


def _decided(formula: Formula, extent: Mapping[int, Size]) -> Formula:
    if not isinstance(formula, AtMostZero | IsZero):
        return formula
    low, high = _interval(formula.linear, extent)
    if isinstance(formula, AtMostZero):
        if high is not None and not_positive(high):
            return terms.TRUE
        return terms.FALSE if low is not None and not_positive(1 - low) else formula
    if (low is not None and not_positive(1 - low)) or (high is not None and not_positive(high + 1)):
        return terms.FALSE
    return terms.TRUE if low == high == 0 else formula


def _narrowed(linear: Linear, extent: Mapping[int, Size]) -> Linear:
    """Quotients that are one number in the whole box become that number."""
    result = linear
    for term, coefficient in linear.terms:
        if isinstance(term, Quotient):
            low, high = _interval(terms.atom(term), extent)
            if low is not None and low == high:
                change = terms.plus(terms.constant(low), terms.atom(term), -1)
                result = terms.plus(result, change, coefficient)
    return result


def _interval(linear: Linear, extent: Mapping[int, Size]) -> tuple[Size | None, Size | None]:
    """Lower and upper bound; None: unbounded."""
    low: Size | None = linear.constant
    high: Size | None = linear.constant
    for term, coefficient in linear.terms:
        least, most = _atom_interval(term, extent)
        if coefficient < 0:
            least, most = most, least
        low = None if low is None or least is None else terms.simplified(low + coefficient * least)
        high = None if high is None or most is None else terms.simplified(high + coefficient * most)
    return low, high


def _atom_interval(term: Atom, extent: Mapping[int, Size]) -> tuple[Size | None, Size | None]:
    match term:
        case Axis(number) if number in extent:
            return 0, extent[number] - 1
        case Axis():
            return 0, None
        case Quotient(numerator, divisor):
            low, high = _interval(numerator, extent)
            return (
                low // divisor if isinstance(low, int) else None,
                high // divisor if isinstance(high, int) else None,
            )
        case Magnitude():
            return 0, None
        case Entry():
            return None, None


def not_positive(value: Size) -> bool:
    """Whether `value <= 0` for every value of its symbols (sizes are positive)."""
    return value <= 0 if isinstance(value, int) else value.is_nonpositive is True


def not_negative(linear: Linear) -> bool:
    """Whether `linear >= 0` at every position."""
    low, _ = _interval(linear, {})
    return low is not None and not_positive(-low)
