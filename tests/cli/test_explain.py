"""`fusion-pass explain`: what it prints, as text and as JSON, and what it says to a wrong command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fusion_pass.cli import main

HERE = Path(__file__).parent


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["explain", "--json", "--model", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("mode", ["--train", "--inference"])
@pytest.mark.parametrize("more", [[], ["--dynamic"], ["--dtype", "bfloat16"]])
def test_every_layer_of_qwen3(capsys: pytest.CaptureFixture[str], mode: str, more: list[str]) -> None:
    found = explain(capsys, "qwen3", "--layers", "3", mode, *more)
    assert list(found) == ["model", "sites", "counts"]
    assert found["model"] == "qwen3"
    for site in found["sites"]:
        assert list(site) == ["fusion", "layer", "status", "reason", "kernel", "arguments"]
    fused = [site for site in found["sites"] if site["fusion"] == "qk_norm_rope"]
    assert [site["status"] for site in fused] == ["fused"] * 3
    assert {site["kernel"] for site in fused} == {"reference"}
    assert {site["arguments"]["norm"] for site in fused} == {"rms"}
    assert {site["arguments"]["eps"] for site in fused} == {1e-6}
    assert len({site["layer"] for site in fused}) == 3
    assert found["counts"]["qk_norm_rope"] == 3


def test_without_the_reference_a_cpu_has_no_kernel_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    found = explain(capsys, "qwen3", "--no-reference")
    (site,) = (site for site in found["sites"] if site["fusion"] == "qk_norm_rope")
    assert site["status"] == "skipped"
    assert site["kernel"] == ""
    assert "No kernel for cpu" in site["reason"]
    assert "qk_norm_rope" not in found["counts"]


@pytest.mark.parametrize("factory", ["with_keywords", "with_positions"])
def test_a_model_of_ones_own(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, factory: str) -> None:
    monkeypatch.syspath_prepend(HERE)
    found = explain(capsys, f"factories:{factory}")
    assert sum(found["counts"].get(fusion, 0) for fusion in ("qk_norm_rope", "qkv_norm_rope")) == 2


def test_text_names_layers_kernels_and_the_change_of_the_graph(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--model", "qwen3_vl", "--layers", "2", "--graph"]) == 0
    out = capsys.readouterr().out
    assert "qk_norm_rope: 2 fused" in out
    assert "The reference kernel is plain ATen" in out
    assert "torch.ops.fusion_pass" in out.replace("\n", "")


def test_says_what_the_arguments_do_not(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that the model selects once, and norms that are left alone, as JSON and as text."""
    selected = "rows selected once for the model (interleaved, section [4, 2, 2])"
    (site,) = (s for s in explain(capsys, "qwen3_vl")["sites"] if s["fusion"] == "qk_norm_rope")
    assert site["arguments"]["mrope"].startswith(selected)
    sites = [s for s in explain(capsys, "sana")["sites"] if s["fusion"] == "qk_norm_rope"]
    assert [s["status"] for s in sites] == ["skipped"] * 2
    assert all(s["reason"].startswith("q and k are normalised, but not rotated") for s in sites)
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["explain", "--model", "qwen3_vl"]) == 0
    assert f"Note on 1 of qk_norm_rope, mrope: {selected}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["qwen9"], "name is 'qwen9', which the zoo does not have; take one of llama, "),
        (["flux", "--attention", "eager"], "'flux' always calls SDPA"),
        (["absent_module:f"], "the module 'absent_module' cannot be imported"),
        (["factories:nothing"], "factories has no function 'nothing'"),
        (["factories:module_alone"], "factories:module_alone() returned Identity; it must return (module, inputs)"),
        (["factories:bad_inputs"], "returned inputs of type int; they must be a dict or a tuple"),
        (["factories:with_keywords", "--layers", "2"], "--layers is for models of the zoo"),
    ],
)
def test_a_wrong_command_line_gets_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.syspath_prepend(HERE)
    assert main(["explain", "--model", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_json_is_all_that_the_command_prints() -> None:
    """As a process, where warnings of the libraries could reach the output too."""
    command = [sys.executable, "-m", "fusion_pass", "explain", "--model", "flux", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "flux"


def test_who_reads_the_output_may_stop() -> None:
    """`fusion-pass models | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as output:
        command = [sys.executable, "-m", "fusion_pass", "models"]
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "")
