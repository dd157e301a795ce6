"""Compile representative launches of the attention kernels for a GPU that need not be there; print registers, spills
and matrix instructions as JSON.

    python tests/kernels/compile_attention.py 90 [NAME ... | variants]

`variants` only reads the kernels, in every combination of conditions.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

import torch
import triton
from compile_norm_rope import TYPES, Recorder, resources
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from fusion_pass.kernels.attention_problem import Problem, resolve
from fusion_pass.kernels.triton import attention as launchers

KERNELS = (
    "attention_forward",
    "attention_dq",
    "attention_dkdv",
    "attention_tail",
    "attention_delta",
    "attention_ranges",
)

POINTERS = {**TYPES, torch.uint8: "*u8"}

CASES: dict[str, dict[str, Any]] = {
    "causal_64": {"head_dim": 64},
    "causal_128": {"head_dim": 128},
    "full_128": {"head_dim": 128, "causal": "none"},
    "causal_72": {"head_dim": 72},
    "segments_128": {"head_dim": 128, "given": ("q_segment_ids",)},
    "bias_128": {"head_dim": 128, "causal": "none", "given": ("bias",)},
}

# Every way through the code that the compiler sees and the interpreter does not: types, and names that change theirs.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"causal": "none"},
    "one token": {"tokens": 1, "heads": 1, "kv_heads": 1},
    "window": {"window_left": 9},
    "window on both sides": {"causal": "none", "window_left": 9, "window_right": 3},
    "mask": {"given": ("mask",)},
    "bias": {"causal": "none", "given": ("bias",)},
    "bias, causal, sinks": {"given": ("bias", "sinks")},
    "bias of each head, softcap": {"causal": "none", "given": ("bias of heads",), "softcap": 5.0},
    "segments and mask": {"given": ("q_segment_ids", "mask")},
    "mask and window": {"window_left": 9, "given": ("mask",)},
    "bias and window": {"window_left": 9, "given": ("bias",)},
    "bias, window on both sides": {"causal": "none", "window_left": 9, "window_right": 3, "given": ("bias",)},
    "segments, mask and window": {"window_left": 9, "given": ("q_segment_ids", "mask")},
    "documents": {"window_left": 9, "given": ("cu_seqlens_q", "cu_seqlens_k")},
    "softcap, sinks, gradient of lse": {"softcap": 5.0, "given": ("sinks", "grad_lse")},
    "float32": {"dtype": torch.float32},
}


def run(
    head_dim: int = 64,
    causal: str = "top_left",
    given: tuple[str, ...] = (),
    softcap: float = 0.0,
    window_left: int = -1,
    window_right: int = -1,
    tokens: int = 256,
    heads: int = 8,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """One forward and backward."""
    batch = 1 if "cu_seqlens_q" in given else 2
    q, k = (torch.randn(batch, tokens, n, head_dim, dtype=dtype) for n in (heads, kv_heads))
    conditions = {
        "mask": torch.ones(tokens, tokens, dtype=torch.bool),
        "bias": torch.zeros(2, 1, tokens, tokens),
        "bias of heads": torch.zeros(1, heads, tokens, tokens),
        "q_segment_ids": torch.zeros(2, tokens, dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, tokens], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, tokens], dtype=torch.int32),
    }
    named = {name.partition(" ")[0].replace("bias", "mask"): conditions[name] for name in given if name in conditions}
    bounds = {"causal": causal, "window_left": window_left, "window_right": window_right}
    seen = resolve(tokens, tokens, **bounds, **named)
    sinks = torch.zeros(heads) if "sinks" in given else None
    problem = Problem(q, k, k, sinks, seen, head_dim**-0.5, softcap)
    out, lse = launchers.forward(problem, "bshd")
    grad_lse = torch.randn_like(lse) if "grad_lse" in given else None
    launchers.backward(problem, torch.randn_like(out), grad_lse, out, lse, (True, True, True, False))


def compile_launch(
    kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arch: int, front_end: bool
) -> dict[str, int]:
    """What the launch would compile: an integer that is a multiple of 16 is known to be; 1 and None are constants."""
    options = {key: kwargs.pop(key) for key in ("num_warps", "num_stages") if key in kwargs}
    bound = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    constants: dict[Any, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}

    def described(value: Any, path: tuple[int, ...]) -> Any:
        if isinstance(value, tuple):
            parts = [described(part, (*path, index)) for index, part in enumerate(value)]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if value is None or (type(value) is int and value == 1):
            constants[path] = value
            return "constexpr"
        if isinstance(value, float):
            return "fp32"
        if isinstance(value, torch.Tensor) or value % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return POINTERS[value.dtype] if isinstance(value, torch.Tensor) else "i32"

    signature = {}
    for index, name in enumerate(kernel.arg_names):
        if name in kwargs:
            signature[name], constants[(index,)] = "constexpr", bound[name]
        else:
            signature[name] = described(bound[name], (index,))
    source = ASTSource(kernel, signature, constants, attributes)
    if front_end:
        _read(source, arch)
        return {}
    ptx = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm["ptx"]
    matrix = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[arch]
    return resources(ptx, arch) | {"matrix_products": ptx.count(matrix)}


def _read(source: ASTSource, arch: int) -> None:
    """What the compiler does first: the kernel's text to its own language, where types are checked. Takes no time."""
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    options, context = backend.parse_options({}), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)


def main() -> None:
    arch, *names = sys.argv[1:]
    front_end = names == ["variants"]
    cases = VARIANTS if front_end else {name: CASES[name] for name in names or CASES}
    report: dict[str, dict[str, dict[str, int]]] = {}
    for name, case in cases.items():
        recorders = {kernel: Recorder(getattr(launchers, kernel)) for kernel in KERNELS}
        with (
            mock.patch.multiple(launchers, **recorders),
            mock.patch.object(launchers, "_architecture", return_value=int(arch)),
        ):
            run(**case)
        report[name] = {
            kernel: compile_launch(recorder.kernel, *launch, int(arch), front_end)
            for kernel, recorder in recorders.items()
            for launch in recorder.launches
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
