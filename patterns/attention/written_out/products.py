"""The two products of an attention written out, queries by keys and weights by values.

Matches     `matmul`, `bmm`, `baddbmm`, `einsum` of three, four or five axes: `[B * H, S, D]` or `[B, S, D]`,
            `[B, H, S, D]`, `[B, K, G, S, D]` with K key heads and the G query heads of each. By einsum, keys and values
            may have one head, or one for each group.
Becomes     q, k and v as `Heads`.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import cast

from torch import fx

from fusion_pass.graph.vocabulary import Size, operation

from ..heads import Heads
from .nodes import rank_of, shape_of

PRODUCTS = frozenset({"matmul", "baddbmm", "einsum"})


def leading_of(node: fx.Node) -> tuple[Size, ...]:
    """The lengths of the axes of `node` in front of its last two."""
    return shape_of(node)[:-2]


def queries_and_keys(product: fx.Node, q: object, k: object) -> tuple[Heads, Heads] | None:
    """The factors of a matrix product `[..., S, D] [..., D, keys]`."""
    return _factors(product, q, k, transposed=True)


def queries_and_keys_of_einsum(product: fx.Node) -> tuple[Heads, Heads] | None:
    """The factors of an einsum `[..., queries, keys]`."""
    parts = _einsum(product)
    if parts is None or len(parts[2]) not in (3, 4, 5):
        return None
    q, k, out = parts
    batch, row, column = out[:-2], out[-2], out[-1]
    if row in k.word and column in q.word:
        q, k = k, q
    summed = set(q.word) & set(k.word) - set(out)
    if len(summed) != 1:
        return None
    (lane,) = summed
    leading = leading_of(product)
    if set(q.word) != {*batch, row, lane} or q.lengths(batch) != leading:
        return None  # an axis of the queries is missing, or broadcast
    if not k.serves_all(batch, column, lane, leading):
        return None
    return q.heads(batch, row, lane), k.heads(batch, column, lane)


def values(product: fx.Node, weights: fx.Node) -> tuple[Heads, tuple[int, ...]] | None:
    """What `product` multiplies `weights` with, and the axis of `[B, S, H, D]` (`[B, S, K, G, D]`) that each axis of
    the product is.
    """
    if operation(product) == "einsum":
        return _values_of_einsum(product, weights)
    if operation(product) != "matmul" or len(product.args) != 2 or product.args[0] is not weights:
        return None
    found = _factors(product, weights, product.args[1], transposed=False)
    return None if found is None else (found[1], {3: (0, 1, 3), 4: (0, 2, 1, 3), 5: (0, 2, 3, 1, 4)}[rank_of(weights)])


def _values_of_einsum(product: fx.Node, weights: fx.Node) -> tuple[Heads, tuple[int, ...]] | None:
    parts = _einsum(product)
    if parts is None:
        return None
    first, second, out = parts
    probabilities, v = (second, first) if second.node is weights else (first, second)
    if probabilities.node is not weights or len(probabilities.word) not in (3, 4, 5):
        return None
    batch, row, column = probabilities.word[:-2], probabilities.word[-2], probabilities.word[-1]
    lanes = set(v.word) - set(probabilities.word)
    if len(lanes) != 1:
        return None
    (lane,) = lanes
    axes = {row: 1, lane: 4 if len(batch) == 3 else 3, **dict(zip(batch, (0, 2, 3), strict=False))}
    if set(out) != set(axes) or not v.serves_all(batch, column, lane, probabilities.lengths(batch)):
        return None
    return v.heads(batch, column, lane), tuple(axes[letter] for letter in out)


def _factors(product: fx.Node, a: object, b: object, *, transposed: bool) -> tuple[Heads, Heads] | None:
    """The factors of a matrix product of three, four or five axes. `transposed`: the second one is `[..., D, keys]`."""
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return None
    rank = rank_of(product)
    if {rank_of(a), rank_of(b)} != {rank}:
        return None
    tokens, lanes = (rank - 1, rank - 2) if transposed else (rank - 2, rank - 1)
    if rank == 3:
        return Heads(a, (0, 1, None, 2)), Heads(b, (0, tokens, None, lanes))
    if rank == 4:
        return Heads(a, (0, 2, 1, 3)), Heads(b, (0, tokens, 1, lanes))
    wide, one = leading_of(product), leading_of(b)
    # The head (k, g) of all reads k of few, or the one of one.
    if rank != 5 or leading_of(a) != wide or one not in (wide, (*wide[:2], 1), (wide[0], 1, 1)):
        return None
    return Heads(a, (0, 3, 1, 4), group=2), Heads(b, (0, tokens, 1, lanes), group=2)


# --- einsum -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Lettered:
    """An operand of an einsum; `word` has a letter for each of its axes."""

    node: fx.Node
    word: str

    def lengths(self, letters: str) -> tuple[Size, ...]:
        """The lengths of the axes that have `letters`, 1 where there is none."""
        shape = shape_of(self.node)
        return tuple(shape[self.word.index(letter)] if letter in self.word else 1 for letter in letters)

    def serves_all(self, batch: str, token: str, lane: str, leading: tuple[Size, ...]) -> bool:
        """Whether keys or values have all axes of `batch`, whose lengths are `leading`, or miss those of the heads, or
        of the second axis of heads, which are of length one or not there: one head serves all queries, or all of a
        group.
        """
        every = {*batch, token, lane}
        letters = (every, *(every - set(batch[n:]) for n in range(1, len(batch))))
        ones = (1,) * len(leading)
        return set(self.word) in letters and any(
            self.lengths(batch) == (*leading[:n], *ones[n:]) for n in range(1, len(batch) + 1)
        )

    def heads(self, batch: str, token: str, lane: str) -> Heads:
        """The operand as `Heads`; `batch` are the letters of batch and heads."""
        word = self.word
        found = [word.index(letter) if letter in word else None for letter in batch[1:]]
        head, group = (*found, None, None)[:2]
        return Heads(self.node, (word.index(batch[0]), word.index(token), head, word.index(lane)), group)


def _einsum(node: fx.Node) -> tuple[_Lettered, _Lettered, str] | None:
    """Operands and the letters of the result, of an einsum of two tensors without diagonals."""
    equation, *operands = node.args or (None,)
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or not all(isinstance(x, fx.Node) for x in operands):
        return None
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    words = inputs.split(",")
    if not arrow or len(words) != 2:
        return None
    if "." in equation:
        axes = {rank_of(x) - len(word) + 3 for x, word in zip(operands, words, strict=True)}
        if len(axes) != 1 or not all("..." in word for word in (*words, out)):
            return None  # one has axes that the other has not
        unused = [letter for letter in string.ascii_letters if letter not in equation]
        spelled = "".join(unused[: axes.pop()])
        words, out = [word.replace("...", spelled) for word in words], out.replace("...", spelled)
    if any(len(set(word)) != len(word) for word in (*words, out)):
        return None
    first, second = (_Lettered(cast(fx.Node, x), word) for x, word in zip(operands, words, strict=True))
    return first, second, out
