"""`attention` over packed documents (`cu_seqlens`) through the vendor's `TND` layout: the back end `ascend_packed`.

The vendor takes the ends of the documents as integers on the host, also in the operator whose schema says `Tensor`
(op-plugin, `ToIntArrayRef`: "tensor must be on CPU"). Ours are on the device, so every call waits for the device to
read them: `backend="auto"` does not do that, the back end has to be named.

| here | there |
|---|---|
| documents | `actual_seq_qlen`, `actual_seq_kvlen`: the ends, without the leading zero and without empty documents |
| causal, the diagonal from each document's first or last pair | `sparse_mode` 2 or 3, which count in each document |
| a window, the diagonal from each document's last pair | `sparse_mode` 4 |
| tokens after the last document | cut off, and filled in afterwards |
| `lse` | `softmax_layout="TND"`: the statistics are `[T, N, 8]` (without it `[N, T, 8]` under the same shape) |

What the lengths turn out to be can stand against it (`plan` names the cases); then the reference computes the call.

`npu_fusion_attention`, not `_v2`: without a sink `_v2` takes `softmax_layout` and does not pass it on (op-plugin,
`FlashAttentionV2KernelNpuOpApi.cpp`), while this one raises where CANN cannot obey it. Sources: as in `attention.py`,
and `aclnnFlashAttentionVarLenScoreV4.md` and `aclnnFlashAttentionUnpaddingScoreGradV4.md` of ops-transformer. The
vendor's test on a 910B (`test_npu_flash_attention_tnd`) has documents of unequal query and key lengths, grouped
heads, this softmax layout, and the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import attention_reference
from ..attention_problem import Problem
from ..registry import Request
from .attention import (
    NO_LIMIT,
    Call,
    compressed_mask,
    copies,
    lse_without_keys,
    missing_operators,
    sinks_argument,
    sinks_gradient,
    sinks_unsupported,
    unsupported,
)

LARGEST_TOKENS = 1_000_000
LARGEST_DOCUMENTS = 1000
"""The documentation says both 1K and 2K."""
OPERATORS = ("aclnnFlashAttentionVarLenScoreV4", "aclnnFlashAttentionUnpaddingScoreGradV4")
"""CANN's operators with a softmax layout, forward and backward."""
SINK_OPERATORS = ("aclnnFlashAttentionVarLenScoreV5", "aclnnFlashAttentionUnpaddingScoreGradV5")


def supports(request: Request) -> str | None:
    """Why packed documents of these sizes are not taken, or None. What the lengths are is not known here."""
    if "cu_seqlens_q" not in request.dtypes:
        return "there is no cu_seqlens_q; it takes packed documents only."
    if "mask" in request.dtypes:
        return "mask is given; with packed documents the vendor takes none but its compressed one."
    for name in ("q", "k"):
        tokens = request.shapes[name][1]
        if tokens is None or tokens > LARGEST_TOKENS:
            return f"{name} has {tokens} tokens; it takes up to {LARGEST_TOKENS}."
    if "sinks" in request.dtypes:
        return unsupported(request) or sinks_unsupported(request, SINK_OPERATORS)
    return unsupported(request) or missing_operators(request, OPERATORS)


def gate(_: Request) -> str | None:
    """Why `backend="auto"` does not choose it."""
    return (
        "it reads cu_seqlens on the host, which waits for the device in every call; name it "
        "(backend='ascend_packed') to allow that."
    )


@dataclass(frozen=True)
class Plan:
    """Documents on the host, without the empty ones, and which keys a query sees in each."""

    query_ends: tuple[int, ...]
    key_ends: tuple[int, ...]
    masking: dict[str, Any]


def plan(problem: Problem) -> Plan | str:
    """The vendor's arguments for these documents, or why there are none. Waits for the device."""
    seen = problem.seen
    assert seen.documents is not None
    starts_q, starts_k = (tensor.tolist() for tensor in seen.documents)
    # The first document starts at token 0, whatever stands there.
    starts_q[0] = starts_k[0] = 0
    documents = [
        (q0, q1, k0, k1)
        for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False)
        if q1 > q0 or k1 > k0
    ]
    for q0, q1, k0, k1 in documents:
        if q1 <= q0 or k1 <= k0:
            return f"a document has {q1 - q0} queries and {k1 - k0} keys"
    if documents and (documents[-1][1] > problem.q.shape[1] or documents[-1][3] > problem.k.shape[1]):
        return "cu_seqlens ends after the last token"
    if len(documents) > LARGEST_DOCUMENTS:
        return f"there are {len(documents)} documents, more than {LARGEST_DOCUMENTS}"
    masking = _masking(problem, documents)
    if isinstance(masking, str):
        return masking
    return Plan(tuple(d[1] for d in documents), tuple(d[3] for d in documents), masking)


def _masking(problem: Problem, documents: Sequence[tuple[int, int, int, int]]) -> dict[str, Any] | str:
    seen = problem.seen
    if (seen.left is None and seen.right is None) or not documents:
        return {}
    # The key that the first query of a document faces, counted from the document's first key.
    firsts = [q0 - k0 for q0, _, k0, _ in documents]
    if seen.positions is not None:
        facing = seen.positions[torch.tensor([q0 for q0, *_ in documents], device=seen.positions.device)].tolist()
        firsts = [position - k0 for position, (_, _, k0, _) in zip(facing, documents, strict=True)]
    more_keys = [(k1 - k0) - (q1 - q0) for q0, q1, k0, k1 in documents]
    mask = {"atten_mask": compressed_mask(problem.q.device)}
    causal = seen.left is None and seen.right == 0
    if causal and not any(firsts):
        return {**mask, "sparse_mode": 2}
    if firsts != more_keys:
        return "a window counts from the first query and key of documents with unequal numbers of them"
    if min(more_keys) < 0:
        return "a document has more queries than keys, and its diagonal ends in the last of both"
    if causal:
        return {**mask, "sparse_mode": 3}
    return {
        **mask,
        "sparse_mode": 4,
        "pre_tockens": NO_LIMIT if seen.left is None else seen.left,
        "next_tockens": NO_LIMIT if seen.right is None else seen.right,
    }


def forward(problem: Problem, order: str) -> tuple[Tensor, Tensor]:
    """(out, lse); see `AttentionBackend`."""
    packed = plan(problem)
    if isinstance(packed, str):
        return attention_reference.forward(problem, order)
    out, lse = problem.empty_out(order), problem.empty_lse()
    queries = packed.query_ends[-1] if packed.query_ends else 0
    out[:, queries:] = 0
    lse[:, :, queries:] = lse_without_keys(problem)
    if queries:
        computed, maximum, total, *_ = forward_call(problem, packed)()
        out[0, :queries] = computed
        lse[0, :, :queries] = (maximum[..., 0] + total[..., 0].log()).t()
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
    assert grad_lse is None, "the registry does not choose this back end when lse has a gradient"
    packed = plan(problem)
    if isinstance(packed, str):
        return attention_reference.backward(problem, grad_out, grad_lse, out, lse, needs, into)
    gradients = problem.gradients(needs, into)
    if not packed.query_ends:
        for gradient in gradients:
            if gradient is not None:
                gradient.zero_()
        return *gradients, sinks_gradient(problem, problem.q.new_zeros(problem.q.shape[2]), needs)
    computed = backward_call(problem, packed, grad_out, out, lse)()
    ends = (packed.query_ends[-1], packed.key_ends[-1], packed.key_ends[-1])
    for gradient, value, end in zip(gradients, computed, ends, strict=False):
        if gradient is not None:
            gradient[0, :end] = value
            gradient[:, end:] = 0
    return *gradients, sinks_gradient(problem, computed[4], needs)


def forward_call(problem: Problem, packed: Plan) -> Call:
    """The call that computes out `[T, N, D]` and the softmax's statistics `[T, N, 8]`."""
    return Call(
        "npu_fusion_attention",
        (*_tokens(problem, packed), problem.q.shape[2], "TND"),
        {"scale": problem.scale, "keep_prob": 1.0, **_documents(packed), **sinks_argument(problem)},
    )


def backward_call(problem: Problem, packed: Plan, grad_out: Tensor, out: Tensor, lse: Tensor) -> Call:
    """The call that computes the gradients of q, k, v and (fifth) the sinks from out and the log-sum."""
    queries = packed.query_ends[-1]
    maximum = copies(lse[0, :, :queries].t())
    return Call(
        "npu_fusion_attention_grad",
        (*_tokens(problem, packed), grad_out[0, :queries], problem.q.shape[2], "TND"),
        {
            "softmax_max": maximum,
            "softmax_sum": torch.ones_like(maximum),
            "attention_in": out[0, :queries],
            "scale_value": problem.scale,
            "keep_prob": 1.0,
            **_documents(packed),
            **sinks_argument(problem),
        },
    )


def _tokens(problem: Problem, packed: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v `[T, N, D]` up to the end of the last document."""
    keys = packed.key_ends[-1]
    return problem.q[0, : packed.query_ends[-1]], problem.k[0, :keys], problem.v[0, :keys]


def _documents(packed: Plan) -> dict[str, Any]:
    return {
        "actual_seq_qlen": list(packed.query_ends),
        "actual_seq_kvlen": list(packed.key_ends),
        "softmax_layout": "TND",
        **packed.masking,
    }
