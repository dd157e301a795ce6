"""Sinks of an attention written out: for each head a score that takes its share of the softmax and has no value.

Matches     softmax(cat(scores, sinks)) without its last column; softmax(scores) v sigmoid(logsumexp(scores) - sinks),
            which is the same: exp(lse) / (exp(lse) + exp(sink)).
Requires    one number for each head.
Becomes     `sinks`, `[H]`.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import fx

from fusion_pass.graph.effects import Effects
from fusion_pass.graph.site import Operand
from fusion_pass.graph.vocabulary import fake_tensor, first_argument, operation

from .nodes import CASTS, keeps_numbers, rank_of, reduces_last, shape_of
from .softmax import Softmax

_CASTS_OF_SINKS = frozenset({"to", "float", "type_as", "_to_copy"})

_FACTORS = (["unsqueeze", "sigmoid", "sub"], ["sigmoid", "sub"], ["sigmoid", "unsqueeze", "sub"])
"""From a factor of the result back to the log-sum-exp, casts apart."""

_MAX_CHAIN = 10


def per_head(node: object, head: int) -> Operand | None:
    """`[H]` of a tensor `[1 or B, H, ...]` that varies along `head` only, counted from the right (-1: the last axis).

    Axes of size one may be missing on the left, as in any tensor that is broadcast.
    """
    current = node
    while isinstance(current, fx.Node) and operation(current) in {"expand", *_CASTS_OF_SINKS}:
        if not keeps_numbers(current):
            return None
        current = first_argument(current)
    shape = shape_of(current)
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


def cuts_column(node: fx.Node) -> bool:
    """`x[..., :-1]` of four axes."""
    if operation(node) == "slice":
        return node.args[1:] in ((-1, 0, -1), (3, 0, -1))
    if operation(node) != "getitem" or not isinstance(node.args[1], tuple):
        return False
    *front, last = node.args[1]
    whole = all(part is Ellipsis or part == slice(None) for part in front)
    full = Ellipsis in front or len(front) == 3
    return bool(whole and full and last in (slice(None, -1), slice(0, -1)))


def as_a_factor(effects: Effects, softmax: Softmax, product: fx.Node) -> tuple[Operand, list[fx.Node]] | None:
    """The sinks by which `product`, the result of an attention `[B, H, S, D]`, is rescaled, and what computes the
    rescaled result, which is the last; None if it is not.
    """
    total = _log_sum_exp(effects, softmax)
    (scaled,) = product.users if len(product.users) == 1 else (None,)
    if total is None or scaled is None or operation(scaled) != "mul" or len(scaled.args) != 2:
        return None
    factor = scaled.args[1] if scaled.args[0] is product else scaled.args[0]
    chain = _chain(factor, total)
    if chain is None or not all(keeps_numbers(node) for node in chain if operation(node) in CASTS):
        return None
    if [operation(node) for node in chain if operation(node) not in CASTS] not in _FACTORS:
        return None
    sinks = next(_subtracted(node) for node in chain if operation(node) == "sub")
    if sinks is None or not _is_column(factor, product):
        return None
    return sinks, [total, *reversed(chain), scaled]


def _log_sum_exp(effects: Effects, softmax: Softmax) -> fx.Node | None:
    """The only log-sum-exp of the scores that the softmax sees."""
    scores = softmax.scores
    seen = effects.last_write(scores, softmax.reader)
    found = [n for n in scores.users if operation(n) == "logsumexp" and effects.last_write(scores, n) is seen]
    return found[0] if len(found) == 1 and reduces_last(found[0], 4) else None


def _chain(node: object, top: fx.Node) -> list[fx.Node] | None:
    """`node` and its first arguments below `top`."""
    chain: list[fx.Node] = []
    while node is not top:
        if not isinstance(node, fx.Node) or len(chain) == _MAX_CHAIN:
            return None
        chain.append(node)
        node = first_argument(node)
    return chain


def _subtracted(node: fx.Node) -> Operand | None:
    """`[H]` of `scores of rows [B, H, ...] - sinks`."""
    rows, sinks = node.args if len(node.args) == 2 and not node.kwargs else (None, None)
    rank = rank_of(node)
    return per_head(sinks, 1 - rank) if isinstance(rows, fx.Node) and rank_of(rows) == rank else None


def _is_column(factor: object, product: fx.Node) -> bool:
    """Whether `factor` is one number for each row of `product`."""
    return fake_tensor(factor) is not None and shape_of(factor) == (*shape_of(product)[:-1], 1)
