# ruff: noqa: E402 (what follows a `needs` imports the tool it asks for)
"""The norm + rotation kernels at source level: the interpreter against float64 (run with TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from ascend_tools import cases, needs, toolchain

needs(toolchain.missing_lowering())
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter needs TRITON_INTERPRET=1 before Triton is imported", allow_module_level=True)

from ascend_tools import interpreter

from fusion_pass.kernels.ascend import norm_rope, norm_rope_kernels
from fusion_pass.kernels.options import Options
from fusion_pass.kernels.streams import Stream

interpreter.install(norm_rope_kernels)

# Its cast from float32 to bfloat16 truncates: a whole step, where rounding to nearest is half of one.
STEPS = 2


@pytest.fixture(autouse=True)
def few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_rope, "platform_of", lambda device: cases.FEW_CORES)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_forward(case: cases.Case) -> None:
    cases.check_forward(norm_rope, case, rounding_steps=STEPS)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_backward(case: cases.Case) -> None:
    cases.check_backward(norm_rope, case, rounding_steps=STEPS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"conjugate": True},
        {"eps": 1e-3},
        {"mrope_section": (11, 10, 11)},
        {"mrope_layout": "sectioned"},
        {"norm": "rms_one_plus"},
        {"norm_first": False},
        {"pairing": "adjacent"},
    ],
    ids=str,
)
def test_the_check_sees_a_wrong_kernel(wrong: dict[str, Any]) -> None:
    class Wrong:
        @staticmethod
        def forward(streams: Sequence[Stream], tables: Any, options: Options, copy: Any) -> None:
            norm_rope.forward(streams, tables, replace(options, **wrong), copy)

    case = cases.Case("wrong", options=cases.mrope("interleaved", 64))
    with pytest.raises(AssertionError, match="more than allowed"):
        cases.check_forward(Wrong, case, rounding_steps=STEPS)
