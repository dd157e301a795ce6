"""The attention kernels compiled for GPUs that need not be there: matrix units used, no load narrower than 16 bytes,
registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from spills import allowed

SCRIPT = Path(__file__).with_name("compile_attention.py")

# Bytes of spill stores and loads that are accepted: nothing in the forward and the dq pass of sm_90. The dk/dv pass
# holds two accumulators of [keys, head_dim] and two tiles of scores; it spills some addresses and is still the fastest
# of the shapes measured (docs/attention.md).
SPILLS = {
    90: {"attention_forward": 0, "attention_dq": 0, "attention_dkdv": 1200, "attention_tail": 0},
    80: {"attention_forward": 100, "attention_dq": 250, "attention_dkdv": 500},
}
MATRIX_KERNELS = frozenset({"attention_forward", "attention_dq", "attention_dkdv", "attention_tail"})


def compiled(architecture: int, *names: str) -> dict[str, dict[str, dict[str, int]]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), str(architecture), *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, dict[str, dict[str, int]]] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.parametrize(
    ("architecture", "cases"), [(90, ["causal_128", "causal_72", "bias_128"]), (80, ["causal_128"])]
)
def test_registers_loads_and_matrix_products(architecture: int, cases: list[str]) -> None:
    report = compiled(architecture, *cases)
    assert set(report) == set(cases)
    for case, kernels in report.items():
        for kernel in kernels.keys() & MATRIX_KERNELS:
            facts = kernels[kernel]
            where = (architecture, case, kernel, facts)
            assert facts["matrix_products"] > 0, where
            assert facts["narrow_loads"] == 0, where
            assert facts["wide_loads"] > 0, where
            assert facts["spills"] <= allowed(SPILLS[architecture][kernel]), where


def test_the_compiler_takes_every_combination_of_conditions() -> None:
    """The interpreter has no types: a name that changes its own in a loop is an error of the compiler only."""
    report = compiled(90, "variants")
    assert len(report) >= 12
    assert all(
        {"attention_forward", "attention_dq", "attention_dkdv", "attention_delta"} <= set(k) for k in report.values()
    )
    assert {kernel for kernels in report.values() for kernel in kernels} == {
        *MATRIX_KERNELS,
        "attention_delta",
        "attention_ranges",
    }
