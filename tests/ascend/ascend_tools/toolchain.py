"""The public part of the Ascend tool chain, as far as it runs on a plain x86 machine.

    Triton source --triton-ascend--> linalg --bishengir-compile--> memory plan --hivmc (not public)--> NPU binary
                                       '--LLVM 19--> a shared library for this machine

`lower` makes the linalg module a launch would compile to, `plan_memory` passes it through Huawei's compiler up to its
closed last step, which allocates every on-chip buffer and fails where one does not fit, and `run_on_host` executes
it, one call for each program of the grid.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
PREFIX = Path(sys.prefix)
LLVM = Path(os.environ.get("ASCEND_TESTS_LLVM19", PREFIX / "llvm"))
CACHE = Path(os.environ.get("FUSION_PASS_ASCEND_CACHE", PREFIX / "lowered"))

TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "i1",
}
EVERY_STEP_RAN = "External hivmc run fails"
"""The compiler's complaint that the closed last step is absent: everything before it succeeded."""

BUFFERIZE = (
    "--convert-elementwise-to-linalg --convert-tensor-to-linalg --empty-tensor-to-alloc-tensor "
    "--one-shot-bufferize=allow-return-allocs-from-loops=true --buffer-deallocation-pipeline "
    "--convert-bufferization-to-memref --convert-linalg-to-loops --lower-affine --convert-scf-to-cf "
    "--arith-expand=include-bf16=true --expand-strided-metadata --lower-affine --memref-expand --convert-cf-to-llvm "
    "--convert-math-to-llvm --convert-arith-to-llvm --convert-vector-to-llvm --convert-index-to-llvm "
    "--finalize-memref-to-llvm --convert-func-to-llvm --convert-arith-to-llvm --convert-cf-to-llvm "
    "--reconcile-unrealized-casts"
).split()


PASSES = "function(sroa,early-cse,simplifycfg)"
"""What makes the host code small; -O2 takes longer than the code it speeds up runs."""


def missing_lowering() -> str | None:
    """Why a launch cannot be lowered here, or None."""
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("triton.backends.ascend") is None:
        return "triton-ascend is not installed"
    return None


def missing_compiler() -> str | None:
    """Why the memory plan cannot be made here, or None."""
    if importlib.util.find_spec("ascendnpuir") is None:
        return "ascendnpu-ir (bishengir-compile) is not installed"
    return missing_lowering()


def missing_host() -> str | None:
    """Why lowered modules cannot be executed here, or None."""
    if not (LLVM / "usr/lib/llvm-19/bin/mlir-opt").exists():
        return f"LLVM 19 with MLIR tools is not in {LLVM}"
    return missing_lowering()


@dataclass(frozen=True)
class Lowered:
    """A linalg module and the name of its function."""

    name: str
    text: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:20]


def lower(launch: Any, platform: str = "Ascend910B4") -> Lowered:
    """The linalg module of `launch` (a `fusion_pass.kernels.ascend.launch.Launch`)."""
    import triton
    from triton._C.libtriton import ir
    from triton.backends.ascend import compiler as ascend
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    names = [name for name in launch.kernel.arg_names if name not in launch.constants]
    signature = {name: _type(launch.arguments[name]) for name in names}
    # `cache_key` covers the source of the kernel and of the functions it calls.
    made_from = (triton.__version__, launch.kernel.cache_key, signature, sorted(launch.constants.items()), platform)
    kept = CACHE / f"{hashlib.sha256(repr(made_from).encode()).hexdigest()[:20]}.linalg.mlir"
    if kept.exists():
        return Lowered(launch.kernel.__name__, kept.read_text())
    target = GPUTarget("npu", platform, 0)
    backend = make_backend(target)
    source = ASTSource(launch.kernel, signature, dict(launch.constants))
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata = {"hash": "test", "target": target, **options.__dict__}
    module = ascend.make_ttir(module, metadata, options)
    text = ascend.ttir_to_linalg(module, metadata, options, named_ops=True)
    _write(kept, text)
    return Lowered(launch.kernel.__name__, text)


def _write(path: Path, text: str) -> None:
    """At once, so that another process never reads a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(text)
    os.replace(unfinished, path)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


@dataclass(frozen=True)
class Plan:
    """What bishengir-compile said."""

    fits: bool
    message: str
    weakened: bool
    """It fits only after the compiler had turned optimisations off by itself and tried again."""
    vector_bytes: int
    """Peak of the Unified Buffer, from the offsets it gave the buffers."""


def plan_memory(lowered: Lowered, platform: str) -> Plan:
    """Every on-chip buffer allocated for `platform`, by Huawei's compiler."""
    temps = _folder(lowered, platform)
    source = temps / "in.mlir"
    _write(source, re.sub(r', mix_mode = "[^"]*"', "", lowered.text))
    spec = importlib.util.find_spec("ascendnpuir")
    assert spec is not None
    assert spec.origin is not None
    done = subprocess.run(
        [
            str(Path(spec.origin).parent / "bin" / "bishengir-compile"),
            str(source),
            f"--target={platform}",
            "--enable-auto-multi-buffer=True",
            "--enable-auto-bind-sub-block=True",
            "--enable-hfusion-compile=true",
            "--enable-hivm-compile=true",
            "--enable-triton-kernel-compile=true",
            f"--save-temps={temps}",
            "-o",
            str(temps / "kernel.o"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    fits = EVERY_STEP_RAN in done.stderr and "overflow, requires" not in done.stderr.split("retry")[-1]
    planned = temps / "module.hivm.opt.mlir"
    return Plan(
        fits=fits,
        message=done.stderr.strip(),
        weakened="retrying" in done.stderr,
        vector_bytes=_peak(planned.read_text()) if fits and planned.exists() else 0,
    )


def device_spec(lowered: Lowered, platform: str) -> dict[str, int]:
    """The compiler's own table of the chip, as it writes it into the module: cores, and memory sizes in bits."""
    plan_memory(lowered, platform)
    module = (_folder(lowered, platform) / "module.hivm.opt.mlir").read_text()
    return {name: int(value) for name, value in re.findall(r'dlti\.dl_entry<"(\w+)", (\d+) : i\d+>', module)}


def _folder(lowered: Lowered, platform: str) -> Path:
    """Where this process keeps what the compiler writes for one module and chip."""
    folder = CACHE / f"{lowered.digest}.{platform}.{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


ELEMENT_BYTES = {"f32": 4, "i32": 4, "f16": 2, "bf16": 2, "i16": 2, "i8": 1, "i1": 1, "i64": 8, "f64": 8}


def _peak(module: str) -> int:
    """Largest `offset + size` of a buffer in the Unified Buffer: `hivm.hir.pointer_cast(%offset) : memref<..., ub>`."""
    constants = {name: int(value) for name, value in re.findall(r"(%\w+) = arith\.constant (\d+) : i64", module)}
    peak = 0
    cast = r"hivm\.hir\.pointer_cast\(([^)]*)\)[^:]*: memref<([\dx]+)x(\w+)[^>]*address_space<ub>>"
    for offsets, shape, element in re.findall(cast, module):
        size = ELEMENT_BYTES[element]
        for extent in shape.split("x"):
            size *= int(extent)
        for offset in offsets.split(","):
            peak = max(peak, constants.get(offset.split("[")[0].strip(), 0) + size)
    return peak


def run_on_host(launch: Any) -> None:
    """Execute a launch on this machine: the lowered module, compiled by LLVM 19, once for each program."""
    lowered = lower(launch)
    function = _host_function(lowered)
    values: list[Any] = []
    keep: list[Any] = [
        _Descriptor(torch.zeros(4096, dtype=torch.int8)),
        _Descriptor(torch.zeros(4096, dtype=torch.int8)),
    ]
    values += [ctypes.byref(descriptor) for descriptor in keep]
    names = [name for name in launch.kernel.arg_names if name not in launch.constants]
    for name in names:
        value = launch.arguments[name]
        if isinstance(value, torch.Tensor):
            keep.append(_Descriptor(value))
            values.append(ctypes.byref(keep[-1]))
        elif isinstance(value, float):
            values.append(ctypes.c_float(value))
        else:
            values.append((ctypes.c_int32 if _type(value) == "i32" else ctypes.c_int64)(value))
    for program in range(launch.programs):
        grid = [launch.programs, 1, 1, program, 0, 0]
        function(*values, *(ctypes.c_int32(v) for v in grid))


class _Descriptor(ctypes.Structure):
    """MLIR's rank-1 memref descriptor over a tensor's memory."""

    _fields_ = (
        ("allocated", ctypes.c_void_p),
        ("aligned", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("stride", ctypes.c_int64),
    )

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.data_ptr(), tensor.data_ptr(), 0, 2**40, 1)
        self.tensor = tensor


@functools.cache
def _host_function(lowered: Lowered) -> Any:
    library = CACHE / f"{lowered.digest}.so"
    if not library.exists():
        _compile_for_host(lowered, library)
    return getattr(ctypes.CDLL(str(library)), f"_mlir_ciface_{lowered.name}")


def _compile_for_host(lowered: Lowered, library: Path) -> None:
    binaries = LLVM / "usr/lib/llvm-19/bin"
    stem = str(library.with_suffix(f".{os.getpid()}"))
    text = re.sub(r"\) attributes \{[^}]*\} \{$", ") attributes {llvm.emit_c_interface} {", lowered.text, flags=re.M)
    text = re.sub(r" \{tt\.[^}]*\}", "", text)
    # A hint of Huawei's own dialect about the layout of a buffer; it computes nothing.
    text = re.sub(r"^ *annotation\.mark .*\n", "", text, flags=re.M)
    _write(Path(f"{stem}.in.mlir"), text)
    for command in (
        [str(binaries / "mlir-opt"), f"{stem}.in.mlir", *BUFFERIZE, "-o", f"{stem}.llvm.mlir"],
        [str(binaries / "mlir-translate"), "--mlir-to-llvmir", f"{stem}.llvm.mlir", "-o", f"{stem}.ll"],
        [str(binaries / "opt"), f"-passes={PASSES}", f"{stem}.ll", "-o", f"{stem}.bc"],
        [str(binaries / "llc"), "-O2", "-relocation-model=pic", "-filetype=obj", f"{stem}.bc", "-o", f"{stem}.o"],
        ["gcc", "-shared", f"{stem}.o", str(_runtime()), "-o", f"{stem}.tmp.so", "-lm"],
    ):
        _check(command)
    os.replace(f"{stem}.tmp.so", library)


@functools.cache
def _runtime() -> Path:
    """`host_runtime.c`, compiled once a process."""
    source = HERE / "host_runtime.c"
    compiled = CACHE / f"host_runtime.{os.getpid()}.o"
    _check(["gcc", "-O2", "-c", "-fPIC", str(source), "-o", str(compiled)])
    return compiled


def _check(command: list[str]) -> None:
    libraries = f"{LLVM}/usr/lib/x86_64-linux-gnu:{LLVM}/usr/lib/llvm-19/lib"
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "LD_LIBRARY_PATH": libraries}
    )
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {done.stderr.strip()[:2000]}")
