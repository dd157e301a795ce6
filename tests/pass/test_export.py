"""Models that are exported, and compiled ahead of time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.virtualized import V

import fusion_pass
from fusion_pass import FusionConfig, FusionError
from fusion_pass.inductor_hook import FusionHook

HEAD = 16


class Rotated(nn.Module):
    """RMSNorm of each head, rotation of halves, attention: `[B, S, H, D]` to `[B, H, S, D]`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HEAD) + 0.5)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = (self.rotated(x, cos, sin).transpose(1, 2) for x in (q, k))
        return F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin


def inputs(tokens: int) -> tuple[Tensor, ...]:
    angles = torch.randn(tokens, 1, HEAD // 2).repeat(1, 1, 2)
    return (*(torch.randn(2, tokens, 3, HEAD) for _ in range(3)), angles.cos(), angles.sin())


def test_an_exported_model_is_read_and_compiled() -> None:
    config = FusionConfig(allow_reference=True, expect={"qk_norm_rope": 1, "attention": 1})
    model, given = Rotated(), inputs(5)
    exported = torch.export.export(model, given)
    assert fusion_pass.explain(exported, config=config).counts == config.expect
    compiled = torch.compile(exported.module(), backend=fusion_pass.FusionBackend(config, inner=lambda m, _: m.forward))
    torch.testing.assert_close(compiled(*given), model(*given))


def test_ahead_of_time_nothing_is_fused_where_operators_get_another_dtype(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """AOTInductor of torch 2.11 calls them with float64 for float32."""
    monkeypatch.setattr("fusion_pass.inductor_hook._RIGHT_AHEAD_OF_TIME", False)
    module = torch.export.export(Rotated(), inputs(5)).module()
    before = str(module.graph)
    with V.set_aot_compilation(True):
        FusionHook(FusionConfig(allow_reference=True), None)(module.graph)
        with pytest.raises(FusionError, match="Nothing is fused in what AOTInductor compiles"):
            FusionHook(FusionConfig(allow_reference=True, strict=True), None)(module.graph)
    assert str(module.graph) == before
    assert "may call operators with another dtype" in caplog.text


@pytest.mark.slow
def test_a_model_compiled_ahead_of_time(tmp_path: Path) -> None:
    """AOTInductor copies its options, and calls operators with None for an empty list (`mrope_section`). Before torch
    2.13 nothing is fused, and the numbers are right too."""
    expected = {"qk_norm_rope": 1, "attention": 1} if torch.__version__ >= "2.13" else None
    config = FusionConfig(allow_reference=True, expect=expected)
    tokens = torch.export.Dim("tokens", min=2, max=64)
    places = [{1: tokens}] * 3 + [{0: tokens}] * 2
    model = Rotated()
    options = fusion_pass.inductor_options(config)
    with torch.no_grad():
        exported = torch.export.export(model, inputs(5), dynamic_shapes=tuple(places))
        path = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(tmp_path / "model.pt2"), inductor_configs=options
        )
        given = inputs(11)
        torch.testing.assert_close(torch._inductor.aoti_load_package(path)(*given), model(*given))
    reports = options["pre_grad_custom_pass"].reports
    assert [report.counts for report in reports] == ([] if expected is None else [expected])
