"""Who asks scores or weights for their shape or dtype reads no numbers of them: a mask that is made like the scores.

What computes those numbers is dead then, and Inductor drops it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attention_graphs as graphs
import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager_default_partitioner

from fusion_pass import FusionBackend, FusionConfig
from fusion_pass.graph.vocabulary import reads_no_numbers

B, H, S, D = 2, 4, 7, 8

Model = Callable[..., Tensor]


def qkv() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, H, S, D, requires_grad=True) for _ in range(3)]


def attention(change: Callable[[Tensor], Tensor]) -> Model:
    return lambda q, k, v: change(q @ k.mT).softmax(-1) @ v


def future(tokens: int = S) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).triu(1)


CAUSAL: dict[str, Model] = {
    "ones_like": attention(lambda s: s.masked_fill(torch.ones_like(s).triu(1).bool(), -math.inf)),
    "full_like": attention(lambda s: s + torch.full_like(s, -math.inf).triu(1)),
    "new_full": attention(lambda s: s + s.new_full((S, S), -math.inf).triu(1)),
    "expand_as": attention(lambda s: s.masked_fill_(future()[None, None].expand_as(s), -1e9)),
    "type_as": attention(lambda s: s + future().type_as(s) * -1e9),
    "to": attention(lambda s: s + future().float().to(s) * -1e9),
    "size": attention(lambda s: s.masked_fill(future(s.size(-1)), -1e9)),
}


@pytest.mark.parametrize(("name", "dynamic"), [*((name, None) for name in CAUSAL), ("ones_like", True), ("size", True)])
def test_mask_made_like_the_scores(name: str, dynamic: bool | None) -> None:
    module, inputs = graphs.captured(CAUSAL[name], *qkv(), dynamic=dynamic)
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site), place.reason
    assert graphs.conditions(place) == {"causal": "top_left"}


def test_shape_of_the_weights() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.mT).softmax(-1)
        return weights @ v + torch.zeros_like(weights).sum()

    assert isinstance(graphs.site(graphs.captured(model, *qkv())[0]), graphs.Site)


def test_mask_of_data_made_like_the_scores() -> None:
    """The mask is read by the call, and made like scores that the call does not compute: results and gradients."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        bias = torch.zeros_like(scores) + v.detach().sum(-1)[:, :, None]
        return (scores + bias).softmax(-1) @ v

    torch._dynamo.reset()
    inputs = [x.detach().double().requires_grad_() for x in qkv()]
    backend = FusionBackend(FusionConfig(allow_reference=True), inner=aot_eager_default_partitioner)
    ours, theirs = torch.compile(model, backend=backend)(*inputs), model(*inputs)
    assert backend.reports[-1].counts == {"attention": 1}
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), inputs) for out in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


READ: dict[str, Model] = {
    "a number of them": lambda s, x: torch.full_like(x, 1.0) * s.mean(),
    "as another shape": lambda s, x: s.view_as(x),
    "as another dtype": lambda s, x: s.type_as(x),
    "in both places": lambda s, x: s.expand_as(s),
    "filled with one": lambda s, x: x.new_zeros(2).fill_(s[0, 0, 0, 0]),
    "as numbers": lambda s, x: torch.where(x > 0, x, s),
}


@pytest.mark.parametrize("name", READ)
def test_numbers_that_are_read(name: str) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = q @ k.mT
        return scores.softmax(-1) @ v, READ[name](scores, q @ q.mT)

    module, _ = graphs.captured(model, *qkv())
    assert "also read by" in graphs.refusal(module)


def test_functions_of_the_same_name() -> None:
    """`zeros_like` of a user may do anything."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    theirs, ours = graph.call_function(zeros_like, (x,)), graph.call_function(torch.zeros_like, (x,))
    assert not reads_no_numbers(theirs, x)
    assert reads_no_numbers(ours, x)


def zeros_like(x: Tensor) -> Tensor:
    return x * 2.0
