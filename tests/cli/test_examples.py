"""The examples run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_add_a_fusion_fuses_one_place_and_refuses_the_other() -> None:
    out = run("add_a_fusion.py")
    assert "silu: fused." in out
    assert "silu: skipped. 'weight' is also read outside the product." in out
    assert "torch.ops.aten.silu.default" in out


def test_train_fuses_when_asked_and_trains_alike() -> None:
    plain = run("train.py", "--steps", "2", TORCHDYNAMO_DISABLE="1")  # not compiled: half a minute less
    fused = run("train.py", "--steps", "2", "--fusion-pass", "--fusion-pass-allow-reference", "--fusion-pass-strict")
    assert "fused" not in plain
    assert re.search("qkv?_norm_rope: 2 fused", fused)
    assert [line for line in fused.splitlines() if line.startswith("step")] == plain.splitlines()[:2]
