"""Packed documents through the vendor's TND layout: the lengths read on the host, each document attention of its own.

As in `test_vendor_attention.py`, the operators are an emulation of the documentation under the real schemas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from ascend_tools import device, needs, schemas, vendor
from ascend_tools.attention_oracle import check_backward, check_forward
from torch import Tensor

from fusion_pass.kernels import attention_reference, registry
from fusion_pass.kernels.ascend import attention, packed_attention
from fusion_pass.kernels.attention_problem import Problem, resolve

needs(device.missing())
needs(schemas.missing())

HEADS, KV_HEADS, D = 4, 2, 16


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    with vendor.registered():
        yield


@pytest.fixture(autouse=True)
def newest_cann(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "missing_operator", lambda name: None)


def starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def problem_of(
    q_lengths: Sequence[int],
    k_lengths: Sequence[int] | None = None,
    *,
    after: tuple[int, int] = (0, 0),
    dtype: torch.dtype = torch.float32,
    sinks: bool = False,
    **visible: Any,
) -> Problem:
    """Documents of these lengths, and `after` tokens (queries, keys) that belong to none."""
    generator = torch.Generator().manual_seed(sum(q_lengths))
    keys = sum(q_lengths if k_lengths is None else k_lengths) + after[1]
    queries = sum(q_lengths) + after[0]

    def normal(length: int, heads: int) -> Tensor:
        return torch.randn((1, length, heads, D), generator=generator).to(dtype)

    seen = resolve(
        queries,
        keys,
        cu_seqlens_q=starts(q_lengths),
        cu_seqlens_k=None if k_lengths is None else starts(k_lengths),
        **{"causal": "none", "window_left": -1, "window_right": -1, **visible},
    )
    sink = torch.randn(HEADS, generator=generator).to(dtype) if sinks else None
    return Problem(normal(queries, HEADS), normal(keys, KV_HEADS), normal(keys, KV_HEADS), sink, seen, 0.3, 0.0)


def check(problem: Problem) -> None:
    out, lse = check_forward(packed_attention, problem)
    check_backward(packed_attention, problem, out, lse)


SAME = {
    "every key": ({}, None),
    "causal from the first pair": ({"causal": "top_left"}, 2),
    "causal from the last pair": ({"causal": "bottom_right"}, 2),
    "window before": ({"causal": "top_left", "window_left": 2}, 4),
    "window after": ({"window_right": 1}, 4),
    "window on both sides": ({"window_left": 2, "window_right": 1}, 4),
}
"""For documents with the keys of their queries: visibility and sparse_mode."""


@pytest.mark.parametrize("after", [(0, 0), (3, 3)], ids=["", "tokens outside"])
@pytest.mark.parametrize("name", SAME)
def test_self_attention(name: str, after: tuple[int, int]) -> None:
    """With an empty document, and one of a single token."""
    visible, mode = SAME[name]
    problem = problem_of([5, 1, 0, 9], after=after, **visible)
    packed = packed_attention.plan(problem)
    assert isinstance(packed, packed_attention.Plan)
    assert packed.query_ends == packed.key_ends == (5, 6, 15)
    assert packed.masking.get("sparse_mode") == mode
    check(problem)


UNEQUAL = {
    "every key": ({}, None),
    "causal from the first pair": ({"causal": "top_left"}, 2),
    "causal from the last pair": ({"causal": "bottom_right"}, 3),
    "causal and a window": ({"causal": "bottom_right", "window_left": 2}, 4),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_more_keys_than_queries(name: str) -> None:
    """Each document has a diagonal of its own."""
    visible, mode = UNEQUAL[name]
    problem = problem_of([2, 5, 3], [4, 5, 9], after=(1, 2), **visible)
    packed = packed_attention.plan(problem)
    assert isinstance(packed, packed_attention.Plan)
    assert packed.masking.get("sparse_mode") == mode
    check(problem)


def test_equal_lengths_in_two_tensors_are_self_attention() -> None:
    problem = problem_of([2, 5], [2, 5], causal="top_left", window_left=1)
    packed = packed_attention.plan(problem)
    assert isinstance(packed, packed_attention.Plan)
    assert packed.masking["sparse_mode"] == 4
    check(problem)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("after", [(0, 0), (3, 3)], ids=["", "tokens outside"])
def test_sinks(dtype: torch.dtype, after: tuple[int, int]) -> None:
    check(problem_of([5, 1, 9], after=after, dtype=dtype, sinks=True, causal="top_left"))


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_no_documents(sinks: bool) -> None:
    check(problem_of([0, 0], after=(4, 4), dtype=torch.bfloat16, sinks=sinks, causal="top_left"))


@pytest.mark.parametrize(
    ("lengths", "visible", "reason"),
    [
        (([2, 3], [2, 0]), {}, "a document has 3 queries and 0 keys"),
        (([2, 0], [2, 3]), {}, "a document has 0 queries and 3 keys"),
        (([2, 4], [2, 3]), {"causal": "bottom_right"}, "more queries than keys"),
        (([2, 3], [2, 4]), {"causal": "top_left", "window_left": 1}, "a window counts from the first query"),
        (([2, 3], [2, 4]), {"window_right": 1}, "a window counts from the first query"),
        (([1] * 1001, [1] * 1001), {}, "there are 1001 documents"),
    ],
)  # fmt: skip
def test_what_the_lengths_rule_out_is_computed_by_the_reference(
    lengths: tuple[list[int], list[int]], visible: dict[str, Any], reason: str
) -> None:
    problem = problem_of(*lengths, **visible)
    found = packed_attention.plan(problem)
    assert isinstance(found, str)
    assert reason in found
    for ours, theirs in zip(
        packed_attention.forward(problem, "bshd"), attention_reference.forward(problem, "bshd"), strict=True
    ):
        assert torch.equal(ours, theirs)


def request_of(problem: Problem, op: str, **dtypes: torch.dtype) -> registry.Request:
    present = {"q": problem.q, "k": problem.k, "v": problem.v}
    return registry.Request(
        op=op,
        device=device.stand_in(),
        dtypes={name: tensor.dtype for name, tensor in present.items()} | {"cu_seqlens_q": torch.int32} | dtypes,
        shapes={name: tuple(tensor.shape) for name, tensor in present.items()},
        options={"causal": "top_left", "softcap": 0.0, "deterministic": False},
    )


@pytest.mark.parametrize("op", ["attention", "attention_backward"])
def test_it_has_to_be_named(op: str) -> None:
    (kernel,) = [kernel for kernel in registry.kernels(op) if kernel.name == "ascend_packed"]
    request = request_of(problem_of([2, 3]), op)
    assert kernel.supports(request) is None
    assert "waits for the device in every call; name it" in (kernel.gate(request) or "")


def test_what_no_length_allows_is_refused() -> None:
    problem = problem_of([2, 3])
    request = request_of(problem, "attention", mask=torch.bool)
    assert "mask is given" in (packed_attention.supports(request) or "")
    assert "float64" in (packed_attention.supports(request_of(problem, "attention", q=torch.float64)) or "")
    backward = request_of(problem, "attention_backward", sinks=torch.float32)
    assert "half precision" in (packed_attention.supports(backward) or "")
    assert "lse has a gradient" in (
        packed_attention.supports(request_of(problem, "attention_backward", grad_lse=torch.float32)) or ""
    )


@pytest.mark.parametrize(
    ("op", "sinks", "operator"),
    [
        ("attention", False, "aclnnFlashAttentionVarLenScoreV4"),
        ("attention_backward", False, "aclnnFlashAttentionUnpaddingScoreGradV4"),
        ("attention", True, "aclnnFlashAttentionVarLenScoreV5"),
        ("attention_backward", True, "aclnnFlashAttentionUnpaddingScoreGradV5"),
    ],
)
def test_an_older_cann_is_named(op: str, sinks: bool, operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "missing_operator", lambda name: f"the CANN installed here has no {name}.")
    request = request_of(problem_of([2, 3], dtype=torch.bfloat16), op, **({"sinks": torch.float32} if sinks else {}))
    assert f"has no {operator}" in (packed_attention.supports(request) or "")
