"""Compile the fused end of the block's backward for a GPU that need not be there; print registers and spills as JSON.

    python tests/kernels/compile_block_end.py 90 [NAME ...]

As `compile_norm_rope.py`: the host code runs on CPU tensors and its launches are kept.
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

from fusion_pass.kernels.attention_problem import Unfinished
from fusion_pass.kernels.options import Options
from fusion_pass.kernels.streams import GradStream, Tables
from fusion_pass.kernels.triton import block_end, norm_rope

INSTANCES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2 12+2": {"heads": 12, "kv_heads": 2},
    "parts": {"heads": 16, "kv_heads": 1, "parts": 4},
    "head_dim 64": {"head_dim": 64, "parts": 2},
    "head_dim 96": {"head_dim": 96, "heads": 24, "kv_heads": 24},
    "gemma per lane": {"norm": "rms_one_plus", "entries": 128},
    "sectioned": {"rows": 3, "mrope_layout": "sectioned", "mrope_section": (16, 24, 24)},
    "interleaved": {"rows": 3, "mrope_layout": "interleaved", "mrope_section": (24, 20, 20)},
    "gathered": {"positions": True},
    "no norm": {"norm": "none"},
    "partial adjacent": {"rotary_dim": 64, "pairing": "adjacent"},
}


def run(
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    parts: int = 1,
    rows: int = 1,
    entries: int | None = None,
    positions: bool = False,
    tokens: int = 4096,
    **options: Any,
) -> None:
    """One end of a backward, from a packed qkv."""
    chosen = Options(**{"norm": "rms", "eps": 1e-6, "rotary_dim": head_dim, **options})  # type: ignore[arg-type]
    packed, gradient = torch.empty(2, 1, tokens, heads + 2 * kv_heads, head_dim, dtype=torch.bfloat16).unbind()
    counts = heads, kv_heads, kv_heads
    weight = torch.empty(head_dim, dtype=torch.bfloat16) if chosen.norm != "none" else None
    (q, k, _), (dq, dk, dv) = packed.split(counts, 2), gradient.split(counts, 2)
    streams = [
        GradStream(x, x if weight is not None else None, dx, weight, None, weight is not None)
        for x, dx in ((q, dq), (k, dk))
    ]
    width = chosen.rotary_dim // 2 if entries is None else entries
    table = torch.empty((4096, width) if positions else (1, tokens, width) if rows == 1 else (rows, 1, tokens, width))
    found = [torch.empty(1, tokens, kv_heads * parts, head_dim, dtype=torch.bfloat16) for _ in range(2)]
    unfinished = Unfinished(
        torch.empty(1, heads, tokens, head_dim).transpose(1, 2),
        0.1,
        found[0],
        dv if parts == 1 else found[1],
        parts,
        None,
    )
    index = torch.empty(tokens, dtype=torch.int64) if positions else None
    block_end.finish(unfinished, streams, dv, Tables(table, table, index), chosen)


def compiled(arch: int, **instance: Any) -> dict[str, int]:
    """Registers and spilled bytes of the kernel that a call launches."""
    recorder = Recorder(block_end.end_kernel)
    facts = mock.Mock(return_value=(132, arch))
    with (
        mock.patch.multiple(block_end, end_kernel=recorder, device_facts=facts),
        mock.patch.multiple(norm_rope, reduce_kernel=Recorder(norm_rope.reduce_kernel), device_facts=facts),
    ):
        run(**instance)
    ((args, kwargs),) = recorder.launches
    options = {key: kwargs.pop(key) for key in ("num_warps", "maxnreg") if key in kwargs}
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(recorder.arg_names):
        value = kwargs[name] if name in kwargs else args[index]
        if name in kwargs:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(recorder.kernel, signature, constants, attributes)
    ptx = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm["ptx"]
    return resources(ptx, arch)


def main() -> None:
    arch, *names = sys.argv[1:]
    print(json.dumps({name: compiled(int(arch), **INSTANCES[name]) for name in names or INSTANCES}))


if __name__ == "__main__":
    main()
