"""The axes in front of queries and keys: batch and heads, however views join and split them between the products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import fx

from fusion_pass.graph.vocabulary import Size, fake_tensor, first_argument, sizes

from ..refused import Refused
from .heads import Heads


@dataclass(frozen=True)
class Leading:
    """The axes in front of queries and keys, whatever views make of them on the way."""

    merged: tuple[Size, int] | None = None
    """Batch and heads, where a product has one axis for both."""
    grouped: tuple[int, int] | None = None
    """Key heads, and the query heads of each, where a product has an axis for either."""

    def of(self, heads: Heads, rank: int) -> Heads:
        """`heads`, read by a product of `rank` axes."""
        return heads if rank > 3 else replace(heads, merged=self.merged)


def moved_leading(view: fx.Node, source: object) -> tuple[Size, ...] | None:
    """The lengths of the axes of `view` in front of its last two; None unless it is a view of `source` that
    leaves those two alone.
    """
    before, after = fake_tensor(source), fake_tensor(view)
    if first_argument(view) is not source or before is None or after is None or before.dtype != after.dtype:
        return None
    old, new = sizes(before), sizes(after)
    return new[:-2] if old[-2:] == new[-2:] and {len(old), len(new)} <= {3, 4, 5} else None


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
