"""The masks of one attention, each as the formula of where a query sees a key.

A boolean mask is that formula. An additive one is a choice between numbers: 0 is seen, a number that the operator takes
for -inf (`mask_floor`) is hidden; a mask with any other number in it has no formula and is data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from fusion_pass.graph.vocabulary import fake_tensor, sizes
from fusion_pass.kernels.attention_problem import mask_floor

from ..formulas import terms as terms
from ..formulas.box import within
from ..formulas.reading import IndexReader
from ..formulas.terms import Element, Formula, Number, Select
from .masked_scores import Frame, MaskRefused, MaskTerm, Meaning

_MAX_CONE = 400
"""Nodes that are searched for a smaller mask, or for ids of documents."""


@dataclass(frozen=True)
class MaskReading:
    """`masks` of the scores `frame`, for a call that reads its operands at `anchor`."""

    reader: IndexReader
    masks: tuple[MaskTerm, ...]
    frame: Frame
    anchor: fx.Node

    def check(self, mask: MaskTerm) -> None:
        """Raise `MaskRefused` unless `mask` is a tensor that can be one of these scores."""
        node, tensor = mask.node, fake_tensor(mask.node)
        if tensor is None:
            raise MaskRefused(f"The shape of the mask {node.name!r} is not known.")
        shape = sizes(tensor)
        if mask.meaning is Meaning.ADDED and not tensor.is_floating_point():
            raise MaskRefused(
                f"The mask {node.name!r} holds {tensor.dtype} and is added to the scores; what is added has to be "
                "floating-point numbers."
            )
        if not self.frame.takes(shape) and not self._was_added(mask):
            raise MaskRefused(
                f"The mask {node.name!r} has shape {list(shape)}, which does not broadcast to the scores, {self.frame}."
            )

    def is_read(self, mask: MaskTerm) -> bool:
        """Whether it is known where `mask` lets a key be seen, or it cannot be a mask."""
        try:
            self.check(mask)
        except MaskRefused:
            return True
        return self.formula(mask) is not None

    def rank(self, mask: MaskTerm) -> int:
        """Number of axes that the scores have where `mask` is applied."""
        scores = fake_tensor(mask.reader)
        return self.frame.batch_axis if scores is None else scores.dim()

    def formula(self, mask: MaskTerm) -> Formula | None:
        """Where `mask` lets a key be seen, in the axes of the scores; None for data."""
        return self._formula(mask.node, mask.reader, mask.meaning, mask.factor, self.rank(mask))

    def formula_at_anchor(self, node: fx.Node, meaning: Meaning, rank: int) -> Formula | None:
        """The same for a tensor of the graph, as a mask of `rank` axes that the call itself reads."""
        return self._formula(node, self.anchor, meaning, 1.0, rank)

    def condition(self, node: fx.Node) -> Formula | None:
        """The formula of a boolean tensor that is broadcast against the scores; None for other tensors."""
        element = self.reader.read(node, self.anchor)
        return within(cast(Formula, element), self.frame.extent) if terms.is_formula(element) else None

    def cone(self) -> Iterator[fx.Node]:
        """The tensors that the masks are computed from, the masks first."""
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

    @property
    def wants_gradient(self) -> bool:
        """Whether the attention is differentiated."""
        return cast(torch.Tensor, fake_tensor(self.anchor)).requires_grad

    def _formula(self, node: fx.Node, reader: fx.Node, meaning: Meaning, factor: float, rank: int) -> Formula | None:
        element = self.reader.read(node, reader)
        if meaning is Meaning.ADDED:
            formula = visible(element, cast(torch.Tensor, fake_tensor(node)).dtype, factor)
        elif terms.is_formula(element):
            formula = cast(Formula, element)
            formula = terms.negation(formula) if meaning is Meaning.HIDDEN else formula
        else:
            formula = None
        if formula is not None and rank != self.frame.batch_axis:
            formula = _of_every_head(within(formula, self.frame.extent_at(rank)), rank)
        return None if formula is None else within(formula, self.frame.extent)

    def _was_added(self, mask: MaskTerm) -> bool:
        """Whether the graph itself has joined `mask` to the scores and has given them no other shape."""
        scores, rank = fake_tensor(mask.reader), self.rank(mask)
        extent = self.frame.extent_at(rank)
        return scores is not None and sizes(scores) == tuple(extent[rank - axis] for axis in range(rank))


def _of_every_head(formula: Formula, rank: int) -> Formula | None:
    """A formula for scores of `rank` axes as one for their own; None if it speaks of heads, or of an axis that holds
    the batch with them.
    """
    heads = range(3, max(rank, 4))
    if terms.at(formula, dict.fromkeys(heads, terms.constant(0))) != formula:
        return None
    return cast(Formula, terms.at(formula, {rank: terms.axis(4)}))


def visible(element: Element, dtype: torch.dtype, factor: float) -> Formula | None:
    """Where an additive mask of `dtype`, multiplied by `factor` later, lets a key be seen; None for data."""
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


def has_finite_numbers(element: Element) -> bool:
    """Whether an additive mask (`visible`) hides a key by a finite number."""
    return any(value < 0 and math.isfinite(value) for value in numbers_in(element))
