"""The vendor's operator for inference: taken where no gradient will be asked for, computed as the reference does.

As in `test_vendor_attention.py` the operator is an emulation of its documentation under the real schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from ascend_tools import device, needs, schemas, vendor
from ascend_tools.attention_oracle import check_forward
from ascend_tools.vendor_cases import VISIBLE, B, problem_of, request_of

from fusion_pass.kernels import registry
from fusion_pass.kernels.ascend import inference_attention

needs(device.missing())
needs(schemas.missing())

EVERY_KEY = VISIBLE[0]


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    with vendor.registered():
        yield


@pytest.mark.parametrize("visible", VISIBLE, ids=lambda v: f"{v['causal']} {v['window_left']} {v['window_right']}")
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (5, 11), (11, 5), (1, 7)])
def test_visibility(queries: int, keys: int, visible: dict[str, Any]) -> None:
    problem = problem_of(queries, keys, 2, torch.bfloat16, None, visible)
    reason = inference_attention.supports(request_of(problem, "attention", visible))
    keep = problem.seen.keep(queries, keys, torch.device("cpu"))
    sees = keep is None or bool(keep.any(-1).all())
    windows = visible["window_left"] != -1 or visible["window_right"] != -1
    alone = queries == 1 and visible["causal"] == "top_left"
    assert (reason is None) == (sees and not windows and not alone), reason
    if reason is None:
        check_forward(inference_attention, problem)


@pytest.mark.parametrize("shape", [(1, 1, 9, 9), (B, 1, 9, 9), (B, 1, 1, 9)])
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
def test_boolean_mask(shape: tuple[int, ...], causal: str) -> None:
    """With rows that see nothing among them."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[..., 0, :] = False
    visible = {**EVERY_KEY, "causal": causal}
    problem = problem_of(9, 9, 2, torch.float16, mask, visible)
    assert inference_attention.supports(request_of(problem, "attention", visible)) is None
    out, _ = check_forward(inference_attention, problem, "bhsd")
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [1, 4])
def test_decoding(dtype: torch.dtype, group: int) -> None:
    """A single query after all keys, causal or not, goes without a mask."""
    for causal in ("none", "bottom_right"):
        problem = problem_of(1, 7, group, dtype, None, {**EVERY_KEY, "causal": causal})
        assert "atten_mask" not in inference_attention.forward_call(problem).options
        check_forward(inference_attention, problem)


def test_it_stands_before_the_operator_for_training() -> None:
    names = [kernel.name for kernel in registry.kernels("attention")]
    assert names.index("ascend_inference") < names.index("ascend")
    request = request_of(problem_of(9, 9, 1, torch.bfloat16, None, EVERY_KEY), "attention", EVERY_KEY)
    assert inference_attention.supports(request) is None
    assert "a gradient will be asked for" in (inference_attention.supports(replace(request, training=True)) or "")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"softcap": 30.0}, "softcap"),
        ({"dtypes": {"sinks": torch.float32}}, "sinks are given"),
        ({"dtypes": {"cu_seqlens_q": torch.int32}}, "cu_seqlens_q are given"),
        ({"dtypes": {"q": torch.float32}}, "q is torch.float32"),
    ],
)
def test_what_cannot_be_mapped_is_refused(change: dict[str, Any], reason: str) -> None:
    problem = problem_of(9, 9, 1, torch.bfloat16, None, EVERY_KEY)
    assert reason in (inference_attention.supports(request_of(problem, "attention", EVERY_KEY, **change)) or "")


@pytest.mark.parametrize(
    ("q", "k", "reason"),
    [
        ((1, 9, 4, 24), (1, 9, 4, 24), "head_dim is 24"),
        ((1, 9, 128, 512), (1, 9, 128, 512), "128 heads of 512 are 65536 elements"),
        ((1, 9, 128, 128), (1, 9, 1, 128), "128 query heads for 1 of keys"),
    ],
)
def test_sizes_beyond_the_documentation_are_refused(q: Any, k: Any, reason: str) -> None:
    request = request_of(problem_of(9, 9, 1, torch.bfloat16, None, EVERY_KEY), "attention", EVERY_KEY)
    assert reason in (inference_attention.supports(replace(request, shapes={"q": q, "k": k, "v": k})) or "")


@pytest.mark.parametrize(
    ("queries", "shape", "dtype", "reason"),
    [
        (9, (B, 4, 9, 9), torch.bool, "the same for all heads"),
        (9, (9, 9), torch.float32, "it takes booleans"),
        (1, (1, 9), torch.bool, "a single query"),
    ],
)
def test_masks_beyond_the_documentation_are_refused(queries: int, shape: Any, dtype: Any, reason: str) -> None:
    request = request_of(problem_of(queries, 9, 2, torch.bfloat16, None, EVERY_KEY), "attention", EVERY_KEY)
    masked = replace(request, dtypes={**request.dtypes, "mask": dtype}, shapes={**request.shapes, "mask": shape})
    assert reason in (inference_attention.supports(masked) or "")
