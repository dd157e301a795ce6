# ruff: noqa: E402 (what follows a `needs` imports the tool it asks for)
"""Our flash attention forward after lowering: executed here, and placed in on-chip memory by Huawei's compiler."""

from __future__ import annotations

import os

import pytest
import torch
from ascend_tools import cases, flash_cases, needs, toolchain
from ascend_tools.attention_oracle import check_forward

needs(toolchain.missing_compiler())
needs(toolchain.missing_host())
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("with TRITON_INTERPRET=1 nothing is lowered", allow_module_level=True)

from fusion_pass.kernels.ascend import flash


@pytest.mark.parametrize("case", flash_cases.CASES, ids=lambda case: case.name)
def test_forward(case: flash_cases.FlashCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "platform_of", lambda device: cases.FEW_CORES)
    monkeypatch.setattr(flash, "start", toolchain.run_on_host)
    check_forward(flash, flash_cases.make(case, 0))


WIDE = [
    flash_cases.FlashCase(f"{mask}{segments} {head_dim} {dtype}", 300, 300, dtype, head_dim=head_dim, mask=mask,
                          segments=segments, softcap=5.0, sinks=True, visible={"causal": "top_left", "window_left": 64})
    for head_dim in (64, 128, 256)
    for dtype in (flash_cases.BF16, flash_cases.FP32)
    for mask, segments in (("none", False), ("bool", False), ("add", False), ("none", True))
]  # fmt: skip
"""Everything at once, at each head_dim of the tile table."""


@pytest.mark.parametrize("case", [*flash_cases.CASES, *WIDE], ids=lambda case: case.name)
def test_memory(case: flash_cases.FlashCase) -> None:
    problem = flash_cases.make(case, 0)
    launch = flash.forward_launch(problem, problem.empty_out("bshd"), problem.empty_lse())
    plan = toolchain.plan_memory(toolchain.lower(launch), "Ascend910B4")
    assert plan.fits, plan.message


def test_the_whole_step_as_one_tile_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 x 1024 scores, the step of the vendor's kernels, are why the kernel cuts its tiles itself."""
    monkeypatch.setattr(flash, "TILES", ((128, (128, 1024)),))
    case = flash_cases.FlashCase("step", 2048, 2048, torch.bfloat16, head_dim=128, visible=flash_cases.CAUSAL)
    problem = flash_cases.make(case, 0)
    launch = flash.forward_launch(problem, problem.empty_out("bshd"), problem.empty_lse())
    plan = toolchain.plan_memory(toolchain.lower(launch), "Ascend910B4")
    assert not plan.fits
    assert "ub overflow" in plan.message
