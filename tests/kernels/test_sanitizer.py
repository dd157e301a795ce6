"""compute-sanitizer finds nothing: no access outside a tensor (memcheck), and in the CUDA C++ kernels no two that race
in shared memory (racecheck).

Of racecheck on the Hopper kernels docs/hopper.md says what it reports and why that is not read as a race: it does not
know all of the barriers that Triton's warp specialisation makes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sanitized_calls
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.exhaustive]
IN_CUDA = ("heads_of_few_tokens", "heads_of_many_tokens", "hidden_rows")


def sanitized(tool: str, group: str) -> str:
    """What the tool prints about a process that makes the group's calls."""
    command = shutil.which("compute-sanitizer")
    if command is None:
        pytest.skip("there is no compute-sanitizer on the PATH")
    # Calls of the host that are meant to fail are no error: cuda-bindings asks so which functions a driver has.
    options = ["--tool", tool, "--report-api-errors", "no", "--print-limit", "10", "--error-exitcode", "9"]
    script = Path(__file__).with_name("sanitized_calls.py")
    done = subprocess.run(
        [command, *options, sys.executable, str(script), group],
        capture_output=True,
        text=True,
        check=False,
        # Each tensor is an allocation of its own, so that what lies behind its end belongs to nobody.
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "all calls returned" in done.stdout
    return done.stdout


@pytest.mark.parametrize("group", sanitized_calls.GROUPS)
def test_no_access_outside_of_a_tensor(group: str, device: torch.device) -> None:
    if torch.cuda.get_device_capability()[0] != 9 and group.startswith(("attention", "whole_block")):
        pytest.skip("the Hopper kernels run on sm_90")
    assert "ERROR SUMMARY: 0 errors" in sanitized("memcheck", group)


@pytest.mark.parametrize("group", IN_CUDA)
def test_no_race_in_shared_memory(group: str, device: torch.device) -> None:
    assert "RACECHECK SUMMARY: 0 hazards" in sanitized("racecheck", group)
