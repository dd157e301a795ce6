"""`attention` through the vendor's operators: our arguments in theirs, exactly, or a reason why not.

| here | there |
|---|---|
| every key seen | no `atten_mask` (the modes and token counts are then ignored) |
| causal `top_left`, `bottom_right` | `sparse_mode` 2, 3 and the compressed mask: 2048 x 2048, True above the diagonal |
| a window | `sparse_mode` 4 with that mask; `pre_tokens`, `next_tokens` count from the bottom-right diagonal |
| a boolean mask, with any of these | `sparse_mode` 1 with the whole condition negated (theirs hides where True) |
| `sinks` | `sink`, in float32: one more score in the maximum and the sum of its head's rows |
| `out`, `lse` | `out`, `softmax_max + log(softmax_sum)` of the scaled scores, the sink among them |
| `lse` in the backward | `softmax_max = lse`, `softmax_sum = 1`: `exp(s - lse) / 1` is the same probability |

Sources: the operator documentation inside the torch_npu 2.13.0 wheel (`_op_plugin_docs.py`) and its schemas; for the
statistics the vendor's test on a 910B (op-plugin, `test/test_custom_ops/test_npu_flash_attention.py`); for the sink
and its gradient `aclnnFlashAttentionScoreV3.md` and `aclnnFlashAttentionScoreGradV3.md` of ops-transformer.

This is `npu_fusion_attention_v2` and its gradient. The operator for inference is in `inference_attention.py`, packed
documents are in `packed_attention.py`. `tests/ascend/test_vendor_attention.py` holds the calls to the schemas and to an
emulation of the documentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..attention_problem import Problem
from ..registry import Request
from .environment import missing_operator

NO_LIMIT = 2147483647
"""The vendor's default for `pre_tokens` and `next_tokens`."""
COMPRESSED = 2048
STATISTIC_COPIES = 8
"""The vendor keeps a row's maximum and sum eight times, `[B, N, S, 8]`."""
LARGEST_HEAD_DIM = 768
LARGEST_HEADS = 256
FLASH_LARGEST_HEAD_DIM = 256
SINK_OPERATORS = ("aclnnFlashAttentionScoreV3", "aclnnFlashAttentionScoreGradV3")
"""CANN's operators that take sinks, forward and backward."""
HALF_TYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Call:
    """One call of `torch.ops.npu.<name>`."""

    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def __call__(self) -> Any:
        return getattr(torch.ops.npu, self.name)(*self.arguments, **self.options)


def supports(request: Request) -> str | None:
    """Why the vendor's operators cannot compute this call exactly, or None."""
    if "q_segment_ids" in request.dtypes:
        return "q_segment_ids are given; the vendor takes documents as lengths, not as ids."
    if "cu_seqlens_q" in request.dtypes:
        return "cu_seqlens_q is given, which the vendor reads on the host; ascend_packed does, and waits for it."
    mask = request.dtypes.get("mask")
    if mask is not None and mask != torch.bool:
        return f"mask is {mask}; the vendor adds a bias before it hides keys, and -inf in a bias is not documented."
    return unsupported(request) or sinks_unsupported(request, SINK_OPERATORS) or some_row_sees_no_key(request)


def unsupported(request: Request) -> str | None:
    """What the vendor takes in no layout."""
    if request.device.type != "npu":
        return f"it runs on npu tensors, and these are on {request.device.type}."
    if request.options.get("softcap", 0.0):
        return "softcap is set; the vendor's operators have none."
    if "grad_lse" in request.dtypes:
        return "lse has a gradient, which the vendor's backward does not take."
    if needs_backward(request) and request.options.get("deterministic", False):
        return "deterministic is set, and the vendor's backward is not by default (aclnnFlashAttentionScoreGradV3.md)."
    if request.dtypes["q"] not in (*HALF_TYPES, torch.float32):
        return f"q is {request.dtypes['q']}; it takes bfloat16, float16 or float32."
    return _shapes_fit(request)


def needs_backward(request: Request) -> bool:
    """Whether it is the backward, or a forward whose backward this back end will be asked for."""
    return request.training or request.op == "attention_backward"


def sinks_unsupported(request: Request, operators: tuple[str, str]) -> str | None:
    """Why the sinks of this call are not taken, or None. `operators`: those of CANN, forward and backward; they are
    newer than the ones without sinks."""
    if "sinks" not in request.dtypes:
        return None
    if needs_backward(request) and request.dtypes["q"] not in HALF_TYPES:
        return f"sinks are given and q is {request.dtypes['q']}; their gradient is documented for half precision only."
    missing = missing_operators(request, operators)
    return None if missing is None else f"sinks are given, and {missing}"


def missing_operators(request: Request, operators: tuple[str, str]) -> str | None:
    """Why CANN cannot run this call with these operators (forward and backward), or None."""
    forward, backward = operators
    missing = missing_operator(forward) if request.op == "attention" else None
    return missing or (missing_operator(backward) if needs_backward(request) else None)


def _shapes_fit(request: Request) -> str | None:
    q, k, v = (request.shapes[name] for name in ("q", "k", "v"))
    if 0 in (*q, *k):
        return f"q has shape {list(q)} and k {list(k)}; the vendor's sizes start at 1."
    if q[3] is None or q[3] != v[3] or q[3] > LARGEST_HEAD_DIM:
        return f"head_dim is {q[3]} and {v[3]}; it takes equal ones up to {LARGEST_HEAD_DIM}."
    if q[2] is None or q[2] > LARGEST_HEADS:
        return f"there are {q[2]} query heads; it takes up to {LARGEST_HEADS}."
    return None


def some_row_sees_no_key(request: Request) -> str | None:
    """Whether causality or a window leaves a query without keys, as a reason.

    A boolean mask may leave a row empty, which is repaired afterwards.
    """
    q, k = request.shapes["q"][1], request.shapes["k"][1]
    causal = request.options.get("causal", "none")
    left, right = (request.options.get(name, -1) for name in ("window_left", "window_right"))
    assert isinstance(left, int)
    assert isinstance(right, int)
    if causal == "none" and left < 0 and right < 0:
        return None
    if q is None or k is None:
        return "a length is not known, so it is not known whether every query sees a key."
    offset = k - q if causal == "bottom_right" else 0
    last = 0 if causal != "none" else right
    first_row_empty = last >= 0 and offset + last < 0
    last_row_empty = left >= 0 and q - 1 + offset - left > k - 1
    if first_row_empty or last_row_empty:
        return f"with {q} queries and {k} keys some query sees no key; the vendor does not document its log-sum."
    return None


def flash_supports(request: Request) -> str | None:
    """Why our own forward kernel (`flash.py`) cannot compute this call, or None."""
    if request.device.type != "npu":
        return f"it runs on npu tensors, and these are on {request.device.type}."
    if request.training:
        return "it has no backward, and a gradient will be asked for."
    q, v = request.shapes["q"], request.shapes["v"]
    if request.dtypes["q"] not in (*HALF_TYPES, torch.float32):
        return f"q is {request.dtypes['q']}; it takes bfloat16, float16 or float32."
    if q[3] is None or q[3] != v[3] or q[3] % 16 or q[3] > FLASH_LARGEST_HEAD_DIM:
        return f"head_dim is {q[3]} and {v[3]}; it takes equal multiples of 16 up to {FLASH_LARGEST_HEAD_DIM}."
    if "cu_seqlens_k" in request.dtypes:
        return "cu_seqlens_k is given; the kernel has one diagonal for all documents."
    if request.dtypes.get("q_segment_ids") in (torch.int64, torch.uint64, torch.uint32):
        return f"q_segment_ids are {request.dtypes['q_segment_ids']}; it compares int32."
    if request.dtypes.get("k_segment_ids") in (torch.int64, torch.uint64, torch.uint32):
        return f"k_segment_ids are {request.dtypes['k_segment_ids']}; it compares int32."
    return None


def forward(problem: Problem, order: str) -> tuple[Tensor, Tensor]:
    """(out, lse); see `AttentionBackend`."""
    computed, maximum, total, *_ = forward_call(problem)()
    return finish(problem, computed, maximum[..., 0] + total[..., 0].log(), order)


def finish(problem: Problem, computed: Tensor, lse: Tensor, order: str) -> tuple[Tensor, Tensor]:
    """out in memory `order` and lse, with the rows repaired that see no key."""
    empty = _empty_rows(problem)
    if empty is not None:
        lse = torch.where(empty, lse_without_keys(problem), lse)
        computed = computed.masked_fill(empty.transpose(1, 2).unsqueeze(-1), 0)
    out = problem.empty_out(order)
    out = computed if computed.stride() == out.stride() else out.copy_(computed)
    return out, lse.contiguous()


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
    empty = _empty_rows(problem)
    if empty is not None:
        # A row without keys: no gradient flows in, and its probabilities only have to be finite.
        lse = lse.masked_fill(lse == -torch.inf, 0)
        grad_out = grad_out.masked_fill(empty.transpose(1, 2).unsqueeze(-1), 0)
    gradients = backward_call(problem, grad_out, out, lse)()
    results: list[Tensor | None] = []
    for gradient, needed, given in zip(gradients, needs, into, strict=False):
        results.append(None if not needed else gradient.contiguous() if given is None else given.copy_(gradient))
    return *results[:3], sinks_gradient(problem, gradients[6], needs)


def lse_without_keys(problem: Problem) -> Tensor:
    """`[Hq, 1]`, the log-sum of a row that sees no key: of its sink alone, if there is one."""
    if problem.sinks is None:
        return problem.q.new_full((problem.q.shape[2], 1), -torch.inf, dtype=torch.float32)
    return problem.sinks.float()[:, None]


def sinks_argument(problem: Problem) -> dict[str, Tensor]:
    """The sinks in the vendor's arguments."""
    return {} if problem.sinks is None else {"sink": problem.sinks.float().contiguous()}


def sinks_gradient(problem: Problem, computed: Tensor, needs: Sequence[bool]) -> Tensor | None:
    """The vendor's gradient of the sinks in their dtype, or None."""
    return computed.to(problem.sinks.dtype) if problem.sinks is not None and len(needs) > 3 and needs[3] else None


def forward_call(problem: Problem) -> Call:
    """The call that computes out and the softmax's statistics. Layout BSND."""
    return Call(
        "npu_fusion_attention_v2",
        (problem.q, problem.k, problem.v, problem.q.shape[2], "BSND"),
        {"scale": problem.scale, "keep_prob": 1.0, **visibility(problem), **sinks_argument(problem)},
    )


def backward_call(problem: Problem, grad_out: Tensor, out: Tensor, lse: Tensor) -> Call:
    """The call that computes the gradients of q, k, v and the sinks from out and the log-sum. Layout BSND."""
    maximum = copies(lse)
    return Call(
        "npu_fusion_attention_grad_v2",
        (problem.q, problem.k, problem.v, grad_out, problem.q.shape[2], "BSND"),
        {
            "softmax_max": maximum,
            "softmax_sum": torch.ones_like(maximum),
            "attention_in": out,
            "scale_value": problem.scale,
            "keep_prob": 1.0,
            **visibility(problem),
            **sinks_argument(problem),
        },
    )


def copies(lse: Tensor) -> Tensor:
    """The log-sum as the vendor keeps a row's statistic: eight times, side by side."""
    return lse.unsqueeze(-1).expand(*lse.shape, STATISTIC_COPIES).contiguous()


def visibility(problem: Problem) -> dict[str, Any]:
    """Which keys a query sees, in the vendor's arguments; empty when it sees all."""
    seen = problem.seen
    queries, keys = problem.q.shape[1], problem.k.shape[1]
    if seen.mask is not None:
        return {"atten_mask": _hidden(problem), "sparse_mode": 1, "inner_precise": 2}
    # A bound that no row reaches hides nothing: causality of a single query at the end, a window as long as the keys.
    left = seen.left if seen.left is not None and queries - 1 + seen.offset > seen.left else None
    right = seen.right if seen.right is not None and seen.offset + seen.right < keys - 1 else None
    if left is None and right is None:
        return {}
    compressed = {"atten_mask": compressed_mask(problem.q.device)}
    if left is None and right == 0:
        return {**compressed, "sparse_mode": 2 if seen.offset == 0 else 3}
    # The vendor counts from the diagonal that ends in the last query and key; ours may start at the first.
    shift = keys - queries - seen.offset
    return {
        **compressed,
        "sparse_mode": 4,
        "pre_tokens": NO_LIMIT if left is None else left + shift,
        "next_tokens": NO_LIMIT if right is None else right - shift,
    }


def _hidden(problem: Problem) -> Tensor:
    """The condition negated, in a shape the vendor takes: `[B, N, S, S]`, `[B, 1, S, S]` or `[1, 1, S, S]`."""
    queries, keys = problem.q.shape[1], problem.k.shape[1]
    keep = problem.seen.keep(queries, keys, problem.q.device)
    assert keep is not None
    batch = problem.q.shape[0] if keep.shape[1] > 1 else keep.shape[0]
    return keep.logical_not().expand(batch, keep.shape[1], queries, keys).contiguous()


def _empty_rows(problem: Problem) -> Tensor | None:
    """`[B, N, S]`, True where a boolean mask leaves a query without a key."""
    if problem.seen.mask is None:
        return None
    batch, queries, heads, _ = problem.q.shape
    keep = problem.seen.keep(queries, problem.k.shape[1], problem.q.device)
    assert keep is not None
    return keep.any(-1).logical_not().expand(batch, heads, queries)


@lru_cache(maxsize=8)
def compressed_mask(device: torch.device) -> Tensor:
    """The vendor's compressed mask: one for all lengths."""
    return torch.ones((COMPRESSED, COMPRESSED), dtype=torch.bool, device=device).triu(1)
