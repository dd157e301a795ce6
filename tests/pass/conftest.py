from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from toy import ScaledSin

from fusion_pass import extensions


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`only(pattern, ...)`: the pass knows these patterns and no others, for this test."""

    def use(*patterns: Any) -> None:
        monkeypatch.setattr(extensions, "patterns", lambda: patterns)
        for module in ("recognise", "identity"):
            monkeypatch.setattr(f"fusion_pass.{module}.patterns", lambda: patterns)

    return use


@pytest.fixture
def toy(only: Callable[..., None]) -> ScaledSin:
    """The pass with the toy pattern alone."""
    pattern = ScaledSin()
    only(pattern)
    return pattern
