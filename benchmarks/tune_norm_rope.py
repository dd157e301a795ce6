"""Try tile sizes of the Triton norm + rotation kernels on this card: `python -m benchmarks.tune_norm_rope [--only
NAME ...] [--tokens N] [--directions forward ...]`.

Prints the best tiles of each shape and direction with their fraction of a device copy. What is best on an H100
stands in `kernels/triton/norm_rope_tiles.py`. Variants are compiled by several processes first, then timed alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from unittest import mock

import torch

from benchmarks.norm_rope import SHAPES, Shape, fused, make_data
from benchmarks.timing import copy_bandwidth, graph_time, sets_for, side_stream
from fusion_pass.kernels.registration import forget_replays
from fusion_pass.kernels.triton import norm_rope
from fusion_pass.kernels.triton.norm_rope_tiles import Tiles, next_power_of_2

DIRECTIONS = ("forward", "forward (training)", "backward")
Variant = tuple[str, Tiles]
"""Direction and tiles."""


def variants(shape: Shape, directions: Sequence[str]) -> Iterator[Variant]:
    """Candidates around the measured optimum: 16 or 32 elements a thread forward, 8 or 16 backward."""
    lanes = next_power_of_2(shape.head_dim)
    k = min(8, next_power_of_2(shape.kv_heads))
    if shape.norm_scope == "hidden":
        heads, kv_heads = next_power_of_2(shape.heads), next_power_of_2(shape.kv_heads)
        for warps in (2, 4, 8, 16):
            elements = heads * lanes // (32 * warps)
            if elements > 64:
                continue
            yield from ((d, Tiles(1, heads, kv_heads, k, warps)) for d in directions if d != "backward")
            if "backward" in directions and elements <= 32:
                for resident in (16, 20, 24, 32):
                    if resident % warps == 0:
                        yield "backward", Tiles(1, heads, kv_heads, k, warps, resident // warps)
        return
    for heads in sorted({2, 4, 8, k}):
        for elements, warps in ((16, 1), (16, 2), (16, 4), (32, 1), (32, 2), (32, 4)):
            tokens = elements * 32 * warps // (heads * lanes)
            if tokens:
                tiles = Tiles(tokens, heads, min(heads, k), min(heads, k), warps)
                yield from ((d, tiles) for d in directions if d != "backward")
        for elements, warps, resident, registers in (
            (8, 2, 24, None), (8, 4, 20, None), (8, 4, 24, None), (8, 4, 32, 64), (8, 8, 24, None),
            (16, 2, 16, 128), (16, 4, 16, None), (16, 4, 16, 128), (16, 8, 16, 128), (16, 4, 12, None),
        ):  # fmt: skip
            tokens = elements * 32 * warps // (heads * lanes)
            if tokens and "backward" in directions:
                yield (
                    "backward",
                    Tiles(tokens, heads, min(heads, k), min(heads, k), warps, resident // warps, registers),
                )


@contextmanager
def tiled(variant: Variant) -> Iterator[None]:
    """Launches use these tiles."""
    direction, tiles = variant
    forget_replays()
    with mock.patch.object(norm_rope, f"{direction.split()[0]}_tiles", return_value=tiles):
        yield
    forget_replays()


def call(shape: Shape, variant: Variant, tokens: int, sets: int) -> list[object]:
    """One function a set of fresh inputs."""
    direction = variant[0]
    data = [make_data(shape, tokens) for _ in range(sets)]
    if direction != "backward":
        return [lambda d=d: fused(shape, d.x, d.cos, d.sin, d.weights) for d in data]
    outputs = [fused(shape, d.x, d.cos, d.sin, d.weights) for d in data]
    inputs = [[t for t in (*d.x, *d.weights) if t is not None] for d in data]
    return [
        lambda o=o, i=i, d=d: torch.autograd.grad(o, i, d.upstream, retain_graph=True)
        for o, i, d in zip(outputs, inputs, data, strict=True)
    ]


def compile_variant(job: tuple[Shape, Variant]) -> None:
    """Put the variant's binaries into Triton's cache on disk."""
    shape, variant = job
    with tiled(variant), torch.set_grad_enabled(variant[0] != "forward"):
        call(shape, variant, 1024, 1)[0]()


def time_shape(shape: Shape, tokens: int, found: Sequence[Variant], bandwidth: float) -> None:
    """Print the best variants of one shape."""
    table: dict[str, list[tuple[float, Variant]]] = {}
    count = sets_for(shape.least_bytes(tokens, "forward"), most=8)
    for direction in dict.fromkeys(d for d, _ in found):
        least = shape.least_bytes(tokens, direction)
        calls = call(shape, (direction, found[0][1]), tokens, count)
        for variant in (v for v in found if v[0] == direction):
            with tiled(variant), torch.set_grad_enabled(direction != "forward"):
                median = graph_time(calls, replays=7, least_us=500).median
                table.setdefault(direction, []).append((least / median / bandwidth, variant))
        del calls
        entries = sorted(table[direction], key=lambda entry: -entry[0])
        shown = " | ".join(
            f"{100 * share:.1f} {t.tokens}x{t.q_heads}/{t.k_heads} w{t.warps} p{t.programs} r{t.registers}"
            for share, (_, t) in entries[:6]
        )
        print(f"{shape.name}, {tokens} tokens, {direction}: {shown} | worst {100 * entries[-1][0]:.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--directions", nargs="+", default=DIRECTIONS)
    parser.add_argument("--processes", type=int, default=14)
    arguments = parser.parse_args()
    start = time.perf_counter()
    shapes = [shape for shape in SHAPES if arguments.only is None or shape.name in arguments.only]
    jobs = [(shape, variant) for shape in shapes for variant in variants(shape, arguments.directions)]
    with ProcessPoolExecutor(arguments.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_variant, jobs))
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e3:.0f} GB/s, {len(jobs)} variants, {time.perf_counter() - start:.0f} s", flush=True)
    for tokens in arguments.tokens:
        for shape in shapes:
            time_shape(shape, tokens, [variant for s, variant in jobs if s is shape], bandwidth)


if __name__ == "__main__":
    with side_stream():
        main()
