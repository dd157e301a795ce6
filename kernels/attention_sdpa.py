"""`attention` by PyTorch's cuDNN kernels, where they compute the same (`attention_kernels._sdpa_supports`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .attention_problem import Problem

_aten = torch.ops.aten

REPEATABLE = True
"""See `recording.py`."""


def forward(problem: Problem, order: str) -> tuple[Tensor, Tensor]:
    """(out, lse); see `AttentionBackend`. cuDNN gives out the memory order of q; the other order costs a copy."""
    result = _aten._scaled_dot_product_cudnn_attention(
        problem.q.transpose(1, 2),
        problem.k.transpose(1, 2),
        problem.v.transpose(1, 2),
        None,
        True,
        0.0,
        problem.seen.right is not None,
        False,
        scale=problem.scale,
    )
    out = problem.empty_out(order)
    computed = result[0].transpose(1, 2)
    out = computed if computed.stride() == out.stride() else out.copy_(computed)
    return out, result[1].reshape(problem.q.shape[0], problem.q.shape[2], problem.q.shape[1])


def backward(
    problem: Problem,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    needs: Sequence[bool],
    into: Sequence[Tensor | None] = (None, None, None),
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k and v; see `AttentionBackend`."""
    assert grad_lse is None, "the registry does not choose this back end when lse has a gradient"
    q, k = problem.q, problem.k
    no_seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of the dropout, which there is not
    gradients = _aten._scaled_dot_product_cudnn_attention_backward(
        (grad_out if grad_out.stride(3) == 1 else grad_out.contiguous()).transpose(1, 2),
        q.transpose(1, 2),
        k.transpose(1, 2),
        problem.v.transpose(1, 2),
        out.transpose(1, 2),
        lse[..., None],
        no_seed,
        no_seed,
        None,
        None,
        None,
        q.shape[1],
        k.shape[1],
        0.0,
        problem.seen.right is not None,
        scale=problem.scale,
    )
    results: list[Tensor | None] = []
    for gradient, needed, given in zip(gradients, needs, into, strict=False):
        computed = gradient.transpose(1, 2)
        results.append(None if not needed else computed if given is None else given.copy_(computed))
    return *results, None
