"""Which axis of its argument each axis of a transposition is, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusion_pass.graph.vocabulary import reordered_axes

CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "transpose": torch.Tensor.transpose,
    "permute": torch.Tensor.permute,
    "t": torch.Tensor.t,
    "mT": lambda x: x.mT,
    "numpy_T": torch.ops.aten.numpy_T,
}
TRANSPOSITIONS: list[tuple[str, tuple[Any, ...]]] = [
    ("transpose", (1, 2)),
    ("transpose", (-1, 0)),
    ("permute", (0, 2, 1, 3)),
    ("permute", ((3, -2, 0, 1),)),
    ("permute", ([-1, 0, 1, 2],)),
    ("t", ()),
    ("mT", ()),
    ("numpy_T", ()),
]


@pytest.mark.parametrize(("name", "args"), TRANSPOSITIONS)
def test_transposition(name: str, args: tuple[Any, ...]) -> None:
    x = torch.empty((2, 3, 5, 7)[: 2 if name == "t" else 4])
    axes = reordered_axes(name, args, x.dim())
    assert axes is not None
    assert torch.Size(x.shape[axis] for axis in axes) == CALLS[name](x, *args).shape


NO_TRANSPOSITIONS: list[tuple[str, tuple[Any, ...]]] = [
    ("transpose", (1, "number")),
    ("transpose", (1, 2, 3, 0)),
    ("transpose", ((1, 2),)),
    ("permute", (1, 0)),
    ("permute", ((0, 1, 2, "number"),)),
    ("permute", ("numbers",)),
    ("view", (0, 2, 1, 3)),
    ("expand", (1, 2)),
]


@pytest.mark.parametrize(("name", "args"), NO_TRANSPOSITIONS)
def test_no_transposition(name: str, args: tuple[Any, ...]) -> None:
    """An axis that is known only at run time, too few axes, another operation."""
    assert reordered_axes(name, args, 4) is None
