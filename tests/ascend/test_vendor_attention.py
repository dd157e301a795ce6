"""The vendor's attention operators: every call bound to the schema of the real wheel and to an emulation of its
documentation.

The schemas are those of torch_npu 2.13.0, registered here under the same names, so PyTorch's dispatcher checks each
argument's name, type and kind. The implementations are written from the operator documentation and nothing else: they
expand the sparse modes, compressed mask and token counts to a full mask. What the hardware does is not part of this
test.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from ascend_tools import device, needs, schemas
from torch import Tensor

from fusion_pass.kernels import attention_reference, registry
from fusion_pass.kernels.ascend import attention
from fusion_pass.kernels.attention_problem import Problem, resolve

needs(device.missing())
needs(schemas.missing())

B, N2, D = 2, 2, 16
NO_LIMIT = 2147483647  # the default in the schema; the dispatcher leaves out arguments that equal their default


def hidden(atten_mask: Tensor | None, mode: int, before: int, after: int, rows: int, cols: int) -> Tensor:
    """True where a score takes no part, from the documentation of `sparse_mode`."""
    if atten_mask is None:
        return torch.zeros(rows, cols, dtype=torch.bool)
    if mode == 1:
        assert atten_mask.shape[-2:] == (rows, cols)
        assert atten_mask.dim() == 2 or (atten_mask.dim() == 4 and tuple(atten_mask.shape[:2]) != (1, B))
        return atten_mask
    assert atten_mask.dtype == torch.bool
    assert torch.equal(atten_mask, torch.triu(torch.ones(2048, 2048), 1).bool())
    i, j = torch.arange(rows)[:, None], torch.arange(cols)[None, :]
    if mode == 2:
        return j > i
    i = i + cols - rows
    if mode == 3:
        return j > i
    assert mode == 4
    assert before + after >= 0, "the band is empty"
    return (j > i + after) | (j < i - before)


def hidden_by(o: dict[str, Any], query: Tensor, key: Tensor) -> Tensor:
    mode, mask = o.get("sparse_mode", 0), o.get("atten_mask")
    before, after = (o.get(name, NO_LIMIT) for name in ("pre_tokens", "next_tokens"))
    return hidden(mask, mode, before, after, query.shape[1], key.shape[1])


def scores_of(q: Tensor, k: Tensor, scale: float, mask: Tensor) -> Tensor:
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    return torch.einsum("bind,bjnd->bnij", q.double(), k.double()).mul(scale).masked_fill(mask, -torch.inf)


def emulate(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **o: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    assert input_layout == "BSND"
    assert head_num == query.shape[2]
    assert o.get("keep_prob", 1.0) == 1.0
    mask = hidden_by(o, query, key)
    scores = scores_of(query, key, o["scale"], mask)
    if o.get("inner_precise", 0) != 2:
        assert scores.isfinite().any(-1).all(), "a row without keys, and invalid-row computation is off"
    maximum = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    weights = (scores - maximum).exp()
    total = weights.sum(-1, keepdim=True)
    v = value.repeat_interleave(query.shape[2] // value.shape[2], 2).double()
    out = torch.einsum("bnij,bjnd->bind", weights / total.clamp(min=1e-30), v).to(query.dtype)
    eight = (*total.shape[:-1], 8)
    return out, maximum.expand(eight).float(), total.expand(eight).float(), torch.empty(0), 0, 0, 0


def emulate_grad(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, **o: Any
) -> tuple[Tensor, ...]:
    assert input_layout == "BSND"
    assert head_num == query.shape[2]
    mask = hidden_by(o, query, key)
    scores = scores_of(query, key, o["scale_value"], mask)
    assert o["softmax_max"].shape == (*scores.shape[:-1], 8) == o["softmax_sum"].shape
    p = (scores - o["softmax_max"][..., :1].double()).exp() / o["softmax_sum"][..., :1].double()
    group = query.shape[2] // key.shape[2]
    k, v = (t.repeat_interleave(group, 2).double() for t in (key, value))
    g = dy.double()
    delta = (g * o["attention_in"].double()).sum(-1).transpose(1, 2)[..., None]
    ds = p * (torch.einsum("bind,bjnd->bnij", g, v) - delta) * o["scale_value"]
    dq = torch.einsum("bnij,bjnd->bind", ds, k)
    dk = torch.einsum("bnij,bind->bjnd", ds, query.double()).unflatten(2, (-1, group)).sum(3)
    dv = torch.einsum("bnij,bind->bjnd", p, g).unflatten(2, (-1, group)).sum(3)
    return *(t.to(query.dtype) for t in (dq, dk, dv)), *(torch.empty(0) for _ in range(4))


def emulate_decode(query: Tensor, key: Tensor, value: Tensor, **o: Any) -> tuple[Tensor, Tensor]:
    assert o["softmax_lse_flag"]
    assert o["input_layout"] == "BSND"
    assert (o["num_heads"], o["num_key_value_heads"]) == (query.shape[2], key.shape[2])
    assert all(t.is_contiguous() for t in (query, key, value))
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert query.shape[1] == 1
    out, maximum, total, *_ = emulate(query, key, value, query.shape[2], "BSND", scale=o["scale"])
    return out, maximum[..., :1] + total[..., :1].log()


@pytest.fixture(scope="module", autouse=True)
def operators() -> Any:
    library = torch.library.Library("npu", "FRAGMENT")
    for name, function in {
        "npu_fusion_attention_v2": emulate,
        "npu_fusion_attention_grad_v2": emulate_grad,
        "npu_fused_infer_attention_score": emulate_decode,
    }.items():
        library.define(schemas.read(name))
        library.impl(name, function, "CPU")
    yield
    library._destroy()


VISIBLE = [
    {"causal": causal, "window_left": left, "window_right": right}
    for causal, left, right in itertools.product(("none", "top_left", "bottom_right"), (-1, 0, 3), (-1, 0, 2))
]


def problem_of(queries: int, keys: int, group: int, dtype: torch.dtype, mask: Tensor | None, visible: Any) -> Problem:
    generator = torch.Generator().manual_seed(queries * 1000 + keys)

    def normal(length: int, heads: int) -> Tensor:
        return torch.randn((B, heads, length, D), generator=generator).to(dtype).transpose(1, 2)

    seen = resolve(queries, keys, mask=mask, **visible)
    return Problem(normal(queries, N2 * group), normal(keys, N2), normal(keys, N2), None, seen, 0.3, 0.0)


def request_of(problem: Problem, op: str, visible: Any, **more: Any) -> registry.Request:
    present = {"q": problem.q, "k": problem.k, "v": problem.v}
    if problem.seen.mask is not None:
        present["mask"] = problem.seen.mask
    return registry.Request(
        op=op,
        device=device.stand_in(),
        dtypes={n: t.dtype for n, t in present.items()} | more.pop("dtypes", {}),
        shapes={n: tuple(t.shape) for n, t in present.items()},
        options={**visible, "softcap": 0.0, "deterministic": False, **more},
        training=op == "attention_backward",
    )


def check(problem: Problem) -> None:
    exact = Problem(problem.q.double(), problem.k.double(), problem.v.double(), None, problem.seen, problem.scale, 0.0)
    out, lse = attention.forward(problem, "bshd")
    exact_out, exact_lse = attention_reference.forward(exact, "bshd")
    tolerance = 2 * torch.finfo(problem.q.dtype).eps
    torch.testing.assert_close(out.double(), exact_out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-5, rtol=1e-5)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    exact_grads = attention_reference.backward(exact, grad.double(), None, exact_out, exact_lse, (True,) * 3 + (False,))
    # From the exact out and lse, so that only the mapping is compared.
    grads = attention.backward(problem, grad, None, exact_out, exact_lse.float(), (True,) * 3 + (False,))
    for ours, expected in zip(grads[:3], exact_grads[:3], strict=True):
        assert ours is not None
        assert ours.is_contiguous()
        torch.testing.assert_close(ours.double(), expected, atol=20 * tolerance, rtol=4 * tolerance)


@pytest.mark.parametrize("visible", VISIBLE, ids=lambda v: f"{v['causal']} {v['window_left']} {v['window_right']}")
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (5, 11), (11, 5), (1, 7)])
def test_visibility(queries: int, keys: int, visible: dict[str, Any]) -> None:
    """Every visibility is either refused, because some query sees no key, or computed as the reference does."""
    problem = problem_of(queries, keys, 2, torch.float32, None, visible)
    reason = attention.supports(request_of(problem, "attention", visible))
    keep = problem.seen.keep(queries, keys, torch.device("cpu"))
    sees = keep is None or bool(keep.any(-1).all())
    assert (reason is None) == sees, reason
    if reason is None:
        check(problem)


@pytest.mark.parametrize("shape", [(1, 1, 9, 9), (B, 1, 9, 9), (B, 4, 9, 9), (1, 4, 9, 9), (B, 1, 1, 9)])
@pytest.mark.parametrize("visible", [VISIBLE[0], VISIBLE[9], VISIBLE[15]])
def test_boolean_mask(shape: tuple[int, ...], visible: dict[str, Any]) -> None:
    """With rows that see nothing among them."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[..., 0, :] = False
    problem = problem_of(9, 9, 2, torch.float32, mask, visible)
    assert attention.supports(request_of(problem, "attention", visible)) is None
    check(problem)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("group", [1, 4])
def test_one_query_is_decoding(dtype: torch.dtype, group: int) -> None:
    problem = problem_of(1, 7, group, dtype, None, VISIBLE[0])
    expected = "npu_fusion_attention_v2" if dtype == torch.float32 else "npu_fused_infer_attention_score"
    assert attention.forward_call(problem).name == expected
    out, lse = attention.forward(problem, "bhsd")
    assert out.transpose(1, 2).is_contiguous()
    assert math.isfinite(lse.sum().item())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"softcap": 30.0}, "softcap"),
        ({"dtypes": {"sinks": torch.float32}}, "sinks"),
        ({"dtypes": {"q_segment_ids": torch.int32}}, "q_segment_ids"),
        ({"dtypes": {"cu_seqlens_q": torch.int32}}, "cu_seqlens_q"),
        ({"dtypes": {"mask": torch.float32}}, "mask is torch.float32"),
        ({"dtypes": {"grad_lse": torch.float32}}, "lse has a gradient"),
        ({"dtypes": {"q": torch.float64}}, "q is torch.float64"),
        ({"deterministic": True}, "deterministic"),
    ],
)
def test_what_cannot_be_mapped_is_refused(change: dict[str, Any], reason: str) -> None:
    problem = problem_of(9, 9, 1, torch.bfloat16, None, VISIBLE[0])
    refusal = attention.supports(request_of(problem, "attention_backward", VISIBLE[0], **change))
    assert refusal is not None
    assert reason in refusal


def test_a_call_that_does_not_fit_the_schema_fails() -> None:
    """The dispatcher does look: the test above would see a renamed argument."""
    problem = problem_of(9, 9, 1, torch.float32, None, VISIBLE[0])
    call = attention.forward_call(problem)
    with pytest.raises(RuntimeError, match="pre_tockens"):
        attention.Call(call.name, call.arguments, {**call.options, "pre_tockens": 1})()
