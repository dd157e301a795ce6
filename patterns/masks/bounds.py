"""Causality and windows: the conditions of a mask that bound how far a key lies from its query.

j - i <= 0                  causal, top-left
j - i <= keys - queries     causal, bottom-right; a left bound is counted from that diagonal
j - i <= c, c > 0           a window on the right
j - i <= c, c < 0           stricter than causal: causality is passed on, and the mask stays beside it
i - j <= c                  a window on the left
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from fusion_pass.graph.vocabulary import Size

from ..formulas import terms as terms
from ..formulas.terms import AtMostZero, Axis, Formula
from .masked_scores import KEY, QUERY, Frame


@dataclass(frozen=True)
class Bounds:
    """Options of `attention`, and the conditions that they say in full."""

    causal: str
    window_left: int
    window_right: int
    conditions: frozenset[Formula]


def find_bounds(facts: Mapping[Formula, Formula], frame: Frame) -> Bounds:
    """The bounds among `facts` (a condition as written -> as it reads under the others)."""
    rights: dict[Formula, Size] = {}
    lefts: dict[Formula, Size] = {}
    for condition, fact in facts.items():
        distance = _distance(fact)
        if distance is not None:
            side, limit = distance
            (rights if side == KEY else lefts)[condition] = limit
    shift = terms.plus(terms.constant(frame.keys), terms.constant(frame.queries), -1).constant
    causal, right, says_all = _right_bound(_tightest(rights.values()), shift)
    left = _left_bound(_tightest(lefts.values()), shift if causal == "bottom_right" else 0)
    said = frozenset(rights if says_all else ()) | frozenset(lefts if left is not None else ())
    return Bounds(causal, -1 if left is None else left, right, said)


def _distance(fact: Formula) -> tuple[int, Size] | None:
    """(KEY, c) for `j - i <= c`, (QUERY, c) for `i - j <= c`."""
    if not isinstance(fact, AtMostZero):
        return None
    coefficients = dict(fact.linear.terms)
    for side, other in ((KEY, QUERY), (QUERY, KEY)):
        if coefficients == {Axis(side): 1, Axis(other): -1}:
            return side, terms.times(fact.linear, -1).constant
    return None


def _tightest(limits: Iterable[Size]) -> Size | None:
    """The smallest of `limits`; None if there is none or no telling."""
    distinct = set(limits)
    if len(distinct) == 1:
        return distinct.pop()
    return min(cast("set[int]", distinct)) if distinct and all(isinstance(n, int) for n in distinct) else None


def _right_bound(limit: Size | None, shift: Size) -> tuple[str, int, bool]:
    """`causal` and `window_right` for `j - i <= limit`, and whether they say all of it. `shift`: keys - queries."""
    if limit == 0:
        return "top_left", -1, True
    if limit == shift:
        return "bottom_right", -1, True
    if isinstance(limit, int):
        return ("none", limit, True) if limit > 0 else ("top_left", -1, False)
    return "none", -1, False


def _left_bound(limit: Size | None, offset: Size) -> int | None:
    """`window_left` for `i - j <= limit`, counted from a diagonal that lies `offset` to the right."""
    if limit is None:
        return None
    left = terms.plus(terms.constant(limit), terms.constant(offset)).constant
    return left if isinstance(left, int) and left >= 0 else None
