"""The norm + rotation kernels, source level: Triton's interpreter against float64 (run with TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import pytest
from ascend_tools import cases, needs, toolchain

needs(toolchain.missing_lowering())
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter needs TRITON_INTERPRET=1 before Triton is imported", allow_module_level=True)

from ascend_tools import interpreter  # noqa: E402

from fusion_pass.kernels.ascend import norm_rope  # noqa: E402

interpreter.install()

# Its cast from float32 to bfloat16 truncates: a whole step, where rounding to nearest is half of one.
STEPS = 2


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_forward(case: cases.Case) -> None:
    cases.check_forward(norm_rope, case, rounding_steps=STEPS)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_backward(case: cases.Case) -> None:
    cases.check_backward(norm_rope, case, rounding_steps=STEPS)
