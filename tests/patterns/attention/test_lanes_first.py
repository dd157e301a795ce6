"""Queries, keys and values whose lanes lie apart in memory, as a convolution leaves them: they are copied for the call,
which reads a head lane by lane. Through the whole pass, with gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager_default_partitioner

from fusion_pass import FusionBackend, FusionConfig

B, H, S, D = 2, 4, 9, 8

Model = Callable[[Tensor], Tensor]


def joined_with_batch(x: Tensor, softmax_in: torch.dtype = torch.float32) -> Tensor:
    """UNets of guided diffusion: `[B, 3 H D, S]`, heads joined with the batch, the result lanes first again."""
    b, _, tokens = x.shape
    q, k, v = x.reshape(b * H, 3 * D, tokens).split(D, dim=1)
    weights = torch.einsum("bct,bcs->bts", q * D**-0.25, k * D**-0.25)
    weights = torch.softmax(weights.to(softmax_in), dim=-1).type(weights.dtype)
    return torch.einsum("bts,bcs->bct", weights, v).reshape(b, -1, tokens)


def of_heads(x: Tensor) -> Tensor:
    q, k, v = (part.unflatten(1, (H, D)) for part in x.chunk(3, dim=1))
    scores = torch.einsum("bhdi,bhdj->bhij", q * D**-0.5, k)
    scores = scores - scores.amax(dim=-1, keepdim=True).detach()
    return torch.einsum("bhij,bhdj->bhid", scores.softmax(-1), v).transpose(2, 3).flatten(1, 2)


def by_sdpa(x: Tensor) -> Tensor:
    q, k, v = (part.unflatten(1, (H, D)).transpose(2, 3) for part in x.chunk(3, dim=1))
    return F.scaled_dot_product_attention(q, k, v).transpose(2, 3).flatten(1, 2)


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("model", [joined_with_batch, of_heads, by_sdpa])
def test_lanes_that_lie_apart(model: Model, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    x = torch.randn(B, 3 * H * D, S, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x.requires_grad_()
    backend = FusionBackend(FusionConfig(allow_reference=True), inner=aot_eager_default_partitioner)
    ours, theirs = torch.compile(model, backend=backend, dynamic=dynamic)(x), model(x)
    assert backend.reports[-1].counts == {"attention": 1}, backend.reports[-1]
    exact = joined_with_batch(x, softmax_in=torch.float64) if model is joined_with_batch else model(x)
    outs = (ours, theirs, exact)
    gradients = [torch.autograd.grad(out.square().sum(), x)[0] for out in outs]
    for mine, eager, right in (outs, gradients):
        assert (mine - right).norm() <= (eager - right).norm() + 1e-12 * right.norm()
