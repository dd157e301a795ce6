"""Where a softmax is, however it is spelled.

Matches     `softmax`; exp(log_softmax(x)); exp(x - logsumexp(x)); e / sum(e) with e = exp(x - max(x)).
Requires    the logarithm, or the sum, over one axis. Without the maximum e / sum(e) is another function: it is
            infinite or not a number where a score is large (above 88 in float32), and refused.
Becomes     `Softmax`: what it is the softmax of, and the node that holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from torch import fx

from fusion_pass.graph.effects import Effects
from fusion_pass.graph.vocabulary import fake_tensor, first_argument, in_place, operation

from ...literals import number
from ...refused import Refused
from .nodes import CASTS, keeps_numbers, reduces_last, shape_of

_SOFTMAX = frozenset({"softmax", "_softmax", "_safe_softmax"})
_LOG_SOFTMAX = frozenset({"log_softmax", "_log_softmax"})
_EXP = frozenset({"exp", "exp_"})

ANCHORS = _SOFTMAX | _EXP
"""The operations that `read` is asked about."""

_NEAR = 8
"""Operations between the exponentials and the division by their sum."""


@dataclass(frozen=True)
class Softmax:
    """`weights` is the softmax of `scores`, as `reader` sees them, over axis `dim`."""

    scores: fx.Node
    reader: fx.Node
    dim: object
    weights: fx.Node
    nodes: tuple[fx.Node, ...]
    """What computes `weights` from `scores`, `weights` the last."""
    less_maximum: bool = False
    """Right only if each row of `scores` is less its maximum."""


def read(effects: Effects, node: fx.Node) -> Softmax | None:
    """The softmax at `node`, which is one of `ANCHORS`; None if there is none.

    Raises `Refused` for exponentials that are divided by their sum in another way.
    """
    x = first_argument(node)
    if not isinstance(x, fx.Node):
        return None
    if operation(node) in _SOFTMAX:
        return Softmax(x, node, _dim(node), node, (node,))
    return _of_logarithms(effects, node) or _of_exponentials(effects, node, x)


def _dim(node: fx.Node) -> object:
    return node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")


def _of_logarithms(effects: Effects, exp: fx.Node) -> Softmax | None:
    """exp(log_softmax(x)), exp(x - logsumexp(x))."""
    chain, current = [exp], _argument(effects, exp)
    while current is not None and operation(current) in CASTS and keeps_numbers(current):
        chain.append(current)
        current = _argument(effects, current)
    x = None if current is None else first_argument(current)
    if current is None or not isinstance(x, fx.Node):
        return None
    nodes = (current, *reversed(chain))
    if operation(current) in _LOG_SOFTMAX:
        return Softmax(x, current, _dim(current), exp, nodes)
    if operation(current) != "sub" or len(current.args) != 2 or current.kwargs:
        return None
    column = _column(current.args[1], x)
    if column is None or operation(column[0]) != "logsumexp" or first_argument(column[0]) is not x:
        return None
    if effects.last_write(x, column[0]) is not effects.last_write(x, current):
        return None
    return Softmax(x, current, -1, exp, (*column, *nodes))


def _argument(effects: Effects, node: fx.Node) -> fx.Node | None:
    """The first argument as `node` sees it; None where that is not the result of one node."""
    x = first_argument(node)
    write = effects.last_write(x, node) if isinstance(x, fx.Node) else None
    if write is None:
        return x if isinstance(x, fx.Node) else None
    return write if in_place(write) is not None and first_argument(write) is x else None


def _of_exponentials(effects: Effects, exp: fx.Node, x: fx.Node) -> Softmax | None:
    """e / sum(e)."""
    copies = _copies(exp)
    for e in copies:
        for quotient in e.users:
            column = _divisor(quotient, e)
            if column is None or operation(column[0]) != "sum" or first_argument(column[0]) not in copies:
                continue
            read = (effects.last_write(first_argument(column[0]), column[0]), effects.last_write(e, quotient))
            if read == (None, None) and keeps_numbers(column[0]):
                passed = [copies[node] for node in (e, cast(fx.Node, first_argument(column[0])))]
                nodes = dict.fromkeys((exp, *passed[0], *passed[1], *column, quotient))
                return Softmax(x, exp, -1, quotient, tuple(nodes), less_maximum=True)
    if _is_divided_by_sum(exp):
        raise Refused(
            f"{exp.name!r} is divided by its sum, as in a softmax, but not as exp(x) / exp(x).sum(-1, keepdim=True); "
            "torch.softmax is read in every form."
        )
    return None


def _copies(exp: fx.Node) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """`exp` and its casts, each with the casts on the way."""
    copies: dict[fx.Node, tuple[fx.Node, ...]] = {exp: ()}
    queue = [exp]
    for node in queue:
        for user in node.users:
            if operation(user) in CASTS and first_argument(user) is node and keeps_numbers(user):
                copies[user] = (*copies[node], user)
                queue.append(user)
    return copies


def _divisor(quotient: fx.Node, e: fx.Node) -> list[fx.Node] | None:
    """What `e` is divided by in `quotient`: the nodes from a reduction over its last axis on."""
    name = in_place(quotient) or operation(quotient)
    if len(quotient.args) != 2 or quotient.kwargs:
        return None
    a, b = quotient.args
    if name == "div" and a is e:
        return _column(b, e)
    if name != "mul" or e not in (a, b):
        return None
    factor = b if a is e else a
    if not isinstance(factor, fx.Node):
        return None
    inverse = operation(factor) == "reciprocal" or (operation(factor) == "div" and number(factor.args[0]) == 1)
    column = _column(factor.args[-1], e) if inverse and factor.args and not factor.kwargs else None
    return None if column is None else [*column, factor]


def _column(node: object, wide: fx.Node) -> list[fx.Node] | None:
    """The nodes from a reduction over the last axis of a tensor like `wide` to `node`, if that is one number a row."""
    chain: list[fx.Node] = []
    rows = shape_of(wide)[:-1]
    if fake_tensor(node) is None or shape_of(node) != (*rows, 1):
        return None
    current = node
    while isinstance(current, fx.Node) and operation(current) not in ("sum", "logsumexp"):
        if operation(current) != "unsqueeze" and not (operation(current) in CASTS and keeps_numbers(current)):
            return None
        chain.insert(0, current)
        current = first_argument(current)
    return [current, *chain] if isinstance(current, fx.Node) and reduces_last(current, len(rows) + 1) else None


def _is_divided_by_sum(exp: fx.Node) -> bool:
    """Whether something that is computed from `exp` is divided by a sum of it over the last axis."""
    wide = shape_of(exp)
    sums = [
        node
        for node in _near(exp, lambda node: shape_of(node) == wide)
        if operation(node) == "sum" and reduces_last(node, len(wide))
    ]
    return any(
        (in_place(node) or operation(node)) in ("div", "reciprocal")
        for total in sums
        for node in _near(total, lambda node: operation(node) not in ("div", "reciprocal"))
    )


def _near(node: fx.Node, through: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """The tensors that are computed from `node` in a few steps, each but the last one that `through` lets pass."""
    found: dict[fx.Node, int] = {node: 0}
    queue = [node]
    for current in queue:
        if found[current] < _NEAR and (current is node or through(current)):
            for user in current.users:
                if user not in found and fake_tensor(user) is not None:
                    found[user] = found[current] + 1
                    queue.append(user)
    return queue
