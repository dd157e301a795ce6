"""Attention three times: the call under test, the reference in float64, and eager PyTorch in the dtype as yardstick."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusion_pass.kernels import attention_reference
from fusion_pass.kernels.attention_problem import Problem

from .closeness import assert_no_worse, poisoned_memory


def exactly(problem: Problem) -> Problem:
    """The same values in float64."""
    q, k, v = (t.double() for t in (problem.q, problem.k, problem.v))
    return replace(problem, q=q, k=k, v=v, sinks=None if problem.sinks is None else problem.sinks.double())


def eager(problem: Problem) -> tuple[Tensor, Tensor]:
    """As a model writes it: products in the dtype, softmax in float32, probabilities rounded to the dtype."""
    q, k, v, seen = problem.q, problem.k, problem.v, problem.seen
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(2, 3)) * problem.scale
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if seen.mask is not None and seen.mask.dtype != torch.bool:
        scores = scores + seen.mask.to(scores.dtype)
    wide = scores.float()
    keep = seen.keep(q.shape[2], k.shape[2], q.device)
    empty = torch.zeros((), dtype=torch.bool)
    if keep is not None:
        wide = wide.masked_fill(~keep, -torch.inf)
        empty = ~keep.any(-1, keepdim=True)
    if problem.sinks is not None:
        wide = torch.cat([wide, problem.sinks.float()[None, :, None, None].expand(*wide.shape[:3], 1)], -1)
        empty = torch.zeros((), dtype=torch.bool)
    wide = wide.masked_fill(empty, 0)
    probabilities = torch.softmax(wide, -1).masked_fill(empty, 0)[..., : k.shape[2]]
    lse = torch.logsumexp(wide, -1, keepdim=True).masked_fill(empty, -torch.inf)[..., 0]
    return (probabilities.to(v.dtype) @ v).transpose(1, 2), lse


def eager_gradients(problem: Problem, grad_out: Tensor) -> tuple[Tensor, ...]:
    """Of q, k, v and the sinks (if there are any), by autograd through `eager`."""
    leaves = [t.detach().clone().requires_grad_() for t in (problem.q, problem.k, problem.v)]
    sinks = None if problem.sinks is None else problem.sinks.detach().clone().requires_grad_()
    out, _ = eager(replace(problem, q=leaves[0], k=leaves[1], v=leaves[2], sinks=sinks))
    return torch.autograd.grad(out, leaves + ([] if sinks is None else [sinks]), grad_out)


def check_forward(backend: Any, problem: Problem, order: str = "bshd") -> tuple[Tensor, Tensor]:
    """out and lse of `backend`, no worse than eager's; returns them."""
    with poisoned_memory():
        out, lse = backend.forward(problem, order)
    eager_out, eager_lse = eager(problem)
    exact_out, exact_lse = attention_reference.forward(exactly(problem), "bshd")
    assert_no_worse(out, eager_out, exact_out, "out")
    assert_no_worse(lse, eager_lse, exact_lse, "lse")
    return out, lse


def check_backward(backend: Any, problem: Problem, out: Tensor, lse: Tensor, seed: int = 1) -> None:
    """The gradients of `backend` from out and lse of a forward, no worse than eager's."""
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype)
    needs: Sequence[bool] = (True, True, True, problem.sinks is not None)
    with poisoned_memory():
        computed = backend.backward(problem, grad_out, None, out, lse, needs)
    exact = exactly(problem)
    exact_out, exact_lse = attention_reference.forward(exact, "bshd")
    expected = attention_reference.backward(exact, grad_out.double(), None, exact_out, exact_lse, needs)
    yardsticks = eager_gradients(problem, grad_out)
    for name, gradient, yardstick, value in zip(
        ("dq", "dk", "dv", "dsinks"), computed, yardsticks, expected, strict=False
    ):
        assert gradient is not None
        assert value is not None
        assert gradient.is_contiguous(), name
        assert_no_worse(gradient, yardstick, value, name)
