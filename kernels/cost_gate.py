"""Where Inductor's own code for norm + rotation was measured faster than every kernel here: left to it by
`backend="auto"` and by the pass, unless a kernel is named.

Each line is a row of the benchmark (`python -m benchmarks.norm_rope`, H100) below 1.0x: forward and backward together
in training, the forward alone in inference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .registry import Request


@dataclass(frozen=True)
class Slower:
    """`what` is slower by the measured factor, and how a request is known to be of that kind."""

    what: str
    factor: float
    covers: Callable[[Request], bool]


def _one_token(request: Request) -> bool:
    shape = _shape(request)
    return shape[:2] == (1, 1)


def head_dim(request: Request) -> int | None:
    """Of a request of norm + rotation; None where it is not known."""
    shape = _shape(request)
    found = request.options.get("head_dim") or (shape[-1] if shape else None)
    return found if isinstance(found, int) else None


def _shape(request: Request) -> tuple[int | None, ...]:
    return next((request.shapes[name] for name in ("x", "q", "qkv") if name in request.shapes), ())


SLOWER = (
    # OLMo 2: 7.3 us against 6.8; a later run 6.90 against 6.95, a tie. At 1024 tokens it is 1.8x faster. On an H200
    # 1.09x together, but the backward 0.85x.
    Slower(
        "a norm over the hidden row at one token in training",
        0.94,
        lambda r: _one_token(r) and r.training and r.options.get("norm_scope") == "hidden",
    ),
    # 1.44 us against 1.41; in training 1.8x faster.
    Slower(
        "heads of 80 lanes at one token without gradients",
        0.98,
        lambda r: _one_token(r) and not r.training and head_dim(r) == 80,
    ),
)


def gate(request: Request) -> str | None:
    """None, or the reason to leave a request to Inductor."""
    for slower in SLOWER:
        if slower.covers(request):
            return f"Inductor's own code is faster for {slower.what} ({slower.factor}x on an H100)."
    return None
