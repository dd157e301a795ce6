"""Packed documents: a condition `f(b, i) == g(b, j)` of a mask as the segment ids that the graph has anyway.

    entry(b, i) - entry(b, j) == 0      the tensor `ids[b, token]` itself
    eq(x[b, i, 1], y[b, 1, j])          the arguments of the comparison, computed from whatever (chunks: `i // c`)

Hugging Face numbers the documents by counting the breaks of the positions, and compares the positions within them too.
Between two equal counts is no break, so positions that run by a fixed step differ there as their tokens do, and the
comparison is causality.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from fusion_pass.graph.site import Operand, Step
from fusion_pass.graph.vocabulary import fake_tensor, operation, sizes

from ..formulas import terms as terms
from ..formulas.reading import IndexReader
from ..formulas.terms import AtMostZero, Entry, Formula, IsZero, Linear
from .masked_scores import KEY, QUERY
from .reading import MaskReading


@dataclass(frozen=True)
class Documents:
    """A query sees the keys of its own segment: ids `[batch or 1, tokens]`, and the condition that they say in full."""

    queries: Operand
    keys: Operand | None
    """None: those of the queries."""
    condition: Formula


def find_documents(reading: MaskReading, facts: Mapping[Formula, Formula]) -> Documents | None:
    """The documents among the conditions `facts`."""
    equalities = sorted((part for part in facts if isinstance(part, IsZero)), key=terms.order)
    for find in (_looked_up_ids, _computed_ids):
        for equality in equalities:
            ids = find(reading, equality)
            if ids is not None:
                q, k = ids
                return Documents(q, None if q == k else k, equality)
    return None


def within_documents(reader: IndexReader, conditions: frozenset[Formula]) -> dict[Formula, Formula]:
    """Each condition, and what it says where the others hold: positions within one segment differ as the tokens do."""
    rules = [rule for part in conditions if isinstance(part, IsZero) for rule in _same_run(reader, part.linear)]
    facts: dict[Formula, Formula] = {}
    for condition in conditions:
        fact = condition
        for entry, other, distance in rules:
            if isinstance(fact, AtMostZero):
                coefficient = dict(fact.linear.terms).get(entry, 0)
                same = terms.plus(terms.atom(other), distance)
                replaced = terms.plus(fact.linear, terms.plus(same, terms.atom(entry), -1), coefficient)
                fact = terms.at_most_zero(replaced)
        facts[condition] = fact
    return facts


def _same_run(reader: IndexReader, linear: Linear) -> Iterator[tuple[Entry, Entry, Linear]]:
    """(x, y, d) with `x == y + d` wherever the segment ids of `linear == 0` are equal."""
    sides = _two_entries(linear)
    if sides is None:
        return
    a, b = sides
    run = reader.runs.get((a.node, a.version))
    if run is None or (a.node, a.version) != (b.node, b.version):
        return
    rank = len(a.index)
    dim = rank - run.axis
    if any(x != y for d, (x, y) in enumerate(zip(a.index, b.index, strict=True)) if d != dim):
        return
    places_a, places_b = ({rank - d: place for d, place in enumerate(entry.index)} for entry in (a, b))
    ((x, _),) = cast(Linear, terms.at(terms.atom(run.entry), places_a)).terms
    ((y, _),) = cast(Linear, terms.at(terms.atom(run.entry), places_b)).terms
    yield cast(Entry, x), cast(Entry, y), terms.times(terms.plus(a.index[dim], b.index[dim], -1), run.step)


def _two_entries(linear: Linear) -> tuple[Entry, Entry] | None:
    """The entries x, y of `x - y`, or of a multiple."""
    if linear.constant != 0 or len(linear.terms) != 2:
        return None
    (first, a), (second, b) = linear.terms
    return (first, second) if a == -b and isinstance(first, Entry) and isinstance(second, Entry) else None


def _looked_up_ids(reading: MaskReading, equality: IsZero) -> tuple[Operand, Operand] | None:
    """Ids of queries and keys in the tensors whose entries `equality` compares."""
    sides = _two_entries(equality.linear)
    if sides is None:
        return None
    for q, k in (sides, sides[::-1]):
        q_ids, k_ids = _entries(reading, q, QUERY), _entries(reading, k, KEY)
        if q_ids is not None and k_ids is not None:
            return q_ids, k_ids
    return None


def _entries(reading: MaskReading, entry: Entry, token: int) -> Operand | None:
    """`[batch or 1, tokens]` of `entry`, if it is `tensor[b, token]` up to constants."""
    frame = reading.frame
    if reading.reader.effects.last_write(entry.node, reading.anchor) is not entry.version:
        return None
    steps: list[Step] = []
    kept: list[int] = []
    for length, place in zip(sizes(cast(torch.Tensor, fake_tensor(entry.node))), entry.index, strict=True):
        number = next((n for n in (token, frame.batch_axis) if place == terms.axis(n)), None)
        if number is not None and length == frame.extent[number]:
            kept.append(number)
        elif length == 1 and not kept:
            kept.append(frame.batch_axis)
        elif not place.terms and isinstance(place.constant, int):
            steps.append(Step("select", (len(kept), place.constant)))
        else:
            return None
    if kept == [token]:
        return Operand(entry.node, (*steps, Step("unsqueeze", (0,))))
    return Operand(entry.node, tuple(steps)) if kept == [frame.batch_axis, token] else None


def _computed_ids(reading: MaskReading, equality: IsZero) -> tuple[Operand, Operand] | None:
    """Ids of queries and keys as the arguments of the comparison that computes `equality`."""
    for node in reading.cone():
        if operation(node) != "eq" or len(node.args) != 2 or reading.condition(node) != equality:
            continue
        for q, k in (node.args, node.args[::-1]):
            q_ids, k_ids = _column(reading, q, QUERY), _column(reading, k, KEY)
            if q_ids is not None and k_ids is not None:
                return q_ids, k_ids
    return None


def _column(reading: MaskReading, node: object, token: int) -> Operand | None:
    """`[batch or 1, tokens]` of a tensor that is broadcast against the scores and varies along these axes only."""
    tensor, frame = fake_tensor(node), reading.frame
    if tensor is None or tensor.is_floating_point() or tensor.dtype == torch.bool:
        return None
    assert isinstance(node, fx.Node)
    if reading.reader.effects.last_write(node, reading.anchor) is not None:
        return None
    shape, steps, kept = sizes(tensor), list[Step](), list[int]()
    for d, length in enumerate(shape):
        number = len(shape) - d
        if number in (token, frame.batch_axis) and length in (1, frame.extent[number]):
            kept.append(number)
        elif length == 1:
            steps.append(Step("select", (len(kept), 0)))
        else:
            return None
    if not kept or shape[len(shape) - token] != frame.extent[token]:
        return None
    return Operand(node, (*steps, Step("unsqueeze", (0,))) if kept == [token] else tuple(steps))
