"""A wheel built from the tree holds the three folders under `fusion_pass` and needs its dependencies alone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"fusion_pass": "fusion_pass", "patterns": "fusion_pass/patterns", "kernels": "fusion_pass/kernels"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged: a build leaves files beside its sources."""
    copy = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "*.md"))
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(target), str(source))
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with this wheel and what it depends on, and nothing else.

    The dependencies are links to the installed ones, so that no test downloads PyTorch.
    """
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False)
    (site,) = home.glob("lib/python*/site-packages")
    for distribution in dependencies("torch", "numpy", "rich"):
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():  # `nvidia`, of the CUDA builds of PyTorch, is a folder of many distributions
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    interpreter = home / "bin" / "python"
    pip("--python", str(interpreter), "install", "--no-deps", "--no-index", str(wheel))
    return interpreter


def dependencies(*names: str) -> Iterator[metadata.Distribution]:
    """The installed distributions that `names` need, themselves included, extras left out."""
    pending, seen = list(names), set[str]()
    while pending:
        name = pending.pop()
        if name.lower() in seen:
            continue
        seen.add(name.lower())
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # a requirement of another platform or Python version
        yield distribution
        for requirement in distribution.requires or ():
            if "extra ==" not in requirement:
                match = re.match(r"[\w.-]+", requirement)
                assert match is not None
                pending.append(match.group())


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def run(python: Path, *arguments: str) -> str:
    done = subprocess.run([python, *arguments], capture_output=True, text=True, cwd=python.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_holds_every_source_and_nothing_at_the_top(source: Path, wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {
        f"{package}/{path.relative_to(source / folder).as_posix()}"
        for folder, package in FOLDERS.items()
        for path in (source / folder).rglob("*")
        if path.is_file()
    }
    assert held == expected


def test_imports_with_torch_alone(python: Path) -> None:
    program = """
import sys, fusion_pass, fusion_pass.kernels, fusion_pass.patterns, fusion_pass.zoo
assert "site-packages" in fusion_pass.__file__, fusion_pass.__file__
for absent in ("triton", "transformers", "diffusers", "rich", "torch_npu"):
    assert absent not in sys.modules, f"{absent} was imported"
for other in ("kernels", "patterns"):
    try:
        __import__(other)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"the wheel left a top-level {other}")
"""
    run(python, "-c", program)


def test_registers_the_backend(python: Path) -> None:
    program = """
import torch
assert "fusion_pass" in torch._dynamo.list_backends(None)
torch._dynamo.lookup_backend("fusion_pass")
"""
    run(python, "-c", program)


def test_finds_the_sites_of_a_model(python: Path) -> None:
    """Without the extras the command explains the one model that needs torch alone."""
    out = run(python, "-m", "fusion_pass", "explain", "--model", "qwen3_fused_qkv", "--layers", "2")
    assert out.count("fused") >= 2


def test_installs_the_command(python: Path) -> None:
    done = subprocess.run([python.parent / "fusion-pass", "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "explain" in done.stdout
