"""What an Ascend machine must have for the kernels to run, and the sentence for each thing that is missing.

Nothing here imports `torch_npu`: PyTorch loads it by itself (`torch.backends` entry point) where it is installed and
works.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
from functools import cache
from pathlib import Path

import torch

from .platform import DEFAULT_PLATFORM, Platform, platform_named


def missing_runtime() -> str | None:
    """None if an NPU can be used, else why not."""
    if importlib.util.find_spec("torch_npu") is None:
        release = torch.__version__.split("+")[0]
        return f"torch_npu is not installed; install the torch-npu release made for torch {release}."
    if not _loads("libascendcl.so"):
        return (
            "CANN is not found: libascendcl.so does not load. Install the CANN toolkit and kernels and run "
            "`source set_env.sh` of its folder before Python."
        )
    npu = getattr(torch, "npu", None)
    if npu is None:
        return "torch_npu is not loaded: `import torch_npu` (PyTorch does unless TORCH_DEVICE_BACKEND_AUTOLOAD is 0)."
    if not npu.is_available():
        return "torch_npu is loaded, but torch.npu.is_available() is False: no NPU is visible to this process."
    return None


def missing_triton() -> str | None:
    """None if Triton-Ascend is installed, else why not."""
    try:
        importlib.metadata.version("triton-ascend")
    except importlib.metadata.PackageNotFoundError:
        if importlib.util.find_spec("triton") is None:
            return "triton-ascend is not installed; install triton-ascend 3.2.0 or later."
        return (
            "the installed `triton` is not Triton-Ascend. Both install a package named triton: uninstall triton, then "
            "install triton-ascend 3.2.0 or later."
        )
    return None


def missing_operator(name: str) -> str | None:
    """None if CANN has the operator `name` (`aclnnFlashAttentionScoreV3`), else why not.

    torch_npu looks for it in the same libraries (op-plugin, `op_api_common.cpp`), and raises where it does not find it.
    """
    if any(_has_symbol(library, f"{name}GetWorkspaceSize") for library in _operator_libraries()):
        return None
    return f"the CANN installed here has no {name}; a newer one has."


def platform_of(device: torch.device) -> Platform:
    """The chip behind `device`; for a CPU tensor (the interpreter) the smallest one.

    Raises:
        ValueError: the chip is not in the platform table.
    """
    return DEFAULT_PLATFORM if device.type == "cpu" else _npu(device.index or 0)


@cache
def _npu(index: int) -> Platform:
    name: str = getattr(torch, "npu").get_device_name(index)  # noqa: B009  # torch_npu adds it
    return platform_named(name)


@cache
def _operator_libraries() -> tuple[str, ...]:
    """CANN's operators are in one library, or (from 8.5 on) in several beside it."""
    home = os.environ.get("ASCEND_HOME_PATH")
    beside = [] if home is None else sorted(map(str, Path(home, "lib64").glob("libopapi_*.so")))
    return *beside, "libopapi.so", "libaclnn_ops_train.so", "libaclnn_ops_infer.so"


@cache
def _has_symbol(library: str, symbol: str) -> bool:
    return _loads(library) and hasattr(ctypes.CDLL(library), symbol)


@cache
def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
