"""The Triton back end: CUDA devices, and any device under Triton's interpreter (`TRITON_INTERPRET=1`, for checking)."""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import lru_cache

import torch

from ..cost_gate import head_dim, triton_gate
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
    lanes = head_dim(request)
    if lanes is not None and lanes % 2:
        return f"head_dim is {lanes}, it takes even ones."
    return None


KERNELS = (
    Kernel(
        name="triton",
        ops=NORM_ROPE_OPS,
        load=lambda: importlib.import_module(f"{__name__}.norm_rope"),
        available=available,
        supports=_supports,
        gate=triton_gate,
    ),
)
