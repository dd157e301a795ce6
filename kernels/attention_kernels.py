"""The implementations of `attention` that need no other back end's folder: PyTorch's own, Triton, and the reference."""

from __future__ import annotations

import importlib
import importlib.util

import torch

from .registry import Kernel, Request

ATTENTION_OPS = frozenset({"attention", "attention_backward"})

_LARGEST_HEAD_DIM = 256
_LATENT = (192, 128)
"""Lanes of q and k, and of v, in multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the unequal pair that is
tested on cuDNN."""


def _triton_available() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; PyTorch's CUDA builds bring it."
    if _interpreted():
        return None
    if not torch.cuda.is_available():
        return "there is no CUDA GPU (TRITON_INTERPRET=1 runs it on the CPU, for tests)."
    if torch.cuda.get_device_capability() < (8, 0):
        return f"the GPU is sm_{''.join(map(str, torch.cuda.get_device_capability()))}; it takes sm_80 or newer."
    return None


def _interpreted() -> bool:
    try:
        from triton import knobs
    except ImportError:  # Triton-Ascend 3.2 is a package named triton without it
        return False
    return bool(knobs.runtime.interpret)


def _triton_supports(request: Request) -> str | None:
    if request.device.type != ("cpu" if _interpreted() else "cuda"):
        return f"it runs on CUDA tensors, and these are on {request.device.type}."
    if request.dtypes["q"] == torch.float64:
        return "q is float64; it takes bfloat16, float16 or float32."
    scale = request.options.get("scale")
    if isinstance(scale, (int, float)) and scale <= 0:
        return f"scale is {scale}; it takes a positive scale."
    for name in ("q", "v"):
        head_dim = request.shapes[name][-1] if name in request.shapes else None
        if head_dim is not None and (head_dim > _LARGEST_HEAD_DIM or head_dim % 8):
            return f"head_dim of {name} is {head_dim}; it takes a multiple of 8, at most {_LARGEST_HEAD_DIM}."
    return None


def _sdpa_available() -> str | None:
    if not torch.cuda.is_available():
        return "there is no CUDA GPU."
    if not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
        return "PyTorch was built without cuDNN."
    return None


def _sdpa_supports(request: Request) -> str | None:
    """Only what cuDNN computes exactly as `attention` defines it, away from its known faults.

    Ragged tiles are refused: with a length that is not a multiple of 128 cuDNN has scored padded keys 0 instead of
    -inf (pytorch issue 196678).
    """
    if request.device.type != "cuda":
        return f"it runs on CUDA tensors, and these are on {request.device.type}."
    for name in ("mask", "sinks", "q_segment_ids", "cu_seqlens_q"):
        if name in request.dtypes:
            return f"{name} is given."
    if "grad_lse" in request.dtypes:
        return "lse has a gradient, which PyTorch's backward does not take."
    for name in ("window_left", "window_right"):
        if request.options.get(name, -1) != -1:
            return f"{name} is {request.options[name]}; PyTorch's call has no window."
    if request.options.get("softcap", 0.0):
        return "softcap is set; PyTorch's call has none."
    scale = request.options.get("scale")
    if isinstance(scale, (int, float)) and scale <= 0:
        return f"scale is {scale}; it takes a positive scale."
    if request.options.get("deterministic", False):
        return "deterministic is set, and cuDNN's backward is not."
    if request.dtypes["q"] not in (torch.bfloat16, torch.float16):
        return f"q is {request.dtypes['q']}; it takes bfloat16 or float16."
    return _sdpa_shapes(request)


def _sdpa_shapes(request: Request) -> str | None:
    q, k, v = (request.shapes[name] for name in ("q", "k", "v"))
    if q[0] == 0 or q[2] == 0:
        return "the batch is empty."
    if (q[3], v[3]) != _LATENT and (q[3] is None or q[3] != v[3] or q[3] % 8 or q[3] > _LARGEST_HEAD_DIM):
        return (
            f"head_dim is {q[3]} and {v[3]}; it takes 192 and 128, or equal multiples of 8 up to {_LARGEST_HEAD_DIM}."
        )
    if request.options.get("causal", "none") == "bottom_right" and (q[1] is None or q[1] != k[1]):
        return f"causal is 'bottom_right' with {q[1]} queries and {k[1]} keys; PyTorch aligns to the top left."
    for name, length in (("queries", q[1]), ("keys", k[1])):
        if length is not None and (length == 0 or length % 128):
            return f"there are {length} {name}; it is used for multiples of 128."
    return None


def _sdpa_gate(request: Request) -> str | None:
    """cuDNN beats the Triton kernel where it has warp-specialised kernels: on sm_90 and sm_100."""
    if not torch.backends.cuda.cudnn_sdp_enabled():  # type: ignore[no-untyped-call]
        return "cuDNN attention is switched off (torch.backends.cuda.enable_cudnn_sdp)."
    if any(size is None for name in ("q", "k") for size in request.shapes[name]):
        return "a size is not known, and it is used for multiples of 128 tokens."
    if torch.cuda.get_device_capability(request.device)[0] not in (9, 10):
        return "the GPU is neither sm_90 nor sm_100, where the Triton kernel is as fast."
    return None


KERNELS = (
    Kernel(
        name="sdpa",
        ops=ATTENTION_OPS,
        load=lambda: importlib.import_module(f"{__package__}.attention_sdpa"),
        available=_sdpa_available,
        supports=_sdpa_supports,
        gate=_sdpa_gate,
    ),
    Kernel(
        name="triton",
        ops=ATTENTION_OPS,
        load=lambda: importlib.import_module(f"{__package__}.triton.attention"),
        available=_triton_available,
        supports=_triton_supports,
    ),
    Kernel(
        name="reference",
        ops=ATTENTION_OPS,
        load=lambda: importlib.import_module(f"{__package__}.attention_reference"),
        available=lambda: None,
    ),
)
