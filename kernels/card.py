"""What a table of measurements knows a card by: its architecture, and how fast its memory is.

One architecture has cards of several memories. An H100 and an H200 compute alike, but what feeds 3.4 TB/s leaves 4.8
TB/s waiting: tiles and choices are keyed by both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Card:
    """`architecture`: 10 major + minor, 90 for sm_90. `memory`: GB/s at the pins; 0 where the driver does not say."""

    architecture: int
    memory: int


H100, H200 = Card(90, 3352), Card(90, 4814)
"""Those that were measured: H100 80GB HBM3 and H200."""


@lru_cache
def card_of(device: torch.device) -> Card:
    """Of a CUDA device; what is measured on an H100 for any other (the interpreter, tests)."""
    if device.type != "cuda":
        return H100
    properties = torch.cuda.get_device_properties(device)
    bits, kilohertz = (getattr(properties, name, 0) for name in ("memory_bus_width", "memory_clock_rate"))
    # Two transfers a clock.
    return Card(10 * properties.major + properties.minor, round(2 * kilohertz * bits / 8e6))


def nearest(card: Card, measured: Iterable[Card]) -> Card | None:
    """The measured card to go by: of the same architecture, with the nearest memory (the first, where that is not
    known). None if there is none."""
    alike = [other for other in measured if other.architecture == card.architecture]
    if not card.memory:
        return next(iter(alike), None)
    return min(alike, key=lambda other: abs(math.log(other.memory / card.memory)), default=None)
