"""Without a GPU the Triton kernels run in Triton's interpreter, for the duration of a test of this folder."""

from __future__ import annotations

import importlib.util

import pytest
import quick_interpreter
import torch


@pytest.fixture(autouse=True)
def interpret_triton_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`triton.jit` reads the variable when a kernel's module is imported: tests import those inside the test."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    quick_interpreter.install(monkeypatch, importlib.import_module("triton.runtime.interpreter"))


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The GPU for a test marked `gpu`, which is skipped where there is none; else the CPU."""
    if request.node.get_closest_marker("gpu") is None:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return torch.device("cuda")
