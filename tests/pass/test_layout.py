"""Readers that depend on how a replaced value lies in memory get it as it lay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiling import eager
from torch import Tensor, fx

from fusion_pass import FusionBackend, FusionConfig

LIBRARY = torch.library.Library("fusion_pass_layout_tests", "DEF")
LIBRARY.define("strides(Tensor x) -> Tensor")
LIBRARY.impl("strides", lambda x: torch.tensor(x.stride()), "CompositeExplicitAutograd")
torch.library.register_fake(
    "fusion_pass_layout_tests::strides", lambda x: x.new_empty(x.dim(), dtype=torch.int64), lib=LIBRARY
)


def test_an_operator_of_somebody_elses_sees_the_strides_of_the_model() -> None:
    """Its fake implementation does not say that it reads them."""

    def model(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        y = x * torch.cat([cos, cos], -1) + torch.cat([-second, first], -1) * torch.cat([sin, sin], -1)
        return torch.ops.fusion_pass_layout_tests.strides(y * 2)

    x = torch.randn(4, 2, 24, 16).permute(1, 2, 0, 3)  # [batch, tokens, heads, head_dim], head by head in memory
    cos, sin = torch.randn(2, 2, 24, 1, 8)
    backend = FusionBackend(FusionConfig(allow_reference=True, expect={"rope": 1}), inner=eager)
    strides = torch.compile(model, backend=backend, fullgraph=True)(x, cos, sin)
    assert strides.tolist() == model(x, cos, sin).tolist() == [384, 16, 768, 1]


@pytest.mark.parametrize("alias", [True, False])
def test_a_result_returned_beside_its_detached_alias(alias: bool) -> None:
    """AOTAutograd returns the alias in the shape of the memory: the result of the call must not be a view of it."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out = (q @ k.mT).softmax(-1) @ v
        return out, (out if alias else q * 2.0).detach()

    graphs: list[fx.GraphModule] = []

    def keep(module: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module)
        return eager(module, inputs)

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 3, 8, requires_grad=True) for _ in range(3))
    compiler = FusionBackend(FusionConfig(allow_reference=True, expect={"attention": 1}), inner=keep)
    for ours, expected in zip(torch.compile(model, backend=compiler)(q, k, v), model(q, k, v), strict=True):
        torch.testing.assert_close(ours, expected)
    (graph,) = graphs
    assert bool(graph.graph.find_nodes(op="call_method", target="clone")) is alias
