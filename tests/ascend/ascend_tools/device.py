"""A device called `npu`, registered from Python: tensors on it have a device and no arithmetic of their own."""

from __future__ import annotations

from functools import cache

import torch
from torch.utils import backend_registration


def missing() -> str | None:
    """Why there can be no stand-in device here, or None."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        return f"torch {torch.__version__} cannot register a device from Python (2.13 can)"
    return None


@cache
def stand_in() -> torch.device:
    """Register it once a process. A process that has it can have no real NPU."""
    backend_registration._setup_privateuseone_for_python_backend("npu")
    return torch.device("npu", 0)
