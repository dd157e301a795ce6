"""Differences and sums along an axis, and what they say together: how a model counts its packed documents.

`cumsum(diff(position) != 1)` numbers the documents of a row. The numbers themselves stay data; but where two of them
are equal no break lies between, which is a `Run` and proves causality (`masks/documents.py`).
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fusion_pass.graph.vocabulary import sizes

from . import terms as terms
from .operations import Reader, Run, counted, integer, linear_of, operator, rank_of, tensor_of
from .terms import Element, Entry, Formula, Linear, Select, Unreadable


@operator("diff")
def _diff(
    reader: Reader, node: fx.Node, x: Any, n: Any = 1, dim: Any = -1, prepend: Any = None, append: Any = None
) -> Element:
    rank = rank_of(node)
    number = rank - integer(dim) % rank
    if n != 1 or append is not None:
        raise Unreadable("a difference other than that of neighbours")
    here = terms.axis(number)
    element = reader.argument(x, node)

    def difference(later: Element, earlier: Element) -> Element:
        return terms.each_case(lambda a, b: terms.plus(linear_of(a), linear_of(b), -1), later, earlier)

    if prepend is None:
        return difference(terms.at(element, {number: terms.plus(here, terms.constant(1))}), element)
    if sizes(tensor_of(prepend))[rank - number] != 1:
        raise Unreadable("more than one element in front")
    first = difference(terms.at(element, {number: terms.constant(0)}), reader.argument(prepend, node))
    others = difference(element, terms.at(element, {number: terms.plus(here, terms.constant(-1))}))
    return terms.select(terms.is_zero(here), first, others)


@operator("cumsum")
def _cumsum(reader: Reader, node: fx.Node, x: Any, dim: Any, *, dtype: Any = None) -> Element:
    rank = rank_of(node)
    number = rank - integer(dim) % rank
    element = counted(reader.argument(x, node))
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
