"""What a call of an operator costs the host, and what the first call costs.

    python -m benchmarks.host_time [--first-call]

Every call is small (one token; attention of 128 queries), so that the device keeps up. Calls are made ten at a time,
with the device idle before; the median of such tens. Ways in: `eager` the Python function without a gradient,
`recorded` the same with one, `backward` of it by `torch.autograd.grad`, `torch.ops` as Inductor's code calls it,
`compiled` a `torch.compile`d function of this call alone, its guards included, and `graphs` the same with
mode="reduce-overhead". `--first-call`: seconds of the first attention call, forward and backward, in a new process with
an empty and with a filled Triton cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_pass import kernels

from .timing import Row, write_results

_FIRST_CALL = """
import json, time, torch
torch.zeros(1, device="cuda").sum().item()
start = time.perf_counter()
from fusion_pass.kernels import attention
imported = time.perf_counter()
q, k, v = (torch.randn(1, 2048, 8, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
out, _ = attention(q, k, v, causal="top_left", backend="hopper")
torch.cuda.synchronize()
forward = time.perf_counter()
torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
torch.cuda.synchronize()
end = time.perf_counter()
print(json.dumps({"import": imported - start, "forward": forward - imported, "backward": end - forward}))
"""

Call = Callable[..., Any]
_TOGETHER = 10


def host_time(call: Callable[[], object], repeats: int) -> float:
    """Microseconds the host spends in one call."""
    for _ in range(20):
        call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_TOGETHER):
            call()
        times.append((time.perf_counter() - start) * 1e6 / _TOGETHER)
    return statistics.median(times)


def _random(*shape: int, grad: bool = False, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_(grad)


def norm_rope_case(tokens: int = 1) -> tuple[Call, list[Tensor]]:
    """Qwen3-8B's layer."""
    options: dict[str, Any] = {"norm": "rms", "eps": 1e-6, "rotary_dim": 128, "backend": "triton"}
    tensors = [
        _random(1, tokens, 32, 128, grad=True), _random(1, tokens, 8, 128, grad=True), _random(1, tokens, 128),
        _random(1, tokens, 128), _random(128, grad=True), _random(128, grad=True),
    ]  # fmt: skip

    def call(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor, k_weight: Tensor) -> Any:
        return kernels.qk_norm_rope(q, k, cos, sin, None, q_weight, k_weight, **options)

    return call, tensors


def packed_case(tokens: int = 1) -> tuple[Call, list[Tensor]]:
    """The same from one packed projection."""
    options: dict[str, Any] = {
        "norm": "rms", "eps": 1e-6, "rotary_dim": 128, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128,
        "backend": "triton",
    }  # fmt: skip
    tensors = [
        _random(1, tokens, 48 * 128, grad=True), _random(1, tokens, 128), _random(1, tokens, 128),
        _random(128, grad=True), _random(128, grad=True),
    ]  # fmt: skip

    def call(qkv: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor, k_weight: Tensor) -> Any:
        return kernels.qkv_norm_rope(qkv, cos, sin, None, q_weight, k_weight, **options)

    return call, tensors


def rope_case(tokens: int = 1) -> tuple[Call, list[Tensor]]:
    """The rotation alone, of one tensor."""
    tensors = [_random(1, tokens, 32, 128, grad=True), _random(1, tokens, 64), _random(1, tokens, 64)]
    return lambda x, cos, sin: kernels.rope(x, cos, sin, backend="triton"), tensors


def attention_case(backend: str, **options: Any) -> tuple[Call, list[Tensor]]:
    """Eight heads of 128."""
    tensors = [_random(1, 128, 8, 128, grad=True) for _ in range(3)]
    return lambda q, k, v: kernels.attention(q, k, v, causal="top_left", backend=backend, **options)[0], tensors


def pytorch_case() -> tuple[Call, list[Tensor]]:
    """PyTorch's own attention, for comparison."""
    tensors = [_random(1, 8, 128, 128, grad=True) for _ in range(3)]
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), tensors


def documents_case() -> tuple[Call, list[Tensor]]:
    """Packed documents on Hopper."""
    tensors = [_random(1, 128, 8, 128, grad=True) for _ in range(3)]
    bounds = torch.tensor([0, 40, 128], device="cuda", dtype=torch.int32)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernels.attention(q, k, v, cu_seqlens_q=bounds, causal="top_left", backend="hopper")[0]

    return call, tensors


CASES: dict[str, Callable[[], tuple[Call, list[Tensor]]]] = {
    "qk_norm_rope, triton": norm_rope_case,
    "qkv_norm_rope, triton": packed_case,
    "rope, triton": rope_case,
    "attention, hopper": lambda: attention_case("hopper"),
    "attention, hopper, deterministic": lambda: attention_case("hopper", deterministic=True),
    "attention of documents, hopper": documents_case,
    "attention, sdpa": lambda: attention_case("sdpa"),
    "attention, triton": lambda: attention_case("triton"),
    "PyTorch's attention": pytorch_case,
}


def measure(call: Call, tensors: Sequence[Tensor], repeats: int, compiled: bool) -> dict[str, float]:
    """Microseconds of each way in."""
    found: dict[str, float] = {}
    with torch.no_grad():
        found["eager"] = host_time(lambda: call(*tensors), repeats)
    # As in a model: weights are leaves, activations are not.
    recorded = [t.clone() if t.requires_grad and t.dim() > 1 else t for t in tensors]
    found["recorded"] = host_time(lambda: call(*recorded), repeats)
    wanted = [t for t in recorded if t.requires_grad]
    results = call(*recorded)
    results = [t for t in (results if isinstance(results, tuple) else (results,)) if t.grad_fn is not None]
    grads = [torch.randn_like(t) for t in results]
    found["backward"] = host_time(lambda: torch.autograd.grad(results, wanted, grads, retain_graph=True), repeats)
    if compiled:
        for name, mode in (("compiled", None), ("graphs", "reduce-overhead")):
            torch._dynamo.reset()
            function = torch.compile(call, mode=mode, fullgraph=True)
            with torch.no_grad():
                found[name] = host_time(lambda f=function: f(*tensors), repeats)  # type: ignore[misc]
    return found


def overloads(repeats: int) -> dict[str, float]:
    """Calls as Inductor writes them."""
    ops = torch.ops.fusion_pass
    call, tensors = norm_rope_case()
    q, k, cos, sin, q_weight, k_weight = (t.detach() for t in tensors)
    x, y, z = (_random(1, 128, 8, 128) for _ in range(3))
    with torch.no_grad():
        return {
            "qk_norm_rope, triton": host_time(
                lambda: ops.qk_norm_rope.default(
                    q, k, cos, sin, None, q_weight, k_weight, norm="rms", eps=1e-6, rotary_dim=128, backend="triton"
                ),
                repeats,
            ),
            "attention, hopper": host_time(
                lambda: ops.attention.default(x, y, z, causal="top_left", backend="hopper"), repeats
            ),
        }


def first_call() -> dict[str, dict[str, float]]:
    """Seconds, in a process of its own."""
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm"):
            done = subprocess.run(
                [sys.executable, "-c", _FIRST_CALL], env={**os.environ, "TRITON_CACHE_DIR": cache},
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            found[name] = {key: round(value, 2) for key, value in json.loads(done.stdout.splitlines()[-1]).items()}
    return found


def main() -> None:
    """Print and write `benchmarks/results/host_time-CARD.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-call", action="store_true", help="measure the first call, too")
    parser.add_argument("--repeats", type=int, default=60, help="tens of calls a measurement")
    parser.add_argument("--cases", nargs="*", default=list(CASES), help="names of cases (default: all)")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    arguments = parser.parse_args()
    by_overload = overloads(arguments.repeats)
    rows = []
    for name in arguments.cases:
        found = measure(*CASES[name](), arguments.repeats, not arguments.no_compile)
        if name in by_overload:
            found["torch.ops"] = by_overload[name]
        print(f"{name:36}", "  ".join(f"{way} {us:.1f}" for way, us in found.items()), flush=True)
        rows += [Row(name, way, "us", round(us, 1), {}, 0.0) for way, us in found.items()]
    facts: dict[str, object] = {}
    if arguments.first_call:
        facts["first_call_seconds"] = first_call()
        print("first call:", facts["first_call_seconds"])
    print(write_results("host_time", rows, facts))


if __name__ == "__main__":
    main()
