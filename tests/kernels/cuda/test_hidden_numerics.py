"""The norm over the whole row against float64, forward and each gradient; and the same bits again (on hardware)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hidden_cases import HIDDEN_CASES, MODELS
from norm_rope_cases import Case, Inputs, call, make_inputs, model
from test_norm_rope_numerics import (  # noqa: F401  the fixture poisons `torch.empty`
    check,
    gradients,
    poisoned_memory,
    relative_error,
)
from torch import Tensor

from fusion_pass.kernels import norm_rope, qk_norm_rope

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", HIDDEN_CASES, ids=str)
def test_on_gpu(case: Case, device: torch.device) -> None:
    check(case, "cuda", device)


def dense(case: Case, device: torch.device) -> Inputs:
    """The heads of a token follow each other, as they do in a model: a copy takes several. (Other tests have gaps.)"""
    inputs = make_inputs(case, device)
    inputs.x = [x.detach().contiguous().requires_grad_() for x in inputs.x]
    return inputs


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_heads_that_adjoin(case: Case, device: torch.device) -> None:
    inputs = dense(case, device)
    exact_inputs = inputs.to(torch.float64, str(device))
    results = [model(case, exact_inputs), model(case, inputs), call(case, inputs, "cuda")]
    upstream = [torch.randn_like(t).double() for t in results[2]]
    found = [
        [*result, *gradients(result, upstream, of.differentiable())]
        for result, of in zip(results, (exact_inputs, inputs, inputs), strict=True)
    ]
    for exact, eager, ours in zip(*found, strict=True):
        rounding = torch.finfo(ours.dtype).eps * (0.5 if ours.dtype == torch.bfloat16 else 4)
        assert relative_error(ours, exact) <= max(relative_error(eager, exact), rounding)


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_the_same_bits_again(case: Case, device: torch.device) -> None:
    """Teams that meet at barriers of their own, slots that are filled again while others read: forty times."""
    inputs = dense(case, device)
    results = call(case, inputs, "cuda")
    grads = [torch.randn_like(t) for t in results]
    first = torch.autograd.grad(results, inputs.differentiable(), grads, retain_graph=True)
    for _ in range(40):
        again = call(case, inputs, "cuda")
        assert all(torch.equal(a, b) for a, b in zip(results, again, strict=True))
        once_more = torch.autograd.grad(results, inputs.differentiable(), grads, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, once_more, strict=True))


@pytest.mark.parametrize("offset", [1, 4])
@pytest.mark.parametrize("heads", [16, 80, 128])
def test_addresses_that_no_bulk_copy_takes(device: torch.device, heads: int, offset: int) -> None:
    """The kernel of such a call loads; the second call of a shape is a replay, and its addresses may be others. One,
    two and four slots a thread."""
    tokens = 300
    options: dict[str, Any] = {"norm": "rms", "eps": 1e-6, "norm_scope": "hidden", "rotary_dim": 128}
    table = torch.randn(1, tokens, 64, device=device)
    weight = torch.randn(heads * 128, device=device, requires_grad=True)
    size = tokens * heads * 128
    buffer = torch.randn(size + 16, device=device, dtype=torch.bfloat16)
    upstream = torch.randn(1, tokens, heads, 128, device=device, dtype=torch.bfloat16)

    def step(x: Tensor, backend: str) -> tuple[Tensor, ...]:
        x, given = x.requires_grad_(), weight.detach().to(torch.promote_types(x.dtype, torch.float32)).requires_grad_()
        y = norm_rope(x, table, table, None, given, **options, backend=backend)
        return (y, *torch.autograd.grad(y, (x, given), upstream.to(y.dtype)))

    exact = step(buffer[:size].view(1, tokens, heads, 128).double(), "reference")
    for start in (0, offset, 0, offset):
        x = torch.empty_like(buffer)[start : start + size].copy_(buffer[:size]).view(1, tokens, heads, 128)
        for ours, truth in zip(step(x, "cuda"), exact, strict=True):
            rounding = torch.finfo(ours.dtype).eps * (0.5 if ours.dtype == torch.bfloat16 else 4)
            assert relative_error(ours, truth) <= rounding


@pytest.mark.parametrize("shape", [(0, 3, 4, 8), (2, 0, 4, 8)])
def test_no_tokens(device: torch.device, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True, device=device)
    table, weight = torch.randn(1, shape[1], 4, device=device), torch.randn(32, requires_grad=True, device=device)
    y = norm_rope(
        x, table, table, None, weight, norm="rms", norm_scope="hidden", eps=1e-6, rotary_dim=8, backend="cuda"
    )
    y.sum().backward()
    assert y.shape == shape
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0] * 32


def test_parameters_of_two_dtypes_and_one_that_is_absent(device: torch.device) -> None:
    """They are brought to a common form, and the gradients back from it."""
    q, k = (torch.randn(1, 200, heads, 64, device=device, dtype=torch.bfloat16) for heads in (8, 4))
    table = torch.randn(1, 200, 32, device=device)
    options: dict[str, Any] = {"norm": "rms", "eps": 1e-6, "norm_scope": "hidden", "rotary_dim": 64}
    for dtypes in ((torch.float32, torch.bfloat16), (torch.bfloat16, None), (None, torch.float32)):
        weights = [
            None if dtype is None else torch.randn(heads * 64, device=device, dtype=dtype, requires_grad=True)
            for heads, dtype in zip((8, 4), dtypes, strict=True)
        ]
        found = []
        for backend, dtype in (("cuda", None), ("reference", torch.float64)):
            given = [t if t is None else t.detach().to(dtype) for t in (q, k, table, table, None, *weights)]
            wanted = [w.requires_grad_() for w in given[-2:] if w is not None]
            results = qk_norm_rope(*given, **options, backend=backend)
            found.append([*results, *torch.autograd.grad(results, wanted, [torch.ones_like(t) for t in results])])
        for ours, exact in zip(*found, strict=True):
            rounding = torch.finfo(ours.dtype).eps * (0.5 if ours.dtype == torch.bfloat16 else 4)
            assert relative_error(ours, exact) <= rounding
