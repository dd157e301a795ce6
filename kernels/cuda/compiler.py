"""From source text to a loaded kernel: NVRTC through `cuda.core`, with the cubins kept on disk.

Neither nvcc nor a host compiler is needed, and no header of the CUDA toolkit. A cubin is found again by the hash of
everything that it depends on: the sources, the instance's constants, the architecture, the options and NVRTC's version.

The cache is the folder `$FUSION_PASS_CUDA_CACHE`, else `$XDG_CACHE_HOME/fusion_pass/cuda`, else
`~/.cache/fusion_pass/cuda`. A file is written under another name and renamed, so processes may share the folder. Where
it cannot be written, every process compiles for itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent / "source"
CACHE_VARIABLE = "FUSION_PASS_CUDA_CACHE"
OPTIONS = {"std": "c++17"}

_lock = threading.Lock()


def unavailable() -> str | None:
    """None, or why nothing can be compiled here: the package or library that is missing, and how to get it."""
    remedy = "Install fusion-pass[cuda]."
    try:
        _nvrtc_version()
    except ImportError as error:
        return f"cuda-core or cuda-bindings is not installed ({error}). {remedy}"
    except RuntimeError as error:  # cuda-pathfinder's DynamicLibNotFoundError is one
        return f"NVRTC is not found ({str(error).splitlines()[0]}). {remedy}"
    return None


def compile_cubin(source: str, arch: str, log: Any = None) -> bytes:
    """The cubin of `source` for `arch` ("sm_90"). `log`, a text file, receives what ptxas reports of registers.

    Raises RuntimeError with NVRTC's log if the source does not compile, which is a mistake of this package.
    """
    core = importlib.import_module("cuda.core")
    options = core.ProgramOptions(
        arch=arch, include_path=str(SOURCES), ptxas_options="-v" if log is not None else None, **OPTIONS
    )
    try:
        code = core.Program(source, "c++", options).compile("cubin", logs=log).code
    except Exception as error:
        raise RuntimeError(f"NVRTC cannot compile an instance of {SOURCES.name} for {arch}: {error}") from error
    return bytes(code)


def cached_cubin(source: str, arch: str) -> bytes:
    """`compile_cubin`, or what it made earlier."""
    key = hashlib.sha256(
        "\0".join((source, arch, repr(OPTIONS), _nvrtc_version(), _sources_digest())).encode()
    ).hexdigest()
    path = cache_folder() / f"{key}.cubin"
    with contextlib.suppress(OSError):
        return path.read_bytes()
    cubin = compile_cubin(source, arch)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, cubin)
    return cubin


def cache_folder() -> Path:
    """Where cubins are kept."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fusion_pass" / "cuda"


@cache
def load(source: str, arch: str, name: str) -> Any:
    """The kernel `name` of `source`, loaded (a `cuda.core.Kernel`, which keeps its code alive). It may be launched on
    every device of that architecture: CUDA 12 and later load code without a context."""
    with _lock:
        object_code = importlib.import_module("cuda.core").ObjectCode
        try:
            return object_code.from_cubin(cached_cubin(source, arch)).get_kernel(name)
        except Exception:  # a damaged file in the cache; if it is something else, the fresh code says so
            return object_code.from_cubin(compile_cubin(source, arch)).get_kernel(name)


def _write(path: Path, content: bytes) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise


@cache
def _nvrtc_version() -> str:
    importlib.import_module("cuda.core")
    error, *version = importlib.import_module("cuda.bindings.nvrtc").nvrtcVersion()
    if int(error):
        raise RuntimeError(f"nvrtcVersion failed: {error}")
    return ".".join(map(str, version))


@cache
def _sources_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.glob("*.cuh")):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()
