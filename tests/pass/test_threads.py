"""Several threads at once."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from threading import Event
from types import ModuleType, SimpleNamespace

import pytest

from fusion_pass.kernels import registry


def test_a_thread_that_asks_while_another_imports_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets them all: with a part of them a call has no kernel, or another one than the next call."""
    all_of_them = registry.kernels()
    importing, go_on = Event(), Event()

    def slowly(name: str) -> ModuleType:
        importing.set()
        assert go_on.wait(60)
        return importlib.import_module(name)

    monkeypatch.setattr(registry, "_kernels", [])
    monkeypatch.setattr(registry, "_discovered", False)
    monkeypatch.setattr(registry, "importlib", SimpleNamespace(import_module=slowly, util=importlib.util))
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(registry.kernels)
        assert importing.wait(60)
        second = threads.submit(registry.kernels)
        with pytest.raises(TimeoutError):
            second.result(0.2)
        go_on.set()
        assert first.result() == second.result() == all_of_them
