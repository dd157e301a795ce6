"""What a mask is: causal, a window, documents, padding, or data.

Matches     any tensor added to the scores of an attention, or choosing among them.
Requires    nothing. What cannot be proved stays an explicit mask; a proof holds for every length the graph can take.
Becomes     `causal`, `window_left`, `window_right`, `q_segment_ids`, `k_segment_ids` and `mask` of the operator.

The mask's formula (`index_reading`) is split into the conditions that hold together. With query i, key j, batch b:

    j - i <= c             a bound on the right; c = 0 is causal top-left, c = keys - queries is bottom-right
    i - j <= c             a window on the left
    f(b, i) == g(b, j)     documents: two per-token integers that the graph computes anyway
    anything else          an explicit mask: the smallest tensor of the graph that holds it, and no more than the mask

A mask kept whole is joined by the bounds proved of it: they change no result and let a kernel skip what they exclude.

A key hidden by a finite number (finfo.min) is hidden only from a row that sees another key; the softmax of a row of
nothing but hidden keys is over these very numbers. Such a mask becomes conditions where every row is proved to see a
key, and is passed on as numbers elsewhere. The page `docs/masks.md` has the reasoning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import cast

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_pass.graph.effects import Effects
from fusion_pass.graph.site import Operand, Step
from fusion_pass.graph.vocabulary import Size, fake_tensor, operation, sizes
from fusion_pass.kernels.attention_problem import mask_floor

from . import index_terms as terms
from .heads import constant
from .index_reading import IndexReader
from .index_terms import AtMostZero, Axis, Element, Entry, Formula, IsZero, Linear, Number, Select
from .ranges import Ranges

_KEY, _QUERY = 1, 2
"""Axes of the scores, from the right."""

_MAX_CONE = 400
"""Nodes searched for a smaller mask."""


class Meaning(Enum):
    """How a mask acts on the scores."""

    SEEN = "boolean, True is seen"
    HIDDEN = "boolean, True is hidden"
    ADDED = "added to the scores"


@dataclass(frozen=True)
class MaskTerm:
    """One mask: `reader` applies `node` to the scores."""

    node: fx.Node
    reader: fx.Node
    meaning: Meaning
    hidden: float = -math.inf
    """The score that a boolean mask gives a hidden key."""
    factor: float = 1.0
    """What the masked scores are multiplied by later."""
    raised: float = -math.inf
    """No score is less than this later: a hidden key has it, or more."""


@dataclass(frozen=True)
class Frame:
    """The scores, `[batch, heads, queries, keys]`; `heads` is None if there is no such axis.

    A mask may meet them in another shape, whose axes a view joins or splits: `[batch * heads, queries, keys]`, or
    with two axes of heads, of lengths `grouped`.
    """

    batch: Size
    heads: Size | None
    queries: Size
    keys: Size
    grouped: tuple[int, int] | None = None

    @property
    def batch_axis(self) -> int:
        return 3 if self.heads is None else 4

    @property
    def extent(self) -> dict[int, Size]:
        """Size of every axis, by its number."""
        extent = {_KEY: self.keys, _QUERY: self.queries, self.batch_axis: self.batch}
        return extent if self.heads is None else {**extent, 3: self.heads}

    def extent_at(self, rank: int) -> dict[int, Size]:
        """`extent`, where the scores have `rank` axes."""
        if rank == self.batch_axis or rank == 4:
            return self.extent
        extent = {_KEY: self.keys, _QUERY: self.queries}
        if rank == 3:
            return {**extent, 3: self.batch * cast(Size, self.heads)}
        first, second = cast("tuple[int, int]", self.grouped)
        return {**extent, 3: second, 4: first, 5: self.batch}

    def takes(self, shape: Sequence[Size], rank: int | None = None) -> bool:
        """Whether a mask of this shape broadcasts to the scores of `rank` axes, by default their own."""
        extent = self.extent if rank is None else self.extent_at(rank)
        return len(shape) <= len(extent) and all(n in (1, extent[len(shape) - d]) for d, n in enumerate(shape))

    def __str__(self) -> str:
        heads = "" if self.heads is None else f"{self.heads}, "
        return f"[{self.batch}, {heads}{self.queries}, {self.keys}]"


@dataclass(frozen=True)
class SeenKeys:
    """Which keys a query sees, in the arguments of `attention` (docs/attention.md)."""

    causal: str = "none"
    window_left: int = -1
    window_right: int = -1
    q_segments: Operand | None = None
    k_segments: Operand | None = None
    mask: Operand | None = None


class MaskRefused(Exception):
    """Why a mask can neither be proved nor passed on, as a sentence."""


def prove(reader: IndexReader, masks: Sequence[MaskTerm], frame: Frame, anchor: fx.Node) -> SeenKeys:
    """What `masks` together let a query see, for a call that reads its operands at `anchor`. Raises `MaskRefused`."""
    whole = _Proof(reader, masks, frame, anchor)
    apart = [part for mask in masks for part in ([mask] if whole.is_read(mask) else _apart(reader, mask))]
    if len(apart) > len(masks):
        with suppress(MaskRefused):
            return _Proof(reader, apart, frame, anchor).seen()
    return whole.seen()


def _apart(reader: IndexReader, mask: MaskTerm) -> list[MaskTerm]:
    """An additive mask as the bias and the mask that the graph makes it of, as ALiBi and causality; else `mask`."""
    node = mask.node
    if mask.meaning is not Meaning.ADDED or node.op not in ("call_function", "call_method") or node.kwargs:
        return [mask]
    find = _PARTS.get(operation(node))
    parts = None if find is None else find(reader.effects, mask, *node.args)
    if parts is None or any(fake_tensor(part.node) is None or reader.effects.writes(part.node) for part in parts):
        return [mask]
    return [mask] if reader.effects.writes(node) else parts


def _summands(_: Effects, mask: MaskTerm, *args: object) -> list[MaskTerm] | None:
    nodes = [a for a in args if isinstance(a, fx.Node)]
    return [replace(mask, node=a) for a in nodes] if len(nodes) == len(args) == 2 else None


def _filled(effects: Effects, mask: MaskTerm, *args: object) -> list[MaskTerm] | None:
    """`x.masked_fill(m, c)`, and `where(m, x, c)` with a number in either place: x, and c where m says."""
    if len(args) != 3:
        return None
    node, meaning = mask.node, Meaning.HIDDEN
    x, chosen, value = args
    if operation(node) == "where":
        chosen, x = (x, chosen) if node.op == "call_function" else (chosen, x)
        meaning = Meaning.SEEN
        if constant(effects, value) is None:
            x, value, meaning = value, x, Meaning.HIDDEN
    number = constant(effects, value)
    floor = mask_floor(cast(torch.Tensor, fake_tensor(node)).dtype)
    if not isinstance(x, fx.Node) or not isinstance(chosen, fx.Node) or number is None:
        return None
    if not number <= floor or not number * mask.factor <= floor:
        return None
    return [replace(mask, node=x), replace(mask, node=chosen, meaning=meaning, hidden=number)]


_PARTS: dict[str, Callable[..., list[MaskTerm] | None]] = {
    "add": _summands,
    "masked_fill": _filled,
    "where": _filled,
}


def visible(element: Element, dtype: torch.dtype, factor: float = 1.0) -> Formula | None:
    """Where an additive mask lets a key be seen: 0 is seen, what the operator takes for -inf is not. None: neither."""
    match element:
        case Number(value):
            if value == 0:
                return terms.TRUE
            return terms.FALSE if value <= mask_floor(dtype) and value * factor <= mask_floor(dtype) else None
        case Select(condition, yes, no):
            seen, unseen = visible(yes, dtype, factor), visible(no, dtype, factor)
            if seen is None or unseen is None:
                return None
            return cast(Formula, terms.select(condition, seen, unseen))
        case _:
            return None


def numbers_in(element: Element) -> list[float]:
    """The numbers that an additive mask (`visible`) chooses from."""
    match element:
        case Number(value):
            return [value]
        case Select(_, yes, no):
            return [*numbers_in(yes), *numbers_in(no)]
        case _:
            return []


def hides_by_numbers(element: Element) -> bool:
    """Whether an additive mask (`visible`) hides a key by a finite number."""
    return any(value < 0 and math.isfinite(value) for value in numbers_in(element))


class _Proof:
    def __init__(self, reader: IndexReader, masks: Sequence[MaskTerm], frame: Frame, anchor: fx.Node) -> None:
        self.reader, self.masks, self.frame, self.anchor = reader, masks, frame, anchor
        self.rank = frame.batch_axis
        self.ranges = Ranges(reader.effects)

    def seen(self) -> SeenKeys:
        known: list[tuple[MaskTerm, Formula]] = []
        data: list[MaskTerm] = []
        for term in self.masks:
            self._check_tensor(term)
            formula = self._formula_of(term)
            if formula is None:
                data.append(term)
            else:
                known.append((term, formula))
        whole = terms.conjuncts(terms.every(formula for _, formula in known))
        safe = self._every_row_sees_a_key(whole) and all(self._is_small(term, known) for term in data)
        if not safe and any(self._hides_by_numbers(term, term in data) for term in self.masks):
            return SeenKeys(mask=self._numbers())
        facts = _with_runs(self.reader, whole)
        bounds = _Bounds.of(facts, self.frame)
        q_segments, k_segments, document = self._segments(facts)
        rest = {part for part in whole if part not in bounds.parts and part != document and facts[part] != terms.TRUE}
        if not rest:
            mask = self._only(data)
        elif data:
            raise MaskRefused(
                "The scores have two masks that cannot be proved, "
                f"{known[0][0].node.name!r} and {data[0].node.name!r}; one can be passed on."
            )
        else:
            mask = self._explicit([term for term, _ in known], frozenset(rest), whole, safe)
        return SeenKeys(bounds.causal, bounds.left, bounds.right, q_segments, k_segments, mask)

    def is_read(self, term: MaskTerm) -> bool:
        """Whether it is known where a mask lets a key be seen, or the mask cannot be one."""
        try:
            self._check_tensor(term)
        except MaskRefused:
            return True
        return self._formula_of(term) is not None

    def _formula_of(self, term: MaskTerm) -> Formula | None:
        return self._formula(term.node, term.reader, term.meaning, term.factor, self._rank(term))

    def _formula(self, node: fx.Node, reader: fx.Node, meaning: Meaning, factor: float, rank: int) -> Formula | None:
        """Where the mask `node` lets a key be seen, for scores that have `rank` axes where it meets them."""
        tensor = fake_tensor(node)
        assert tensor is not None
        element = self.reader.read(node, reader)
        if meaning is Meaning.ADDED:
            formula = visible(element, tensor.dtype, factor)
        elif terms.is_formula(element):
            formula = cast(Formula, element)
            formula = terms.negation(formula) if meaning is Meaning.HIDDEN else formula
        else:
            formula = None
        if formula is not None and rank != self.rank:
            formula = self._of_every_head(terms.within(formula, self.frame.extent_at(rank)), rank)
        return None if formula is None else terms.within(formula, self.frame.extent)

    def _of_every_head(self, formula: Formula, rank: int) -> Formula | None:
        """A formula for scores of `rank` axes as one for their own; None if it speaks of heads, or of an axis that
        holds the batch with them.
        """
        inner = range(3, rank) if rank > 4 else (3,)
        if any(terms.at(formula, {axis: terms.constant(place)}) != formula for axis in inner for place in (0, 1)):
            return None
        return cast(Formula, terms.at(formula, {rank: terms.axis(4)})) if rank > 4 else formula

    def _rank(self, term: MaskTerm) -> int:
        """Number of axes of the scores that a mask is applied to."""
        scores = fake_tensor(term.reader)
        return self.rank if scores is None else scores.dim()

    def _check_tensor(self, term: MaskTerm) -> None:
        node, tensor = term.node, fake_tensor(term.node)
        if tensor is None:
            raise MaskRefused(f"The shape of the mask {node.name!r} is not known.")
        shape = sizes(tensor)
        if term.meaning is Meaning.ADDED and not tensor.is_floating_point():
            raise MaskRefused(
                f"The mask {node.name!r} holds {tensor.dtype} and is added to the scores; what is added has to be "
                "floating-point numbers."
            )
        if not self.frame.takes(shape, self._rank(term)) and not self._was_added(term, tensor):
            raise MaskRefused(
                f"The mask {node.name!r} has shape {list(shape)}, which does not broadcast to the scores, {self.frame}."
            )

    def _was_added(self, term: MaskTerm, mask: torch.Tensor) -> bool:
        """Whether the graph itself has joined `mask` to scores of the full shape, and guards what it asks of sizes."""
        scores, rank = fake_tensor(term.reader), self._rank(term)
        extent = self.frame.extent_at(rank)
        if scores is None or sizes(scores) != tuple(extent[rank - axis] for axis in range(rank)):
            return False
        pairs = zip(reversed(mask.shape), reversed(scores.shape), strict=False)
        return mask.dim() <= rank and all(
            statically_known_true(m == n) or statically_known_true(m == 1) for m, n in pairs
        )

    # --- hidden by numbers -------------------------------------------------------------------------------------------

    def _hides_by_numbers(self, term: MaskTerm, is_data: bool) -> bool:
        """Whether a key is hidden by a finite number. The numbers of an additive mask of data are just added."""
        if math.isfinite(term.raised):
            return True
        if term.meaning is Meaning.ADDED:
            return not is_data and hides_by_numbers(self.reader.read(term.node, term.reader))
        return math.isfinite(term.hidden)

    def _is_small(self, term: MaskTerm, known: Iterable[tuple[MaskTerm, Formula]]) -> bool:
        """Whether the numbers of a mask of data are too small to bring back a key that `known` masks hide by one."""
        hidden = [-max(number, other.raised) for other, _ in known for number in self._hiding(other)]
        if math.isfinite(term.raised):
            hidden.append(-term.raised)
        found = self.ranges.of(term.node) if term.meaning is Meaning.ADDED else None
        largest = math.inf if found is None else max(map(abs, found)) * term.factor
        return largest <= min(hidden, default=math.inf) / 2

    def _hiding(self, term: MaskTerm) -> list[float]:
        """The numbers that hide keys."""
        if term.meaning is not Meaning.ADDED:
            return [term.hidden * term.factor]
        return [number * term.factor for number in numbers_in(self.reader.read(term.node, term.reader)) if number < 0]

    def _every_row_sees_a_key(self, parts: frozenset[Formula]) -> bool:
        """Whether one of three keys is seen in every row: the one on either diagonal, or the first."""
        query, queries, keys = terms.axis(_QUERY), terms.constant(self.frame.queries), terms.constant(self.frame.keys)
        shift = terms.plus(keys, queries, -1)
        places = [terms.constant(0)]
        if terms.not_negative(shift):  # else the last queries have no key on their diagonal
            places += [query, terms.plus(query, shift)]
        return any(
            all(
                terms.within(cast(Formula, terms.at(part, {_KEY: place})), self.frame.extent) == terms.TRUE
                for part in parts
            )
            for place in places
        )

    def _numbers(self) -> Operand:
        """The one mask as a tensor to be added."""
        if len(self.masks) > 1:
            names = " and ".join(repr(mask.node.name) for mask in self.masks)
            raise MaskRefused(
                f"The masks {names} hide keys by finite numbers, and a row may see no key: what its softmax gives then "
                "depends on all of them, and one can be passed on."
            )
        (mask,) = self.masks
        if math.isfinite(mask.raised):
            raise MaskRefused(
                f"The scores are raised to {mask.raised:.6g} behind the mask {mask.node.name!r}, and a row may see no "
                "key: all its keys have that number then."
            )
        if mask.meaning is Meaning.ADDED:
            return self._passed_on(mask)
        if self._wants_gradient():
            raise MaskRefused(
                f"The mask {mask.node.name!r} replaces scores by a finite number, and a row may see no key: it has no "
                "gradient then, and that of a mask that is added has one."
            )
        operand = self._passed_on(replace(mask, factor=1.0))
        hidden = () if mask.meaning is Meaning.HIDDEN else (Step("logical_not"),)
        axes = tuple(step for step in operand.steps if step.method != "logical_not")
        # Any number that no score changes: a replaced score has the same part in its row as every other one.
        numbers = (Step("to", (torch.bfloat16,)), Step("mul", (torch.finfo(torch.bfloat16).min,)))
        return Operand(operand.node, (*hidden, *numbers, *axes))

    # --- documents ---------------------------------------------------------------------------------------------------

    def _segments(self, facts: dict[Formula, Formula]) -> tuple[Operand | None, Operand | None, Formula | None]:
        """Segment ids of queries and keys, and the condition they stand for."""
        equalities = sorted((part for part in facts if isinstance(part, IsZero)), key=terms.order)
        for find in (self._direct_sides, self._computed_sides):
            for part in equalities:
                sides = find(part)
                if sides is not None:
                    q, k = sides
                    same = q == k and self.frame.queries == self.frame.keys
                    return q, None if same else k, part
        return None, None, None

    def _direct_sides(self, part: IsZero) -> tuple[Operand, Operand] | None:
        """The sides of `entry(b, i) - entry(b, j) == 0`, or of a multiple, read in the tensors they are entries of."""
        linear = part.linear
        if linear.constant != 0 or len(linear.terms) != 2:
            return None
        (first, a), (second, b) = linear.terms
        if a != -b or not isinstance(first, Entry) or not isinstance(second, Entry):
            return None
        for q, k in ((first, second), (second, first)):
            q_ids, k_ids = self._per_token(q, _QUERY), self._per_token(k, _KEY)
            if q_ids is not None and k_ids is not None:
                return q_ids, k_ids
        return None

    def _per_token(self, entry: Entry, token: int) -> Operand | None:
        """`[batch or 1, tokens]` of `entry`, if it is `tensor[b, token]` up to constants."""
        tensor = fake_tensor(entry.node)
        if tensor is None or self.reader.effects.last_write(entry.node, self.anchor) is not entry.version:
            return None
        steps: list[Step] = []
        kept: list[int] = []
        for length, place in zip(sizes(tensor), entry.index, strict=True):
            number = next((n for n in (token, self.frame.batch_axis) if place == terms.axis(n)), None)
            if number is not None and length == self.frame.extent[number]:
                kept.append(number)
            elif place == terms.constant(0) and length == 1 and not kept:
                kept.append(self.frame.batch_axis)
            elif not place.terms and isinstance(place.constant, int):
                steps.append(Step("select", (len(kept), place.constant)))
            else:
                return None
        if kept == [token]:
            return Operand(entry.node, (*steps, Step("unsqueeze", (0,))))
        return Operand(entry.node, tuple(steps)) if kept == [self.frame.batch_axis, token] else None

    def _computed_sides(self, part: IsZero) -> tuple[Operand, Operand] | None:
        """The sides of `f(b, i) == g(b, j)` as the arguments of the comparison that computes it."""
        for node in self._cone():
            if operation(node) != "eq" or len(node.args) != 2 or self._at_anchor(node) != part:
                continue
            for q, k in (node.args, node.args[::-1]):
                q_ids, k_ids = self._token_column(q, _QUERY), self._token_column(k, _KEY)
                if q_ids is not None and k_ids is not None:
                    return q_ids, k_ids
        return None

    def _token_column(self, node: object, token: int) -> Operand | None:
        """`[batch or 1, tokens]` of a tensor that is broadcast against the scores and varies along these axes only."""
        tensor = fake_tensor(node)
        if tensor is None or tensor.is_floating_point() or tensor.dtype == torch.bool:
            return None
        assert isinstance(node, fx.Node)
        if self.reader.effects.last_write(node, self.anchor) is not None:
            return None
        shape, steps, kept = sizes(tensor), list[Step](), list[int]()
        for d, length in enumerate(shape):
            number = len(shape) - d
            if number in (token, self.frame.batch_axis) and length in (1, self.frame.extent[number]):
                kept.append(number)
            elif length == 1:
                steps.append(Step("select", (len(kept), 0)))
            else:
                return None
        if not kept or kept[-1] != token or shape[len(shape) - token] != self.frame.extent[token]:
            return None
        return Operand(node, (*steps, Step("unsqueeze", (0,))) if kept == [token] else tuple(steps))

    # --- explicit masks ----------------------------------------------------------------------------------------------

    def _only(self, data: Sequence[MaskTerm]) -> Operand | None:
        if not data:
            return None
        if len(data) > 1:
            names = " and ".join(repr(mask.node.name) for mask in data)
            raise MaskRefused(f"The scores have two masks of data, {names}, and at most one can be passed on.")
        return self._passed_on(data[0])

    def _passed_on(self, mask: MaskTerm) -> Operand:
        """One mask, whole."""
        if self.reader.effects.last_write(mask.node, mask.reader) is not self.reader.effects.last_write(
            mask.node, self.anchor
        ):
            raise MaskRefused(f"The mask {mask.node.name!r} is overwritten before the attention is finished.")
        operand = self._operand(mask.node, mask.meaning is Meaning.HIDDEN, self._rank(mask))
        if mask.factor == 1 or mask.meaning is not Meaning.ADDED:
            return operand
        # In float32 at least: the bias of a far key is large, and what the scores differ by is not.
        wide = torch.promote_types(cast(torch.Tensor, fake_tensor(mask.node)).dtype, torch.float32)
        return Operand(operand.node, (Step("to", (wide,)), Step("mul", (mask.factor,)), *operand.steps))

    def _explicit(
        self, masks: Sequence[MaskTerm], rest: frozenset[Formula], whole: frozenset[Formula], safe: bool
    ) -> Operand:
        """The smallest tensor that holds at least `rest` and at most `whole`. `safe`: every row sees a key."""
        best: tuple[tuple[int, ...], Operand] | None = None
        for node, meaning in self._candidates():
            if meaning is Meaning.ADDED and not safe and hides_by_numbers(self.reader.read(node, self.anchor)):
                continue
            rank = max(self.rank, cast(torch.Tensor, fake_tensor(node)).dim())
            formula = self._formula(node, self.anchor, meaning, 1.0, rank)
            if formula is None:
                continue
            held = terms.conjuncts(formula)
            if not rest <= held <= whole:
                continue
            shape = sizes(cast(torch.Tensor, fake_tensor(node)))
            extends = tuple(len(shape) >= number and shape[len(shape) - number] != 1 for number in (2, 3, 4, 1))
            cost = (*extends, meaning is Meaning.ADDED, meaning is Meaning.HIDDEN, len(held))
            if best is None or cost < best[0]:
                best = cost, self._operand(node, meaning is Meaning.HIDDEN, rank)
        if best is None:
            names = " and ".join(repr(mask.node.name) for mask in masks)
            raise MaskRefused(f"No single tensor of the graph holds what the masks {names} say together.")
        return best[1]

    def _candidates(self) -> Iterator[tuple[fx.Node, Meaning]]:
        for node in self._cone():
            tensor = fake_tensor(node)
            if tensor is None or tensor.dim() == 0:
                continue
            if not self.frame.takes(sizes(tensor)) and not self._is_of_every_head(sizes(tensor)):
                continue
            if tensor.dtype == torch.bool:
                yield node, Meaning.SEEN
                yield node, Meaning.HIDDEN
            elif tensor.is_floating_point():
                yield node, Meaning.ADDED

    def _is_of_every_head(self, shape: tuple[Size, ...]) -> bool:
        """Whether this is a mask for scores with two axes of heads that varies along neither."""
        grouped = self.frame.grouped is not None and len(shape) == 5 and shape[1:3] == (1, 1)
        return grouped and self.frame.takes((shape[0], *shape[2:]))

    def _operand(self, node: fx.Node, hidden: bool, rank: int) -> Operand:
        """`node` as the operator's `mask`, which has an axis for heads and is True where a key is seen. `rank`: the
        number of axes of the scores it is made for.
        """
        tensor = cast(torch.Tensor, fake_tensor(node))
        if tensor.requires_grad and self._wants_gradient():
            raise MaskRefused(
                f"The bias {node.name!r} requires a gradient, and the attention operator has none for it."
            )
        steps = [Step("logical_not")] if hidden else []
        shape = sizes(tensor)
        if rank == 3 and len(shape) == 3:
            # [batch, ...], where the scores have one head; else [batch * heads, ...] or [1, ...]
            whole = self.frame.heads is not None and shape[0] != 1
            steps.append(Step("unflatten", (0, (-1, self.frame.heads))) if whole else Step("unsqueeze", (1,)))
        if rank == 5 and len(shape) >= 3:
            steps += self._one_axis_of_heads(node, shape)
        return Operand(node, tuple(steps))

    def _one_axis_of_heads(self, node: fx.Node, shape: tuple[Size, ...]) -> list[Step]:
        """The steps that make one axis of two axes of heads."""
        axis = len(shape) - 4
        first, second = (1, shape[0]) if axis < 0 else shape[axis : axis + 2]
        if (first, second) == (1, 1):
            return [] if axis < 0 else [Step("select", (axis + 1, 0))]
        if (first, second) != self.frame.grouped or axis < 0:
            raise MaskRefused(
                f"The mask {node.name!r} varies along one of two axes of heads, which the operator has as one."
            )
        return [Step("flatten", (axis, axis + 1))]

    def _wants_gradient(self) -> bool:
        result = fake_tensor(self.anchor)
        return result is None or result.requires_grad

    def _cone(self) -> Iterator[fx.Node]:
        """The nodes that the masks are computed from, the masks first."""
        queue = [mask.node for mask in self.masks]
        seen = set(queue)
        for node in queue:
            yield node
            if len(seen) > _MAX_CONE:
                return
            for parent in node.all_input_nodes:
                if parent not in seen and fake_tensor(parent) is not None:
                    seen.add(parent)
                    queue.append(parent)

    def _at_anchor(self, node: fx.Node) -> Element | None:
        element = self.reader.read(node, self.anchor)
        return terms.within(cast(Formula, element), self.frame.extent) if terms.is_formula(element) else None


@dataclass(frozen=True)
class _Bounds:
    """Causality and window, and the conditions they stand for."""

    causal: str
    left: int
    right: int
    parts: frozenset[Formula]

    @staticmethod
    def of(facts: dict[Formula, Formula], frame: Frame) -> _Bounds:
        """The bounds among `facts` (condition as written -> as it reads under the others)."""
        rights: dict[Formula, Size] = {}
        lefts: dict[Formula, Size] = {}
        for part, fact in facts.items():
            distance = _distance(fact)
            if distance is not None:
                side, limit = distance
                (rights if side == _KEY else lefts)[part] = limit
        right, left = _tightest(rights.values()), _tightest(lefts.values())
        shift = terms.plus(terms.constant(frame.keys), terms.constant(frame.queries), -1).constant
        causal, window_right, offset = "none", -1, cast(Size, 0)
        if right is not None and right == 0:
            causal = "top_left"
        elif right is not None and right == shift:
            causal, offset = "bottom_right", shift
        elif isinstance(right, int) and right > 0:
            window_right = right
        elif isinstance(right, int):
            causal, right = "top_left", None  # stricter than causal: implied by the mask, which stays
        else:
            right = None
        if left is not None:
            left = terms.plus(terms.constant(left), terms.constant(offset)).constant
            left = left if isinstance(left, int) and left >= 0 else None
        parts = frozenset(rights if right is not None else ()) | frozenset(lefts if left is not None else ())
        return _Bounds(causal, -1 if left is None else left, window_right, parts)


def _distance(fact: Formula) -> tuple[int, Size] | None:
    """(_KEY, c) for `j - i <= c`, (_QUERY, c) for `i - j <= c`."""
    if not isinstance(fact, AtMostZero):
        return None
    coefficients = dict(fact.linear.terms)
    for side, other in ((_KEY, _QUERY), (_QUERY, _KEY)):
        if coefficients == {Axis(side): 1, Axis(other): -1}:
            return side, terms.times(fact.linear, -1).constant
    return None


def _tightest(limits: Iterable[Size]) -> Size | None:
    """The smallest of `limits`; None if there is none or no telling."""
    distinct = set(limits)
    if len(distinct) == 1:
        return distinct.pop()
    return min(cast("set[int]", distinct)) if distinct and all(isinstance(n, int) for n in distinct) else None


def _with_runs(reader: IndexReader, parts: frozenset[Formula]) -> dict[Formula, Formula]:
    """Each condition, and what it says given the others: positions within one segment differ as the tokens do."""
    facts: dict[Formula, Formula] = {}
    rules = [rule for part in parts if isinstance(part, IsZero) for rule in _same_run(reader, part.linear)]
    for part in parts:
        fact = part
        for later, earlier, distance in rules:
            if isinstance(fact, AtMostZero):
                coefficient = dict(fact.linear.terms).get(later, 0)
                if coefficient and dict(fact.linear.terms).get(earlier, 0) == -coefficient:
                    difference = terms.plus(terms.atom(later), terms.atom(earlier), -1)
                    replaced = terms.plus(terms.plus(fact.linear, difference, -coefficient), distance, coefficient)
                    fact = terms.at_most_zero(replaced)
        facts[part] = fact
    return facts


def _same_run(reader: IndexReader, linear: Linear) -> Iterator[tuple[Entry, Entry, Linear]]:
    """(x, y, d) with `x - y == d` wherever the segment ids of `linear == 0` are equal."""
    entries = [(term, coefficient) for term, coefficient in linear.terms if isinstance(term, Entry)]
    if linear.constant != 0 or len(linear.terms) != 2 or len(entries) != 2 or entries[0][1] != -entries[1][1]:
        return
    a, b = entries[0][0], entries[1][0]
    run = reader.runs.get((a.node, a.version))
    if run is None or (a.node, a.version) != (b.node, b.version):
        return
    rank = len(a.index)
    dim = rank - run.axis
    if any(x != y for d, (x, y) in enumerate(zip(a.index, b.index, strict=True)) if d != dim):
        return
    places_a, places_b = ({rank - d: place for d, place in enumerate(entry.index)} for entry in (a, b))
    ((x, _),) = terms.at(terms.atom(run.entry), places_a).terms  # type: ignore[union-attr]
    ((y, _),) = terms.at(terms.atom(run.entry), places_b).terms  # type: ignore[union-attr]
    distance = terms.times(terms.plus(a.index[dim], b.index[dim], -1), run.step)
    yield cast(Entry, x), cast(Entry, y), distance
    yield cast(Entry, y), cast(Entry, x), terms.times(distance, -1)
