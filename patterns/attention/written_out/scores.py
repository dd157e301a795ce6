"""The scores of an attention written out, read from its softmax back to the product of queries and keys.

Matches     one product q k' (`matmul`, `@`, `bmm`, `baddbmm`, `einsum`) and, in any order: a positive factor,
            c tanh(.), masks that are added or that choose, casts, less the row maximum, sinks as one more column,
            views that join or split batch and heads.
Requires    a soft cap below the masks; the sinks above all else; a hidden score low enough to be hidden.
Becomes     `Scores`:  cap tanh(inner q.k) + masks. The operator's `scale` is inner cap, or inner without a cap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import fx

from fusion_pass.graph.effects import Effects
from fusion_pass.graph.site import Operand
from fusion_pass.graph.vocabulary import CALLS, Size, fake_tensor, first_argument, in_place, operation
from fusion_pass.kernels.attention_problem import mask_floor

from ...literals import constant, number, number_times
from ...masks.masked_scores import MaskTerm, Meaning
from ...refused import Refused
from ..heads import Heads
from ..leading import moved_leading
from .nodes import CASTS, MAX_STEPS, keeps_numbers, rank_of, reduces_last, shape_of, version_read
from .products import PRODUCTS, leading_of, queries_and_keys, queries_and_keys_of_einsum
from .sinks import per_head


@dataclass(frozen=True)
class Scores:
    """The scores up to one node, from the product outwards."""

    q: Heads
    k: Heads
    product: fx.Node
    inner: float = 1.0
    """The factor of q.k, below the soft cap."""
    cap: float | None = None
    masks: tuple[MaskTerm, ...] = ()
    sinks: Operand | None = None
    shifted: bool = False
    """Each row less its maximum, which only a softmax does not see."""
    nodes: tuple[fx.Node, ...] = ()
    """What the scores are computed by, the product first."""
    leading: tuple[tuple[Size, ...], ...] = ()
    """The axes in front of queries and keys: those of the product, and behind each view."""

    def through(self, *nodes: fx.Node) -> Scores:
        """The same scores, `nodes` later."""
        return replace(self, nodes=(*self.nodes, *nodes))


def _name(node: fx.Node) -> str:
    return in_place(node) or operation(node)


class Parser:
    """Reads the scores from the softmax back to the product. Returns None for what is no form of scores."""

    def __init__(self, effects: Effects) -> None:
        self.effects = effects
        self.blocker: fx.Node | None = None
        self.product: fx.Node | None = None
        """A product that is reached and not understood."""
        self._depth = 0

    def scores(self, node: fx.Node) -> Scores | None:
        """The scores that `node` holds."""
        if node.op not in CALLS or self._depth > MAX_STEPS or fake_tensor(node) is None:
            return None
        name = _name(node)
        rule = _RULES.get(name)
        if rule is None:
            self.blocker = self.blocker or node
            return None
        self._depth += 1
        try:
            scores = rule(self, node)
            if scores is None and name in PRODUCTS:
                self.product = node
            elif scores is None and self.blocker is None and self.product is None:
                self.blocker = node
            return scores
        finally:
            self._depth -= 1

    def is_less_maximum(self, node: fx.Node) -> bool:
        """Whether the last that is done to the scores in `node` is to take off the maximum of each row."""
        while operation(node) in CASTS and isinstance(first_argument(node), fx.Node):
            node = version_read(self.effects, first_argument(node), node)
        return _name(node) == "sub"

    def _of(self, argument: object, reader: fx.Node) -> Scores | None:
        return self.scores(version_read(self.effects, argument, reader)) if isinstance(argument, fx.Node) else None

    # --- products ---

    def _matmul(self, node: fx.Node) -> Scores | None:
        return _scores(node, queries_and_keys(node, *node.args)) if len(node.args) == 2 else None

    def _baddbmm(self, node: fx.Node) -> Scores | None:
        by_name = [node.kwargs[name] for name in ("batch1", "batch2") if name in node.kwargs]
        if len(node.args) + len(by_name) != 3 or not node.args:
            return None
        given: list[object] = [*node.args, *by_name]
        bias, q, k = given
        alpha, beta = (number(node.kwargs.get(name, 1)) for name in ("alpha", "beta"))
        scores = _scores(node, queries_and_keys(node, q, k))
        if scores is None or alpha is None or beta not in (0, 1):
            return None
        scores = replace(scores, inner=alpha)
        if beta == 0:
            return scores
        return replace(scores, masks=(MaskTerm(cast(fx.Node, bias), node, Meaning.ADDED),))

    def _einsum(self, node: fx.Node) -> Scores | None:
        return _scores(node, queries_and_keys_of_einsum(node))

    # --- what is done to scores ---

    def _cast(self, node: fx.Node) -> Scores | None:
        if not keeps_numbers(node):
            return None
        scores = self._of(first_argument(node), node)
        return scores and scores.through(node)

    def _view(self, node: fx.Node) -> Scores | None:
        leading = moved_leading(node, first_argument(node))
        scores = self._of(first_argument(node), node) if leading is not None else None
        if scores is None or leading is None or scores.sinks is not None:
            return None
        return replace(scores, leading=(*scores.leading, leading)).through(node)

    def _scaled(self, node: fx.Node) -> Scores | None:
        taken = number_times(node, _name(node))
        scores = self._of(taken[0], node) if taken is not None and taken[1] > 0 else None
        if scores is None or taken is None or scores.sinks is not None:
            return None
        factor = taken[1]
        masks = tuple(replace(mask, factor=mask.factor * factor, raised=mask.raised * factor) for mask in scores.masks)
        for mask in masks:
            hidden = -math.inf if mask.meaning is Meaning.ADDED else mask.hidden * mask.factor
            _check_hides(mask.reader, max(hidden, mask.raised) * _USUAL_FACTOR)
        if scores.cap is not None:
            return replace(scores, cap=scores.cap * factor, masks=masks).through(node)
        return replace(scores, inner=scores.inner * factor, masks=masks).through(node)

    def _tanh(self, node: fx.Node) -> Scores | None:
        scores = self._of(first_argument(node), node)
        if scores is None or scores.cap is not None or scores.masks or scores.sinks is not None or scores.shifted:
            return None
        return replace(scores, cap=1.0).through(node)

    def _add(self, node: fx.Node) -> Scores | None:
        if node.kwargs.get("alpha", 1) != 1 or len(node.args) != 2:
            return None
        pairs: list[Sequence[object]] = [node.args, node.args[::-1]]
        if shape_of(node.args[0]) != shape_of(node):  # the scores have the shape of the sum; a bias mostly has not
            pairs.reverse()
        for x, mask in pairs:
            scores = self._of(x, node)
            if scores is not None and isinstance(mask, fx.Node) and fake_tensor(mask) is not None:
                return self._masked(scores, node, MaskTerm(mask, node, Meaning.ADDED))
        return None

    def _masked_fill(self, node: fx.Node) -> Scores | None:
        x, mask, value = node.args if len(node.args) == 3 else (None, None, None)
        return self._chosen(node, x, mask, value, Meaning.HIDDEN)

    def _where(self, node: fx.Node) -> Scores | None:
        if len(node.args) != 3:
            return None
        mask, x, value = node.args if node.op == "call_function" else (node.args[1], node.args[0], node.args[2])
        meaning = Meaning.SEEN
        if isinstance(value, fx.Node) and self._of(value, node) is not None:
            x, value, meaning = value, x, Meaning.HIDDEN
        return self._chosen(node, x, mask, value, meaning)

    def _chosen(self, node: fx.Node, x: object, mask: object, value: object, meaning: Meaning) -> Scores | None:
        scores = self._of(x, node)
        if scores is None or not isinstance(mask, fx.Node):
            return None
        number = constant(self.effects, value)
        if number is None:
            raise Refused(f"{node.name!r} replaces hidden scores by {value}, which is no known number.")
        _check_hides(node, number)
        return self._masked(scores, node, MaskTerm(mask, node, meaning, number))

    def _masked(self, scores: Scores, node: fx.Node, mask: MaskTerm) -> Scores | None:
        if scores.sinks is not None:
            return None
        return replace(scores, masks=(*scores.masks, mask)).through(node)

    def _sub(self, node: fx.Node) -> Scores | None:
        """Scores minus their row maximum: the softmax is the same."""
        x, maximum = node.args if len(node.args) == 2 else (None, None)
        chain = _row_maximum(maximum, x)
        scores = self._of(x, node) if chain is not None else None
        return None if scores is None or chain is None else replace(scores.through(*chain, node), shifted=True)

    def _raised(self, node: fx.Node) -> Scores | None:
        """Scores, but no less than a number that hides: the least one, so that none becomes -inf."""
        x, *numbers = node.args or (None,)
        numbers += [node.kwargs[name] for name in ("min", "other") if name in node.kwargs]
        number = constant(self.effects, numbers[0]) if len(numbers) == 1 else None
        if node.kwargs.keys() - {"min", "other"} or number is None or not math.isfinite(number):
            return None
        scores = self._of(x, node)
        if (
            scores is None
            or scores.sinks is not None
            or number > mask_floor(cast(torch.Tensor, fake_tensor(node)).dtype)
        ):
            return None
        masks = tuple(replace(mask, raised=max(mask.raised, number)) for mask in scores.masks)
        return replace(scores, masks=masks).through(node)

    def _cat(self, node: fx.Node) -> Scores | None:
        """Sinks as one more column."""
        parts = first_argument(node)
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        if not isinstance(parts, tuple | list) or len(parts) != 2 or dim not in (-1, 3) or rank_of(node) != 4:
            return None
        scores = self._of(parts[0], node)
        if scores is None or scores.sinks is not None or scores.shifted:
            return None
        sinks = per_head(parts[1], 1 - rank_of(node))
        if sinks is None:
            raise Refused(
                f"{cast(fx.Node, parts[1]).name!r}, joined to the scores as a sink, is not one number for each head."
            )
        return replace(scores, sinks=sinks).through(node)


_RULES: dict[str, Callable[[Parser, fx.Node], Scores | None]] = {
    "matmul": Parser._matmul,
    "baddbmm": Parser._baddbmm,
    "einsum": Parser._einsum,
    **dict.fromkeys(CASTS, Parser._cast),
    "view": Parser._view,
    "mul": Parser._scaled,
    "div": Parser._scaled,
    "tanh": Parser._tanh,
    "add": Parser._add,
    "masked_fill": Parser._masked_fill,
    "where": Parser._where,
    "sub": Parser._sub,
    "cat": Parser._cat,
    **dict.fromkeys(("max", "maximum", "clamp", "clamp_min"), Parser._raised),
}


_USUAL_FACTOR = 100
"""A hidden score may be divided by this: by the root of any head_dim. It differs from all others by 1e6 then."""


def _check_hides(node: fx.Node, number: float) -> None:
    """Raise `Refused` unless `number`, which hidden scores become at `node` or later, hides them."""
    tensor = fake_tensor(node)
    if tensor is None or not number <= mask_floor(tensor.dtype):
        raise Refused(
            f"{node.name!r} replaces hidden scores by a number that is not low enough to hide them: "
            "the softmax would still give them weight."
        )


def _scores(product: fx.Node, factors: tuple[Heads, Heads] | None) -> Scores | None:
    return None if factors is None else Scores(*factors, product, nodes=(product,), leading=(leading_of(product),))


def _row_maximum(maximum: object, scores: object) -> list[fx.Node] | None:
    """The nodes that compute `scores.max(-1, keepdim=True)`, if `maximum` is that."""
    if not isinstance(maximum, fx.Node):
        return None
    chain = [maximum]
    if operation(maximum) == "detach" and isinstance(first_argument(maximum), fx.Node):
        chain.insert(0, cast(fx.Node, first_argument(maximum)))
    if operation(chain[0]) == "getitem" and chain[0].args[1] == 0:
        chain.insert(0, cast(fx.Node, chain[0].args[0]))
    top = chain[0]
    if operation(top) not in ("max", "amax") or first_argument(top) is not scores:
        return None
    return chain if reduces_last(top, rank_of(scores)) and [*top.args[1:], *top.kwargs.values()][1:] == [True] else None
