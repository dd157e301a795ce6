# ruff: noqa: E402 (what follows a `needs` imports the tool it asks for)
"""The norm + rotation kernels in Huawei's compiler, up to its closed last step: every on-chip buffer has a place."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from ascend_tools import cases, needs, toolchain

needs(toolchain.missing_compiler())
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("with TRITON_INTERPRET=1 nothing is lowered", allow_module_level=True)

from fusion_pass.kernels.ascend import norm_rope
from fusion_pass.kernels.ascend.launch import Launch
from fusion_pass.kernels.ascend.platform import DEFAULT_PLATFORM, PLATFORMS, Platform
from fusion_pass.kernels.ascend.row_tiling import RowTile


def launches(case: cases.Case, monkeypatch: pytest.MonkeyPatch, platform: Platform) -> list[Launch]:
    """What forward and backward would start."""
    seen: list[Launch] = []
    monkeypatch.setattr(norm_rope, "start", seen.append)
    monkeypatch.setattr(norm_rope, "platform_of", lambda device: platform)
    cases.run_forward(norm_rope, case)
    cases.run_backward(norm_rope, case)
    return seen


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_case_fits(case: cases.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules that test_norm_rope_host.py executes: few cores, so that several tokens are one tile."""
    for launch in launches(case, monkeypatch, cases.FEW_CORES):
        plan = toolchain.plan_memory(toolchain.lower(launch), "Ascend910B4")
        assert plan.fits, plan.message
        assert not plan.weakened, "the compiler switched optimisations off to make it fit"


def model(heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> cases.Case:
    options = cases.rope(head_dim) if head_dim != 128 else cases.mrope("interleaved", 128)
    return cases.Case(
        f"{heads} {head_dim}",
        heads,
        head_dim,
        sequence=800,
        dtype=dtype,
        options=options,
        bias=True,
        copy_heads=heads[1],
    )


CHIPS = ["Ascend910B2", "Ascend910B4", "Ascend910_9392"]


@pytest.mark.parametrize(
    ("head_dim", "platforms"), [(64, ["Ascend910B4"]), (128, CHIPS), (256, ["Ascend910B4"])], ids=["64", "128", "256"]
)
@pytest.mark.parametrize("heads", [(16, 2), (96, 8), (128, 8)], ids=str)
def test_head_counts(
    heads: tuple[int, int], head_dim: int, platforms: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On several chips only for one head_dim: what decides is the Unified Buffer, and `test_platform_table` shows that
    all chips of the table have the same."""
    for platform in platforms:
        for dtype in (torch.bfloat16, torch.float32) if platform == "Ascend910B4" else (torch.bfloat16,):
            for launch in launches(model(heads, head_dim, dtype), monkeypatch, PLATFORMS[platform]):
                plan = toolchain.plan_memory(toolchain.lower(launch, platform), platform)
                assert plan.fits, plan.message
                assert not plan.weakened
                assert 0 < plan.vector_bytes <= PLATFORMS[platform].ub


def test_the_check_sees_an_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole token of 128 query heads as one tile, which is why tiles are cut."""

    def whole(counts: list[int], *_: Any, **__: Any) -> RowTile:
        return RowTile(1, tuple(counts))

    monkeypatch.setattr(norm_rope, "tile_rows", whole)
    for launch in launches(model((128, 8), 128, torch.bfloat16), monkeypatch, DEFAULT_PLATFORM):
        plan = toolchain.plan_memory(toolchain.lower(launch), "Ascend910B4")
        assert not plan.fits
        assert "ub overflow" in plan.message


@pytest.mark.parametrize("name", sorted(PLATFORMS))
def test_platform_table(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our table of chips against the compiler's."""
    launch = launches(cases.CASES[0], monkeypatch, PLATFORMS[name])[0]
    spec = toolchain.device_spec(toolchain.lower(launch, name), name)
    platform = PLATFORMS[name]
    assert spec["VECTOR_CORE_COUNT"] == platform.vector_cores
    assert spec["CUBE_CORE_COUNT"] == platform.cube_cores
    assert spec["UB_SIZE"] == 8 * platform.ub
    assert spec["L1_SIZE"] == 8 * platform.l1
    assert spec["L0C_SIZE"] == 8 * platform.l0c
