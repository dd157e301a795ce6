"""Try tile sizes of the Triton norm + rotation kernels on this card: `python -m benchmarks.tune_norm_rope [--only
NAME ...] [--tokens N]`.

Prints the best tiles of each shape and direction with their fraction of a device copy. What is best on an H100
stands in `kernels/triton/norm_rope_tiles.py`. Variants are compiled by several processes first, then timed alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch

from benchmarks.norm_rope import SHAPES, Shape, fused, make_data
from benchmarks.timing import copy_bandwidth, graph_time, sets_for, side_stream
from fusion_pass.kernels.triton import norm_rope
from fusion_pass.kernels.triton.norm_rope_tiles import Tiles, next_power_of_2

Variant = tuple[str, Tiles, int]
"""Direction, tiles, persistent programs on a multiprocessor (backward)."""


def variants(shape: Shape, backward_too: bool = True) -> Iterator[Variant]:
    """Candidates around the measured optimum: about 32 elements a thread forward, 8 to 16 backward."""
    lanes = next_power_of_2(shape.head_dim)
    if shape.norm_scope == "hidden":
        heads = next_power_of_2(shape.heads)
        for warps in (4, 8, 16):
            tiles = Tiles(1, heads, next_power_of_2(shape.kv_heads), 8, warps)
            yield "forward", tiles, 0
            for programs in (1, 2, 4):
                yield "backward", tiles, programs
        return
    k = min(8, next_power_of_2(shape.kv_heads))
    for heads in sorted({2, k, 8}):
        for elements, warps in ((1024, 1), (2048, 2), (2048, 4), (4096, 4)):
            if elements >= heads * lanes:
                yield "forward", Tiles(elements // (heads * lanes), heads, min(heads, k), min(heads, k), warps), 0
        for elements, warps in ((512, 2), (1024, 2), (1024, 4), (2048, 8)):
            if elements >= heads * lanes:
                tiles = Tiles(elements // (heads * lanes), heads, min(heads, k), min(heads, k), warps)
                for programs in (16 // warps, 24 // warps):
                    yield "backward", tiles, programs


@contextmanager
def tiled(variant: Variant) -> Iterator[None]:
    """Launches use these tiles."""
    direction, tiles, programs = variant
    with (
        mock.patch.object(norm_rope, f"{direction}_tiles", return_value=tiles),
        mock.patch.object(norm_rope, "programs_per_multiprocessor", return_value=programs),
    ):
        yield


def compile_variant(job: tuple[Shape, Variant]) -> None:
    """Put the variant's binaries into Triton's cache on disk."""
    shape, variant = job
    with tiled(variant):
        data = make_data(shape, 1024)
        outputs = fused(shape, data.x, data.cos, data.sin, data.weights)
        if variant[0] == "backward":
            torch.autograd.grad(outputs, data.x, data.upstream)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--processes", type=int, default=12)
    arguments = parser.parse_args()
    shapes = [shape for shape in SHAPES if arguments.only is None or shape.name in arguments.only]
    jobs = [(shape, variant) for shape in shapes for variant in variants(shape)]
    unique = list({(replace(s, name=""), (d, t, 0)): (s, (d, t, p)) for s, (d, t, p) in jobs}.values())
    with ProcessPoolExecutor(arguments.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_variant, unique))
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e3:.0f} GB/s, {len(jobs)} variants", flush=True)
    for shape in shapes:
        count = sets_for(shape.least_bytes(arguments.tokens, "forward"), most=8)
        data = [make_data(shape, arguments.tokens) for _ in range(count)]
        table: dict[str, list[tuple[float, Variant]]] = {"forward": [], "backward": []}
        for variant in (variant for s, variant in jobs if s is shape):
            with tiled(variant):
                if variant[0] == "forward":
                    calls = [lambda d=d, shape=shape: fused(shape, d.x, d.cos, d.sin, d.weights) for d in data]
                else:
                    outputs = [fused(shape, d.x, d.cos, d.sin, d.weights) for d in data]
                    inputs = [[t for t in (*d.x, *d.weights) if t is not None] for d in data]
                    calls = [
                        lambda o=o, i=i, d=d: torch.autograd.grad(o, i, d.upstream, retain_graph=True)
                        for o, i, d in zip(outputs, inputs, data, strict=True)
                    ]
                table[variant[0]].append((graph_time(calls, replays=7, least_us=500).median, variant))
        for direction, entries in table.items():
            least = shape.least_bytes(arguments.tokens, "forward (training)" if direction == "forward" else direction)
            best = sorted(entries, key=lambda entry: entry[0])[:4]
            shown = " | ".join(
                f"{100 * least / time / bandwidth:.1f}% {t.tokens}x{t.q_heads}/{t.k_heads}w{t.warps}p{p}"
                for time, (_, t, p) in best
            )
            print(f"{shape.name} {direction}: {shown}", flush=True)


if __name__ == "__main__":
    with side_stream():
        main()
