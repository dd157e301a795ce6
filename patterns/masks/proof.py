"""What a mask is: causal, a window, documents, padding, or data.

Matches     any tensor added to the scores of an attention, or choosing among them.
Requires    nothing. What cannot be proved stays an explicit mask; a proof holds for every length the graph can take.
Becomes     `causal`, `window_left`, `window_right`, `q_segment_ids`, `k_segment_ids` and `mask` of the operator.

The mask's formula (`reading.py`) is split into the conditions that hold together. With query i, key j, batch b:

    j - i <= c, i - j <= c     causality and windows                                                `bounds.py`
    f(b, i) == g(b, j)         documents: two per-token integers that the graph computes anyway     `documents.py`
    anything else              an explicit mask                                                     `operand.py`

A mask kept whole is joined by the bounds proved of it: they change no result and let a kernel skip what they exclude.
Keys hidden by finite numbers need more (`finite_numbers.py`). The page `docs/masks.md` has the reasoning.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import fx

from fusion_pass.graph.site import Operand

from ..formulas import terms as terms
from ..formulas.reading import IndexReader
from ..formulas.terms import Formula
from .bounds import find_bounds
from .documents import find_documents, within_documents
from .finite_numbers import are_small, as_numbers, every_row_sees_a_key, hides_by_numbers
from .masked_scores import Frame, MaskRefused, MaskTerm
from .operand import smallest, whole
from .parts import take_apart
from .reading import MaskReading


@dataclass(frozen=True)
class SeenKeys:
    """Which keys a query sees, in the arguments of `attention` (docs/attention.md)."""

    causal: str = "none"
    window_left: int = -1
    window_right: int = -1
    q_segments: Operand | None = None
    k_segments: Operand | None = None
    mask: Operand | None = None


def prove(reader: IndexReader, masks: Sequence[MaskTerm], frame: Frame, anchor: fx.Node) -> SeenKeys:
    """What `masks` together let a query see, for a call that reads its operands at `anchor`. Raises `MaskRefused`."""
    reading = MaskReading(reader, tuple(masks), frame, anchor)
    parts = [p for mask in masks for p in ([mask] if reading.is_read(mask) else take_apart(reader.effects, mask))]
    if len(parts) > len(masks):
        with suppress(MaskRefused):
            return _seen(replace(reading, masks=tuple(parts)))
    return _seen(reading)


def _seen(reading: MaskReading) -> SeenKeys:
    known: list[tuple[MaskTerm, Formula]] = []
    data: list[MaskTerm] = []
    for mask in reading.masks:
        reading.check(mask)
        formula = reading.formula(mask)
        if formula is None:
            data.append(mask)
        else:
            known.append((mask, formula))
    conditions = terms.conjuncts(terms.every(formula for _, formula in known))
    safe = every_row_sees_a_key(conditions, reading.frame) and are_small(reading, data, [mask for mask, _ in known])
    if not safe and any(hides_by_numbers(reading, mask, is_data=mask in data) for mask in reading.masks):
        return SeenKeys(mask=as_numbers(reading))
    facts = within_documents(reading.reader, conditions)
    bounds = find_bounds(facts, reading.frame)
    documents = find_documents(reading, facts)
    said = bounds.conditions if documents is None else bounds.conditions | {documents.condition}
    rest = frozenset(part for part in conditions - said if facts[part] != terms.TRUE)
    return SeenKeys(
        bounds.causal,
        bounds.window_left,
        bounds.window_right,
        q_segments=None if documents is None else documents.queries,
        k_segments=None if documents is None else documents.keys,
        mask=_mask(reading, rest, conditions, [mask for mask, _ in known], data, safe),
    )


def _mask(
    reading: MaskReading,
    rest: frozenset[Formula],
    conditions: frozenset[Formula],
    known: Sequence[MaskTerm],
    data: Sequence[MaskTerm],
    safe: bool,
) -> Operand | None:
    """The one mask that holds `rest`, those of the `conditions` of the masks `known` that nothing else says, or the
    mask of `data`.
    """
    if rest and data:
        raise MaskRefused(
            "The scores have two masks that cannot be proved, "
            f"{known[0].node.name!r} and {data[0].node.name!r}; one can be passed on."
        )
    if len(data) > 1:
        raise MaskRefused(f"The scores have more than one mask of data, {_names(data)}; one can be passed on.")
    if data:
        return whole(reading, data[0])
    if not rest:
        return None
    found = smallest(reading, rest, conditions, every_row_sees_a_key=safe)
    if found is None:
        raise MaskRefused(f"No single tensor of the graph holds what the masks {_names(known)} say together.")
    return found


def _names(masks: Sequence[MaskTerm]) -> str:
    return " and ".join(repr(mask.node.name) for mask in masks)
