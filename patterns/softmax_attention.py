"""Attention written out: a product of queries and keys, a softmax, a product with the values.

Matches     softmax(scores) v, the softmax as `softmax_forms.py` reads it and the scores as `softmax_scores.py` does;
            with sinks as one more column of scores that is cut off again, or as sigmoid(logsumexp(scores) - sink)
            times the result. Three axes, four, or five: two axes of heads, as in grouped attention.
Requires    the softmax over the last axis; no dropout; no other reader of scores or weights; weights left as they are.
Becomes     `scale`, `softcap`, `sinks` and the masks of `attention`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import fx

from fusion_pass.graph import lanes
from fusion_pass.graph.effects import Effects
from fusion_pass.graph.site import Operand
from fusion_pass.graph.vocabulary import Size, fake_tensor, first_argument, operation, reads_no_numbers, sizes

from . import softmax_forms
from .facts import Refused
from .heads import Heads, number
from .softmax_forms import Softmax
from .softmax_scores import (
    CASTS,
    MAX_STEPS,
    PRODUCTS,
    Leading,
    Parser,
    Scores,
    einsum,
    heads_of_letters,
    keeps_numbers,
    leading_axes,
    letter_sizes,
    moved_leading,
    one_head_or_each,
    per_head,
    product_of,
    scores_rank,
    version_read,
)


@dataclass(frozen=True)
class Written:
    """An attention written out. `order`: the axis of `[B, S, H, D]` that each axis of `result` is; with two axes of
    heads, the axis of `[B, S, K, G, D]`; of batch and heads in one, as with one head for each batch.
    """

    scores: Scores
    v: Heads
    result: fx.Node
    order: tuple[int, ...]
    leading: Leading
    sinks: Operand | None
    nodes: frozenset[fx.Node] = field(repr=False)
    values: fx.Node
    """The product of weights and values."""


def read(effects: Effects, anchor: fx.Node) -> Written | None:
    """The attention around the softmax at `anchor`, one of `softmax_forms.ANCHORS`; None for another use.

    Raises `Refused` for an attention that cannot be fused.
    """
    tensor = fake_tensor(anchor)
    if tensor is None or tensor.dim() not in (3, 4, 5):
        return None
    if not _reaches_product(anchor) or not _comes_from_product(anchor):
        return None
    softmax = softmax_forms.read(effects, anchor)
    if softmax is None:
        return None
    if softmax.dim not in (-1, tensor.dim() - 1):
        raise Refused(
            f"The softmax {softmax.weights.name!r} runs over axis {softmax.dim}, not over the keys, which are the last."
        )
    parser = Parser(effects)
    seen = version_read(effects, softmax.scores, softmax.reader)
    scores = parser.scores(seen)
    if scores is None and parser.blocker is not None:
        raise Refused(
            f"{parser.blocker.name!r} ({operation(parser.blocker)}) stands between the scores and their softmax, "
            "and no kernel of ours computes it."
        )
    if scores is None and parser.product is not None and _is_of_heads(parser.product):
        raise Refused(f"{parser.product.name!r} multiplies queries and keys in a way that is not known.")
    if scores is None:
        return None
    if softmax.less_maximum and not parser.is_less_maximum(seen):
        raise Refused(
            f"The exponentials {softmax.reader.name!r} are divided by their sum, and no maximum of the row is taken "
            "off before: a large score makes them infinite, where a softmax is a number."
        )
    return _Values(effects, softmax, scores).read()


def _reaches_product(softmax: fx.Node) -> bool:
    """Whether a product stands a few operations that keep the rows after the softmax."""
    rows = _rows(fake_tensor(softmax))
    queue, seen = [softmax], {softmax}
    for node in queue:
        for user in node.users:
            tensor = fake_tensor(user)
            if operation(user) in PRODUCTS:
                return True
            if user not in seen and tensor is not None and _rows(tensor) == rows and len(seen) < MAX_STEPS:
                seen.add(user)
                queue.append(user)
    return False


def _comes_from_product(softmax: fx.Node) -> bool:
    """Whether a product with as many rows stands a few elementwise operations before the softmax."""
    rows = _rows(fake_tensor(softmax))
    queue, seen = [softmax], {softmax}
    for node in queue:
        if len(seen) > 2 * MAX_STEPS:
            return False
        for parent in node.all_input_nodes:
            tensor = fake_tensor(parent)
            if parent in seen or tensor is None or _rows(tensor) != rows:
                continue
            if operation(parent) in PRODUCTS:
                return True
            seen.add(parent)
            queue.append(parent)
    return False


def _is_of_heads(product: fx.Node) -> bool:
    """Whether this multiplies more than tokens with one matrix of weights, as a router of experts does."""
    return scores_rank(product) > 3 and all(scores_rank(node) > 2 for node in product.all_input_nodes)


def _rows(tensor: torch.Tensor | None) -> Size:
    """Number of rows: what views of scores have in common."""
    assert tensor is not None
    return lanes.product(sizes(tensor)[:-1])


class _Values:
    """Reads from the softmax on to the result."""

    def __init__(self, effects: Effects, softmax: Softmax, scores: Scores) -> None:
        self.effects, self.softmax, self.scores = effects, softmax, scores
        self.nodes = [*scores.nodes, *softmax.nodes]
        self.leading = [*scores.leading]

    def read(self) -> Written:
        weights, product = self._weights()
        v, order = self._values(weights, product)
        self.nodes.append(product)
        sinks, result = self.scores.sinks, product
        if sinks is None:
            sinks, result = self._rescaled(product)
        nodes = frozenset(self.nodes)
        self._check_readers(nodes, result)
        leading = leading_axes(self.leading)
        q, k = (leading.of(heads, self.scores.product) for heads in (self.scores.q, self.scores.k))
        scores = replace(self.scores, q=q, k=k)
        return Written(scores, leading.of(v, product), result, order, leading, sinks, nodes, product)

    def _weights(self) -> tuple[fx.Node, fx.Node]:
        """The weights as the product with the values reads them, and that product."""
        current, cut = self.softmax.weights, self.scores.sinks is None
        for _ in range(MAX_STEPS):
            if any(write not in self.nodes for write in self.effects.writes(current)):
                raise Refused(f"The attention weights {current.name!r} are written in place.")
            users = [user for user in current.users if not reads_no_numbers(user, current)]
            if len(users) > 1:
                raise Refused(self._read_elsewhere(current))
            if not users:
                break
            (user,) = users
            name = operation(user)
            if name in PRODUCTS:
                if not cut:
                    raise Refused("The column of the sinks is not cut off before the product with the values.")
                return current, user
            if name == "dropout":
                self._check_dropout(user)
            elif not cut and _cuts_last(user):
                cut = True
            elif name == "view" and (leading := moved_leading(user, current)) is not None:
                self.leading.append(leading)
            elif name not in CASTS or not keeps_numbers(user) or first_argument(user) is not current:
                raise Refused(f"{user.name!r} ({name}) changes the attention weights before they meet the values.")
            self.nodes.append(user)
            current = user
        raise Refused("The attention weights meet no values.")

    def _read_elsewhere(self, node: fx.Node) -> str:
        values = [user for user in node.users if not reads_no_numbers(user, node)]
        readers = [user.name for user in values if operation(user) not in PRODUCTS]
        return (
            f"The attention weights {node.name!r} are also read by {', '.join(map(repr, readers))} "
            "(output_attentions?); the fused operator never has them."
        )

    def _check_dropout(self, node: fx.Node) -> None:
        p = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
        training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", node.kwargs.get("train", True))
        check_no_dropout(p if training is not False else 0.0)

    def _values(self, weights: fx.Node, product: fx.Node) -> tuple[Heads, tuple[int, ...]]:
        name, rank = operation(product), scores_rank(weights)
        if name == "matmul" and len(product.args) == 2 and product.args[0] is weights:
            v = cast(fx.Node, product.args[1])
            found = product_of(product, weights, v, transposed=False)
            if found is not None:
                return found[1], {3: (0, 1, 3), 4: (0, 2, 1, 3), 5: (0, 2, 3, 1, 4)}[rank]
        parts = einsum(product) if name == "einsum" else None
        if parts is not None:
            operands, words, out = parts
            if operands[1] is weights:
                operands, words = operands[::-1], words[::-1]
            batch, row, column = words[0][:-2], words[0][-2], words[0][-1]
            lanes = set(words[1]) - set(words[0])
            if operands[0] is weights and len(lanes) == 1 and len(batch) in (1, 2, 3):
                (lane,) = lanes
                axes = {row: 1, lane: 4 if len(batch) == 3 else 3, **dict(zip(batch, (0, 2, 3), strict=False))}
                order = tuple(axes.get(letter, -1) for letter in out)
                leading = letter_sizes(weights, words[0], batch)
                whole = one_head_or_each(operands[1], words[1], batch, column, lane, leading)
                if whole and set(out) == set(axes):
                    return heads_of_letters(operands[1], words[1], batch, column, lane), order
        raise Refused(f"{product.name!r} multiplies the attention weights with values in a way that is not known.")

    def _rescaled(self, product: fx.Node) -> tuple[Operand | None, fx.Node]:
        """Sinks as `result * sigmoid(logsumexp(scores) - sink)`, which is exp(lse) / (exp(lse) + exp(sink))."""
        scores = self.softmax.scores
        seen = self.effects.last_write(scores, self.softmax.reader)
        sums = [
            user
            for user in scores.users
            if operation(user) == "logsumexp" and self.effects.last_write(scores, user) is seen
        ]
        user = next(iter(product.users), None)
        if len(sums) != 1 or len(product.users) != 1 or user is None or operation(user) != "mul" or len(user.args) != 2:
            return None, product
        if len(set(self.leading)) != 1 or scores_rank(product) != 4 or self.scores.shifted:
            # no axis of heads, or another log-sum-exp
            return None, product
        factor = user.args[1] if user.args[0] is product else user.args[0]
        chain: list[fx.Node] = []
        current = factor
        sinks: Operand | None = None
        while isinstance(current, fx.Node) and current is not sums[0] and len(chain) < 10:
            name = operation(current)
            if name == "sub" and sinks is None:
                sinks = _subtracted(current)
                if sinks is None:
                    return None, product
            elif name not in ("sigmoid", "unsqueeze") and not (name in CASTS and keeps_numbers(current)):
                return None, product
            chain.append(current)
            current = current.args[0] if current.args else None
        names = [operation(node) for node in chain if operation(node) not in CASTS]
        if (
            current is not sums[0]
            or sinks is None
            or not _over_last(sums[0])
            or not _column(user, product, cast(fx.Node, factor))
        ):
            return None, product
        if names not in (["unsqueeze", "sigmoid", "sub"], ["sigmoid", "sub"], ["sigmoid", "unsqueeze", "sub"]):
            return None, product
        self.nodes += [sums[0], *reversed(chain), user]
        return sinks, user

    def _check_readers(self, nodes: frozenset[fx.Node], result: fx.Node) -> None:
        for node in self.nodes:
            if node is result:
                continue
            for user in node.users:
                if user not in nodes and not reads_no_numbers(user, node):
                    what = "The attention weights" if node is self.softmax.weights else "The scores"
                    raise Refused(
                        f"{what} {node.name!r} are also read by {user.name!r}; the fused operator never has them."
                    )
            for write in self.effects.writes(node):
                if write not in nodes:
                    raise Refused(
                        f"{node.name!r} is written in place by {write.name!r}, in a way that is not followed."
                    )


def _subtracted(node: fx.Node) -> Operand | None:
    """`[H]` of `scores of rows [B, H, ...] - sinks`."""
    rows, sinks = node.args if len(node.args) == 2 and not node.kwargs else (None, None)
    rank = scores_rank(node)
    if not isinstance(rows, fx.Node) or scores_rank(rows) != rank:
        return None
    return per_head(sinks, 1 - rank)


def _cuts_last(node: fx.Node) -> bool:
    """`x[..., :-1]`."""
    if operation(node) == "slice":
        return node.args[1:] in ((-1, 0, -1), (3, 0, -1))
    if operation(node) != "getitem" or not isinstance(node.args[1], tuple):
        return False
    *front, last = node.args[1]
    whole = all(part is Ellipsis or part == slice(None) for part in front)
    full = Ellipsis in front or len(front) == 3
    return bool(whole and full and last in (slice(None, -1), slice(0, -1)))


def _over_last(node: fx.Node) -> bool:
    """`logsumexp` over the last axis, which goes or stays."""
    arguments = [*node.args[1:], *node.kwargs.values()]
    return (
        bool(arguments) and arguments[0] in (-1, 3, [-1], [3], (-1,)) and all(a in (True, False) for a in arguments[1:])
    )


def _column(user: fx.Node, product: fx.Node, factor: fx.Node) -> bool:
    """Whether `factor` is one number for each row of `product`."""
    wide, column = fake_tensor(product), fake_tensor(factor)
    if wide is None or column is None or fake_tensor(user) is None:
        return False
    return bool(sizes(column) == (*sizes(wide)[:-1], 1))


def check_no_dropout(p: object) -> None:
    """Raise `Refused` unless the dropout probability `p` is known to be 0."""
    known = number(p)
    if known is None:
        raise Refused("The dropout probability of the attention is known only at run time.")
    if known != 0:
        raise Refused(
            f"The attention drops out weights with p = {known}, and no kernel of ours does; set the dropout to 0."
        )
