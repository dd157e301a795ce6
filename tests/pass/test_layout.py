"""Readers that depend on how a replaced value lies in memory get it as it lay."""

from __future__ import annotations

import torch
from compiling import eager
from torch import Tensor

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
