"""Without a GPU the Triton kernels run in Triton's interpreter, for the duration of a test of this folder."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def interpret_triton_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`triton.jit` reads the variable when a kernel's module is imported: tests import those inside the test."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    # A third of the time goes into checks of integers for overflow whose outcome is looked at only in debug mode.
    options = interpreter.interpreter_builder.options
    checked = {"sanitize_overflow": False} if hasattr(options, "sanitize_overflow") else {}
    monkeypatch.setattr(interpreter.interpreter_builder, "options", dataclasses.replace(options, **checked))
    if hasattr(interpreter, "_LangPatchScope"):
        monkeypatch.setattr(interpreter, "_patch_lang", replaced_once_a_launch(interpreter))


def replaced_once_a_launch(interpreter: Any) -> Callable[[Any], Any]:
    """Triton's `_patch_lang`, which replaces the functions of its language by interpreted ones, without repetition.

    Triton 3.6 does it at each launch and again at every call of a function inside the kernel, where all of it is found
    done already: half of the time of these tests.
    """
    replace, languages = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    replaced: set[str] = set()

    class Launch(interpreter._LangPatchScope):
        def restore(self) -> None:
            replaced.clear()
            super().restore()

    def replace_new(function: Any) -> Any:
        modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        seen = {module.__name__ for module in modules if module in languages}
        scope = Launch()
        if not seen <= replaced:
            scope._changes = replace(function)._changes
            replaced.update(seen)
        return scope

    return replace_new


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The GPU for a test marked `gpu`, which is skipped where there is none; else the CPU."""
    if request.node.get_closest_marker("gpu") is None:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return torch.device("cuda")
