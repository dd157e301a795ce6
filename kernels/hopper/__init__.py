"""Attention for sm_90 (H100, H200) in Gluon, the low-level language that Triton ships: TMA, wgmma, warp specialisation.

    forward*.py                the forward kernel
    backward*.py               the backward kernel, head dimensions up to 128
    wide_queries.py,
    wide_keys.py               the backward kernels above: dQ; dK and dV
    prepare.py                 the memory-bound kernels around the backward
    scores.py, rows*.py        masks as intervals of keys      barriers.py  named barriers
    explicit*.py, additive*.py masks as bits; as bits and numbers
    templates.py               tile sizes as data              gluon_api.py names that moved between Triton versions
    instances.py, build.py     signatures, compilation         assembler.py which ptxas
    descriptors.py, plans.py,
    mapped_launch.py           tensor maps, what is kept from call to call, the way to the driver
    launch.py                  the launchers: where a call begins

docs/hopper.md has the design, the measurements and the hazards, docs/hopper_history.md what was tried. This module
imports with torch alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math

import torch

from ..registry import Kernel, Request, kernels

_LARGEST_COPY = 2 << 30
"""Bytes of the copy of an additive mask, which lasts as long as the kernel."""


def _available() -> str | None:
    if not torch.cuda.is_available():
        return "there is no CUDA GPU."
    if torch.version.hip is not None or torch.cuda.get_device_capability()[0] != 9:
        return "it takes sm_90 (H100, H200), whose wgmma and TMA it is written with."
    return _compiler()


@functools.cache
def _compiler() -> str | None:
    """Why the kernels cannot be compiled; None if they can. Asked for on every call, so it is found out once."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; PyTorch's CUDA builds bring it."
    try:
        gluon = importlib.util.find_spec("triton.experimental.gluon.language.nvidia.hopper")
    except ModuleNotFoundError:
        gluon = None
    if gluon is None:
        return "this Triton has no Gluon for Hopper; it takes Triton 3.6 or newer."
    from .assembler import choose

    chosen = choose()
    return chosen if isinstance(chosen, str) else None


def _supports(request: Request) -> str | None:
    if request.device.type != "cuda":
        return f"it runs on CUDA tensors, and these are on {request.device.type}."
    if torch.cuda.get_device_capability(request.device)[0] != 9:
        return "these tensors are on a GPU that is not sm_90."
    for name in ("q", "k", "v"):
        if request.dtypes[name] not in (torch.bfloat16, torch.float16) or request.dtypes[name] != request.dtypes["q"]:
            return f"{name} is {request.dtypes[name]}; it takes bfloat16 or float16, the same for q, k and v."
    if request.dtypes.get("mask", torch.bool) != torch.bool:
        reason = _additive(request)
        if reason is not None:
            return reason
    scale = request.options.get("scale")
    if isinstance(scale, (int, float)) and scale <= 0:
        return f"scale is {scale}; it takes a positive scale."
    head_dim, v_head_dim = request.shapes["q"][-1], request.shapes["v"][-1]
    for name, size in (("q", head_dim), ("v", v_head_dim)):
        if size is None or size < 8 or size % 8 or size > 256:
            return f"head_dim of {name} is {size}; it takes multiples of 8 up to 256."
    return None


def _additive(request: Request) -> str | None:
    """Why it does not take an additive mask."""
    dtype = request.dtypes["mask"]
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"mask is {dtype}; it takes boolean, bfloat16, float16 and float32 masks."
    if "sinks" in request.dtypes:
        return "sinks are given beside an additive mask; it takes one of them."
    sizes = _planes(request), request.shapes["q"][1], request.shapes["k"][1]
    copy = (dtype.itemsize if dtype == request.dtypes["q"] else 4) * math.prod(size or 1 for size in sizes)
    if copy > _LARGEST_COPY:
        return f"it copies an additive mask, and this one would take {copy / 2**30:.1f} GiB; it takes up to 2."
    return None


def _gate(request: Request) -> str | None:
    """Where others are faster and can compute the call."""
    sharing = _FEWEST_SHARING[request.op]
    if _copies_much(request, sharing):
        return (
            f"others are faster for an additive mask that fewer than {sharing} query heads share, because it copies "
            "the mask first; name it (kernels=('hopper',)) to use it."
        )
    reason = _faster_by_cudnn(request)
    if reason is None:
        return None
    cudnn = next((kernel for kernel in kernels(request.op) if kernel.name == "sdpa"), None)
    if cudnn is None or cudnn.available() or cudnn.supports(request) or cudnn.gate(request):
        return None
    return f"cuDNN is faster for {reason}."


_FEWEST_SHARING = {"attention": 8, "attention_backward": 4}
"""At least so many query heads, of all batches, share each plane of an additive mask. With four (head_dim 128, causal
4k, slopes by head) the forward has 0.81 of the speed of our Triton kernel and 0.86 of cuDNN's, the backward 1.61 and
1.10; with sixteen the forward has 1.64 and 2.21 (H100, docs/hopper.md). Eight is between, by the bytes of the copy."""


def _copies_much(request: Request, sharing: int) -> bool:
    """Whether fewer than `sharing` query heads share each plane of an additive mask that has more than one."""
    if request.dtypes.get("mask", torch.bool) == torch.bool:
        return False
    planes, calls = _planes(request), (request.shapes["q"][0] or 1) * (request.shapes["q"][2] or 1)
    return planes > 1 and sharing * planes > calls


def _planes(request: Request) -> int:
    """How many of the pairs of a batch and a query head have a mask of their own."""
    batch, heads = ((1, 1, 1, 1) + request.shapes["mask"])[-4:-2]
    return max(batch or 1, request.shapes.get("q_segment_ids", (1,))[0] or 1) * (heads or 1)


def _faster_by_cudnn(request: Request) -> str | None:
    """The calls that were slower here than with cuDNN (ratio of the speeds), or not measured (docs/hopper.md)."""
    keys = request.shapes["k"][1]
    head_dim = max(request.shapes["q"][-1] or 0, request.shapes["v"][-1] or 0)
    dims = request.shapes["q"][-1], request.shapes["v"][-1]
    if request.op == "attention_backward":
        if dims != (192, 128) or request.options.get("causal", "none") == "none" or (keys or 4096) <= 2048:
            return None
        return "causal backwards of head_dim 192 and 128 with more than 2048 keys"  # H200, 4k and 16k: 0.98, 0.91
    if keys is None:
        return None
    if head_dim > 128 and keys < 8192 and dims not in ((192, 128), (256, 256)):
        return "forwards of a head_dim that is padded to 192 or 256, with fewer than 8192 keys"  # not measured
    return None


KERNELS = (
    Kernel(
        name="hopper",
        ops=frozenset({"attention", "attention_backward"}),
        load=lambda: importlib.import_module(f"{__package__}.launch"),
        available=_available,
        supports=_supports,
        gate=_gate,
    ),
)
