"""`fusion-pass demo`, with a fast compiler in the place of Inductor."""

from __future__ import annotations

import io
import re

import pytest
import torch
from rich.console import Console

from fusion_pass import demo


def run_demo(**options: int) -> tuple[int, str]:
    out = io.StringIO()
    console = Console(file=out, width=160, force_terminal=False)
    status = demo.run(console, inner=torch._dynamo.lookup_backend("aot_eager_default_partitioner"), **options)
    return status, out.getvalue()


def test_fuses_and_trains_both_models() -> None:
    status, text = run_demo(layers=2, steps=2)
    assert status == 0
    assert text.count("qk_norm_rope: 2 fused") == 2
    assert text.count("+qk_norm_rope") >= 2  # in the graph of one layer of each
    rows = re.findall(r"^ *(\d+) │ +([\d.]+) │ +([\d.]+) │ +(\S+) │ +(\S+) │ +(\S+)", text, flags=re.MULTILINE)
    assert [row[0] for row in rows] == ["0", "1"] * 2
    for _, fused, unfused, difference, error_fused, error_unfused in rows:
        assert abs(float(fused) - float(unfused)) < 1e-4
        assert float(difference) < 1e-4
        # Both are float32 rounding noise; neither is always the smaller one.
        assert float(error_fused) < 2 * float(error_unfused)
    losses = [float(row[1]) for row in rows]
    assert losses[1] < losses[0]
    assert losses[3] < losses[2]


def test_an_unfused_layer_fails_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusion_pass.recognise.patterns", tuple)
    status, text = run_demo(layers=1, steps=1)
    assert status == 1
    assert "Only 0 of 1 layers were fused." in text
