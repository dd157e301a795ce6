"""`attention` forward through the vendor's operator for inference: the back end `ascend_inference`.

`npu_fused_infer_attention_score` has a path for a single query (decoding) and one for many; its layout, modes and
compressed mask are those of `attention.py`, and its second result is the log-sum itself. The documentation of
`npu_fusion_attention_v2` calls that one "for training only", and not every product for inference has it, so where no
gradient will be asked for this one stands before it. `npu_prompt_flash_attention` is not used: it has no log-sum.

Left to the other one, because this documentation does not say enough: windows, masks by head, sinks (packed documents
of bfloat16 only). Source: `_op_plugin_docs.py` inside the torch_npu 2.13.0 wheel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention_problem import Problem
from ..registry import Request
from .attention import HALF_TYPES, Call, finish, some_row_sees_no_key, unsupported, visibility

LARGEST_HEAD_DIM = 512
LARGEST_WIDTH = 65535
"""Of heads times head_dim, exclusive, in the layout BSND."""
LARGEST_GROUP = 64


def supports(request: Request) -> str | None:
    """Why the vendor's operator for inference cannot compute this call exactly, or None."""
    if request.training:
        return "a gradient will be asked for, and it is for inference."
    for name in ("sinks", "q_segment_ids", "cu_seqlens_q"):
        if name in request.dtypes:
            return f"{name} are given; it takes none."
    for name in ("window_left", "window_right"):
        if request.options.get(name, -1) != -1:
            return f"{name} is {request.options[name]}; from where its window counts is not documented."
    return unsupported(request) or _mask(request) or _shapes(request) or some_row_sees_no_key(request)


def _mask(request: Request) -> str | None:
    if "mask" not in request.dtypes:
        return None
    shape = request.shapes["mask"]
    if request.dtypes["mask"] != torch.bool or (len(shape) > 2 and shape[-3] != 1):
        return f"mask is {request.dtypes['mask']} of shape {list(shape)}; it takes booleans, the same for all heads."
    if request.shapes["q"][1] in (None, 1):
        return "mask is given with a single query, for which rows without keys are not documented."
    return None


def _shapes(request: Request) -> str | None:
    q, k = request.shapes["q"], request.shapes["k"]
    if request.dtypes["q"] not in HALF_TYPES:
        return f"q is {request.dtypes['q']}; it takes bfloat16 or float16."
    assert q[2] is not None
    assert q[3] is not None  # as `unsupported` has checked
    if q[1] == 1 and request.options.get("causal", "none") == "top_left":
        return "causal is 'top_left' with a single query, for which it looks at no mask."
    if q[3] % 16 or q[3] > LARGEST_HEAD_DIM:
        return f"head_dim is {q[3]}; it takes multiples of 16 up to {LARGEST_HEAD_DIM}."
    if q[2] * q[3] >= LARGEST_WIDTH:
        return f"{q[2]} heads of {q[3]} are {q[2] * q[3]} elements; it takes fewer than {LARGEST_WIDTH}."
    if k[2] is None or q[2] > LARGEST_GROUP * k[2]:
        return f"there are {q[2]} query heads for {k[2]} of keys; it takes up to {LARGEST_GROUP} for each."
    return None


def forward(problem: Problem, order: str) -> tuple[Tensor, Tensor]:
    """(out, lse); see `AttentionBackend`."""
    computed, lse = forward_call(problem)()
    return finish(problem, computed, lse.squeeze(-1), order)


def forward_call(problem: Problem) -> Call:
    """The call that computes out and lse. Layout BSND, of contiguous tensors only."""
    q, k, v = problem.q, problem.k, problem.v
    return Call(
        "npu_fused_infer_attention_score",
        (q.contiguous(), k.contiguous(), v.contiguous()),
        {
            "num_heads": q.shape[2],
            "num_key_value_heads": k.shape[2],
            "input_layout": "BSND",
            "scale": problem.scale,
            "softmax_lse_flag": True,
            **visibility(problem),
        },
    )
