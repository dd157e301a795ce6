"""`fusion-pass doctor`: what it finds here, and the sentence for what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fusion_pass import doctor, extensions
from fusion_pass.cli import main
from fusion_pass.kernels import registry


def part(name: str) -> doctor.Part:
    (found,) = (part for part in doctor.diagnose().parts if part.name == name)
    return found


def test_finds_torch_and_the_registered_backend() -> None:
    assert torch.__version__ in (part("torch").found or "")
    assert part('torch.compile(backend="fusion_pass")').found == "registered"


def test_lists_every_kernel_with_a_reason_where_it_cannot_run() -> None:
    listed = doctor.diagnose().kernels
    assert {status.name for status in listed} == {kernel.name for kernel in registry.kernels()}
    assert next(status.reason for status in listed if status.name == "reference") is None
    assert all(status.reason is None or len(status.reason) > 10 for status in listed)


def test_a_missing_package_gets_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda distribution: None)
    for name, remedy in (
        ("triton", "fusion-pass[triton]"),
        ("cuda-core", "fusion-pass[cuda]"),
        ("transformers", "fusion-pass[zoo]"),
        ("torch_npu", "NPU"),
    ):
        assert part(name).found is None
        assert remedy in part(name).lack


def test_cann_is_a_folder_that_exists(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert part("CANN").found == str(tmp_path)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "gone"))
    assert part("CANN").found is None
    assert "gone', which is no folder" in part("CANN").lack


def test_a_broken_pattern_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ImportError("no such module")

    def broken() -> tuple[object, ...]:
        raise error

    monkeypatch.setattr(extensions, "patterns", broken)
    assert part("fusions").found is None
    assert "ImportError: no such module" in part("fusions").lack
    monkeypatch.setattr(extensions, "patterns", lambda: (extensions.Unloadable("mine = no_such:PATTERN", error),))
    assert part("fusions").found is None
    assert part("fusions").lack == "mine = no_such:PATTERN cannot be loaded: ImportError: no such module"


def test_prints_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for name in ("torch", "triton", "CANN", "torch_npu", "reference"):
        assert name in out
