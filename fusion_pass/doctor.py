"""What is installed here, which kernels can run, and what the others lack. `fusion-pass doctor` prints it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from fusion_pass import extensions
from fusion_pass.kernels import registry


@dataclass(frozen=True)
class Part:
    """Something the pass can use. `found` describes it, or is None; then `lack` says what that means and what helps."""

    name: str
    found: str | None
    lack: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """Everything `fusion-pass doctor` prints."""

    parts: tuple[Part, ...]
    kernels: tuple[registry.Status, ...]


def diagnose() -> Diagnosis:
    """Look at this machine. Asks installed packages for their versions without importing them."""
    return Diagnosis(
        parts=(*_software(), _patterns(), *_devices(), *_ascend()),
        kernels=registry.doctor(),
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _software() -> Iterator[Part]:
    yield Part("Python", platform.python_version())
    yield Part("torch", f"{torch.__version__}, built for {_torch_target()}")
    yield Part(
        "fusion-pass", _version("fusion-pass"), "It is imported from a folder; `pip install` registers its backend."
    )
    yield _backend()
    yield Part(
        "triton",
        _version("triton") or _version("triton-ascend"),
        "The Triton kernels need it: pip install 'fusion-pass[triton]'.",
    )
    yield Part(
        "cuda-core",
        _version("cuda-core"),
        "The CUDA C++ kernels of norm + rotation need it: pip install 'fusion-pass[cuda]'. Each call then takes them "
        "or Triton's, as measured; interleaved MRoPE and head dimensions like 80 and 96 gain most.",
    )
    for name, use in (("transformers", "language models and the demo"), ("diffusers", "diffusion models")):
        yield Part(name, _version(name), f"Only the zoo's {use} need it: pip install 'fusion-pass[zoo]'.")


def _torch_target() -> str:
    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip is not None else "the CPU"


def _backend() -> Part:
    registered = "fusion_pass" in torch._dynamo.list_backends(exclude_tags=None)
    return Part(
        'torch.compile(backend="fusion_pass")',
        "registered" if registered else None,
        "No installed package registers it: pip install fusion-pass.",
    )


def _patterns() -> Part:
    """The fusions looked for. An installed package with a broken pattern is a finding, not a crash."""
    try:
        patterns = extensions.patterns()
    except Exception as error:
        return Part("fusions", None, f"A pattern cannot be loaded: {type(error).__name__}: {error}")
    for pattern in patterns:
        if isinstance(pattern, extensions.Unloadable):
            kind = type(pattern.error).__name__
            return Part("fusions", None, f"{pattern.name} cannot be loaded: {kind}: {pattern.error}")
    return Part("fusions", ", ".join(pattern.name for pattern in patterns))


def _devices() -> Iterator[Part]:
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None or torch.version.hip is not None
        why = "No driver or no GPU is visible." if built else "This PyTorch is built without CUDA."
        yield Part("CUDA device", None, f"{why} The GPU kernels cannot run here.")
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        yield Part(f"CUDA device {index}", f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}")


def _ascend() -> Iterator[Part]:
    """The three things an Ascend NPU needs. All absent is the normal case elsewhere, so each says what it is for."""
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    yield Part(
        "CANN",
        home if home and Path(home).is_dir() else None,
        f"ASCEND_HOME_PATH is {home!r}, which is no folder; source CANN's set_env.sh."
        if home
        else "Only an Ascend NPU needs it: install the CANN toolkit and source its set_env.sh.",
    )
    yield Part("torch_npu", _version("torch-npu"), "Only an Ascend NPU needs it: the release that matches torch's.")
    yield Part(
        "triton-ascend",
        _version("triton-ascend"),
        "Only an Ascend NPU needs it; it installs as `triton`, so give it an environment of its own.",
    )


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print a diagnosis."""
    parts = Table(show_header=False, show_edge=False, pad_edge=False, box=None)
    for part in diagnosis.parts:
        mark = "[green]yes[/green]" if part.found is not None else "[yellow]no[/yellow]"
        parts.add_row(mark, part.name, part.found if part.found is not None else part.lack)
    console.print(parts)

    kernels = Table(title="\nKernels", title_justify="left", show_edge=False, pad_edge=False)
    for heading in ("usable here", "kernel", "operators", "why not"):
        kernels.add_column(heading)
    for status in diagnosis.kernels:
        mark = "[green]yes[/green]" if status.reason is None else "[yellow]no[/yellow]"
        kernels.add_row(mark, status.name, ", ".join(status.ops), status.reason or "")
    console.print(kernels)
