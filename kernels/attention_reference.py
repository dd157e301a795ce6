"""`attention` in plain ATen operations, forward and backward: any device, float64 included.

The S x S scores are materialised. Arithmetic is float32 (float64 for float64 inputs) with one rounding, at the end.
The backward is written out rather than left to autograd, so that it can stand behind the operator's own backward:

    s = cap tanh(scale q.k / cap) + mask        p = softmax(s)          out = p v
    ds = p (grad_out.v - delta),                delta = sum_d grad_out out - grad_lse
    dq = scale sum_k ds' k,  dk = scale sum_q ds' q,  dv = sum_q p grad_out,     ds' = ds (1 - tanh^2)
    dsink = - sum_q p_sink delta                (a sink is a column of scores whose value row is zero)

The probabilities are a softmax, not exp(s - lse): a large lse has lost the digits of the row's sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .attention_problem import Problem, arithmetic_dtype


def forward(problem: Problem, order: str) -> tuple[Tensor, Tensor]:
    """(out `[B, Sq, Hq, Dv]`, lse `[B, Hq, Sq]`); see `AttentionBackend`."""
    q = problem.q
    scores, _ = _scores(problem)
    columns = _with_sinks(scores, problem)
    lse = problem.empty_lse()
    if columns.shape[-1]:
        lse.copy_(torch.logsumexp(columns, dim=-1))
    else:
        lse.fill_(float("-inf"))
    probabilities = _softmax(columns)[..., : scores.shape[-1]]
    out = problem.empty_out(order)
    out.copy_(torch.einsum("bhqk,bkhd->bqhd", probabilities, _per_query_head(problem.v, q).to(scores.dtype)))
    return out, lse


def backward(
    problem: Problem,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    needs: Sequence[bool],
    into: Sequence[Tensor | None] = (None, None, None),
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v and the sinks; see `AttentionBackend`."""
    dq, dk, dv = problem.gradients(needs, into)
    q, k, v, scale = problem.q, problem.k, problem.v, problem.scale
    scores, tanh = _scores(problem)
    dtype = scores.dtype
    do = grad_out.to(dtype)
    columns = _softmax(_with_sinks(scores, problem))
    probabilities = columns[..., : scores.shape[-1]]
    delta = (do * out.to(dtype)).sum(-1).transpose(1, 2)
    if grad_lse is not None:
        delta = delta - grad_lse.to(dtype)
    dscores = probabilities * (torch.einsum("bqhd,bkhd->bhqk", do, _per_query_head(v, q).to(dtype)) - delta[..., None])
    if tanh is not None:
        dscores = dscores * (1 - tanh * tanh)
    if dq is not None:
        dq.copy_(scale * torch.einsum("bhqk,bkhd->bqhd", dscores, _per_query_head(k, q).to(dtype)))
    if dk is not None:
        dk.copy_(_per_kv_head(scale * torch.einsum("bhqk,bqhd->bkhd", dscores, q.to(dtype)), k))
    if dv is not None:
        dv.copy_(_per_kv_head(torch.einsum("bhqk,bqhd->bkhd", probabilities, do), v))
    dsinks = None
    if problem.sinks is not None and needs[3]:
        dsinks = -(columns[..., -1] * delta).sum((0, 2)).to(problem.sinks.dtype)
    return dq, dk, dv, dsinks


def sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """`[Hq]` from lse and delta, both `[B, Hq, Sq]`. A sum in a fixed order: the same bits every time."""
    share = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse.masked_fill(lse == float("-inf"), float("inf")))
    return -(share * delta).sum((0, 2)).to(sinks.dtype)


def _scores(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Scores with every unseen key at -inf, and the tanh of the softcap (None without one)."""
    q, k, seen = problem.q, problem.k, problem.seen
    dtype = arithmetic_dtype(q.dtype)
    scores = problem.scale * torch.einsum("bqhd,bkhd->bhqk", q.to(dtype), _per_query_head(k, q).to(dtype))
    tanh = None
    if problem.softcap > 0:
        tanh = torch.tanh(scores / problem.softcap)
        scores = problem.softcap * tanh
    if seen.mask is not None and seen.mask.dtype != torch.bool:
        scores = scores + seen.mask.to(dtype)
    keep = seen.keep(q.shape[1], k.shape[1], q.device)
    if keep is not None:
        scores = scores.masked_fill(~keep, float("-inf"))
    return scores, tanh


def _with_sinks(scores: Tensor, problem: Problem) -> Tensor:
    """The scores, and the sinks as one more column."""
    if problem.sinks is None:
        return scores
    column = problem.sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], dim=-1)


def _softmax(columns: Tensor) -> Tensor:
    """0 in a row that sees nothing."""
    empty = (columns == float("-inf")).all(-1, keepdim=True)
    return torch.softmax(columns.masked_fill(empty, 0), dim=-1).masked_fill(empty, 0)


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Every key or value head repeated for the query heads that share it."""
    return x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) if x.shape[2] != q.shape[2] else x


def _per_kv_head(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradients of the repeated heads summed onto the head they came from."""
    return gradient.unflatten(2, (x.shape[2], -1)).sum(3) if gradient.shape[2] != x.shape[2] else gradient  # type: ignore[no-untyped-call]
