"""Keys hidden by finite numbers, such as finfo.min, and rows that see no key.

Such a number hides a key only from a row that sees another one; the softmax of a row of nothing but hidden keys is over
these very numbers. So a mask like that becomes conditions where every row is proved to see a key, and no bias beside it
is large enough to bring a hidden key back. Elsewhere its numbers are passed on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import cast

import torch

from fusion_pass.graph.site import Operand, Step

from ..formulas import terms as terms
from ..formulas.box import not_negative, within
from ..formulas.terms import Formula
from .masked_scores import KEY, QUERY, Frame, MaskRefused, MaskTerm, Meaning
from .operand import whole
from .ranges import Ranges
from .reading import MaskReading, has_finite_numbers, numbers_in


def hides_by_numbers(reading: MaskReading, mask: MaskTerm, *, is_data: bool) -> bool:
    """Whether `mask` hides a key by a finite number. The numbers of an additive mask of data are just added."""
    if math.isfinite(mask.raised):
        return True
    if mask.meaning is Meaning.ADDED:
        return not is_data and has_finite_numbers(reading.reader.read(mask.node, mask.reader))
    return math.isfinite(mask.hidden)


def are_small(reading: MaskReading, data: Sequence[MaskTerm], known: Iterable[MaskTerm]) -> bool:
    """Whether the numbers of each mask of `data` are too small to bring back a key that `known` masks hide by one."""
    ranges = Ranges(reading.reader.effects)
    hidden = [-max(number, mask.raised) for mask in known for number in _hiding(reading, mask)]
    for mask in data:
        found = ranges.of(mask.node) if mask.meaning is Meaning.ADDED else None
        largest = math.inf if found is None else max(map(abs, found)) * mask.factor
        # The bias may lower the key that is seen and lift the one that is hidden: half of the number is between them.
        if not largest <= min([*hidden, -mask.raised]) / 4:
            return False
    return True


def _hiding(reading: MaskReading, mask: MaskTerm) -> list[float]:
    """The numbers by which a mask with a formula hides keys."""
    if mask.meaning is not Meaning.ADDED:
        return [mask.hidden * mask.factor]
    element = reading.reader.read(mask.node, mask.reader)
    return [number * mask.factor for number in numbers_in(element) if number < 0]


def every_row_sees_a_key(conditions: frozenset[Formula], frame: Frame) -> bool:
    """Whether one of three keys is seen in every row: the one on either diagonal, or the first."""
    query, queries, keys = terms.axis(QUERY), terms.constant(frame.queries), terms.constant(frame.keys)
    shift = terms.plus(keys, queries, -1)
    places = [terms.constant(0)]
    if not_negative(shift):  # else the last queries have no key on their diagonal
        places += [query, terms.plus(query, shift)]
    return any(
        all(
            within(cast(Formula, terms.at(condition, {KEY: place})), frame.extent) == terms.TRUE
            for condition in conditions
        )
        for place in places
    )


def as_numbers(reading: MaskReading) -> Operand:
    """The one mask of the scores as a tensor to be added. Raises `MaskRefused` where a sum is not the same."""
    if len(reading.masks) > 1:
        names = " and ".join(repr(mask.node.name) for mask in reading.masks)
        raise MaskRefused(
            f"The masks {names} hide keys by finite numbers, and a row may see no key: what its softmax gives then "
            "depends on all of them, and one can be passed on."
        )
    (mask,) = reading.masks
    if math.isfinite(mask.raised):
        raise MaskRefused(
            f"The scores are raised to {mask.raised:.6g} behind the mask {mask.node.name!r}, and a row may see no "
            "key: all its keys have that number then."
        )
    if mask.meaning is Meaning.ADDED:
        return whole(reading, mask)
    if reading.wants_gradient:
        raise MaskRefused(
            f"The mask {mask.node.name!r} replaces scores by a finite number, and a row may see no key: it has no "
            "gradient then, and that of a mask that is added has one."
        )
    operand = whole(reading, mask)
    hidden = () if mask.meaning is Meaning.HIDDEN else (Step("logical_not"),)
    axes = tuple(step for step in operand.steps if step.method != "logical_not")
    # Any number that no score changes: a replaced score has the same part in its row as every other one.
    numbers = (Step("to", (torch.bfloat16,)), Step("mul", (torch.finfo(torch.bfloat16).min,)))
    return Operand(operand.node, (*hidden, *numbers, *axes))
