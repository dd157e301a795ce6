"""Attention written out: a product of queries and keys, a softmax, a product with the values.

Matches     softmax(scores) v, the softmax as `softmax.py` reads it and the scores as `scores.py` does;
            with sinks as one more column of scores that is cut off again, or as sigmoid(logsumexp(scores) - sink)
            times the result. Three axes, four, or five: two axes of heads, as in grouped attention.
Requires    the softmax over the last axis; no dropout; no other reader of scores or weights; weights left as they are.
Becomes     `scale`, `softcap`, `sinks` and the masks of `attention`.
"""

from __future__ import annotations

import torch
from torch import fx

from fusion_pass.graph import lanes
from fusion_pass.graph.effects import Effects
from fusion_pass.graph.site import Operand
from fusion_pass.graph.vocabulary import Size, fake_tensor, first_argument, operation, reads_no_numbers, sizes

from ...refused import Refused
from ..facts import Attention, check_no_dropout
from ..leading import leading_axes, moved_leading
from .nodes import CASTS, MAX_STEPS, keeps_numbers, rank_of, version_read
from .products import PRODUCTS, values
from .scores import Parser, Scores
from .sinks import as_a_factor, cuts_column
from .softmax import Softmax
from .softmax import read as read_softmax


def read(effects: Effects, anchor: fx.Node) -> Attention | None:
    """The attention around the softmax at `anchor`, one of `softmax.ANCHORS`; None for another use.

    Raises `Refused` for an attention that cannot be fused.
    """
    tensor = fake_tensor(anchor)
    if tensor is None or tensor.dim() not in (3, 4, 5):
        return None
    if not _reaches_product(anchor) or not _comes_from_product(anchor):
        return None
    softmax = read_softmax(effects, anchor)
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
    return rank_of(product) > 3 and all(rank_of(node) > 2 for node in product.all_input_nodes)


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

    def read(self) -> Attention:
        weights, product = self._weights()
        multiplied = values(product, weights)
        if multiplied is None:
            raise Refused(f"{product.name!r} multiplies the attention weights with values in a way that is not known.")
        v, order = multiplied
        self.nodes.append(product)
        sinks, result = self.scores.sinks, product
        if sinks is None:
            sinks, result = self._rescaled(product)
        nodes = frozenset(self.nodes)
        self._check_readers(nodes, result)
        leading = leading_axes(self.leading)
        scores = self.scores
        return Attention(
            leading.of(scores.q, rank_of(scores.product)),
            leading.of(scores.k, rank_of(scores.product)),
            leading.of(v, rank_of(product)),
            scale=scores.inner if scores.cap is None else scores.inner * scores.cap,
            cap=scores.cap or 0.0,
            masks=scores.masks,
            is_causal=False,
            sinks=sinks,
            result=result,
            order=order,
            nodes=nodes,
            scores=scores.product,
            values=product,
            leading=leading,
        )

    def _weights(self) -> tuple[fx.Node, fx.Node]:
        """The weights as the product with the values reads them, and that product."""
        current, cut = self.softmax.weights, self.scores.sinks is None
        for _ in range(MAX_STEPS):
            if any(write not in self.nodes for write in self.effects.writes(current)):
                raise Refused(f"The attention weights {current.name!r} are written in place.")
            users = [user for user in current.users if not reads_no_numbers(user, current)]
            if len(users) > 1:
                raise Refused(_read_elsewhere(current, users))
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
            elif not cut and cuts_column(user):
                cut = True
            elif name == "view" and (leading := moved_leading(user, current)) is not None:
                self.leading.append(leading)
            elif name not in CASTS or not keeps_numbers(user) or first_argument(user) is not current:
                raise Refused(f"{user.name!r} ({name}) changes the attention weights before they meet the values.")
            self.nodes.append(user)
            current = user
        raise Refused("The attention weights meet no values.")

    def _check_dropout(self, node: fx.Node) -> None:
        p = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
        training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", node.kwargs.get("train", True))
        check_no_dropout(p if training is not False else 0.0)

    def _rescaled(self, product: fx.Node) -> tuple[Operand | None, fx.Node]:
        """Sinks by which `product` is rescaled, and the rescaled result."""
        one_view = len(set(self.leading)) == 1 and rank_of(product) == 4  # else there is no axis of heads
        if not one_view or self.scores.shifted:  # less a maximum the log-sum-exp is another
            return None, product
        found = as_a_factor(self.effects, self.softmax, product)
        if found is None:
            return None, product
        sinks, nodes = found
        self.nodes += nodes
        return sinks, nodes[-1]

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


def _read_elsewhere(weights: fx.Node, users: list[fx.Node]) -> str:
    others = [user for user in users if operation(user) not in PRODUCTS] or users[1:]
    names = ", ".join(repr(user.name) for user in others)
    hint = " (output_attentions?)" if any(user.op == "output" for user in others) else ""
    return f"The attention weights {weights.name!r} are also read by {names}{hint}; the fused operator never has them."
