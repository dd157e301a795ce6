"""Where Inductor's own code for norm + rotation was measured faster than every kernel here: left to it by
`backend="auto"` and by the pass, unless a kernel is named.

Each line is a row of the benchmark (`python -m benchmarks.norm_rope`) below 1.0x: forward and backward together in
training, the forward alone in inference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .registry import Request


@dataclass(frozen=True)
class Slower:
    """`what` is slower by the measured factor, and how a request is known to be of that kind."""

    what: str
    factor: float
    covers: Callable[[Request], bool]
    card: str = "an H100"


def _one_token(request: Request) -> bool:
    shape = _shape(request)
    return shape[:2] == (1, 1)


def _long_rows_of_many_tokens(request: Request) -> bool:
    shape, lanes = _shape(request), head_dim(request)
    heads = request.options.get("num_heads") or (shape[-2] if len(shape) == 4 else None)
    known = None not in (*shape[:2], lanes, heads)
    return known and shape[0] * shape[1] > 4096 and heads * lanes > 4096  # type: ignore[operator]


def head_dim(request: Request) -> int | None:
    """Of a request of norm + rotation; None where it is not known."""
    shape = _shape(request)
    found = request.options.get("head_dim") or (shape[-1] if shape else None)
    return found if isinstance(found, int) else None


def _shape(request: Request) -> tuple[int | None, ...]:
    return next((request.shapes[name] for name in ("x", "q", "qkv") if name in request.shapes), ())


def _padded_rotation(request: Request) -> bool:
    lanes = head_dim(request) or 0
    padded = 1 << (lanes - 1).bit_length() if lanes else 0
    return request.options.get("norm", "none") == "none" and 3 * lanes < 2 * padded


def _few_tokens(request: Request) -> bool:
    batch, sequence = (*_shape(request), None, None)[:2]
    return batch is not None and sequence is not None and batch * sequence <= 256


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
    # The towers of Qwen3-VL and Qwen2.5-VL, heads of 72 and 80: in training 0.94x and 0.96x at one token, 0.75x and
    # 0.82x at 16 (2.8 us against 2.1), 0.95x at 256; 1.01x to 1.12x from 1024 tokens on.
    Slower(
        "a rotation alone of heads that fill less than two thirds of a power of two, at 256 tokens and fewer",
        0.75,
        lambda r: _padded_rotation(r) and _few_tokens(r),
        "an H200",
    ),
)


SLOWER_IN_TRITON = (
    # OLMo 2 32B, 40+8 heads: 0.88x at 16384 tokens, 0.83x at 65536; 1.01x at 4096. A row of 5120 lanes is padded to
    # 8192 and does not fit the registers. CUDA C++ is twice as fast as Inductor there.
    Slower(
        "a norm over rows of more than 4096 lanes, of more than 4096 tokens in training",
        0.88,
        lambda r: r.training and r.options.get("norm_scope") == "hidden" and _long_rows_of_many_tokens(r),
        "an H200",
    ),
    # The same at 1024 tokens and more, where Triton pads these heads to 128 lanes: 0.55x to 0.65x, and 0.81x to 0.86x.
    Slower(
        "a rotation alone of heads that fill less than two thirds of the lanes they are padded to",
        0.55,
        _padded_rotation,
        "an H200",
    ),
)


def gate(request: Request) -> str | None:
    """None, or the reason to leave a request to Inductor."""
    return _gate(SLOWER, request)


def triton_gate(request: Request) -> str | None:
    """`gate` where there is no CUDA C++ to choose from."""
    reason = _gate(SLOWER_IN_TRITON, request)
    return gate(request) if reason is None else f"{reason} `pip install 'fusion-pass[cuda]'` brings a faster kernel."


def _gate(rows: Iterable[Slower], request: Request) -> str | None:
    for slower in rows:
        if slower.covers(request):
            return f"Inductor's own code is faster for {slower.what} ({slower.factor}x on {slower.card})."
    return None
