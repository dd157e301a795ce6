# ruff: noqa: E402 (what follows a `needs` imports the tool it asks for)
"""The norm + rotation kernels after lowering: the linalg that goes into Huawei's compiler, executed here by LLVM 19."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from ascend_tools import cases, needs, toolchain

needs(toolchain.missing_host())
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("with TRITON_INTERPRET=1 nothing is lowered", allow_module_level=True)

from fusion_pass.kernels.ascend import norm_rope
from fusion_pass.kernels.ascend.platform import PLATFORMS


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_rope, "start", toolchain.run_on_host)
    monkeypatch.setattr(norm_rope, "platform_of", lambda device: cases.FEW_CORES)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_forward(case: cases.Case) -> None:
    cases.check_forward(norm_rope, case)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_backward(case: cases.Case) -> None:
    cases.check_backward(norm_rope, case)


BALANCED = cases.Case(
    "balance", (2, 1), 64, dtype=torch.bfloat16, options=cases.mrope("interleaved", 64), copy_heads=1, bias=True
)


@pytest.mark.parametrize("tokens", cases.TOKEN_COUNTS)
def test_every_core_takes_its_tokens(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 48 vector cores: no token, fewer tokens than cores, as many, one more, and several a core with a rest."""
    monkeypatch.setattr(norm_rope, "platform_of", lambda device: PLATFORMS["Ascend910B2"])
    case = replace(BALANCED, sequence=tokens)
    cases.check_forward(norm_rope, case, seed=tokens)
    cases.check_backward(norm_rope, case, seed=tokens)


def test_gradients_have_the_same_bits_every_time() -> None:
    case = replace(BALANCED, sequence=100)
    first, second = (cases.run_backward(norm_rope, case) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
