"""The attention kernels compiled for GPUs that need not be there: matrix units used, no load narrower than 16 bytes,
registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_attention.py")

# Bytes of spill stores and loads that are accepted: nothing in the forward and the dq pass of sm_90. The dk/dv pass
# holds two accumulators of [keys, head_dim] and two tiles of scores; it spills some addresses and is still the fastest
# of the shapes measured (docs/attention.md).
SPILLS = {
    90: {"attention_forward": 0, "attention_dq": 0, "attention_dkdv": 1200, "attention_tail": 0},
    80: {"attention_forward": 100, "attention_dq": 250, "attention_dkdv": 500},
}


@pytest.mark.parametrize(
    ("architecture", "cases"), [(90, ["causal_128", "causal_72", "bias_128"]), (80, ["causal_128"])]
)
def test_registers_loads_and_matrix_products(architecture: int, cases: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), str(architecture), *cases]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report) == set(cases)
    for case, kernels in report.items():
        for kernel, facts in kernels.items():
            where = (architecture, case, kernel, facts)
            assert facts["matrix_products"] > 0, where
            assert facts["narrow_loads"] == 0, where
            assert facts["wide_loads"] > 0, where
            assert facts["spills"] <= SPILLS[architecture][kernel], where
