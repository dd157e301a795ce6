"""Attention: our Triton kernels beside PyTorch's FlashAttention-2 and cuDNN, in one run on one card.

    python -m benchmarks.attention            # prints the table; writes benchmarks/results/attention-CARD.json

TFLOP/s count 4 B H Sq Sk D for the forward and 2.5 times that for the backward, halved when causal, whatever a kernel
really computes. q, k, v of 16k tokens are four times an H100's L2 cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.timing import RESULTS, Row, graph_time, side_stream, write_results
from fusion_pass.kernels import attention

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
            return scaled_dot_product_attention(*heads_first, is_causal=shape.causal, enable_gqa=grouped).transpose(
                1, 2
            )

    return {"ours": ours} | {name: (lambda b=backend: pytorch(b)) for name, backend in BASELINES.items()}


def compare(shapes: list[Shape]) -> list[Row]:
    """One row a shape and pass, in TFLOP/s."""
    rows = []
    for shape in shapes:
        q, k, v, grad = tensors(shape)
        forwards = implementations(shape, q, k, v)
        outs = {name: call() for name, call in forwards.items()}
        backwards = {
            name: partial(torch.autograd.grad, out, (q, k, v), grad, retain_graph=True) for name, out in outs.items()
        }
        for name, calls in (("forward", forwards), ("backward", backwards)):
            times = {who: graph_time([call]) for who, call in calls.items()}
            work = shape.tflop(name == "backward")
            rates = {who: round(work / (t.median * 1e-6), 1) for who, t in times.items()}
            spreads = {who: round(t.spread / t.median, 4) for who, t in times.items()}
            ours, spread = rates.pop("ours"), spreads.pop("ours")
            rows.append(Row(str(shape), name, "TFLOP/s", ours, rates, spread, baseline_spreads=spreads))
            against = "  ".join(f"{who} {rate:5.0f} ({ours / rate:.2f})" for who, rate in rates.items())
            print(f"{shape!s:44} {name:8} ours {ours:5.0f}  {against}  +-{50 * spread:.1f}%", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with side_stream():
        rows = compare(SHAPES)
    write_results("attention", rows, folder=arguments.output)


if __name__ == "__main__":
    main()
