"""Norm + rotation + attention of one layer as one operator and as two: `python -m benchmarks.whole_block`.

A training step (forward and backward, bf16, causal) of `norm_rope_attention` - as it is, with the rotated queries and
keys kept for the backward, and with the backward ended by the kernels of its parts instead of one launch - against
`qk_norm_rope` (from a packed projection `qkv_norm_rope`) followed by `attention`, with the kernels that are chosen by
themselves; and what the forward keeps for the backward beside its inputs. Each is a CUDA graph, and they are replayed
in turn. Qwen3-8B: 32 query and 8 key heads of 128; Qwen2-VL-2B: 12 and 2; and 32 heads without grouping. Needs a GPU.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from benchmarks.timing import RESULTS, Row, side_stream, write_results
from fusion_pass.kernels import attention, norm_rope_attention, qk_norm_rope, qkv_norm_rope
from fusion_pass.kernels.triton import block_end

HEAD_DIM = 128
HEADS = ((32, 8), (12, 2), (32, 32))
NORM_ROPE = {"norm": "rms", "eps": 1e-6, "rotary_dim": HEAD_DIM}


@dataclass
class Layer:
    """One layer's tensors, all random. Without `packed`, q, k and v are tensors of their own."""

    heads: int
    kv_heads: int
    packed: bool
    inputs: list[Tensor]
    shared: dict[str, Tensor]
    grad: Tensor

    @classmethod
    def of(cls, batch: int, tokens: int, heads: int, kv_heads: int, packed: bool) -> Layer:
        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)

        counts = (heads, kv_heads, kv_heads)
        inputs = [random(batch, tokens, n, HEAD_DIM) for n in counts]
        if packed:
            inputs = [random(batch, tokens, sum(counts) * HEAD_DIM)]
        tables = torch.randn(2, 1, tokens, HEAD_DIM // 2, device="cuda")
        shared = {"cos": tables[0], "sin": tables[1], "q_weight": random(HEAD_DIM), "k_weight": random(HEAD_DIM)}
        grad = random(batch, tokens, heads, HEAD_DIM).detach()
        return cls(heads, kv_heads, packed, inputs, shared, grad)

    @property
    def sizes(self) -> dict[str, int]:
        return {"num_heads": self.heads, "num_kv_heads": self.kv_heads, "head_dim": HEAD_DIM} if self.packed else {}

    def joined(self, keep: bool = False) -> Tensor:
        """One operator; `keep`: its backward has the rotated queries and keys of its forward."""
        names = ("qkv",) if self.packed else ("q", "k", "v")
        tensors = dict(zip(names, self.inputs, strict=True))
        return norm_rope_attention(**tensors, **self.shared, **self.sizes, **NORM_ROPE, causal="top_left", keep=keep)[0]

    def apart(self) -> Tensor:
        """Two operators."""
        if self.packed:
            q, k, v = qkv_norm_rope(self.inputs[0], **self.shared, **self.sizes, **NORM_ROPE)
        else:
            q, k = qk_norm_rope(*self.inputs[:2], **self.shared, **NORM_ROPE)
            v = self.inputs[2]
        return attention(q, k, v, causal="top_left")[0]

    def step(self, forward: Callable[[], Tensor]) -> list[Tensor]:
        """The gradients."""
        weights = [self.shared["q_weight"], self.shared["k_weight"]]
        return list(torch.autograd.grad(forward(), [*self.inputs, *weights], self.grad))


def kept_bytes(forward: Callable[[], Tensor]) -> int:
    """What is allocated after a forward, its result included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = forward()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    del out
    return kept


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of one call."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        call()
    return graph


def interleaved(graphs: dict[str, torch.cuda.CUDAGraph], rounds: int) -> dict[str, list[float]]:
    """Microseconds of each graph, replayed once a round, in every other round in the opposite order."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for graph in graphs.values():
        graph.replay()
    order = list(graphs)
    for _ in range(rounds):
        for name in order:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3)
        order.reverse()
    return times


def ends_apart() -> AbstractContextManager[object]:
    """The backward of the joined operator ends with the kernels of its parts."""
    return mock.patch.object(block_end, "refuses", return_value="the kernels of the parts are measured.")


def benchmark(batch: int, tokens: int, heads: int, kv_heads: int, packed: bool) -> Row:
    layer = Layer.of(batch, tokens, heads, kv_heads, packed)
    for ours, theirs in zip(layer.step(layer.joined), layer.step(layer.apart), strict=True):
        difference = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        assert difference < 1e-2, difference
    case = f"{heads}+{kv_heads} heads{', packed' if packed else ''}, {batch} x {tokens}"
    forwards = {"joined": layer.joined, "apart": layer.apart, "joined, keeps": lambda: layer.joined(keep=True)}
    kept = {name: kept_bytes(forward) for name, forward in forwards.items()}
    graphs = {name: captured(lambda f=forward: layer.step(f)) for name, forward in forwards.items()}
    with ends_apart():
        graphs["joined, ends apart"] = captured(lambda: layer.step(layer.joined))
    times = interleaved(graphs, rounds=30)
    joined, *baselines = (statistics.median(values) for values in times.values())
    spread, *spreads = (q[2] - q[0] for q in (statistics.quantiles(values, n=4) for values in times.values()))
    names = list(times)[1:]
    # The card's clock moves more than these times differ; within a round it hardly does.
    pairs = {name: [x / y for x, y in zip(times[name], times["joined"], strict=True)] for name in names}
    ratios = {f"{name} / joined, median of rounds": statistics.median(values) for name, values in pairs.items()}
    print(
        f"{case}: joined {joined:.0f} us", *(f"{n} {t:.0f} us" for n, t in zip(names, baselines, strict=True)), sep=", "
    )
    print(f"    {', '.join(f'{name} {ratio:.3f}' for name, ratio in ratios.items())}")
    print("    MiB kept:", ", ".join(f"{name} {size / 2**20:.0f}" for name, size in kept.items()), flush=True)
    figures = {name: round(time, 1) for name, time in zip(names, baselines, strict=True)}
    figures |= {name: round(ratio, 4) for name, ratio in ratios.items()}
    figures |= {f"MiB kept, {name}": round(size / 2**20, 1) for name, size in kept.items()}
    spread_of = {name: round(value, 1) for name, value in zip(names, spreads, strict=True)}
    return Row(case, "step", "us", round(joined, 1), figures, round(spread, 1), baseline_spreads=spread_of)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    arguments = parser.parse_args()
    with side_stream():
        rows = [
            benchmark(arguments.batch, arguments.tokens, heads, kv_heads, packed)
            for packed in (False, True)
            for heads, kv_heads in HEADS
        ]
    print(f"wrote {write_results('whole_block', rows, folder=arguments.out)}")


if __name__ == "__main__":
    main()
