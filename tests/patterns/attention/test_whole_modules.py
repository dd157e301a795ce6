"""`torch.nn.MultiheadAttention` and what is built of it: one call in the graph, left alone with a reason."""

from __future__ import annotations

from collections.abc import Callable

import attention_graphs as graphs
import pytest
import torch
from torch import Tensor, nn

from fusion_pass.patterns.norm_rope.pattern import NormRope

MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "attention": (lambda: nn.MultiheadAttention(16, 2), "torch.nn.MultiheadAttention"),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), "torch.nn.MultiheadAttention"),
    "encoder, fast": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(),
        "torch.nn.TransformerEncoderLayer",
    ),
    "normalised first": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, 0.0, norm_first=True),
        "torch.nn.MultiheadAttention",
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_refused_with_its_name(name: str) -> None:
    """The norm in front of it is none of q and k: a projection lies between."""
    make, called = MODULES[name]
    module = make()

    def model(x: Tensor) -> Tensor:
        return module(x, x, x)[0] if isinstance(module, nn.MultiheadAttention) else module(x)

    graph, _ = graphs.captured(model, torch.randn(2, 5, 16), grad="fast" not in name)
    (place,) = graphs.places(graph)
    assert isinstance(place, graphs.Refusal)
    assert f"is all of {called} in one call, its projections included" in place.reason
    assert not list(NormRope().find(graph.graph))
