"""Every variant against float64, forward and each gradient, with unwritten memory poisoned; in the interpreter here,
on hardware with `-m gpu`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from norm_rope_cases import CASES, Case, call, make_inputs, model
from torch import Tensor


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN: what a kernel does not write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def relative_error(value: Tensor, exact: Tensor) -> float:
    return float(
        torch.linalg.vector_norm(value.detach().double() - exact.detach()) / torch.linalg.vector_norm(exact.detach())
    )


def gradients(results: tuple[Tensor, ...], upstream: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(results, inputs, [u.to(r) for u, r in zip(upstream, results, strict=True)]))


def check(case: Case, backend: str, device: torch.device) -> None:
    inputs = make_inputs(case, device)
    exact_inputs = inputs.to(torch.float64, str(device))
    exact = model(case, exact_inputs)
    eager = model(case, inputs)
    ours = call(case, inputs, backend)
    # Upstream gradients hold what the results' dtype can hold, in another memory order than the results.
    upstream = [
        torch.randn(*t.shape[:1], *t.shape[1:3][::-1], t.shape[3]).transpose(1, 2).to(t.dtype).double() for t in ours
    ]
    exact_gradients = gradients(exact, upstream, exact_inputs.differentiable())
    eager_gradients = gradients(eager, upstream, inputs.differentiable())
    our_gradients = gradients(ours, upstream, inputs.differentiable())
    names = [f"result {i}" for i in range(len(ours))] + [f"gradient {i}" for i in range(len(our_gradients))]
    for name, mine, theirs, truth in zip(
        names, (*ours, *our_gradients), (*eager, *eager_gradients), (*exact, *exact_gradients), strict=True
    ):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        # One rounding of an exact value already costs half an epsilon; sums in float32 or float64 cost a few of
        # their own.
        slack = torch.finfo(mine.dtype).eps * (0.5 if mine.dtype.itemsize == 2 else 4)
        if mine.dtype == torch.bfloat16 and backend == "triton" and device.type == "cpu":
            # Triton's interpreter truncates to bfloat16 where hardware rounds, which costs a whole epsilon.
            slack *= 2
        bound = max(relative_error(theirs, truth), slack)
        assert relative_error(mine, truth) <= bound, f"{name}: {relative_error(mine, truth):.2e} > {bound:.2e}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton(case: Case) -> None:
    check(case, "triton", torch.device("cpu"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference(case: Case) -> None:
    check(case, "reference", torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_on_gpu(case: Case, device: torch.device) -> None:
    check(case, "triton", device)


LARGE = [
    Case("qwen3 8B, packed", 32, 8, 128, 2, 515, torch.bfloat16, packing="blocked"),
    Case("qwen2_vl, sectioned", 16, 2, 128, 1, 1000, torch.bfloat16, packing="blocked",
         options={"mrope_layout": "sectioned", "mrope_section": [16, 24, 24]}),
    Case("gemma3", 8, 4, 256, 2, 300, torch.bfloat16, per_lane=True, options={"norm": "rms_one_plus"}),
    Case("olmo2, hidden", 32, 32, 128, 2, 100, torch.bfloat16, per_lane=True, options={"norm_scope": "hidden"}),
    Case("olmo2 32B, hidden", 40, 8, 128, 2, 100, torch.bfloat16, per_lane=True, options={"norm_scope": "hidden"}),
    Case("cohere, row a head", 64, 8, 128, 1, 200, torch.float16, per_head=True,
         options={"norm": "layer", "pairing": "adjacent"}),
    Case("glm4, partial", 32, 2, 128, 2, 300, torch.bfloat16,
         options={"norm": "none", "rotary_dim": 64, "pairing": "adjacent"}),
    Case("head_dim 80", 16, 16, 80, 1, 777, torch.bfloat16, packing="grouped", affine="wb", options={"norm": "layer"}),
    Case("head_dim 72", 16, 16, 72, 1, 777, torch.float16, packing="blocked"),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_triton_on_gpu_at_model_size(case: Case, device: torch.device) -> None:
    check(case, "triton", device)
