"""The kernels compile for GPUs that need not be here, and no instance spills registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from spills import allowed

SCRIPT = Path(__file__).with_name("compile_norm_rope.py")


def compiled(arch: int, *names: str) -> dict[str, dict[str, dict[str, int]]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(arch), *names], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(arch: int, *names: str) -> None:
    spilled = {
        f"{name}, {kernel}": figures["spills"]
        for name, kernels in compiled(arch, *names).items()
        for kernel, figures in kernels.items()
        if figures["spills"] > allowed(0)
    }
    assert not spilled, f"bytes spilled on sm_{arch}: {spilled}"


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_no_spills(arch: int) -> None:
    check(arch, "qwen3 packed", "qwen2_vl 16+2 sectioned")


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_no_spills_in_any_instance(arch: int) -> None:
    check(arch)


def test_loads_are_wide() -> None:
    """Activations and tables travel 16 bytes at a time: a 2-byte load in the inner loop would be seen here."""
    figures = compiled(90, "qwen3 separate")["qwen3 separate"]["backward_kernel"]
    assert figures["narrow_loads"] == 0
    assert figures["wide_loads"] > 0
