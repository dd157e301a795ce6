"""The Python functions under everything that traces, recomputes or differentiates: the operators appear in the graph,
and the gradients are those of the eager call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fusion_pass.kernels import norm_rope, qk_norm_rope, qkv_norm_rope, rope

NORM: dict[str, Any] = {"norm": "rms", "eps": 1e-6, "rotary_dim": 8}
OPERATORS = ("qk_norm_rope", "qkv_norm_rope", "rope", "norm_rope")


def loss(q: Tensor, k: Tensor, qkv: Tensor, table: Tensor, weight: Tensor) -> Tensor:
    """All four functions."""
    a, b = qk_norm_rope(q, k, table, table, None, weight, weight, **NORM)
    x, y, z = qkv_norm_rope(
        qkv, table, table, None, weight, weight, num_heads=4, num_kv_heads=2, head_dim=8, packing="grouped", **NORM
    )
    turned = rope(q, table, table) * norm_rope(q, table, table, None, weight, **NORM)
    return sum(t.square().sum() for t in (a, b, x, y, z, turned))  # type: ignore[return-value]


@pytest.fixture
def inputs() -> list[Tensor]:
    shapes = ((1, 3, 4, 8), (1, 3, 2, 8), (1, 3, 64), (1, 3, 4), (8,))
    return [torch.randn(shape, requires_grad=shape != (1, 3, 4)) for shape in shapes]


def gradients(result: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(result, [t for t in inputs if t.requires_grad])


def test_compiled(inputs: list[Tensor]) -> None:
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled(*inputs), inputs), gradients(loss(*inputs), inputs))
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), loss(*inputs))


def test_compiled_autograd(inputs: list[Tensor]) -> None:
    def step() -> None:
        torch.compile(loss, backend="aot_eager")(*inputs).backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="aot_eager")()
    found = [t.grad for t in inputs if t.requires_grad]
    torch.testing.assert_close(found, list(gradients(loss(*inputs), inputs)))


def test_recomputed(inputs: list[Tensor]) -> None:
    again = checkpoint(loss, *inputs, use_reentrant=False)
    torch.testing.assert_close(gradients(again, inputs), gradients(loss(*inputs), inputs))


@pytest.mark.parametrize("strict", [False, True])
def test_exported(inputs: list[Tensor], strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, *args: Tensor) -> Tensor:
            return loss(*args)

    graph = torch.export.export(Model(), tuple(inputs), strict=strict).graph
    found = {node.target for node in graph.nodes if "fusion_pass" in str(node.target)}
    assert found == {getattr(torch.ops.fusion_pass, name).default for name in OPERATORS}


def test_forward_mode_is_refused(inputs: list[Tensor]) -> None:
    """It would give a tangent of zeros."""
    q, k, _, table, weight = (x.detach() for x in inputs)

    def call(q: Tensor) -> Tensor:
        return qk_norm_rope(q, k, table, table, None, weight, weight, **NORM)[0]

    for _ in range(2):  # so that there is a call to repeat
        call(q)
    with pytest.raises(NotImplementedError, match="fusion_pass::qk_norm_rope has no forward-mode derivative"):
        torch.func.jvp(call, (q,), (q,))
    with torch.autograd.forward_ad.dual_level():
        call(q)
        with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
            call(torch.autograd.forward_ad.make_dual(q, q))
