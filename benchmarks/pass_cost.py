"""What the pass costs at compile time, for a Qwen3 of 36 layers (the depth of Qwen3-4B and 8B).

    python -m benchmarks.pass_cost [--layers 36]

The graph is captured once; the pass then runs on fresh copies of it. Printed: the first run of the process, which
imports and fills the pattern's cache, the median of the later ones with its parts and with norm + rotation alone, and
the share of all of `torch.compile` (Dynamo and AOTAutograd measured; Inductor's code generation comes on top, so the
true share is smaller).
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx

from fusion_pass import FusionConfig, identity, pipeline, recognise, zoo
from fusion_pass.extensions import patterns
from fusion_pass.patterns.norm_rope.pattern import NormRope

RUNS = 21


def milliseconds(function: Callable[[], Any]) -> float:
    """CPU time of one call in this thread: all of it is single-threaded Python, and other load on the machine does
    not count."""
    started = time.thread_time()
    function()
    return 1e3 * (time.thread_time() - started)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    layers = parser.parse_args().layers
    model, inputs = zoo.build("qwen3", layers=layers)
    config = FusionConfig(allow_reference=True)
    times: dict[str, list[float]] = {"find": [], "pass": [], "norm_rope": []}

    def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        for _ in range(RUNS + 1):
            fresh = copy.deepcopy(module)
            times["find"].append(milliseconds(lambda graph=fresh.graph: [list(p.find(graph)) for p in patterns()]))
            fresh = copy.deepcopy(module)
            times["pass"].append(milliseconds(lambda module=fresh: pipeline.fuse(module, config)))
            fresh = copy.deepcopy(module)
            with mock.patch.object(recognise, "patterns", return_value=(NormRope(),)):
                times["norm_rope"].append(milliseconds(lambda module=fresh: pipeline.fuse(module, config)))
        times["nodes"] = [len(module.graph.nodes)]
        times["sites"] = [len(pipeline.fuse(module, config).fused)]
        return aot_eager(module, example_inputs)

    total = milliseconds(lambda: torch.compile(model, backend=backend, fullgraph=True)(**inputs))
    total -= sum(times["find"]) + sum(times["pass"]) + sum(times["norm_rope"])
    whole, find, alone = (statistics.median(times[name][1:]) for name in ("pass", "find", "norm_rope"))
    print(f"qwen3, {layers} layers: {times['nodes'][0]} nodes, {times['sites'][0]} sites, torch {torch.__version__}")
    print(f"  uuid of all sources         {milliseconds(lambda: identity.uuid(config)):8.1f} ms, once per process")
    print(f"  first run (imports, caches) {times['find'][0] + times['pass'][0]:8.1f} ms")
    print(f"  the pass                    {whole:8.1f} ms, of which recognising {find:.1f} ms (median of {RUNS})")
    print(f"  norm + rotation alone       {alone:8.1f} ms")
    print(f"  Dynamo + AOTAutograd        {total:8.1f} ms; the pass is {100 * whole / total:.1f} % of it")


if __name__ == "__main__":
    main()
