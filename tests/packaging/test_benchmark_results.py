"""A benchmark's result says which source was measured."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.timing import source_state


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    done = subprocess.run(["git", "-C", str(folder), *who, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "kernel.py").write_text("1\n")
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "old.json").write_text("{}\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "one")
    return tmp_path


def test_commit_of_a_clean_tree(checkout: Path) -> None:
    (checkout / "benchmarks" / "results" / "old.json").write_text("[]\n")  # this run's own result
    assert source_state(checkout) == {"commit": git(checkout, "rev-parse", "HEAD"), "tree": "clean"}


@pytest.mark.parametrize("name", ["kernel.py", "new.py"])
def test_a_changed_tree_is_told(checkout: Path, name: str) -> None:
    (checkout / name).write_text("2\n")
    assert source_state(checkout)["tree"] == "changed"


def test_a_copy_has_no_commit(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert source_state(tmp_path_factory.mktemp("copy")) == {}
    assert source_state(checkout / "benchmarks") == {}  # a folder of another project's checkout


def test_without_git(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert source_state(checkout) == {}
