"""The Ascend back end: Triton-Ascend kernels for norm + rotation, and attention through the vendor's operators.

`docs/ascend.md` says how far each of them is checked. Nothing of it has run on an NPU.
"""

from __future__ import annotations

import importlib

from ..attention_kernels import ATTENTION_OPS
from ..registry import NORM_ROPE_OPS, Kernel, Request
from . import attention, inference_attention, packed_attention
from .environment import missing_runtime, missing_triton


def _available() -> str | None:
    return missing_runtime() or missing_triton()


def _supports(request: Request) -> str | None:
    if request.device.type != "npu":
        return f"it runs on npu tensors, and these are on {request.device.type}."
    for name, dtype in request.dtypes.items():
        if name in ("x", "q", "k", "qkv") and str(dtype) not in ("torch.bfloat16", "torch.float16", "torch.float32"):
            return f"{name} is {dtype}, which the vector cores do not compute; use bfloat16, float16 or float32."
    if request.options.get("norm") != "none" and request.options.get("norm_scope") == "hidden":
        return "norm_scope='hidden' reduces over all heads, which are several tiles in a vector core."
    return None


KERNELS = (
    Kernel(
        name="ascend",
        ops=NORM_ROPE_OPS,
        load=lambda: importlib.import_module(f"{__name__}.norm_rope"),
        available=_available,
        supports=_supports,
    ),
    Kernel(
        name="ascend_inference",
        ops=frozenset({"attention"}),
        load=lambda: inference_attention,
        available=missing_runtime,
        supports=inference_attention.supports,
    ),
    Kernel(
        name="ascend",
        ops=ATTENTION_OPS,
        load=lambda: attention,
        available=missing_runtime,
        supports=attention.supports,
    ),
    Kernel(
        name="ascend_packed",
        ops=ATTENTION_OPS,
        load=lambda: packed_attention,
        available=missing_runtime,
        supports=packed_attention.supports,
        gate=packed_attention.gate,
    ),
    Kernel(
        name="ascend_flash",
        ops=frozenset({"attention"}),
        load=lambda: importlib.import_module(f"{__name__}.flash"),
        available=_available,
        supports=attention.flash_supports,
    ),
)
