"""Readers that depend on how a replaced value lies in memory get it as it lay."""

from __future__ import annotations

from collections.abc import Iterator
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
LIBRARY.define("far(Tensor x) -> Tensor")
CAUGHT = False
"""Whether the fake implementation of `far` goes on where a stride is not known."""


def is_far(x: Tensor) -> bool:
    try:
        return bool(x.stride(0) > 1000)
    except Exception:
        if CAUGHT:
            return True
        raise


@torch.library.impl(LIBRARY, "far", "CompositeExplicitAutograd")
@torch.library.register_fake("fusion_pass_layout_tests::far", lib=LIBRARY)
def far(x: Tensor) -> Tensor:
    return x.contiguous() if is_far(x) else x.transpose(1, 2).contiguous().transpose(1, 2)


def rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * torch.cat([cos, cos], -1) + torch.cat([-second, first], -1) * torch.cat([sin, sin], -1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.ops.fusion_pass_layout_tests.strides(rotation(x, cos, sin) * 2)


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


def of_three_lengths() -> Iterator[tuple[int, int, tuple[Tensor, ...]]]:
    """Batch, tokens, and arguments of these symbolic sizes."""
    for batch, tokens in ((2, 24), (3, 17), (5, 40)):
        given = heads_first(batch, tokens)
        for tensor in given:
            torch._dynamo.maybe_mark_dynamic(tensor, (0, 1))
        yield batch, tokens, given


def test_strides_are_restored_for_every_length() -> None:
    """Asked for their numbers, symbolic strides would be fixed to those of the first call, and each length compiled."""
    backend = FusionBackend(FusionConfig(allow_reference=True, expect={"rope": 1}), inner=as_it_is)
    compiled = torch.compile(rotated, backend=backend, fullgraph=True)
    for batch, tokens, given in of_three_lengths():
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


def test_a_reader_made_of_others_is_compiled_once() -> None:
    """In C++ a matrix product (of torch 2.11) asks for the numbers of its operands' sizes, which would fix the graph to
    them."""
    weight = torch.randn(16, 16)

    def model(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotation(x, cos, sin).transpose(1, 2) @ weight.expand(4, 16, 16)

    backend = FusionBackend(FusionConfig(allow_reference=True, expect={"rope": 1}), inner=as_it_is)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _, _, given in of_three_lengths():
        torch.testing.assert_close(compiled(*given), model(*given))
    assert len(backend.reports) == 1


@pytest.mark.parametrize("caught", [False, True])
def test_an_answer_for_some_lengths_is_none(monkeypatch: pytest.MonkeyPatch, caught: bool) -> None:
    """The operator lays its result out by a stride of v, and says so. A v of its own, no part of the projection, has
    another one: at 24 tokens the result lies as before, at 10 it would not. Asked for, that would be a guard."""

    def rotated_parts(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        q, k, v = qkv.view(2, -1, 3, 4, 16).unbind(2)
        return rotation(q, cos, sin) * 2, rotation(k, cos, sin) * 2, torch.ops.fusion_pass_layout_tests.far(v) * 2

    monkeypatch.setattr(f"{__name__}.CAUGHT", caught)
    backend = FusionBackend(FusionConfig(allow_reference=True), inner=as_it_is)
    compiled = torch.compile(rotated_parts, backend=backend, fullgraph=True)
    for tokens in (24, 10):
        qkv, (cos, sin) = torch.randn(2, tokens, 192, requires_grad=True), torch.randn(2, 2, tokens, 1, 8)
        for tensor in (qkv, cos, sin):
            torch._dynamo.maybe_mark_dynamic(tensor, 1)
        for ours, expected in zip(compiled(qkv, cos, sin), rotated_parts(qkv, cos, sin), strict=True):
            torch.testing.assert_close(ours, expected, check_stride=True)
    (report,) = backend.reports
    (reason,) = report.reasons
    assert reason == "qkv_norm_rope: 'far' depends on the strides of 'v', which the call cannot give."


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
