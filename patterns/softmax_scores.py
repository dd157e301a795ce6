"""The scores of an attention written out, read from its softmax back to the product of queries and keys.

Matches     one product q k' (`matmul`, `@`, `bmm`, `baddbmm`, `einsum`) and, in any order: a positive factor,
            c tanh(.), masks that are added or that choose, casts, less the row maximum, sinks as one more column,
            views that join or split batch and heads.
Requires    a soft cap below the masks; the sinks above all else; a hidden score low enough to be hidden.
Becomes     `Scores`:  cap tanh(inner q.k) + masks. The operator's `scale` is inner cap, or inner without a cap.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import fx

from fusion_pass.graph.effects import Effects
from fusion_pass.graph.site import Operand
from fusion_pass.graph.vocabulary import Size, fake_tensor, first_argument, in_place, operation, sizes
from fusion_pass.kernels.attention_problem import mask_floor

from .facts import Refused
from .heads import Heads, constant, number, number_times
from .masked_scores import MaskTerm, Meaning

PRODUCTS = frozenset({"matmul", "baddbmm", "einsum"})
CASTS = frozenset(
    "to _to_copy float half bfloat16 double type type_as contiguous clone alias convert_element_type".split()
)
MAX_STEPS = 24

_CASTS_OF_SINKS = frozenset({"to", "float", "type_as", "_to_copy"})


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
        return replace(self, nodes=(*self.nodes, *nodes))


@dataclass(frozen=True)
class Leading:
    """The axes in front of queries and keys, whatever views make of them on the way."""

    merged: tuple[Size, int] | None = None
    """Batch and heads, where a product has one axis for both."""
    grouped: tuple[int, int] | None = None
    """Key heads, and the query heads of each, where a product has an axis for either."""

    def of(self, heads: Heads, product: fx.Node) -> Heads:
        """`heads`, read by `product`."""
        return heads if scores_rank(product) > 3 else replace(heads, merged=self.merged)


def leading_axes(shapes: Sequence[tuple[Size, ...]]) -> Leading:
    """What shapes of the same scores say together. Each view that leads from one to the next keeps the order of the
    elements. Raises `Refused` if they contradict each other.
    """
    one, two, three = ({shape for shape in shapes if len(shape) == n} for n in (1, 2, 3))
    grouped = {(batch, first * second) for batch, first, second in three}
    if len(one) > 1 or len(three) > 1 or len(two | grouped) > 1:
        raise Refused(
            "Between the product of queries and keys and that with the values, views move batches and heads: "
            f"{', '.join(map(str, map(list, dict.fromkeys(shapes))))}."
        )
    merged = next(iter(two | grouped)) if one and (two or three) else None
    numbers = (*(merged or ())[1:], *(n for shape in three for n in shape[1:]))
    if not all(isinstance(n, int) for n in numbers):
        raise Refused("The number of heads is known only at run time, and views join it to the batch or split it.")
    heads = next((shape[1:] for shape in three), None)
    return Leading(cast("tuple[Size, int] | None", merged), cast("tuple[int, int] | None", heads))


def moved_leading(view: fx.Node, source: object) -> tuple[Size, ...] | None:
    """The axes of `view` in front of its last two; None unless it is a view of `source` that leaves those two alone."""
    before, after = fake_tensor(source), fake_tensor(view)
    if first_argument(view) is not source or before is None or after is None or before.dtype != after.dtype:
        return None
    old, new = sizes(before), sizes(after)
    return new[:-2] if old[-2:] == new[-2:] and {len(old), len(new)} <= {3, 4, 5} else None


def version_read(effects: Effects, node: fx.Node, reader: fx.Node) -> fx.Node:
    """The node whose result `reader` sees in `node`: the last in-place operation on it, or `node` itself."""
    write = effects.last_write(node, reader)
    if write is None:
        return node
    if in_place(write) is None or write.args[0] is not node:
        raise Refused(f"{node.name!r} is written in place by {write.name!r}, in a way that is not followed.")
    return write


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
        if node.op not in ("call_function", "call_method") or self._depth > MAX_STEPS or fake_tensor(node) is None:
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
        q, k = node.args[:2] if len(node.args) == 2 else (None, None)
        return _scores(node, q, k)

    def _baddbmm(self, node: fx.Node) -> Scores | None:
        by_name = [node.kwargs[name] for name in ("batch1", "batch2") if name in node.kwargs]
        if len(node.args) + len(by_name) != 3 or not node.args:
            return None
        given: list[object] = [*node.args, *by_name]
        bias, q, k = given
        alpha, beta = (number(node.kwargs.get(name, 1)) for name in ("alpha", "beta"))
        scores = _scores(node, q, k)
        if scores is None or alpha is None or beta not in (0, 1):
            return None
        scores = replace(scores, inner=alpha)
        if beta == 0:
            return scores
        return replace(scores, masks=(MaskTerm(cast(fx.Node, bias), node, Meaning.ADDED),))

    def _einsum(self, node: fx.Node) -> Scores | None:
        parts = einsum(node)
        if parts is None:
            return None
        (first, second), (a, b), out = parts
        batch, row, column = out[:-2], out[-2], out[-1]
        if row in b and column in a:
            first, second, a, b = second, first, b, a
        shared = set(a) & set(b) - set(out)
        if len(shared) != 1 or len(batch) not in (1, 2, 3):
            return None
        (lane,) = shared
        if set(a) != {*batch, row, lane} or not one_head_or_each(second, b, batch, column, lane, leading_of(node)):
            return None
        if letter_sizes(first, a, batch) != leading_of(node):
            return None  # an axis of the queries is broadcast
        return Scores(
            heads_of_letters(first, a, batch, row, lane),
            heads_of_letters(second, b, batch, column, lane),
            node,
            nodes=(node,),
            leading=(leading_of(node),),
        )

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
            if mask.meaning is not Meaning.ADDED:
                _check_hides(mask.reader, mask.hidden * mask.factor * _USUAL_FACTOR)
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
        if _shape(node.args[0]) != _shape(node):  # the scores have the shape of the sum; a bias mostly has not
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
        return replace(scores, masks=tuple(replace(mask, raised=number) for mask in scores.masks)).through(node)

    def _cat(self, node: fx.Node) -> Scores | None:
        """Sinks as one more column."""
        parts = first_argument(node)
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        if not isinstance(parts, tuple | list) or len(parts) != 2 or dim not in (-1, 3) or scores_rank(node) != 4:
            return None
        scores = self._of(parts[0], node)
        if scores is None or scores.sinks is not None or scores.shifted:
            return None
        sinks = per_head(parts[1], 1 - scores_rank(node))
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


def keeps_numbers(node: fx.Node) -> bool:
    """Whether a cast leaves floating-point numbers what they are, up to rounding. Rounding to eight bits is meant."""
    before, after = fake_tensor(first_argument(node)), fake_tensor(node)
    return all(x is not None and x.is_floating_point() and x.itemsize > 1 for x in (before, after))


def scores_rank(node: fx.Node) -> int:
    """Number of axes of a tensor node, 0 for others."""
    tensor = fake_tensor(node)
    return 0 if tensor is None else tensor.dim()


def _shape(node: object) -> tuple[Size, ...]:
    tensor = fake_tensor(node)
    return () if tensor is None else sizes(tensor)


def _scores(node: fx.Node, q: object, k: object) -> Scores | None:
    found = product_of(node, q, k, transposed=True)
    return None if found is None else Scores(*found, node, nodes=(node,), leading=(leading_of(node),))


def product_of(node: fx.Node, a: object, b: object, *, transposed: bool) -> tuple[Heads, Heads] | None:
    """The factors of a matrix product of three, four or five axes. `transposed`: the second one is `[..., D, keys]`."""
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return None
    rank = scores_rank(node)
    if {scores_rank(a), scores_rank(b)} != {rank}:
        return None
    tokens, lanes = (rank - 1, rank - 2) if transposed else (rank - 2, rank - 1)
    if rank == 3:
        return Heads(a, (0, 1, None, 2)), Heads(b, (0, tokens, None, lanes))
    if rank == 4:
        return Heads(a, (0, 2, 1, 3)), Heads(b, (0, tokens, 1, lanes))
    wide, one = leading_of(node), sizes(cast(torch.Tensor, fake_tensor(b)))[:3]
    # The head (k, g) of all reads k of few, or the one of one.
    if rank != 5 or leading_of(a) != wide or one not in (wide, (*wide[:2], 1), (wide[0], 1, 1)):
        return None
    return Heads(a, (0, 3, 1, 4), group=2), Heads(b, (0, tokens, 1, lanes), group=2)


def leading_of(node: fx.Node) -> tuple[Size, ...]:
    return sizes(cast(torch.Tensor, fake_tensor(node)))[:-2]


def einsum(node: fx.Node) -> tuple[tuple[fx.Node, fx.Node], tuple[str, str], str] | None:
    """Operands, their letters and the result's, of an einsum of two tensors without diagonals."""
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or not all(isinstance(x, fx.Node) for x in operands):
        return None
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    words = inputs.split(",")
    if not arrow or len(words) != 2:
        return None
    if "." in equation:
        axes = {scores_rank(cast(fx.Node, x)) - len(word) + 3 for x, word in zip(operands, words, strict=True)}
        if len(axes) != 1 or not all("..." in word for word in (*words, out)):
            return None  # one has axes that the other has not
        unused = [letter for letter in string.ascii_letters if letter not in equation]
        spelled = "".join(unused[: axes.pop()])
        words, out = [word.replace("...", spelled) for word in words], out.replace("...", spelled)
    if any(len(set(word)) != len(word) for word in (*words, out)):
        return None
    return (cast(fx.Node, operands[0]), cast(fx.Node, operands[1])), (words[0], words[1]), out


def one_head_or_each(node: fx.Node, word: str, batch: str, token: str, lane: str, leading: tuple[Size, ...]) -> bool:
    """Whether keys or values of these letters have all axes of `batch`, whose lengths are `leading`, or miss those of
    the heads, or of the second axis of heads, which are of length one or not there: one head serves all queries, or all
    of a group.
    """
    every = {*batch, token, lane}
    letters = (every, *(every - set(batch[n:]) for n in range(1, len(batch))))
    ones = (1,) * len(leading)
    return set(word) in letters and any(
        letter_sizes(node, word, batch) == (*leading[:n], *ones[n:]) for n in range(1, len(batch) + 1)
    )


def letter_sizes(node: fx.Node, word: str, letters: str) -> tuple[Size, ...]:
    """The lengths of the axes of `node` that have `letters`, 1 where there is none."""
    shape = sizes(cast(torch.Tensor, fake_tensor(node)))
    return tuple(shape[word.index(letter)] if letter in word else 1 for letter in letters)


def heads_of_letters(node: fx.Node, word: str, batch: str, token: str, lane: str) -> Heads:
    found = [word.index(letter) if letter in word else None for letter in batch[1:]]
    head, group = (*found, None, None)[:2]
    return Heads(node, (word.index(batch[0]), word.index(token), head, word.index(lane)), group)


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
    rank = scores_rank(scores) if isinstance(scores, fx.Node) else 0
    arguments = [*top.args[1:], *top.kwargs.values()]
    dims = ([-1], [rank - 1], (-1,), -1, rank - 1)
    over_keys = len(arguments) == 2 and arguments[0] in dims and arguments[1] is True
    return chain if operation(top) in ("max", "amax") and first_argument(top) is scores and over_keys else None


def per_head(node: object, head: int) -> Operand | None:
    """`[H]` of a tensor `[1 or B, H, ...]` that varies along `head` only, counted from the right (-1: the last axis).

    Axes of size one may be missing on the left, as in any tensor that is broadcast.
    """
    current = node
    while isinstance(current, fx.Node) and operation(current) in {"expand", *_CASTS_OF_SINKS}:
        if not keeps_numbers(current):
            return None
        current = first_argument(current)
    tensor = fake_tensor(current)
    shape = () if tensor is None else sizes(tensor)
    if len(shape) < -head or any(n != 1 for d, n in enumerate(shape) if d != len(shape) + head):
        return None
    # From here on up there is one axis that is longer than one, which views leave in its order.
    while isinstance(current, fx.Node) and (tensor := fake_tensor(current)) is not None:
        if tensor.dim() == 1:
            return Operand(current)
        if operation(current) not in {"view", "unsqueeze", *_CASTS_OF_SINKS} or not keeps_numbers(current):
            return None
        if operation(current) == "view" and tensor.dtype != cast(torch.Tensor, fake_tensor(current.args[0])).dtype:
            return None  # its bits as other numbers
        current = first_argument(current)
    return None
