"""What the recognisers of norm + rotation say about a graph: small frozen facts, each proved on random lanes (see
`fusion_pass/graph/lanes.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import fx

from fusion_pass.graph.lanes import Value
from fusion_pass.graph.site import Operand

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Rotation:
    """`end` is `start` with pairs of lanes rotated, and with its outer axes permuted.

    Pair i reads lanes (a, b) and writes (u, v) as `u = a cos - b sin, v = b cos + a sin`; `conjugate` has the
    opposite sine. `axes[e]` is the axis of `start` that axis e of `end` is. Tables are [WORLDS, T] numbers, T =
    rotary_dim / 2, or rotary_dim if the two lanes of a pair are not known to share an entry.
    """

    start: fx.Node
    end: fx.Node
    axes: tuple[int, ...]
    head_dim: int
    rotary_dim: int
    rotary_start: int
    pairing: str
    cos: Array = field(repr=False, compare=False)
    sin: Array = field(repr=False, compare=False)
    response: Value = field(repr=False, compare=False)
    """`end` evaluated for the proof; its labels say which table varies along which axis."""


@dataclass(frozen=True)
class Norm:
    """`end` is the normalised `start`, with outer axes permuted and lanes possibly split into heads.

    `width` is the number of lanes that are normalised together. `axes[e]` is the axis of `start` that axis e of `end`
    is, None for lanes.
    """

    start: fx.Node
    end: fx.Node
    axes: tuple[int | None, ...]
    kind: str
    width: int
    eps: float | fx.Node
    weight: Operand | None = None
    bias: Operand | None = None
