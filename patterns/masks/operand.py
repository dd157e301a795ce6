"""Masks that stay: what a mask that is not proved, or not in full, becomes as the operator's `mask`.

A mask of data is passed on whole. One whose formula is known is replaced by the smallest tensor of the graph that holds
what no other argument says: for causality beside padding that is the padding, `[batch, 1, 1, keys]`.

The operator takes `[batch or 1, heads or 1, queries or 1, keys or 1]`, boolean (True is seen) or added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import fx

from fusion_pass.graph.site import Operand, Step
from fusion_pass.graph.vocabulary import Size, fake_tensor, sizes

from ..formulas import terms as terms
from ..formulas.terms import Formula
from .masked_scores import Frame, MaskRefused, MaskTerm, Meaning
from .reading import MaskReading, has_finite_numbers


def whole(reading: MaskReading, mask: MaskTerm) -> Operand:
    """All of one mask. Raises `MaskRefused` where the call cannot read it."""
    effects = reading.reader.effects
    if effects.last_write(mask.node, mask.reader) is not effects.last_write(mask.node, reading.anchor):
        raise MaskRefused(f"The mask {mask.node.name!r} is overwritten before the attention is finished.")
    operand = _operand(reading, mask.node, mask.meaning is Meaning.HIDDEN, reading.rank(mask))
    if mask.factor == 1 or mask.meaning is not Meaning.ADDED:
        return operand
    # In float32 at least: the bias of a far key is large, and what the scores differ by is not.
    wide = torch.promote_types(cast(torch.Tensor, fake_tensor(mask.node)).dtype, torch.float32)
    return Operand(operand.node, (Step("to", (wide,)), Step("mul", (mask.factor,)), *operand.steps))


def smallest(
    reading: MaskReading, least: frozenset[Formula], most: frozenset[Formula], *, every_row_sees_a_key: bool
) -> Operand | None:
    """The smallest tensor that holds at least the conditions `least` and at most `most`; None if the graph has none.

    A mask that hides by finite numbers does only where every row sees a key (`finite_numbers.py`).
    """
    best: tuple[tuple[int, ...], Operand] | None = None
    for node, meaning in _candidates(reading):
        if not every_row_sees_a_key and has_finite_numbers(reading.reader.read(node, reading.anchor)):
            continue
        shape = sizes(cast(torch.Tensor, fake_tensor(node)))
        rank = max(reading.frame.batch_axis, len(shape))
        formula = reading.formula_at_anchor(node, meaning, rank)
        if formula is None:
            continue
        held = terms.conjuncts(formula)
        if not least <= held <= most:
            continue
        extends = tuple(len(shape) >= number and shape[len(shape) - number] != 1 for number in (2, 3, 4, 1))
        cost = (*extends, meaning is Meaning.ADDED, meaning is Meaning.HIDDEN, len(held))
        if best is None or cost < best[0]:
            best = cost, _operand(reading, node, meaning is Meaning.HIDDEN, rank)
    return None if best is None else best[1]


def _candidates(reading: MaskReading) -> Iterator[tuple[fx.Node, Meaning]]:
    for node in reading.cone():
        tensor = fake_tensor(node)
        if tensor is None or tensor.dim() == 0:
            continue
        if not reading.frame.takes(sizes(tensor)) and not _is_of_every_head(reading.frame, sizes(tensor)):
            continue
        if tensor.dtype == torch.bool:
            yield node, Meaning.SEEN
            yield node, Meaning.HIDDEN
        elif tensor.is_floating_point():
            yield node, Meaning.ADDED


def _is_of_every_head(frame: Frame, shape: tuple[Size, ...]) -> bool:
    """Whether this is a mask for scores with two axes of heads that varies along neither."""
    grouped = frame.grouped is not None and len(shape) == 5 and shape[1:3] == (1, 1)
    return grouped and frame.takes((shape[0], *shape[2:]))


def _operand(reading: MaskReading, node: fx.Node, hidden: bool, rank: int) -> Operand:
    """`node` as the operator's `mask`. `hidden`: True is a hidden key in it; `rank`: the number of axes of the scores
    it is made for.
    """
    tensor = cast(torch.Tensor, fake_tensor(node))
    if tensor.requires_grad and reading.wants_gradient:
        raise MaskRefused(f"The bias {node.name!r} requires a gradient, and the attention operator has none for it.")
    steps = [Step("logical_not")] if hidden else []
    shape, heads = sizes(tensor), reading.frame.heads
    if rank == 3 and len(shape) == 3:
        # [batch, ...], where the scores have one head; else [batch * heads, ...] or [1, ...]
        merged = heads is not None and shape[0] != 1
        steps.append(Step("unflatten", (0, (-1, heads))) if merged else Step("unsqueeze", (1,)))
    if rank == 5 and len(shape) >= 3:
        steps += _one_axis_of_heads(reading.frame, node, shape)
    return Operand(node, tuple(steps))


def _one_axis_of_heads(frame: Frame, node: fx.Node, shape: Sequence[Size]) -> list[Step]:
    """The steps that make one axis of two axes of heads."""
    axis = len(shape) - 4
    first, second = (1, shape[0]) if axis < 0 else shape[axis : axis + 2]
    if (first, second) == (1, 1):
        return [] if axis < 0 else [Step("select", (axis + 1, 0))]
    if (first, second) != frame.grouped or axis < 0:
        raise MaskRefused(
            f"The mask {node.name!r} varies along one of two axes of heads, which the operator has as one."
        )
    return [Step("flatten", (axis, axis + 1))]
