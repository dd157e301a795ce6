"""Fake tensors are evaluated as Dynamo evaluates them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode


@contextmanager
def evaluating(mode: FakeTensorMode) -> Iterator[None]:
    """Evaluate fake tensors of `mode`.

    PyTorch has what is made of other operations (`matmul`, and so the attention that SDPA falls back on) in C++ and in
    Python. The former asks for the number behind a symbolic size, which fixes the graph to it.
    """
    with mode, enable_python_dispatcher():
        yield
