"""How far a graph is followed by recursion: as far as Python's stack allows, which models are compiled at any depth of.

What lies further up is taken for a source, or for data. That is never wrong, it only says less.
"""

from __future__ import annotations

import sys

_MOST = 150
_FRAMES = 12
"""Most frames of the stack for one operation below another."""
_FRAMES_LEFT = 200
"""For what an operation calls."""


class Depth:
    """`now`: how many operations are being evaluated, each for the one before it. Whoever evaluates counts them."""

    def __init__(self) -> None:
        self.now = 0
        self._most = _MOST

    @property
    def full(self) -> bool:
        """Whether nothing more may be evaluated below what is."""
        if self.now == 0:
            self._most = min(_MOST, _frames_left() // _FRAMES)
        return self.now > self._most


def _frames_left() -> int:
    frame, used = sys._getframe(), 0
    while frame.f_back is not None:
        frame, used = frame.f_back, used + 1
    return max(0, sys.getrecursionlimit() - used - _FRAMES_LEFT)
