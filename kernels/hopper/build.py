"""From a template to a loaded kernel: the signature, the assembler, the compilation, and what the assembler reports
about it.

Nothing here needs a GPU before `CompiledKernel` is launched, so tests compile every instance on any machine.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from . import assembler

TARGET = GPUTarget("cuda", 90, 32)

_ELEMENT = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}


class _Source(GluonASTSource):  # type: ignore[misc]
    """A Gluon kernel whose cache entry also depends on the assembler that is used."""

    def __init__(self, assembler_version: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._assembler_version = assembler_version

    def hash(self) -> str:
        return f"{super().hash()}-ptxas-{self._assembler_version}"


class Constants:
    """A template as kernels see it: every field is a Triton constant, so that conditions on it are decided at compile
    time."""

    def __init__(self, template: Any) -> None:
        self.template = template

    def __getattr__(self, name: str) -> gl.constexpr:
        return gl.constexpr(getattr(self.template, name))

    def __repr__(self) -> str:
        return repr(self.template)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and other.template == self.template

    def __hash__(self) -> int:
        return hash(self.template)

    def mangle(self) -> str:
        """This argument's part of a function's symbol name."""
        return "_".join(str(value) for value in vars(self.template).values())


@dataclass(frozen=True)
class Instance:
    """One kernel to compile: the Gluon function, its run-time arguments by type, its template."""

    kernel: Any
    arguments: Mapping[str, str]
    """Name to Triton type of every run-time argument, in order."""
    template: Any
    num_warps: int
    max_registers: int
    overlaps: bool = False
    """It may start before the kernel before it ends, for which it waits itself: programmatic dependent launch."""

    def __hash__(self) -> int:
        return hash((id(self.kernel), tuple(self.arguments.items()), self.template))


def tensor_map_layout(dtype: str, block: Sequence[int], *, swizzled: bool = True) -> gl.NVMMASharedLayout:
    """Shared memory layout of a tile that TMA fills; not swizzled for vectors that no product reads."""
    if swizzled:
        return gl.NVMMASharedLayout.get_default_for(list(block), _ELEMENT[dtype])
    return gl.NVMMASharedLayout(
        swizzle_byte_width=0, element_bitwidth=_ELEMENT[dtype].primitive_bitwidth, rank=len(block)
    )


def tensor_map_type(dtype: str, block: Sequence[int], *, swizzled: bool = True) -> str:
    """Triton's type name of a tensor map argument."""
    return f"tensordesc<{dtype}{list(block)},{tensor_map_layout(dtype, block, swizzled=swizzled)!r}>"


def compile_instance(instance: Instance) -> Any:
    """The compiled kernel (`triton.compiler.CompiledKernel`), from Triton's disk cache when it is there.

    Raises RuntimeError when no assembler is fit to use; `assembler.choose()` tells beforehand.
    """
    chosen = assembler.choose()
    if isinstance(chosen, str):
        raise RuntimeError(chosen)
    names = [*instance.arguments, "T", "num_warps"]
    signature = {**instance.arguments, "T": "constexpr", "num_warps": "constexpr"}
    constants = {(names.index("T"),): Constants(instance.template), (names.index("num_warps"),): instance.num_warps}
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in instance.arguments.items()
        if kind.startswith("*")
    }
    source = _Source(chosen.version, instance.kernel, signature, constants, aligned)
    options = {
        "num_warps": instance.num_warps, "maxnreg": instance.max_registers, "enable_fp_fusion": True,
        "launch_pdl": instance.overlaps,
    }  # fmt: skip
    with assembler.assembling_with(chosen):
        return triton.compile(source, target=TARGET, options=options)


@dataclass(frozen=True)
class Resources:
    """What the assembler and the machine code say about a kernel."""

    shared_bytes: int
    spill_bytes: int
    warnings: tuple[str, ...]
    """ptxas advisories by number, such as C7510 and C7512: wgmma was serialised."""
    wgmma: int
    tma_reduce: int
    barrier_ids: tuple[int, ...]
    """Literal ids of `bar.sync` and `barrier.sync` in the PTX, Triton's and ours."""
    overlaps: bool
    """See `Instance`."""
    waits: int
    """Places where the kernel waits for the one before it."""


def resources(kernel: Any) -> Resources:
    """Assemble the kernel's PTX again, verbosely, and count what matters in its SASS."""
    chosen = assembler.choose()
    if isinstance(chosen, str):
        raise RuntimeError(chosen)
    ptx = kernel.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [chosen.path, "-v", "--gpu-name=sm_90a", str(source), "-o", str(source.with_suffix(".cubin"))]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        cubin = Path(folder, "loaded.cubin")
        cubin.write_bytes(kernel.asm["cubin"])
        # Not kernel.asm["sass"]: its parser stops before the end of a warp-specialised kernel.
        sass = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-sass", str(cubin)], capture_output=True, text=True, check=True
        ).stdout
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    return Resources(
        shared_bytes=kernel.metadata.shared,
        spill_bytes=sum(int(stores) + int(loads) for stores, loads in spills),
        warnings=tuple(sorted(set(re.findall(r"C75\d\d", log)))),
        wgmma=len(re.findall(r"\bHGMMA\b", sass)),
        tma_reduce=len(re.findall(r"\bUTMAREDG\b", sass)),
        barrier_ids=tuple(
            sorted({int(number) for number in re.findall(r"\bbar(?:rier)?\.sync(?:\.aligned)?\s+(\d+)", ptx)})
        ),
        overlaps=kernel.metadata.launch_pdl,
        waits=len(re.findall(r"\bgriddepcontrol\.wait\b", ptx)),
    )
