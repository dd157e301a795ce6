"""Compile representative launches of the attention kernels for a GPU that need not be there; print registers, spills
and matrix instructions as JSON.

    python tests/kernels/compile_attention.py 90 [NAME ...]
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

import torch
import triton
from compile_norm_rope import TYPES, Recorder, resources
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusion_pass.kernels.attention_problem import Problem, resolve
from fusion_pass.kernels.triton import attention as launchers

KERNELS = ("attention_forward", "attention_dq", "attention_dkdv", "attention_tail")

CASES: dict[str, dict[str, Any]] = {
    "causal_64": {"head_dim": 64},
    "causal_128": {"head_dim": 128},
    "full_128": {"head_dim": 128, "causal": "none"},
    "causal_72": {"head_dim": 72},
    "segments_128": {"head_dim": 128, "segments": True},
    "bias_128": {"head_dim": 128, "causal": "none", "bias": True},
}


def run(head_dim: int, causal: str = "top_left", segments: bool = False, bias: bool = False) -> None:
    """One forward and backward: 256 tokens, 8 query heads on 2 key heads."""
    q, k = (torch.randn(2, 256, heads, head_dim, dtype=torch.bfloat16) for heads in (8, 2))
    ids = torch.zeros(2, 256, dtype=torch.int32) if segments else None
    mask = torch.zeros(256, 256) if bias else None
    seen = resolve(256, 256, causal=causal, window_left=-1, window_right=-1, mask=mask, q_segment_ids=ids)
    problem = Problem(q, k, k, None, seen, head_dim**-0.5, 0.0)
    out, lse = launchers.forward(problem, "bshd")
    launchers.backward(problem, torch.randn_like(out), None, out, lse, (True, True, True, False))


def compile_launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arch: int) -> dict[str, int]:
    """What the launch would compile: an integer that is a multiple of 16 is known to be; 1 and None are constants."""
    options = {key: kwargs.pop(key) for key in ("num_warps", "num_stages")}
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
        return TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"

    signature = {}
    for index, name in enumerate(kernel.arg_names):
        if name in kwargs:
            signature[name], constants[(index,)] = "constexpr", bound[name]
        else:
            signature[name] = described(bound[name], (index,))
    source = ASTSource(kernel, signature, constants, attributes)
    ptx = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm["ptx"]
    matrix = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[arch]
    return resources(ptx, arch) | {"matrix_products": ptx.count(matrix)}


def main() -> None:
    arch, names = int(sys.argv[1]), sys.argv[2:] or list(CASES)
    report: dict[str, dict[str, dict[str, int]]] = {}
    for name in names:
        recorders = {kernel: Recorder(getattr(launchers, kernel)) for kernel in KERNELS}
        unused = {kernel: Recorder(getattr(launchers, kernel)) for kernel in ("attention_delta", "attention_ranges")}
        with (
            mock.patch.multiple(launchers, **recorders, **unused),
            mock.patch.object(launchers, "_architecture", return_value=arch),
        ):
            run(**CASES[name])
        report[name] = {
            kernel: compile_launch(recorder.kernel, *recorder.launches[0], arch)
            for kernel, recorder in recorders.items()
            if recorder.launches
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
