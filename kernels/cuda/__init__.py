"""The norm + rotation operators in CUDA C++, compiled at run time by NVRTC (docs/cuda.md).

    source/*.cuh               the kernels: lanes.cuh (which lanes a thread holds) first
    instance.py, tiles.py      the constants a kernel is compiled with
    hidden.py                  blocks that hold all heads of a token, for a norm over the whole row
    site.py, parameters.py     the arguments it is launched with
    norm_rope.py               from streams to launches
    compiler.py, launch.py     NVRTC and the cache of cubins; cuLaunchKernelEx

This module imports with torch alone.
"""

from __future__ import annotations

import importlib
from dataclasses import fields
from functools import lru_cache

import torch

from ..cost_gate import gate, head_dim
from ..options import Options
from ..registry import NORM_ROPE_OPS, Kernel, Request

_OPTIONS = frozenset(field.name for field in fields(Options))


@lru_cache
def _available() -> str | None:
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "there is no CUDA device."
    from .compiler import unavailable

    return unavailable()


def _supports(request: Request) -> str | None:
    if request.device.type != "cuda":
        return f"the tensors are on {request.device.type}, it takes cuda."
    if torch.cuda.get_device_capability(request.device)[0] < 8:
        return "the device is older than sm_80, whose conversion instructions it is written with."
    lanes = head_dim(request)
    if lanes is None:
        return None
    from .norm_rope import unsupported

    known = {name: value for name, value in request.options.items() if name in _OPTIONS}
    itemsize = next((request.dtypes[name].itemsize for name in ("x", "q", "qkv") if name in request.dtypes), 2)
    return unsupported(Options(**known), lanes, _heads(request), itemsize)  # type: ignore[arg-type]


def _heads(request: Request) -> list[int]:
    """Of q and of k, as far as the request says."""
    if "qkv" in request.shapes:
        found = [request.options.get(name) for name in ("num_heads", "num_kv_heads")]
    else:
        found = [request.shapes[name][2] for name in ("x", "q", "k") if len(request.shapes.get(name, ())) == 4]
    return [count for count in found if isinstance(count, int)]


KERNELS = (
    Kernel(
        name="cuda",
        ops=NORM_ROPE_OPS,
        load=lambda: importlib.import_module(f"{__name__}.norm_rope"),
        available=_available,
        supports=_supports,
        gate=gate,
    ),
)
