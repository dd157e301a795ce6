"""For every test: one thread a process, because the tensors are tiny and `make test` runs two processes; and garbage
is collected rarely, because the modules of PyTorch and transformers are looked through each time: a quarter of the time
of a test that compiles a model. Dynamo's own collection behind each compilation is left out too."""

import gc
import importlib.metadata
import importlib.util
import os
import sys

os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

import pytest
import torch

torch.set_num_threads(1)
gc.set_threshold(50_000, 20, 50)


def import_triton_for_its_interpreter() -> None:
    """Triton decides when it is imported whether its own library can be interpreted, and Dynamo imports it too early.

    Triton-Ascend, a package named triton from another distribution, is left to the tests that compile with it.
    """
    try:
        importlib.metadata.distribution("triton")
    except importlib.metadata.PackageNotFoundError:
        return
    if torch.cuda.is_available() or "TRITON_INTERPRET" in os.environ:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        importlib.import_module("triton.language")
    finally:
        del os.environ["TRITON_INTERPRET"]


import_triton_for_its_interpreter()


@pytest.fixture(autouse=True)
def a_failure_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in a pattern or in planning reaches the test, also where its configuration says `on_error="warn"`,
    the default. tests/pass/test_failures.py tests that."""

    def reraise(what: str, fusion: str, layer: str, error: Exception, config: object) -> None:
        raise error

    monkeypatch.setattr("fusion_pass.recognise.failure", reraise)


@pytest.fixture(autouse=True)
def guards_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a line of its log Dynamo times the guards of each new graph with the caches of the CPU flushed, which takes
    longer than they do."""
    guards = sys.modules.get("torch._dynamo.guards")
    if guards is not None and hasattr(guards, "profile_guard_manager"):
        monkeypatch.setattr(guards, "profile_guard_manager", lambda *_: 0.0)
