"""Attention in the body of an activation checkpoint: fused there, recomputed in the backward, gradients right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiling import CountingCompiler
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_steps import assert_no_worse, exact_step, step

from fusion_pass import FusionBackend, FusionConfig, zoo

APART = {"qk_norm_rope": 2, "attention": 2}
JOINED = {"norm_rope_attention": 2}


def compiled(model: nn.Module, expect: dict[str, int]) -> tuple[Any, CountingCompiler]:
    torch._dynamo.reset()
    counted = CountingCompiler()
    config = FusionConfig(allow_reference=True, whole_block="norm_rope_attention" in expect, expect=expect)
    return torch.compile(model, backend=FusionBackend(config, inner=counted), fullgraph=True), counted


@pytest.mark.parametrize("expect", [APART, JOINED], ids=["apart", "joined"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_transformers(attention: str, expect: dict[str, int]) -> None:
    pytest.importorskip("transformers")
    module, inputs = zoo.build("qwen3", layers=2, attention=attention)
    plain, exact = step(module, module, inputs), exact_step(module, inputs)
    module.gradient_checkpointing_enable({"use_reentrant": False})
    model, counted = compiled(module, expect)
    ours = step(model, module, inputs)
    assert_no_worse(ours, plain, exact, torch.finfo(torch.float32).eps)
    for name in expect:
        assert counted.forward[f"fusion_pass.{name}.default"] == 2
        assert counted.backward[f"fusion_pass.{name}.default"] >= 1, "nothing was recomputed"
        assert counted.backward[f"fusion_pass.{name}_backward.default"] == 2


class Layer(nn.Module):
    """Norm, rotation and attention without any library."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 3 * 64, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(16, eps=1e-6), nn.RMSNorm(16, eps=1e-6)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        q, k = (_rotated(norm(part), cos, sin) for norm, part in ((self.q_norm, q), (self.k_norm, k)))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + out.transpose(1, 2).flatten(2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + torch.cat([-x[..., 8:], x[..., :8]], -1) * sin


class Checkpointed(nn.Module):
    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.wrapped = wrapped

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, cos, sin, use_reentrant=False) if self.wrapped else layer(x, cos, sin)
        return x


@pytest.mark.parametrize("whole_block", [False, True], ids=["apart", "joined"])
def test_torch_utils_checkpoint(whole_block: bool) -> None:
    angle = torch.arange(24)[:, None] * 0.5 ** torch.arange(8)
    inputs = {
        "x": torch.randn(2, 24, 64),
        "cos": torch.cat([angle.cos()] * 2, -1),
        "sin": torch.cat([angle.sin()] * 2, -1),
    }
    plain_model, module = Checkpointed(False), Checkpointed(True)
    plain, exact = step(plain_model, plain_model, inputs), exact_step(plain_model, inputs)
    names = ("norm_rope_attention",) if whole_block else ("qkv_norm_rope", "attention")
    model, counted = compiled(module, dict.fromkeys(names, 2))
    ours = step(model, module, inputs)
    assert_no_worse(ours, plain, exact, torch.finfo(torch.float32).eps)
    for name in names:
        assert counted.forward[f"fusion_pass.{name}.default"] == 2
        assert counted.backward[f"fusion_pass.{name}.default"] >= 1, "nothing was recomputed"
