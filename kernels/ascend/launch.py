"""One launch of a Triton-Ascend kernel as a value, so that it can be started, lowered, or executed on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Launch:
    """`kernel` over a 1-D grid of `programs`. `arguments` are tensors and numbers, `constants` the `tl.constexpr`
    ones."""

    kernel: Any
    programs: int
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]


def start(launch: Launch) -> None:
    """Start it on the current stream."""
    launch.kernel[(launch.programs,)](**launch.arguments, **launch.constants)
