"""Norm + rotation + attention of one layer as one operator and as two: `python -m benchmarks.whole_block`.

A training step (forward and backward, bf16, causal) of `norm_rope_attention` against `qk_norm_rope` (from a packed
projection `qkv_norm_rope`) followed by `attention`, with the kernels that are chosen by themselves; and what the
forward keeps for the backward beside its inputs. Qwen3-8B: 32 query and 8 key heads of 128; Qwen2-VL-2B: 12 and 2; and
32 heads without grouping. Needs a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.timing import RESULTS, Row, graph_time, side_stream, write_results
from fusion_pass.kernels import attention, norm_rope_attention, qk_norm_rope, qkv_norm_rope

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

    def joined(self) -> Tensor:
        """One operator."""
        names = ("qkv",) if self.packed else ("q", "k", "v")
        tensors = dict(zip(names, self.inputs, strict=True))
        return norm_rope_attention(**tensors, **self.shared, **self.sizes, **NORM_ROPE, causal="top_left")[0]

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


def benchmark(batch: int, tokens: int, heads: int, kv_heads: int, packed: bool) -> Row:
    layer = Layer.of(batch, tokens, heads, kv_heads, packed)
    for ours, theirs in zip(layer.step(layer.joined), layer.step(layer.apart), strict=True):
        difference = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        assert difference < 1e-2, difference
    case = f"{heads}+{kv_heads} heads{', packed' if packed else ''}, {batch} x {tokens}"
    kept = {name: kept_bytes(forward) for name, forward in (("joined", layer.joined), ("apart", layer.apart))}
    joined, apart = (graph_time([lambda f=f: layer.step(f)]) for f in (layer.joined, layer.apart))
    print(
        f"{case}: joined {joined.median:.0f} us, apart {apart.median:.0f} us ({apart.median / joined.median:.3f}x); "
        f"kept {kept['joined'] / 2**20:.0f} and {kept['apart'] / 2**20:.0f} MiB",
        flush=True,
    )
    baselines = {"apart": round(apart.median, 1)}
    baselines |= {f"MiB kept, {name}": round(size / 2**20, 1) for name, size in kept.items()}
    spread, spreads = round(joined.spread, 1), {"apart": round(apart.spread, 1)}
    return Row(case, "step", "us", round(joined.median, 1), baselines, spread, baseline_spreads=spreads)


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
