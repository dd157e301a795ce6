"""Attention: our Triton kernels beside PyTorch's FlashAttention-2 and cuDNN, forward and backward, in one run on one card.

    python -m benchmarks.attention            # the table; writes benchmarks/results/attention-CARD.json
    python -m benchmarks.attention --tiles    # times the tile shapes behind kernels/triton/attention_tiles.py

TFLOP/s count 4 B H Sq Sk D for the forward and 2.5 times that for the backward, halved when causal, whatever a kernel really computes.
Each number is the median of replays of a CUDA graph, interleaved over the implementations.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fusion_pass.kernels import attention
from fusion_pass.kernels.triton import attention as launchers
from fusion_pass.kernels.triton.attention_tiles import Tile

ROUNDS = 9
BASELINES = {"flash-attention-2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True)
class Shape:
    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads}" if self.heads != self.kv_heads else f"{self.heads}"
        kind = "causal" if self.causal else "full"
        return f"hd{self.head_dim} {kind} {self.batch} x {self.tokens} tokens, {heads} heads"

    def tflop(self, backward: bool) -> float:
        forward = 4 * self.batch * self.heads * self.tokens**2 * self.head_dim / (2 if self.causal else 1)
        return forward * (2.5 if backward else 1) / 1e12


SHAPES = [
    Shape(16384 // tokens, tokens, 2048 // head_dim, 2048 // head_dim, head_dim, causal)
    for head_dim in (64, 128)
    for causal in (True, False)
    for tokens in (1024, 4096, 16384)
] + [
    Shape(4, 4096, 8, 8, 256, True),
    Shape(2, 8192, 32, 8, 128, True),
    Shape(1, 16384, 32, 8, 128, True),
]


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`call` as a graph, after a warm-up that compiles and allocates.

    Captured on the current stream: autograd runs a backward on the stream of its forward, which must not be the default one.
    """
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def measure(calls: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Milliseconds of every round, by name."""
    graphs = {name: capture(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            times[name].append(replay_ms(graph))
    return times


def tensors(shape: Shape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v (leaves) and the gradient of the result, [B, S, H, D]."""

    def normal(heads: int) -> Tensor:
        return torch.randn(shape.batch, shape.tokens, heads, shape.head_dim, device="cuda", dtype=torch.bfloat16)

    q, k, v = (normal(heads).requires_grad_() for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
    return q, k, v, normal(shape.heads)


def implementations(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Tensor]]:
    causal = "top_left" if shape.causal else "none"

    def ours() -> Tensor:
        return attention(q, k, v, causal=causal, backend="triton")[0]

    def pytorch(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            grouped = shape.heads != shape.kv_heads
            return scaled_dot_product_attention(*heads_first, is_causal=shape.causal, enable_gqa=grouped).transpose(1, 2)

    return {"ours": ours} | {name: (lambda b=backend: pytorch(b)) for name, backend in BASELINES.items()}


def compare(shapes: list[Shape]) -> list[dict[str, object]]:
    """One row a shape and pass, in TFLOP/s."""
    rows = []
    for shape in shapes:
        q, k, v, grad = tensors(shape)
        forwards = implementations(shape, q, k, v)
        outs = {name: call() for name, call in forwards.items()}
        backwards = {
            name: (lambda o=out: torch.autograd.grad(o, (q, k, v), grad, retain_graph=True)) for name, out in outs.items()
        }
        for name, calls in (("forward", forwards), ("backward", backwards)):
            times = measure(calls)
            work = shape.tflop(name == "backward")
            rates = {who: work / (statistics.median(t) * 1e-3) for who, t in times.items()}
            spread = (max(times["ours"]) - min(times["ours"])) / statistics.median(times["ours"])
            ours = rates.pop("ours")
            rows.append(
                {
                    "case": str(shape),
                    "pass": name,
                    "unit": "TFLOP/s",
                    "ours": round(ours, 1),
                    "baselines": {who: round(rate, 1) for who, rate in rates.items()},
                    "spread": round(spread, 3),
                }
            )
            against = "  ".join(f"{who} {rate:5.0f} ({ours / rate:.2f})" for who, rate in rates.items())
            print(f"{shape!s:44} {name:8} ours {ours:5.0f}  {against}  +-{50 * spread:.1f}%", flush=True)
    return rows


# --- tile shapes ---------------------------------------------------------------------------------------------------

CANDIDATES: dict[tuple[str, int], list[Tile]] = {
    ("forward", 64): [Tile(128, 64, 4, 3), Tile(128, 128, 8, 3), Tile(128, 128, 4, 3), Tile(128, 64, 8, 3)],
    ("forward", 128): [Tile(128, 128, 8, 2), Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 128, 4, 2), Tile(128, 64, 4, 3)],
    ("forward", 256): [Tile(128, 64, 8, 2), Tile(128, 32, 8, 3), Tile(64, 64, 4, 2), Tile(128, 64, 8, 1)],
    ("dq", 64): [Tile(128, 64, 8, 3), Tile(128, 128, 8, 2), Tile(128, 64, 4, 3), Tile(64, 128, 4, 2), Tile(64, 64, 4, 3)],
    ("dq", 128): [Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(128, 128, 8, 2), Tile(64, 64, 4, 3), Tile(64, 128, 8, 2)],
    ("dq", 256): [Tile(64, 64, 8, 1), Tile(128, 32, 8, 2), Tile(128, 64, 8, 1), Tile(64, 32, 4, 2), Tile(64, 64, 4, 1)],
    ("dkdv", 64): [Tile(64, 128, 8, 3), Tile(64, 128, 8, 2), Tile(64, 64, 4, 3), Tile(128, 128, 8, 2), Tile(32, 128, 4, 3)],
    ("dkdv", 128): [Tile(64, 128, 8, 2), Tile(64, 128, 8, 3), Tile(32, 128, 8, 3), Tile(64, 64, 4, 2), Tile(32, 64, 4, 3)],
    ("dkdv", 256): [Tile(64, 64, 8, 1), Tile(32, 64, 8, 2), Tile(32, 64, 8, 1), Tile(64, 64, 4, 1), Tile(32, 128, 8, 1)],
}

_NEEDS = {"dq": (True, False, False, False), "dkdv": (False, True, True, False)}


def one_pass(name: str, tile: Tile, shape: Shape) -> Callable[[], object]:
    """A call that runs pass `name` (with delta, for a backward pass) at `tile`."""
    from fusion_pass.kernels.attention_problem import Problem, resolve

    q, k, v, grad = (x.detach() for x in tensors(shape))
    causal = "top_left" if shape.causal else "none"
    seen = resolve(shape.tokens, shape.tokens, causal=causal, window_left=-1, window_right=-1)
    problem = Problem(q, k, v, None, seen, shape.head_dim**-0.5, 0.0)
    out, lse = launchers.forward(problem, "bshd")

    def call() -> object:
        chosen = launchers.choose_tile
        launchers.choose_tile = lambda *_: tile
        try:
            if name == "forward":
                return launchers.forward(problem, "bshd")
            return launchers.backward(problem, grad, None, out, lse, _NEEDS[name])
        finally:
            launchers.choose_tile = chosen

    return call


def _compile(job: tuple[str, int, Tile, bool]) -> str:
    name, head_dim, tile, causal = job
    try:
        one_pass(name, tile, Shape(2, 256, 16, 16, head_dim, causal))()
        torch.cuda.synchronize()
    except (triton.runtime.errors.OutOfResources, RuntimeError) as error:
        return str(error)[:80]
    return ""


def sweep() -> None:
    """Time every candidate, causal and full, 4 x 4096 tokens."""
    jobs = [
        (name, head_dim, tile, causal)
        for (name, head_dim), tiles in CANDIDATES.items()
        for tile in tiles
        for causal in (True, False)
    ]
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
        failures = list(pool.map(_compile, jobs))
    for job, failure in zip(jobs, failures, strict=True):
        name, head_dim, tile, causal = job
        if failure:
            print(f"{name:8} hd{head_dim} {tile}: {failure}")
            continue
        times = measure({"": one_pass(name, tile, Shape(4, 4096, 2048 // head_dim, 2048 // head_dim, head_dim, causal))})[""]
        median = statistics.median(times)
        shape = f"m{tile.block_m} n{tile.block_n} w{tile.num_warps} s{tile.num_stages}"
        print(f"{name:8} hd{head_dim:<3} {'causal' if causal else 'full  '} {shape:18} {median:.3f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiles", action="store_true", help="time the candidates for the tile table instead")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with torch.cuda.stream(torch.cuda.Stream()):
        if arguments.tiles:
            sweep()
            return
        rows = compare(SHAPES)
    card = torch.cuda.get_device_name().replace(" ", "-")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    arguments.output.mkdir(parents=True, exist_ok=True)
    record = {
        "card": card,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": date.today().isoformat(),
        "commit": commit,
        "rows": rows,
    }
    (arguments.output / f"attention-{card}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
