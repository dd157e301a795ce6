"""Readers that depend on how a replaced value lies in memory get it as it lay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiling import as_it_is, eager
from torch import Tensor, fx

from fusion_pass import FusionBackend, FusionConfig

LIBRARY = torch.library.Library("fusion_pass_layout_tests", "DEF")
LIBRARY.define("strides(Tensor x) -> Tensor")
LIBRARY.impl("strides", lambda x: torch.tensor(x.stride()), "CompositeExplicitAutograd")
torch.library.register_fake(
    "fusion_pass_layout_tests::strides", lambda x: x.new_empty(x.dim(), dtype=torch.int64), lib=LIBRARY
)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    y = x * torch.cat([cos, cos], -1) + torch.cat([-second, first], -1) * torch.cat([sin, sin], -1)
    return torch.ops.fusion_pass_layout_tests.strides(y * 2)


def heads_first(batch: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """x `[batch, tokens, 4 heads, 16]`, head by head in memory, and tables."""
    cos, sin = torch.randn(2, batch, tokens, 1, 8)
    return torch.randn(4, batch, tokens, 16).permute(1, 2, 0, 3), cos, sin


def test_an_operator_of_somebody_elses_sees_the_strides_of_the_model() -> None:
    """Its fake implementation does not say that it reads them."""
    backend = FusionBackend(FusionConfig(allow_reference=True, expect={"rope": 1}), inner=eager)
    given = heads_first(2, 24)
    strides = torch.compile(rotated, backend=backend, fullgraph=True)(*given)
    assert strides.tolist() == rotated(*given).tolist() == [384, 16, 768, 1]


def test_strides_are_restored_for_every_length() -> None:
    """Asked for their numbers, symbolic strides would be fixed to those of the first call, and each length compiled."""
    backend = FusionBackend(FusionConfig(allow_reference=True, expect={"rope": 1}), inner=as_it_is)
    compiled = torch.compile(rotated, backend=backend, fullgraph=True)
    for batch, tokens in ((2, 24), (3, 17), (5, 40)):
        given = heads_first(batch, tokens)
        for tensor in given:
            torch._dynamo.maybe_mark_dynamic(tensor, (0, 1))
        assert compiled(*given).tolist() == rotated(*given).tolist() == [16 * tokens, 16, 16 * tokens * batch, 1]
    assert len(backend.reports) == 1


def test_strides_that_nothing_proves_are_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense in this call, and perhaps not in others: what an operator counts on cannot be restored."""
    monkeypatch.setattr("fusion_pass.layout._is_dense", lambda _: False)
    backend = FusionBackend(FusionConfig(allow_reference=True), inner=as_it_is)
    given = heads_first(2, 24)
    strides = torch.compile(rotated, backend=backend, fullgraph=True)(*given)
    assert strides.tolist() == rotated(*given).tolist()
    (reason,) = backend.reports[0].reasons
    assert "depends on the strides" in reason


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
