"""Inside of `torch.func.vmap`, `grad` and `vjp` nothing is fused, and the reason says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_pass import FusionBackend, FusionConfig

OF_ONE_SAMPLE = "is inside torch.func.vmap, for which the operators have no batching rule."
OF_GRADIENTS = "is inside torch.func.grad, vjp or jvp, which the operators are not made for"

Model = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def rotated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    angle = torch.outer(torch.arange(q.shape[-2]), 0.5 ** torch.arange(4))
    cos, sin = angle.cos(), angle.sin()

    def turn(x: Tensor) -> Tensor:
        a, b = (x * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()).chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    return attention(turn(q), turn(k), v)


def vmapped(model: Model) -> Model:
    return torch.func.vmap(model)


def gradient(model: Model) -> Model:
    return lambda q, k, v: torch.func.grad(lambda x: model(x, k, v).sum())(q)


def pulled_back(model: Model) -> Model:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, pull = torch.func.vjp(model, q, k, v)
        return pull(out)[1]

    return run


@pytest.mark.parametrize(
    ("transform", "axes", "reason"),
    [(vmapped, 5, OF_ONE_SAMPLE), (gradient, 4, OF_GRADIENTS), (pulled_back, 4, OF_GRADIENTS)],
    ids=["vmap", "grad", "vjp"],
)
@pytest.mark.parametrize(("model", "places"), [(attention, 1), (rotated, 2)])
def test_left_alone(model: Model, places: int, transform: Callable[[Model], Model], axes: int, reason: str) -> None:
    torch._dynamo.reset()
    inputs = torch.randn(3, *[2] * (axes - 2), 5, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    backend = FusionBackend(FusionConfig(allow_reference=True), inner=lambda module, _: module.forward)
    ours = torch.compile(transform(model), backend=backend)(*inputs)
    torch.testing.assert_close(ours, transform(model)(*inputs))
    found = [site for report in backend.reports for site in report.sites]
    assert len(found) == places
    assert all(site.status != "fused" and reason in site.reason for site in found), found
