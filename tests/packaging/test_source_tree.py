"""The folders at the top of the repository: what they import of each other, and that they do no harm where the
repository is the current folder (`python -m pytest`)."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "fusion_pass": ROOT / "fusion_pass",
    "fusion_pass.patterns": ROOT / "patterns",
    "fusion_pass.kernels": ROOT / "kernels",
}
MODULES = {
    ".".join((package, *file.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__"): file
    for package, folder in PACKAGES.items()
    for file in folder.rglob("*.py")
}


@functools.cache
def imported(module: str) -> frozenset[str]:
    """What of ours `module` imports, wherever in it."""
    file = MODULES[module]
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    found = list[str]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            names = [f"{base}.{name}" if f"{base}.{name}" in MODULES else base for name in names]
        found += names
    return frozenset(found) & MODULES.keys()


def test_no_module_imports_itself_by_others() -> None:
    """Not by an import inside a function, or for types alone, either."""
    imports = {module: imported(module) for module in MODULES}
    assert "fusion_pass.graph.site" in imports["fusion_pass.patterns.norm_rope.pattern"]
    graphlib.TopologicalSorter(imports).prepare()  # its CycleError names the modules


@pytest.mark.parametrize(
    ("folder", "may_import"),
    [
        ("attention", {"attention", "formulas", "masks"}),
        ("formulas", {"formulas"}),
        ("masks", {"formulas", "masks"}),
        ("norm_rope", {"norm_rope"}),
        ("", set()),
    ],
)
def test_the_folders_of_patterns_import_one_way(folder: str, may_import: set[str]) -> None:
    """As `patterns/__init__.py` says. What stands beside the folders ("") imports none of them."""

    def folder_of(module: str) -> str:
        inner = MODULES[module].relative_to(ROOT).parts[1]
        return "" if inner.endswith(".py") else inner

    patterns = {module for module in MODULES if module.startswith("fusion_pass.patterns.")}
    here = {module for module in patterns if folder_of(module) == folder}
    assert here
    assert {folder_of(name) for module in here for name in imported(module) if name in patterns} - {""} <= may_import


def test_written_out_is_imported_by_the_pattern_of_attention_alone() -> None:
    inner = "fusion_pass.patterns.attention.written_out"
    importers = {m for m in MODULES if not m.startswith(inner) and any(n.startswith(inner) for n in imported(m))}
    assert importers == {"fusion_pass.patterns.attention.pattern"}


def run_at_the_top(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_transformers_takes_our_kernels_for_no_version_of_its_own() -> None:
    """transformers imports any `kernels` it finds to ask for its version; the operators must not be defined twice."""
    run_at_the_top("""
import importlib.util, os
assert importlib.util.find_spec("kernels").origin == os.path.join(os.getcwd(), "kernels", "__init__.py")
import fusion_pass.kernels
from transformers.utils import is_kernels_available
assert not is_kernels_available()
from transformers import Qwen3Model
""")


def test_either_name_of_the_kernels_leads_to_one_package() -> None:
    run_at_the_top("""
import kernels, fusion_pass.kernels
assert kernels.ops is fusion_pass.kernels.ops
""")
