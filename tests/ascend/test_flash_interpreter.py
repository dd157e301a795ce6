# ruff: noqa: E402 (what follows a `needs` imports the tool it asks for)
"""Our flash attention forward at source level: the interpreter against float64 (run with TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import pytest
from ascend_tools import cases, flash_cases, needs, toolchain
from ascend_tools.attention_oracle import check_forward

needs(toolchain.missing_lowering())
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter needs TRITON_INTERPRET=1 before Triton is imported", allow_module_level=True)

from ascend_tools import interpreter

from fusion_pass.kernels.ascend import flash

interpreter.install()

# The interpreter of 3.2.0 multiplies the bits of bfloat16 as integers in `tl.dot`; test_flash_host.py has those cases.
CASES = [case for case in flash_cases.CASES if case.dtype != flash_cases.BF16]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forward(case: flash_cases.FlashCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "platform_of", lambda device: cases.FEW_CORES)
    check_forward(flash, flash_cases.make(case, 0))
