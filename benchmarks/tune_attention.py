"""Times the candidates for `kernels/triton/attention_tiles.py`: `python -m benchmarks.tune_attention`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
import triton

from benchmarks.attention import Shape, tensors
from benchmarks.timing import graph_time, side_stream
from fusion_pass.kernels.attention_problem import Problem, resolve
from fusion_pass.kernels.triton import attention as launchers
from fusion_pass.kernels.triton.attention_tiles import Tile

CANDIDATES: dict[tuple[str, int], list[Tile]] = {
    ("forward", 64): [Tile(128, 64, 4, 3), Tile(128, 128, 8, 3), Tile(128, 128, 4, 3), Tile(128, 64, 8, 3)],
    ("forward", 128): [
        Tile(128, 128, 8, 2),
        Tile(128, 64, 8, 3),
        Tile(128, 64, 8, 2),
        Tile(64, 128, 4, 2),
        Tile(128, 64, 4, 3),
    ],
    ("forward", 256): [Tile(128, 64, 8, 2), Tile(128, 32, 8, 3), Tile(64, 64, 4, 2), Tile(128, 64, 8, 1)],
    ("dq", 64): [
        Tile(128, 64, 8, 3),
        Tile(128, 128, 8, 2),
        Tile(128, 64, 4, 3),
        Tile(64, 128, 4, 2),
        Tile(64, 64, 4, 3),
    ],
    ("dq", 128): [
        Tile(128, 64, 8, 3),
        Tile(128, 64, 8, 2),
        Tile(128, 128, 8, 2),
        Tile(64, 64, 4, 3),
        Tile(64, 128, 8, 2),
    ],
    ("dq", 256): [Tile(64, 64, 8, 1), Tile(128, 32, 8, 2), Tile(128, 64, 8, 1), Tile(64, 32, 4, 2), Tile(64, 64, 4, 1)],
    ("dkdv", 64): [
        Tile(64, 128, 8, 3),
        Tile(64, 128, 8, 2),
        Tile(64, 64, 4, 3),
        Tile(128, 128, 8, 2),
        Tile(32, 128, 4, 3),
    ],
    ("dkdv", 128): [
        Tile(64, 128, 8, 2),
        Tile(64, 128, 8, 3),
        Tile(32, 128, 8, 3),
        Tile(64, 64, 4, 2),
        Tile(32, 64, 4, 3),
    ],
    ("dkdv", 256): [
        Tile(64, 64, 8, 1),
        Tile(32, 64, 8, 2),
        Tile(32, 64, 8, 1),
        Tile(64, 64, 4, 1),
        Tile(32, 128, 8, 1),
    ],
}

_NEEDS = {"dq": (True, False, False, False), "dkdv": (False, True, True, False)}


def one_pass(name: str, tile: Tile, shape: Shape) -> Callable[[], object]:
    """A call that runs pass `name` (with delta, for a backward pass) at `tile`."""
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
    """Time every candidate, causal and full, 4 x 4096 tokens; compiled by several processes first."""
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
        heads = 2048 // head_dim
        time = graph_time([one_pass(name, tile, Shape(4, 4096, heads, heads, head_dim, causal))])
        shape = f"m{tile.block_m} n{tile.block_n} w{tile.num_warps} s{tile.num_stages}"
        print(
            f"{name:8} hd{head_dim:<3} {'causal' if causal else 'full  '} {shape:18} {time.median:.0f} us", flush=True
        )


if __name__ == "__main__":
    torch.manual_seed(0)
    with side_stream():
        sweep()
