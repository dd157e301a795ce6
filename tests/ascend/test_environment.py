"""What an Ascend machine must have: one sentence for each thing that is missing, and nothing imported to find out."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from ascend_tools import device, needs, toolchain

from fusion_pass.kernels.ascend import environment

needs(device.missing())
needs(toolchain.missing_lowering())


def test_importing_and_asking_the_doctor_imports_no_vendor_package() -> None:
    code = (
        "import sys, fusion_pass, fusion_pass.kernels, fusion_pass.kernels.ascend as ascend\n"
        "for kernel in fusion_pass.kernels.doctor():\n"
        "    if kernel.name in {k.name for k in ascend.KERNELS}: print(kernel.name, kernel.reason)\n"
        "print('imported', sorted({'torch_npu', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *kernels, imported = done.stdout.splitlines()
    assert {line.split()[0] for line in kernels} == {"ascend", "ascend_inference", "ascend_packed", "ascend_flash"}
    assert all("torch_npu is not installed; install the torch-npu release made" in line for line in kernels)
    assert "torch_npu" not in imported


@pytest.mark.parametrize(
    ("installed", "loads", "expected"),
    [
        ({}, False, "torch_npu is not installed"),
        ({"torch_npu"}, False, "CANN is not found"),
        ({"torch_npu"}, True, "torch.npu.is_available"),
    ],
)
def test_each_missing_part_has_its_sentence(
    installed: set[str], loads: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.stand_in()
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: object() if name in installed else None)
    monkeypatch.setattr(environment, "_loads", lambda library: loads)
    monkeypatch.setattr(torch, "npu", type("Npu", (), {"is_available": staticmethod(lambda: False)}), raising=False)
    assert expected in (environment.missing_runtime() or "")


@pytest.mark.parametrize(
    ("upstream", "expected"),
    [(False, "triton-ascend is not installed"), (True, "the installed `triton` is not Triton-Ascend")],
)
def test_upstream_triton_is_not_triton_ascend(upstream: bool, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.missing_triton() is None

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(environment.importlib.metadata, "version", version)
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: object() if upstream else None)
    assert expected in (environment.missing_triton() or "")


def test_an_operator_is_looked_for_in_all_libraries_of_cann(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, library = tmp_path / "operators.c", tmp_path / "lib64" / "libopapi_transformer.so"
    source.write_text("int aclnnKnownGetWorkspaceSize(void) { return 0; }")
    library.parent.mkdir()
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    environment._operator_libraries.cache_clear()
    try:
        assert environment.missing_operator("aclnnKnown") is None
        assert environment.missing_operator("aclnnOther") == (
            "the CANN installed here has no aclnnOther; a newer one has."
        )
    finally:
        environment._operator_libraries.cache_clear()


def test_the_slice_operations_are_found_in_both_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """On `triton.language` in 3.2.0, which is installed here; in an extension module of later releases."""
    import triton.language as tl

    from fusion_pass.kernels.ascend import extension

    assert extension._resolve("extract_slice") is tl.extract_slice
    parts = extension.EXTENSION.split(".")
    for end in range(3, len(parts) + 1):
        name = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name) or ModuleType(name))
    later = ModuleType(extension.EXTENSION)
    later.extract_slice = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, extension.EXTENSION, later)
    assert extension._resolve("extract_slice") is later.extract_slice
    with pytest.raises(ImportError, match=r"need triton-ascend 3\.2\.0 or later"):
        extension._resolve("no_such_operation")
