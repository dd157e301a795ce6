"""A mask and the scores it is applied to: what the recognisers of attention hand to the proof in `proof.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import cast

from torch import fx

from fusion_pass.graph.vocabulary import Size

KEY, QUERY = 1, 2
"""Axes of the scores, from the right."""


class MaskRefused(Exception):
    """Why a mask can neither be proved nor passed on, as a sentence."""


class Meaning(Enum):
    """How a mask acts on the scores."""

    SEEN = "boolean, True is seen"
    HIDDEN = "boolean, True is hidden"
    ADDED = "added to the scores"


@dataclass(frozen=True)
class MaskTerm:
    """One mask: `reader` applies `node` to the scores."""

    node: fx.Node
    reader: fx.Node
    meaning: Meaning
    hidden: float = -math.inf
    """The score that a boolean mask gives a hidden key."""
    factor: float = 1.0
    """What the masked scores are multiplied by later."""
    raised: float = -math.inf
    """No score is less than this later: a hidden key has it, or more."""


@dataclass(frozen=True)
class Frame:
    """The scores, `[batch, heads, queries, keys]`; `heads` is None if there is no such axis.

    A mask may meet them in another shape, whose axes a view joins or splits: `[batch * heads, queries, keys]`, or
    with two axes of heads, of lengths `grouped`.
    """

    batch: Size
    heads: Size | None
    queries: Size
    keys: Size
    grouped: tuple[int, int] | None = None

    @property
    def batch_axis(self) -> int:
        """The outermost axis of the scores; counted from the right, it is their number of axes too."""
        return 3 if self.heads is None else 4

    @property
    def extent(self) -> dict[int, Size]:
        """Size of every axis, by its number."""
        extent = {KEY: self.keys, QUERY: self.queries, self.batch_axis: self.batch}
        return extent if self.heads is None else {**extent, 3: self.heads}

    def extent_at(self, rank: int) -> dict[int, Size]:
        """`extent`, where the scores have `rank` axes."""
        if rank == self.batch_axis or rank == 4:
            return self.extent
        extent = {KEY: self.keys, QUERY: self.queries}
        if rank == 3:
            return {**extent, 3: self.batch * cast(Size, self.heads)}
        first, second = cast("tuple[int, int]", self.grouped)
        return {**extent, 3: second, 4: first, 5: self.batch}

    def takes(self, shape: Sequence[Size]) -> bool:
        """Whether a mask of this shape broadcasts to the scores."""
        extent = self.extent
        return len(shape) <= len(extent) and all(n in (1, extent[len(shape) - d]) for d, n in enumerate(shape))

    def __str__(self) -> str:
        heads = "" if self.heads is None else f"{self.heads}, "
        return f"[{self.batch}, {heads}{self.queries}, {self.keys}]"
