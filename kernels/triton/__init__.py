"""The Triton back end: CUDA devices, and any device under Triton's interpreter (`TRITON_INTERPRET=1`, for checking)."""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import lru_cache

import torch

from ..registry import NORM_ROPE_OPS, Kernel, Request


def available() -> str | None:
    """None, or why Triton kernels cannot run on this machine."""
    return _available(interpreted())


@lru_cache
def _available(in_interpreter: bool) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed."
    if in_interpreter:
        return None
    if not torch.cuda.is_available():
        return "there is no CUDA device (and TRITON_INTERPRET is not set)."
    return None


def interpreted() -> bool:
    """True if kernels run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _supports(request: Request) -> str | None:
    if request.device.type != "cuda" and not interpreted():
        return f"the tensors are on {request.device.type}, it takes cuda."
    shape = _shape(request)
    head_dim = request.options.get("head_dim") or (shape[-1] if shape else None)
    if isinstance(head_dim, int) and head_dim % 2:
        return f"head_dim is {head_dim}, it takes even ones."
    return None


def _shape(request: Request) -> tuple[int | None, ...]:
    return next((request.shapes[name] for name in ("x", "q", "qkv") if name in request.shapes), ())


def _gate(request: Request) -> str | None:
    """The one case in the table of docs/kernels.md where forward and backward together are slower than Inductor's code
    on an H100 (0.95x): a norm over the hidden row at one token. At 1024 tokens it is 1.8x; nothing is measured between.
    """
    one_token = _shape(request)[:2] == (1, 1)
    if one_token and request.training and request.options.get("norm_scope") == "hidden":
        return "Inductor's own code is faster for a norm over the hidden row at one token in training."
    return None


KERNELS = (
    Kernel(
        name="triton",
        ops=NORM_ROPE_OPS,
        load=lambda: importlib.import_module(f"{__name__}.norm_rope"),
        available=available,
        supports=_supports,
        gate=_gate,
    ),
)
