"""Try tile sizes of the Triton norm + rotation kernels on this card: `python -m benchmarks.tune_norm_rope [--only
NAME ...] [--tokens N] [--directions forward ...]`.

Prints the best tiles of each shape and direction with their fraction of a device copy. What is best on an H100
stands in `kernels/triton/norm_rope_tiles.py`. Variants are compiled by several processes first, then timed alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from unittest import mock

import torch

from benchmarks.norm_rope import SHAPES, Shape, fused, make_data
from benchmarks.timing import copy_bandwidth, graph_time, sets_for, side_stream
from fusion_pass.kernels.registration import forget_replays
from fusion_pass.kernels.triton import norm_rope
from fusion_pass.kernels.triton.norm_rope_tiles import REGISTERS, Tiles, next_power_of_2

DIRECTIONS = ("forward", "forward (training)", "backward")
Variant = tuple[str, Tiles]
"""Direction and tiles."""


def variants(shape: Shape, direction: str, tokens: int) -> Iterator[Tiles]:
    """Candidates around the measured optimum: 16 or 32 elements a thread forward, 8 or 16 backward; fewer where there
    are few tokens."""
    lanes = next_power_of_2(shape.head_dim)
    k = min(8, next_power_of_2(shape.kv_heads))
    backward = direction == "backward"
    if shape.norm_scope == "hidden":
        heads, kv_heads = next_power_of_2(shape.heads), next_power_of_2(shape.kv_heads)
        for warps in (2, 4, 8, 16):
            elements = heads * lanes // (32 * warps)
            if not backward and elements <= 64:
                yield Tiles(1, heads, kv_heads, k, warps)
            elif backward and elements <= 32:
                for registers in (64, 80, 96, 128, 168):
                    yield Tiles(1, heads, kv_heads, k, warps, REGISTERS // (registers * 32 * warps), registers)
        return
    small = tokens * shape.heads * lanes < 2**22
    # (elements a thread, warps, resident warps, registers)
    sizes = [(8, 4, 24, None), (8, 4, 32, 64), (16, 4, 16, 128), (16, 8, 16, 128)]
    if not backward:
        sizes = [(16, 4, 0, None), (32, 4, 0, None), (32, 8, 0, None)]
    elif shape.norm == "none":  # a rotation alone, one-shot like a forward
        sizes = [(8, 4, 0, None), (16, 4, 0, None), (32, 4, 0, None)]
    if small:
        sizes += [(8, 1, 16, None), (8, 2, 16, None), (4, 4, 16, None)]
    seen = set()
    for heads in (2, 4, 8):
        for elements, warps, resident, registers in sizes:
            block = min(elements * 32 * warps // (heads * lanes), next_power_of_2(tokens))
            # A block that was cut keeps its warps: fewer elements a thread.
            if block and block * heads * lanes >= 64 * warps:
                smaller = min(heads, k)
                seen.add(Tiles(block, heads, smaller, smaller, warps, resident // warps, registers))
    yield from seen


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


def compile_variant(job: tuple[Shape, Variant, int]) -> None:
    """Put the variant's binaries into Triton's cache on disk."""
    shape, variant, tokens = job
    with tiled(variant), torch.set_grad_enabled(variant[0] != "forward"):
        call(shape, variant, min(tokens, 1024), 1)[0]()


def time_shape(shape: Shape, direction: str, tokens: int, bandwidth: float) -> None:
    """Print the best variants of one shape."""
    found = list(variants(shape, direction, tokens))
    least = shape.least_bytes(tokens, direction)
    calls = call(shape, (direction, found[0]), tokens, sets_for(least, most=16))
    table = []
    for tiles in found:
        with tiled((direction, tiles)), torch.set_grad_enabled(direction != "forward"):
            table.append((graph_time(calls, replays=7, least_us=500).median, tiles))
    table.sort(key=lambda entry: entry[0])
    shown = " | ".join(
        f"{100 * least / t / bandwidth:.1f} ({t:.2f} us) {x.tokens}x{x.q_heads}/{x.k_heads} w{x.warps} p{x.programs} "
        f"r{x.registers}"
        for t, x in table[:5]
    )
    print(f"{shape.name}, {tokens} tokens, {direction}: {shown} | worst {table[-1][0]:.2f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--directions", nargs="+", default=DIRECTIONS)
    parser.add_argument("--processes", type=int, default=14)
    arguments = parser.parse_args()
    start = time.perf_counter()
    cases = [
        (shape, direction, tokens)
        for tokens in arguments.tokens
        for shape in SHAPES
        for direction in arguments.directions
        # Without v to copy a forward in training is the forward.
        if (arguments.only is None or shape.name in arguments.only)
        and (shape.packed or direction != "forward (training)")
    ]
    jobs = [(s, (d, tiles), tokens) for s, d, tokens in cases for tiles in variants(s, d, tokens)]
    with ProcessPoolExecutor(arguments.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_variant, jobs, chunksize=2))
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e3:.0f} GB/s, {len(jobs)} variants, {time.perf_counter() - start:.0f} s", flush=True)
    for case in cases:
        time_shape(*case, bandwidth)


if __name__ == "__main__":
    with side_stream():
        main()
