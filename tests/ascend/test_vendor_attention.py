"""The vendor's attention operators: every call bound to the schema of the real wheel and to an emulation of its
documentation (`ascend_tools/vendor.py`). What the hardware does is not part of this test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from ascend_tools import device, needs, schemas, vendor
from ascend_tools.attention_oracle import check_backward, check_forward
from ascend_tools.vendor_cases import VISIBLE, B, problem_of, request_of

from fusion_pass.kernels.ascend import attention
from fusion_pass.kernels.attention_problem import Problem

needs(device.missing())
needs(schemas.missing())


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    with vendor.registered():
        yield


@pytest.fixture(autouse=True)
def newest_cann(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "missing_operator", lambda name: None)


def check(problem: Problem) -> None:
    out, lse = check_forward(attention, problem)
    check_backward(attention, problem, out, lse)


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


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("shape", [(1, 1, 9, 9), (B, 1, 9, 9), (B, 4, 9, 9), (1, 4, 9, 9), (B, 1, 1, 9)])
@pytest.mark.parametrize("visible", [VISIBLE[0], VISIBLE[9], VISIBLE[15]])
def test_boolean_mask(shape: tuple[int, ...], visible: dict[str, Any], sinks: bool) -> None:
    """With rows that see nothing among them."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[..., 0, :] = False
    problem = problem_of(9, 9, 2, torch.bfloat16 if sinks else torch.float32, mask, visible, sinks)
    assert attention.supports(request_of(problem, "attention", visible)) is None
    check(problem)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("visible", [VISIBLE[0], VISIBLE[9], VISIBLE[15]])
def test_sinks(dtype: torch.dtype, visible: dict[str, Any]) -> None:
    problem = problem_of(7, 7, 2, dtype, None, visible, sinks=True)
    for op in ("attention", "attention_backward"):
        assert attention.supports(request_of(problem, op, visible)) is None
    check(problem)


def test_sinks_need_a_newer_cann(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def missing(name: str) -> str:
        asked.append(name)
        return f"the CANN installed here has no {name}."

    monkeypatch.setattr(attention, "missing_operator", missing)
    problem = problem_of(7, 7, 2, torch.bfloat16, None, VISIBLE[0], sinks=True)
    for op in ("attention", "attention_backward"):
        assert "sinks are given, and the CANN" in (attention.supports(request_of(problem, op, VISIBLE[0])) or "")
    assert asked == ["aclnnFlashAttentionScoreV3", "aclnnFlashAttentionScoreGradV3"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"softcap": 30.0}, "softcap"),
        ({"dtypes": {"sinks": torch.float32, "q": torch.float32}}, "their gradient is documented for half precision"),
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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"deterministic": True}, "deterministic is set, and the vendor's backward"),
        ({"dtypes": {"sinks": torch.float32, "q": torch.float32}}, "their gradient is documented for half precision"),
    ],
)
def test_a_forward_for_training_is_refused_for_what_the_backward_refuses(change: dict[str, Any], reason: str) -> None:
    """The backward is asked for by the forward's name."""
    problem = problem_of(9, 9, 1, torch.bfloat16, None, VISIBLE[0])
    request = request_of(problem, "attention", VISIBLE[0], **change)
    assert attention.supports(request) is None
    assert reason in (attention.supports(replace(request, training=True)) or "")


def test_a_forward_without_a_backward_is_not_for_training() -> None:
    request = request_of(problem_of(9, 9, 1, torch.bfloat16, None, VISIBLE[0]), "attention", VISIBLE[0], softcap=30.0)
    assert attention.flash_supports(request) is None
    assert "it has no backward" in (attention.flash_supports(replace(request, training=True)) or "")


def test_a_call_that_does_not_fit_the_schema_fails() -> None:
    """The dispatcher does look: the test above would see a renamed argument."""
    problem = problem_of(9, 9, 1, torch.float32, None, VISIBLE[0])
    call = attention.forward_call(problem)
    with pytest.raises(RuntimeError, match="pre_tockens"):
        attention.Call(call.name, call.arguments, {**call.options, "pre_tockens": 1})()
