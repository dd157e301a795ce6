"""The back end `measured`: CUDA C++ or Triton, for each direction and shape the one that was measured faster.

    form.py       what the speed of a call depends on, taken from the call
    table.py      the measurements, one file a card (`h100.json`), and the nearest of them
    autotune.py   a measurement on the user's machine, for shapes that are in no table (opt-in)
    backend.py    the back end: asks, and hands the call on

Both back ends compute the same from the same arguments and save nothing for the backward, so one call may take one of
them forward and the other backward. This module imports with torch alone.
"""

from __future__ import annotations

import importlib

from .. import cuda, triton
from ..cost_gate import gate
from ..registry import NORM_ROPE_OPS, Kernel, Request


def _available() -> str | None:
    if triton.interpreted():
        return "kernels are interpreted (TRITON_INTERPRET=1), which CUDA C++ cannot be."
    missing = [kernel.name for kernel in (*triton.KERNELS, *cuda.KERNELS) if kernel.available() is not None]
    return f"it takes the faster of triton and cuda, and here {' and '.join(missing)} cannot run." if missing else None


def _supports(request: Request) -> str | None:
    for kernel in (*cuda.KERNELS, *triton.KERNELS):
        reason = kernel.supports(request)
        if reason is not None:
            return f"only one of the two computes this; {kernel.name}: {reason}"
    return None


KERNELS = (
    Kernel(
        name="measured",
        ops=NORM_ROPE_OPS,
        load=lambda: importlib.import_module(f"{__name__}.backend"),
        available=_available,
        supports=_supports,
        gate=gate,
    ),
)
