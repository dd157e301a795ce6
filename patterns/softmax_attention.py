"""Attention written out: a product of queries and keys, a softmax, a product with the values.

Matches     softmax(scores) v, the scores built from one product q k' by, in any order: a factor, c tanh(.), masks
            that are added or that choose, casts, less their own row maximum; with sinks as one more column that is
            cut off again, or as sigmoid(logsumexp(scores) - sink) times the result. In `matmul`, `@`, `bmm`,
            `baddbmm`, `einsum`, and in place.
Requires    the softmax over the last axis; a soft cap below the masks; no dropout; no other reader of scores or weights
Becomes     `scale`, `softcap`, `sinks` and the masks of `attention`.

    scores = cap tanh(inner q.k) + masks        scale = inner cap, or inner without a cap
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import fx

from fusion_pass.graph.effects import Effects
from fusion_pass.graph.site import Operand
from fusion_pass.graph.vocabulary import fake_tensor, in_place, operation, sizes
from fusion_pass.kernels.attention_problem import mask_floor

from .facts import Refused
from .heads import Heads, number, number_times
from .mask import MaskTerm, Meaning

SOFTMAX = frozenset({"softmax", "_softmax", "_safe_softmax"})
PRODUCTS = frozenset({"matmul", "baddbmm", "einsum"})
_CASTS = frozenset(
    "to _to_copy float half bfloat16 double type type_as contiguous clone alias convert_element_type".split()
)
_MAX_STEPS = 24


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
    nodes: tuple[fx.Node, ...] = ()
    """What the scores are computed by, the product first."""

    def through(self, *nodes: fx.Node) -> Scores:
        return replace(self, nodes=(*self.nodes, *nodes))


@dataclass(frozen=True)
class Written:
    """An attention written out. `order`: the axis of `[B, S, H, D]` that each axis of `result` is."""

    scores: Scores
    v: Heads
    result: fx.Node
    order: tuple[int, ...]
    sinks: Operand | None
    nodes: frozenset[fx.Node] = field(repr=False)
    values: fx.Node
    """The product of weights and values."""


def read(effects: Effects, softmax: fx.Node) -> Written | None:
    """The attention around `softmax`; None for another use. Raises `Refused` for an attention that cannot be fused."""
    tensor = fake_tensor(softmax)
    if tensor is None or tensor.dim() not in (3, 4) or not softmax.args or not isinstance(softmax.args[0], fx.Node):
        return None
    dim = softmax.args[1] if len(softmax.args) > 1 else softmax.kwargs.get("dim")
    if not _reaches_product(softmax) or not _comes_from_product(softmax):
        return None
    if dim not in (-1, tensor.dim() - 1):
        raise Refused(f"The softmax {softmax.name!r} runs over axis {dim}, not over the keys, which are the last.")
    parser = _Parser(effects)
    scores = parser.scores(_seen(effects, softmax.args[0], softmax))
    if scores is None and parser.blocker is not None:
        raise Refused(
            f"{parser.blocker.name!r} ({operation(parser.blocker)}) stands between the scores and their softmax, "
            "and no kernel of ours computes it."
        )
    if scores is None:
        return None
    return _Values(effects, softmax, scores).read()


def _reaches_product(softmax: fx.Node) -> bool:
    """Whether a product stands a few operations that keep the rows after the softmax."""
    rows = sizes(cast(torch.Tensor, fake_tensor(softmax)))[:-1]
    queue, seen = [softmax], {softmax}
    for node in queue:
        for user in node.users:
            tensor = fake_tensor(user)
            if operation(user) in PRODUCTS:
                return True
            if user not in seen and tensor is not None and sizes(tensor)[:-1] == rows and len(seen) < _MAX_STEPS:
                seen.add(user)
                queue.append(user)
    return False


def _comes_from_product(softmax: fx.Node) -> bool:
    """Whether a product with as many rows stands a few elementwise operations before the softmax."""
    rows = sizes(cast(torch.Tensor, fake_tensor(softmax)))[:-1]
    queue, seen = [softmax], {softmax}
    for node in queue:
        if len(seen) > 2 * _MAX_STEPS:
            return False
        for parent in node.all_input_nodes:
            tensor = fake_tensor(parent)
            if parent in seen or tensor is None or sizes(tensor)[:-1] != rows:
                continue
            if operation(parent) in PRODUCTS:
                return True
            seen.add(parent)
            queue.append(parent)
    return False


def _seen(effects: Effects, node: fx.Node, reader: fx.Node) -> fx.Node:
    """The node whose result `reader` sees in `node`: the last in-place operation on it, or `node` itself."""
    write = effects.last_write(node, reader)
    if write is None:
        return node
    if in_place(write) is None or write.args[0] is not node or effects.last_write(node, write) is not None:
        raise Refused(f"{node.name!r} is written in place by {write.name!r}, in a way that is not followed.")
    return write


def _name(node: fx.Node) -> str:
    return in_place(node) or operation(node)


class _Parser:
    """Reads the scores from the softmax back to the product. Returns None for what is no form of scores."""

    def __init__(self, effects: Effects) -> None:
        self.effects = effects
        self.blocker: fx.Node | None = None
        self._depth = 0

    def scores(self, node: fx.Node) -> Scores | None:
        """The scores that `node` holds."""
        if node.op not in ("call_function", "call_method") or self._depth > _MAX_STEPS or fake_tensor(node) is None:
            return None
        name = _name(node)
        rule = _RULES.get(name)
        if rule is None:
            self.blocker = node
            return None
        self._depth += 1
        try:
            scores = rule(self, node)
            if scores is None and self.blocker is None and name not in PRODUCTS:
                self.blocker = node
            return scores
        finally:
            self._depth -= 1

    def _of(self, argument: object, reader: fx.Node) -> Scores | None:
        return self.scores(_seen(self.effects, argument, reader)) if isinstance(argument, fx.Node) else None

    # --- products ---

    def _matmul(self, node: fx.Node) -> Scores | None:
        q, k = node.args[:2] if len(node.args) == 2 else (None, None)
        return _product(node, q, k)

    def _baddbmm(self, node: fx.Node) -> Scores | None:
        if len(node.args) != 3:
            return None
        bias, q, k = node.args
        alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
        scores = _product(node, q, k)
        if scores is None or not isinstance(alpha, int | float) or beta not in (0, 1):
            return None
        scores = replace(scores, inner=float(alpha))
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
        if len(shared) != 1 or len(batch) not in (1, 2):
            return None
        (lane,) = shared
        if set(a) != {*batch, row, lane} or set(b) != {*batch, column, lane}:
            return None
        return Scores(_heads(first, a, batch, row, lane), _heads(second, b, batch, column, lane), node, nodes=(node,))

    # --- what is done to scores ---

    def _cast(self, node: fx.Node) -> Scores | None:
        before, after = fake_tensor(node.args[0]), fake_tensor(node)
        if before is None or after is None or not before.is_floating_point() or not after.is_floating_point():
            return None
        scores = self._of(node.args[0], node)
        return scores and scores.through(node)

    def _scaled(self, node: fx.Node) -> Scores | None:
        taken = number_times(node, _name(node))
        scores = self._of(taken[0], node) if taken is not None and taken[1] > 0 else None
        if scores is None or taken is None or scores.sinks is not None:
            return None
        factor = taken[1]
        masks = tuple(replace(mask, factor=mask.factor * factor) for mask in scores.masks)
        if scores.cap is not None:
            return replace(scores, cap=scores.cap * factor, masks=masks).through(node)
        return replace(scores, inner=scores.inner * factor, masks=masks).through(node)

    def _tanh(self, node: fx.Node) -> Scores | None:
        scores = self._of(node.args[0], node)
        if scores is None or scores.cap is not None or scores.masks or scores.sinks is not None:
            return None
        return replace(scores, cap=1.0).through(node)

    def _add(self, node: fx.Node) -> Scores | None:
        if node.kwargs.get("alpha", 1) != 1 or len(node.args) != 2:
            return None
        for x, mask in (node.args, node.args[::-1]):
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
        number, tensor = _constant(self.effects, value), fake_tensor(node)
        if number is None or tensor is None or number > mask_floor(tensor.dtype):
            raise Refused(
                f"{node.name!r} replaces hidden scores by {value}, which is not low enough to hide them: "
                "the softmax would still give them weight."
            )
        return self._masked(scores, node, MaskTerm(mask, node, meaning))

    def _masked(self, scores: Scores, node: fx.Node, mask: MaskTerm) -> Scores | None:
        if scores.sinks is not None:
            return None
        return replace(scores, masks=(*scores.masks, mask)).through(node)

    def _sub(self, node: fx.Node) -> Scores | None:
        """Scores minus their row maximum: the softmax is the same."""
        x, maximum = node.args if len(node.args) == 2 else (None, None)
        chain = _row_maximum(maximum, x)
        scores = self._of(x, node) if chain is not None else None
        return None if scores is None or chain is None else scores.through(*chain, node)

    def _cat(self, node: fx.Node) -> Scores | None:
        """Sinks as one more column."""
        parts = node.args[0]
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        if not isinstance(parts, tuple | list) or len(parts) != 2 or dim not in (-1, 3) or scores_rank(node) != 4:
            return None
        scores = self._of(parts[0], node)
        if scores is None or scores.sinks is not None:
            return None
        sinks = _per_head(parts[1])
        if sinks is None:
            raise Refused(
                f"{cast(fx.Node, parts[1]).name!r}, joined to the scores as a sink, is not one number for each head."
            )
        return replace(scores, sinks=sinks).through(node)


_RULES: dict[str, Callable[[_Parser, fx.Node], Scores | None]] = {
    "matmul": _Parser._matmul,
    "baddbmm": _Parser._baddbmm,
    "einsum": _Parser._einsum,
    **dict.fromkeys(_CASTS, _Parser._cast),
    "mul": _Parser._scaled,
    "div": _Parser._scaled,
    "tanh": _Parser._tanh,
    "add": _Parser._add,
    "masked_fill": _Parser._masked_fill,
    "where": _Parser._where,
    "sub": _Parser._sub,
    "cat": _Parser._cat,
}


def scores_rank(node: fx.Node) -> int:
    """Number of axes of a tensor node, 0 for others."""
    tensor = fake_tensor(node)
    return 0 if tensor is None else tensor.dim()


def _constant(effects: Effects, value: object) -> float | None:
    """A number, also one that the graph holds as a tensor."""
    if isinstance(value, fx.Node):
        if effects.writes(value) or not value.args:
            return None
        name = operation(value)
        if name in _CASTS:
            return _constant(effects, value.args[0])
        at = {"tensor": 0, "scalar_tensor": 0, "full": 1}.get(name)
        if fake_tensor(value) is not None:
            value = value.args[at] if at is not None and len(value.args) > at else None
    return number(value)


def _product(node: fx.Node, q: object, k: object) -> Scores | None:
    rank = scores_rank(node)
    if not isinstance(q, fx.Node) or not isinstance(k, fx.Node) or {scores_rank(q), scores_rank(k)} != {rank}:
        return None
    if rank == 4:
        return Scores(Heads(q, (0, 2, 1, 3)), Heads(k, (0, 3, 1, 2)), node, nodes=(node,))
    return Scores(Heads(q, (0, 1, None, 2)), Heads(k, (0, 2, None, 1)), node, nodes=(node,)) if rank == 3 else None


def einsum(node: fx.Node) -> tuple[tuple[fx.Node, fx.Node], tuple[str, str], str] | None:
    """Operands, their letters and the result's, of an einsum of two tensors without diagonals or `...`."""
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or not all(isinstance(x, fx.Node) for x in operands):
        return None
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    words = inputs.split(",")
    if not arrow or "." in equation or len(words) != 2 or any(len(set(word)) != len(word) for word in (*words, out)):
        return None
    return (cast(fx.Node, operands[0]), cast(fx.Node, operands[1])), (words[0], words[1]), out


def _heads(node: fx.Node, word: str, batch: str, token: str, lane: str) -> Heads:
    head = word.index(batch[1]) if len(batch) == 2 else None
    return Heads(node, (word.index(batch[0]), word.index(token), head, word.index(lane)))


def _row_maximum(maximum: object, scores: object) -> list[fx.Node] | None:
    """The nodes that compute `scores.max(-1, keepdim=True)`, if `maximum` is that."""
    if not isinstance(maximum, fx.Node):
        return None
    chain = [maximum]
    if operation(maximum) == "detach" and isinstance(maximum.args[0], fx.Node):
        chain.insert(0, maximum.args[0])
    if operation(chain[0]) == "getitem" and chain[0].args[1] == 0:
        chain.insert(0, cast(fx.Node, chain[0].args[0]))
    top = chain[0]
    rank = scores_rank(scores) if isinstance(scores, fx.Node) else 0
    arguments = [*top.args[1:], *top.kwargs.values()]
    dims = ([-1], [rank - 1], (-1,), -1, rank - 1)
    over_keys = len(arguments) == 2 and arguments[0] in dims and arguments[1] is True
    return chain if operation(top) in ("max", "amax") and top.args[0] is scores and over_keys else None


def _per_head(node: object) -> Operand | None:
    """`[H]` of a tensor `[1 or B, H, ...]` that varies along heads only."""
    if not isinstance(node, fx.Node):
        return None
    head = 1 - scores_rank(node)
    current = node
    while (tensor := fake_tensor(current)) is not None:
        if tensor.dim() == 1:
            return Operand(current)
        parent = current.args[0] if current.args else None
        before = fake_tensor(parent)
        if before is None or operation(current) not in (
            "expand",
            "view",
            "unsqueeze",
            "to",
            "float",
            "type_as",
            "_to_copy",
        ):
            return None
        wide: list[Any] = [n for n in sizes(before) if n != 1]
        if len(wide) > 1 or (wide and sizes(tensor)[head] != wide[0]):
            return None
        if wide and operation(current) == "expand" and (before.dim() < -head or sizes(before)[head] != wide[0]):
            return None
        current = cast(fx.Node, parent)
    return None


class _Values:
    """Reads from the softmax on to the result."""

    def __init__(self, effects: Effects, softmax: fx.Node, scores: Scores) -> None:
        self.effects, self.softmax, self.scores = effects, softmax, scores
        self.nodes = [*scores.nodes, softmax]

    def read(self) -> Written:
        weights, product = self._weights()
        v, order = self._values(weights, product)
        self.nodes.append(product)
        sinks, result = self.scores.sinks, product
        if sinks is None:
            sinks, result = self._rescaled(product)
        nodes = frozenset(self.nodes)
        self._check_readers(nodes, result)
        return Written(self.scores, v, result, order, sinks, nodes, product)

    def _weights(self) -> tuple[fx.Node, fx.Node]:
        """The weights as the product with the values reads them, and that product."""
        current, cut = self.softmax, self.scores.sinks is None
        for _ in range(_MAX_STEPS):
            if self.effects.writes(current):
                raise Refused(f"The attention weights {current.name!r} are written in place.")
            user = next(iter(current.users), None)
            if len(current.users) != 1 or user is None:
                raise Refused(self._read_elsewhere(current))
            name = operation(user)
            if name in PRODUCTS:
                if not cut:
                    raise Refused("The column of the sinks is not cut off before the product with the values.")
                return current, user
            if name == "dropout":
                self._check_dropout(user)
            elif not cut and _cuts_last(user):
                cut = True
            elif name not in _CASTS or not cast(torch.Tensor, fake_tensor(user)).is_floating_point():
                raise Refused(f"{user.name!r} ({name}) changes the attention weights before they meet the values.")
            self.nodes.append(user)
            current = user
        raise Refused("The attention weights meet no values.")

    def _read_elsewhere(self, node: fx.Node) -> str:
        readers = [user.name for user in node.users if operation(user) not in PRODUCTS]
        return (
            f"The attention weights {node.name!r} are also read by {', '.join(map(repr, readers))} "
            "(output_attentions?); the fused operator never has them."
        )

    def _check_dropout(self, node: fx.Node) -> None:
        p = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
        training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", node.kwargs.get("train", True))
        check_no_dropout(p if training is not False else 0.0)
        if node.kwargs.get("inplace") or node.args[3:4] == (True,):
            raise Refused(f"The dropout {node.name!r} is done in place.")

    def _values(self, weights: fx.Node, product: fx.Node) -> tuple[Heads, tuple[int, ...]]:
        name, rank = operation(product), scores_rank(weights)
        if name == "matmul" and product.args[0] is weights and isinstance(product.args[1], fx.Node):
            v = product.args[1]
            if scores_rank(v) == rank == scores_rank(product):
                return (Heads(v, (0, 2, 1, 3)), (0, 2, 1, 3)) if rank == 4 else (Heads(v, (0, 1, None, 2)), (0, 1, 3))
        parts = einsum(product) if name == "einsum" else None
        if parts is not None:
            operands, words, out = parts
            if operands[1] is weights:
                operands, words = operands[::-1], words[::-1]
            batch, row, column = words[0][:-2], words[0][-2], words[0][-1]
            lanes = set(words[1]) - set(words[0])
            if operands[0] is weights and len(lanes) == 1 and len(batch) == 2:
                (lane,) = lanes
                if set(words[1]) == {*batch, column, lane} and set(out) == {*batch, row, lane}:
                    wanted = (batch[0], row, batch[1], lane)
                    return _heads(operands[1], words[1], batch, column, lane), tuple(wanted.index(c) for c in out)
        raise Refused(f"{product.name!r} multiplies the attention weights with values in a way that is not known.")

    def _rescaled(self, product: fx.Node) -> tuple[Operand | None, fx.Node]:
        """Sinks as `result * sigmoid(logsumexp(scores) - sink)`, which is exp(lse) / (exp(lse) + exp(sink))."""
        scores = self.softmax.args[0]
        sums = [user for user in cast(fx.Node, scores).users if operation(user) == "logsumexp"]
        user = next(iter(product.users), None)
        if len(sums) != 1 or len(product.users) != 1 or user is None or operation(user) != "mul":
            return None, product
        factor = user.args[1] if user.args[0] is product else user.args[0]
        chain: list[fx.Node] = []
        current = factor
        sinks: Operand | None = None
        while isinstance(current, fx.Node) and current is not sums[0] and len(chain) < 10:
            name = operation(current)
            if name == "sub" and sinks is None:
                sinks = _per_head(current.args[1])
                if sinks is None:
                    return None, product
            elif name not in _CASTS | {"sigmoid", "unsqueeze"}:
                return None, product
            chain.append(current)
            current = current.args[0] if current.args else None
        names = [operation(node) for node in chain if operation(node) not in _CASTS]
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
                if user not in nodes:
                    what = "The attention weights" if node is self.softmax else "The scores"
                    raise Refused(
                        f"{what} {node.name!r} are also read by {user.name!r}; the fused operator never has them."
                    )
            for write in self.effects.writes(node):
                if write not in nodes:
                    raise Refused(
                        f"{node.name!r} is written in place by {write.name!r}, in a way that is not followed."
                    )


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
