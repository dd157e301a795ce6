"""Sites in front of, behind and inside of control flow that trains. PyTorch compares the strides of gradients there and
does not compile where they differ."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compiling import backend
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint
from training_steps import assert_no_worse

HEADS, HEAD = 4, 16
MATRIX = torch.linspace(-1, 1, HEAD * HEAD).reshape(HEAD, HEAD)
EYE = torch.eye(HEADS * HEAD)


def rotated(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def doubled_or_negated(x: Tensor) -> Tensor:
    """Gradients of both branches have the strides of the gradient they are given."""
    return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: -x, (x,))


def multiplied_or_copied(x: Tensor) -> Tensor:
    """The result is contiguous, as is the gradient of a matrix product; that of the other branch is as it comes."""
    return torch.cond(x.sum() > 0, lambda x: x @ MATRIX.to(x.dtype), lambda x: x.contiguous() * 1, (x,))


def behind(branches: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def model(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = branches(x.transpose(1, 2))
        return rotated(x, weight, cos, sin)

    return model


def behind_and_in_a_checkpoint(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = multiplied_or_copied(x.transpose(1, 2))
    result: Tensor = checkpoint(rotated, x, weight, cos, sin, use_reentrant=False)
    return result


def in_a_loop(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    def step(count: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return count + 1, rotated(x, weight, cos, sin).clone()

    (_, result) = while_loop(lambda count, _: count < 3, step, (torch.tensor(0), x.transpose(1, 2).contiguous()))
    return result


def in_a_branch(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x.transpose(1, 2)
    return torch.cond(x.sum() > 0, lambda x: F.scaled_dot_product_attention(x, x, x), lambda x: x.sin(), (x,))


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    angles = torch.randn(7, HEAD // 2).repeat(1, 2)
    return torch.randn(2, 7, HEADS, HEAD), torch.rand(HEAD), angles.cos(), angles.sin()


def in_both_branches(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x.transpose(1, 2)
    attention = F.scaled_dot_product_attention
    return torch.cond(x.sum() > 0, lambda x: attention(x, x, x), lambda x: attention(x, x, x, is_causal=True), (x,))


def training_step(model: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The result, and the gradients of x and of the weight, in float64."""
    x, weight, *tables = (tensor.to(dtype) for tensor in inputs())
    out = model(x.requires_grad_(), weight.requires_grad_(), *tables)
    gradients = torch.autograd.grad(out.square().sum(), (x, weight), allow_unused=True, materialize_grads=True)
    return {"out": out.detach().double(), "x": gradients[0].double(), "weight": gradients[1].double()}


def assert_step(compiled: Callable[..., Tensor], model: Callable[..., Tensor]) -> None:
    exact = training_step(model, torch.float64)
    assert_no_worse(training_step(compiled), training_step(model), exact, torch.finfo(torch.float32).eps)


@pytest.mark.parametrize(
    ("model", "fused"),
    [
        (behind(doubled_or_negated), True),
        pytest.param(
            in_a_branch,
            True,
            marks=pytest.mark.skipif(
                torch.__version__ < "2.13",
                reason="torch 2.11 refuses this model without the pass too: its branches' gradients differ in strides",
            ),
        ),
        (in_both_branches, True),
        (behind(multiplied_or_copied), False),
        (behind_and_in_a_checkpoint, False),
        (in_a_loop, False),
    ],
    ids=["behind", "in a branch", "in both branches", "contiguous", "checkpoint", "loop"],
)
def test_training(model: Callable[..., Tensor], fused: bool) -> None:
    compiler = backend(allow_reference=True)
    assert_step(torch.compile(model, backend=compiler, fullgraph=True), model)
    (report,) = compiler.reports
    assert bool(report.fused) == fused
    assert all("goes on to control flow" in reason for reason in report.reasons)
    assert fused or report.skipped


def test_without_gradients_it_is_fused() -> None:
    model = behind(multiplied_or_copied)
    compiled = torch.compile(model, backend=backend(allow_reference=True, expect=1), fullgraph=True)
    torch.testing.assert_close(compiled(*inputs()), model(*inputs()))


def test_equal_layers_that_dynamo_makes_one_body_of() -> None:
    def model(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for _ in range(3):
            x = F.linear(x.flatten(2), EYE.to(x.dtype)).unflatten(2, (HEADS, HEAD)).transpose(1, 2)
            x = rotated(x, weight, cos, sin)
            x = F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2)
        return x

    compiler = backend(allow_reference=True, expect={"norm_rope": 1, "attention": 1})
    with torch._dynamo.config.patch(use_graph_deduplication=True):
        assert_step(torch.compile(model, backend=compiler, fullgraph=True), model)
