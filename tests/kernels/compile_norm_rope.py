"""Compile representative instances of the norm + rotation kernels for a GPU that need not be there; print registers
and spills as JSON.

    python tests/kernels/compile_norm_rope.py 90 [NAME ...]

The host code runs on CPU tensors with the kernels replaced by a recorder, so what is compiled is what a launch would
compile. It runs in a process of its own (`test_norm_rope_compile.py`): in one where TRITON_INTERPRET is set nothing
can be compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from fusion_pass.kernels import registry
from fusion_pass.kernels.triton import norm_rope

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
}


class Recorder:
    """Stands for a JIT function and keeps the arguments of its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.arg_names = kernel.arg_names
        self.launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.launches.append((args, kwargs))


@contextmanager
def recording(arch: int, multiprocessors: int = 1) -> Iterator[dict[str, Recorder]]:
    """Launches are kept instead of made, for a device like that."""
    names = ("forward_kernel", "backward_kernel", "reduce_kernel")
    recorders = {name: Recorder(getattr(norm_rope, name)) for name in names}
    usable = mock.patch.object(registry, "get", return_value=SimpleNamespace(load=lambda: norm_rope))
    facts = mock.Mock(return_value=(multiprocessors, arch))
    with usable, mock.patch.multiple(norm_rope, device_facts=facts, **recorders):
        yield recorders


def compile_launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arch: int) -> dict[str, int]:
    """Registers and spilled bytes of one recorded launch."""
    options = {key: kwargs.pop(key) for key in ("num_warps", "num_stages", "maxnreg", "launch_pdl") if key in kwargs}
    bound = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = bound[name]
        if name in kwargs:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return resources(compiled.asm["ptx"], arch) | {"warps": options.get("num_warps", 4)}


def resources(ptx: str, arch: int) -> dict[str, int]:
    """What ptxas reports about a kernel."""
    gpu = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={gpu}", str(path), "-o", str(Path(folder, "kernel.cubin"))]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.findall(r"Used (\d+) registers", log)
    return {
        "registers": max(map(int, registers)),
        "spills": sum(int(stores) + int(loads) for stores, loads in spills),
        "wide_loads": len(re.findall(r"ld\.global\S*\.v[24]\.b32", ptx)),
        "narrow_loads": len(re.findall(r"ld\.global\S*\.b16", ptx)),
    }


def run(
    name: str,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    packed: bool = True,
    packing: str = "blocked",
    parameters: str = "w",
    per_head: bool = False,
    rows: int = 1,
    entries: int | None = None,
    positions: bool = False,
    tables: torch.dtype = torch.float32,
    table_gradients: bool = False,
    tokens: int = 64,
    **options: Any,
) -> None:
    """One training step of one operator, backward included."""
    options = {"norm": "rms", "eps": 1e-6, "rotary_dim": head_dim, **options}
    if options["norm"] == "none":
        parameters, options["eps"] = "", None
    ops = torch.ops.fusion_pass
    width = (heads + 2 * kv_heads) * head_dim
    entries = options["rotary_dim"] // 2 if entries is None else entries

    def parameter(kind: str, count: int) -> torch.Tensor | None:
        if kind not in parameters:
            return None
        hidden = options.get("norm_scope") == "hidden"
        shape = (count * head_dim,) if hidden else (count, head_dim) if per_head else (head_dim,)
        return torch.ones(shape, dtype=dtype, requires_grad=True)

    affine = (parameter("w", heads), parameter("w", kv_heads), parameter("b", heads), parameter("b", kv_heads))
    shape = (4096, entries) if positions else (1, tokens, entries) if rows == 1 else (rows, 1, tokens, entries)
    cos, sin = (torch.ones(shape, dtype=tables, requires_grad=table_gradients) for _ in range(2))
    index = torch.zeros(tokens, dtype=torch.int64) if positions else None
    if packed:
        qkv = torch.ones(1, tokens, width, dtype=dtype, requires_grad=True)
        sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "packing": packing}
        out = ops.qkv_norm_rope(qkv, cos, sin, index, *affine, **sizes, backend="triton", **options)
    else:
        q, k = (torch.ones(1, tokens, n, head_dim, dtype=dtype, requires_grad=True) for n in (heads, kv_heads))
        out = ops.qk_norm_rope(q, k, cos, sin, index, *affine, backend="triton", **options)
    torch.autograd.backward(out, [torch.ones_like(t) for t in out])


HALF = torch.float16
INSTANCES: dict[str, dict[str, Any]] = {
    "qwen3 packed": {},
    "qwen3 packed, few tokens": {"multiprocessors": 132},
    "qwen3 separate": {"packed": False, "entries": 128, "tables": torch.bfloat16},
    "qwen3_vl 64+8 interleaved": {"heads": 64, "rows": 3, "mrope_layout": "interleaved", "mrope_section": [24, 20, 20]},
    "qwen2_vl 16+2 sectioned": {"heads": 16, "kv_heads": 2, "rows": 3, "mrope_layout": "sectioned", "mrope_section": [16, 24, 24]},  # noqa: E501
    "llama gathered": {"norm": "none", "packed": False, "positions": True},
    "gemma3 256": {"heads": 8, "kv_heads": 4, "head_dim": 256, "norm": "rms_one_plus", "packed": False, "entries": 256},
    "olmo2 hidden": {"kv_heads": 32, "norm_scope": "hidden", "packed": False, "entries": 128},
    "cohere per head": {"norm": "layer", "per_head": True, "packed": False, "pairing": "adjacent", "dtype": HALF},
    "glm4 partial adjacent": {"kv_heads": 2, "norm": "none", "rotary_dim": 64, "pairing": "adjacent"},
    "neox partial grouped": {"heads": 40, "kv_heads": 40, "head_dim": 72, "rotary_dim": 18, "norm": "layer", "parameters": "wb", "packing": "grouped"},  # noqa: E501
    "llama4 norm last": {"heads": 40, "norm_first": False, "parameters": "", "pairing": "adjacent", "packed": False},
    "deepseek 64": {"heads": 16, "kv_heads": 1, "head_dim": 64, "norm": "none", "pairing": "adjacent_to_halves", "packed": False, "entries": 64},  # noqa: E501
    "head_dim 80": {"heads": 16, "kv_heads": 16, "head_dim": 80, "parameters": "wb"},
    "head_dim 96": {"heads": 24, "kv_heads": 24, "head_dim": 96, "pairing": "adjacent"},
    "head_dim 112": {"head_dim": 112, "dtype": HALF},
    "head_dim 192": {"heads": 16, "kv_heads": 4, "head_dim": 192},
    "float32": {"dtype": torch.float32},
    "float64": {"heads": 4, "kv_heads": 2, "dtype": torch.float64, "tables": torch.float64},
    "tiles of three sizes": {"heads": 3, "kv_heads": 1, "norm_scope": "hidden"},
    "table gradients": {"table_gradients": True, "parameters": "wb", "packed": False},
}  # fmt: skip


def main() -> None:
    arch, *names = sys.argv[1:]
    result: dict[str, dict[str, dict[str, int]]] = {}
    for name in names or INSTANCES:
        instance = dict(INSTANCES[name])
        with recording(int(arch), instance.pop("multiprocessors", 1)) as recorders:
            run(name, **instance)
        result[name] = {
            kernel: compile_launch(recorder.kernel, *recorder.launches[0], int(arch))
            for kernel, recorder in recorders.items()
            if recorder.launches
        }
        print(f"{name}: {result[name]}", file=sys.stderr, flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
