"""The identity of the pass: a digest of everything of ours that a compiled artefact depends on.

Inductor's and AOTAutograd's caches know an operator by its name, not by its body or its backward (pytorch issue
144344). So the digest covers the sources of the pass, the patterns and the kernels, those of third-party patterns,
the versions of torch and of what compiles the kernels, and the configuration: a changed kernel never meets an artefact
compiled with the old one.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch._guards import CompileContext

from fusion_pass.config import FusionConfig
from fusion_pass.extensions import patterns

CACHE_KEY = "fusion_pass"
_SUFFIXES = frozenset({".py", ".cu", ".cuh", ".h", ".cpp", ".json"})


def uuid(config: FusionConfig) -> bytes:
    """32 bytes, never empty (a falsy uuid would bypass the caches). The sources are read once per process."""
    return hashlib.sha256(_code_digest(_pattern_sources()) + config.cache_key().encode()).digest()


def cache_key(config: FusionConfig) -> dict[str, str]:
    """`uuid` as an entry of a mapping from names to keys."""
    return {CACHE_KEY: uuid(config).hex()}


def leave_precompile() -> None:
    """Keep the graph that is being compiled out of the store of `torch._dynamo.config.caching_precompile`.

    That store knows a compiled function by its name and first line alone. A process with other settings, or with
    another version of us, would be given this graph, without a run of the pass.
    """
    if CompileContext.current_compile_id() is None or not getattr(torch._dynamo.config, "caching_precompile", False):
        return
    from torch._dynamo.symbolic_convert import InstructionTranslator

    captured = InstructionTranslator.current_tx().output
    captured.bypass_package("The fusion pass takes no part in the key of precompiled functions.")


def sources_digest(roots: Iterable[Path]) -> bytes:
    """Digest of names and contents of all source files below `roots` (folders or files)."""
    digest = hashlib.sha256()
    for root in roots:
        files = sorted(path for path in root.rglob("*") if path.suffix in _SUFFIXES) if root.is_dir() else [root]
        for file in files:
            digest.update(f"{file.relative_to(root)}\0".encode())
            digest.update(file.read_bytes())
    return digest.digest()


@functools.cache
def _code_digest(extra: tuple[Path, ...]) -> bytes:
    packages = [
        importlib.import_module(name) for name in ("fusion_pass", "fusion_pass.patterns", "fusion_pass.kernels")
    ]
    roots = [Path(folder) for package in packages for folder in package.__path__]
    # An artefact names its kernels: without the package that compiles one of them it must not be found.
    compilers = " ".join(map(_version, ("triton", "triton-ascend", "cuda-core", "cuda-bindings")))
    versions = f"{torch.__version__} {torch.version.git_version} {compilers}"
    return hashlib.sha256(sources_digest([*roots, *extra]) + versions.encode()).digest()


def _pattern_sources() -> tuple[Path, ...]:
    """Of the patterns that are not ours: the folders of their packages, or the file of a module that is in none."""
    found: set[Path] = set()
    for pattern in patterns():
        module = sys.modules.get(type(pattern).__module__)
        package = getattr(module, "__package__", None) or ""
        if package.split(".")[0] == __package__:
            continue
        folders = getattr(sys.modules.get(package), "__path__", None)
        file = getattr(module, "__file__", None)
        found.update(map(Path, folders if folders else [file] if file else []))
    return tuple(sorted(found))


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"
