"""Attention: our kernels beside PyTorch's and FlashAttention-4, interleaved in one run on one card.

    python -m benchmarks.attention              # the table; writes benchmarks/results/attention-CARD.json
    python -m benchmarks.attention --every      # every length from 512 to 32768
    python -m benchmarks.attention --portable   # our Triton kernels beside FlashAttention-2
    python -m benchmarks.attention --plot benchmarks/results/attention-CARD.json

`ours` is `backend="hopper"`, with --portable `backend="triton"`. Baselines: PyTorch's default (on an H100 cuDNN),
cuDNN, FlashAttention-2 (PyTorch's; --portable), our Triton kernels, FlexAttention (compiled; windows, documents), and
FlashAttention-4 where `flash-attn-4` is installed (`pip install flash-attn-4`; with
FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 its kernels are compiled side by side first).

TFLOP/s count 4 B H Sq Sk D for the forward (D the mean of q's and v's) and 2.5 times that for the backward, of the
pairs that are seen, whatever a kernel really computes; the backward includes every kernel of it. Every implementation
runs in a CUDA graph of its own; those that cannot be captured (cuDNN's backward) run call after call and are named
with a star. In each round all implementations take their turn; medians over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.timing import RESULTS, Row, side_stream, write_results
from fusion_pass.kernels import attention

ROUNDS = 7
LEAST_US = 6000.0
"""Of one implementation's turn."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a call; `window`: keys before the diagonal that are seen; `documents`: equal ones, packed; `mask`:
    causality is in a mask with an entry for every query and key, and nothing says that it is causal (`mask_of`)."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    v_head_dim: int = 0
    window: int = -1
    documents: int = 1
    mask: str = ""
    deterministic: bool = False
    """Measure the reproducible backward too."""
    triton: bool = False
    """Measure our Triton kernels too."""
    portable: bool = False
    """Ours are the Triton kernels, and FlashAttention-2 is a baseline."""

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads}" if self.heads != self.kv_heads else f"{self.heads}"
        kind = "causal" if self.causal else "full"
        dims = f"{self.head_dim}" if not self.v_head_dim else f"{self.head_dim}/{self.v_head_dim}"
        more = f", window {self.window}" if self.window >= 0 else ""
        more += f", {self.documents} documents" if self.documents > 1 else ""
        more += f", as a mask {self.mask}" if self.mask else ""
        return f"hd{dims} {kind} {self.batch} x {self.tokens} tokens, {heads} heads{more}"

    @property
    def plain(self) -> bool:
        """PyTorch's call can say it."""
        return self.window < 0 and self.documents == 1

    def pairs(self) -> float:
        """Pairs of a query and a key that it sees, of one head. Half of the square if causal, as the field counts."""
        length = self.tokens / self.documents
        every = self.documents * length**2 / (2 if self.causal else 1)
        return every if self.window < 0 else min(every, self.tokens * (self.window + 1.0))

    def tflop(self, backward: bool) -> float:
        """Of one call."""
        dims = self.head_dim + (self.v_head_dim or self.head_dim)
        return 2 * self.batch * self.heads * self.pairs() * dims * (2.5 if backward else 1) / 1e12


MASKS = ("of pairs", "by head", "that is added", "of slopes")


def shapes(lengths: tuple[int, ...]) -> list[Shape]:
    """16k tokens, hidden size 2048, at every length; and single ones of other kinds."""
    square = [
        Shape(max(1, 16384 // tokens), tokens, 2048 // head_dim, 2048 // head_dim, head_dim, causal,
              deterministic=head_dim < 256, triton=head_dim == 128 and tokens == 4096)
        for head_dim in (128, 64, 256)
        for causal in (True, False)
        for tokens in lengths
    ]  # fmt: skip
    return [
        Shape(2, 8192, 32, 8, 128, True, deterministic=True),
        Shape(1, 16384, 32, 8, 128, True, documents=8, triton=True),
        Shape(1, 16384, 32, 8, 128, True, window=1023, triton=True),
        *square,
        *(Shape(4, 4096, 16, 16, 128, True, mask=mask, triton=True) for mask in MASKS),
        Shape(2, 8192, 64, 8, 128, True),
        Shape(1, 4096, 32, 1, 128, True),
        *(Shape(batch, 4096, 32, 8, 128, True) for batch in (1, 2)),
        Shape(4, 4096, 16, 16, 192, True, v_head_dim=128),
    ]


def portable_shapes(lengths: tuple[int, ...]) -> list[Shape]:
    """16k tokens, hidden size 2048, at every length, of the head dimensions that FlashAttention-2 is tuned for."""
    return [
        Shape(max(1, 16384 // tokens), tokens, 2048 // head_dim, 2048 // head_dim, head_dim, causal, portable=True)
        for head_dim in (64, 128)
        for causal in (True, False)
        for tokens in lengths
    ]


def tensors(shape: Shape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v (leaves) and the gradient of the result, [B, S, H, D]."""
    v_head_dim = shape.v_head_dim or shape.head_dim

    def normal(heads: int, dim: int) -> Tensor:
        return torch.randn(shape.batch, shape.tokens, heads, dim, device="cuda", dtype=torch.bfloat16)

    sizes = (shape.heads, shape.head_dim), (shape.kv_heads, shape.head_dim), (shape.kv_heads, v_head_dim)
    q, k, v = (normal(*size).requires_grad_() for size in sizes)
    return q, k, v, normal(shape.heads, v_head_dim)


def options_of(shape: Shape) -> dict[str, Any]:
    """Arguments of `attention`. Documents are segment ids, as the pass finds them in a packed batch."""
    options: dict[str, Any] = {"causal": "top_left" if shape.causal else "none", "window_left": shape.window}
    if shape.mask:
        options |= {"causal": "none", "mask": mask_of(shape)}
    if shape.documents > 1:
        length = shape.tokens // shape.documents
        options["q_segment_ids"] = torch.arange(shape.tokens, device="cuda").div(length, rounding_mode="floor")[None]
    return options


@functools.lru_cache(maxsize=1)
def mask_of(shape: Shape) -> Tensor:
    """Causality of every pair: booleans, one for all heads or one a head; 0 and the least number, a batch's each; or
    slopes that differ by head (ALiBi, arXiv 2108.12409) with -inf."""
    token = torch.arange(shape.tokens, device="cuda")
    seen = (token <= token[:, None])[None, None]
    if shape.mask == "of pairs":
        return seen
    if shape.mask == "by head":
        return seen.expand(1, shape.heads, -1, -1).contiguous()
    if shape.mask == "that is added":
        least = torch.finfo(torch.bfloat16).min
        zeros = torch.zeros(shape.batch, 1, shape.tokens, shape.tokens, device="cuda", dtype=torch.bfloat16)
        return zeros.masked_fill_(~seen, least)
    slopes = 2.0 ** -(8 / shape.heads * torch.arange(1, shape.heads + 1, device="cuda"))
    return (slopes[:, None, None] * (token - token[:, None])).bfloat16().masked_fill(~seen, float("-inf"))


# ---------------------------------------------------------------------------------------------------- implementations

Call = Callable[[], Tensor]


def implementations(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Call]:
    """Forward calls by name; the backward is autograd's."""
    options = options_of(shape)

    def ours(backend: str, **more: Any) -> Tensor:
        return attention(q, k, v, **options, **more, backend=backend)[0]

    if shape.portable:
        baselines = {"flash-attention-2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
        by_pytorch = {name: partial(_pytorch, shape, q, k, v, backend) for name, backend in baselines.items()}
        return {"ours": partial(ours, "triton"), **by_pytorch}
    calls: dict[str, Call] = {"ours": partial(ours, "hopper")}
    if shape.deterministic:
        calls["ours, deterministic"] = partial(ours, "hopper", deterministic=True)
    if shape.triton:
        calls["our Triton kernels"] = partial(ours, "triton")
    if shape.plain:
        for name, backend in (("pytorch", None), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            calls[name] = partial(_pytorch, shape, q, k, v, backend)
    else:
        calls["flex"] = _flex(shape, q, k, v)
    if importlib.util.find_spec("flash_attn") is not None and shape.documents == 1 and not shape.mask:
        calls["flash-attn-4"] = partial(_flash_attention_4, shape, q, k, v)
    return calls


def _pytorch(shape: Shape, q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend | None) -> Tensor:
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    options: dict[str, Any] = {"is_causal": shape.causal, "enable_gqa": shape.heads != shape.kv_heads}
    if shape.mask:
        options |= {"is_causal": False, "attn_mask": mask_of(shape)}
    if backend is None:
        return scaled_dot_product_attention(*heads_first, **options).transpose(1, 2)
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(*heads_first, **options).transpose(1, 2)


def _flex(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Call:
    from torch._functorch import config as functorch_config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = shape.tokens // shape.documents

    def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        result = (query // length) == (key // length)
        if shape.causal:
            result = result & (key <= query)
        return result & (query - key <= shape.window) if shape.window >= 0 else result

    mask = create_block_mask(seen, None, None, shape.tokens, shape.tokens, device="cuda")
    functorch_config.donated_buffer = False  # the backward is timed again and again with its graph kept
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def call() -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = compiled(*heads_first, block_mask=mask, enable_gqa=shape.heads != shape.kv_heads)
        return out.transpose(1, 2)

    return call


def _flash_attention_4(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from flash_attn.cute import flash_attn_func

    window = (None, None) if shape.window < 0 else (shape.window, 0)
    result = flash_attn_func(q, k, v, causal=shape.causal, window_size=window)
    return result[0] if isinstance(result, tuple) else result


# ---------------------------------------------------------------------------------------------------- timing


@dataclass
class Turn:
    """One implementation: a graph of one call, or the call itself."""

    run: Callable[[], object]
    captured: bool
    repeats: int

    @classmethod
    def of(cls, call: Callable[[], object]) -> Turn:
        """Warm up and capture `call`."""
        stream = torch.cuda.current_stream()
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                call()
            turn = cls(graph.replay, True, 1)
        except RuntimeError:
            torch.cuda.synchronize()
            turn = cls(call, False, 1)
        turn.repeats = max(2, int(LEAST_US / max(turn.time(), 1.0)))
        return turn

    def time(self) -> float:
        """Microseconds of one call, behind as many of its own: the card runs at its power limit, and its clock depends
        on what ran before."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(self.repeats):
            self.run()
        start.record()
        for _ in range(self.repeats):
            self.run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / self.repeats


def interleaved(calls: dict[str, Callable[[], object]]) -> dict[str, tuple[float, float]]:
    """Median and (largest - smallest) / median of every implementation, in microseconds; a star after the name of one
    that could not be captured. One that does not run at all is left out, with a line that says why."""
    turns: dict[str, Turn] = {}
    for name, call in calls.items():
        try:
            turn = Turn.of(call)
        except Exception as error:  # whatever a baseline fails with, the others are measured
            if name == "ours":
                raise
            print(f"    {name}: {str(error).splitlines()[0][:100]}")
            continue
        turns[name if turn.captured else f"{name}*"] = turn
    times: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(ROUNDS):
        for name in random.sample(list(turns), len(turns)):
            times[name].append(turns[name].time())
    return {name: (statistics.median(x), (max(x) - min(x)) / statistics.median(x)) for name, x in times.items()}


def compare(cases: list[Shape], seconds: float, write: Callable[[list[Row]], object]) -> None:
    """One row a shape and pass, in TFLOP/s. `write` is called with the rows so far after every shape; none is begun
    after `seconds`."""
    rows: list[Row] = []
    end = time.monotonic() + seconds
    for done, shape in enumerate(cases):
        if time.monotonic() > end:
            print(f"stopped after {seconds:.0f} s: {done} of {len(cases)} shapes")
            return
        q, k, v, grad = tensors(shape)
        forwards = implementations(shape, q, k, v)
        outs: dict[str, Tensor] = {}
        for name, call in list(forwards.items()):
            try:
                outs[name] = call()
            except Exception as error:  # whatever a baseline fails with, the others are measured
                if name == "ours":
                    raise
                print(f"    {name}: {str(error).splitlines()[0][:100]}")
                del forwards[name]
        backwards: dict[str, Callable[[], object]] = {
            name: partial(torch.autograd.grad, out, (q, k, v), grad, retain_graph=True) for name, out in outs.items()
        }
        for name, calls in (("forward", forwards), ("backward", backwards)):
            times = interleaved(dict(calls))
            work = shape.tflop(name == "backward")
            rates = {who: round(work / (median * 1e-6), 1) for who, (median, _) in times.items()}
            spreads = {who: round(spread, 4) for who, (_, spread) in times.items()}
            ours = next(who for who in rates if who.rstrip("*") == "ours")
            rate, spread = rates.pop(ours), spreads.pop(ours)
            rows.append(Row(str(shape), name, "TFLOP/s", rate, rates, spread, baseline_spreads=spreads))
            against = "  ".join(f"{who} {other:.0f} ({rate / other:.2f})" for who, other in rates.items())
            print(f"{shape!s:52} {name:8} {ours} {rate:4.0f}  {against}  spread {100 * spread:.0f}%", flush=True)
        write(rows)


# ---------------------------------------------------------------------------------------------------- compilation


def _once(shape: Shape) -> None:
    """Run what is compiled once, so that the caches on disk have it."""
    q, k, v, grad = tensors(shape)
    for name, call in implementations(shape, q, k, v).items():
        if name.startswith("our") or name in ("flex", "flash-attn-4"):
            with contextlib.suppress(Exception):  # shows again when it is measured
                torch.autograd.grad(call(), (q, k, v), grad)


def compile_first(cases: list[Shape], processes: int) -> None:
    """Compile the kernels of all cases side by side."""
    kinds = {
        (s.head_dim, s.v_head_dim, s.causal, s.window >= 0, s.documents > 1, s.deterministic, s.triton, s.portable): s
        for s in cases
    }
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(_once, kinds.values()))


# ---------------------------------------------------------------------------------------------------- plot


def plot(path: Path) -> Path:
    """Bars of TFLOP/s, one panel a pass, beside the result file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    record = json.loads(path.read_text())
    figure, axes = pyplot.subplots(1, 2, figsize=(16, 0.32 * len(record["rows"]) + 2), squeeze=False)
    for axis, name in zip(axes[0], ("forward", "backward"), strict=True):
        rows = [row for row in record["rows"] if row["pass"] == name][::-1]
        who = list(dict.fromkeys(itertools.chain(["ours"], *(row["baselines"] for row in rows))))
        height = 0.8 / len(who)
        for index, implementation in enumerate(who):
            places = [
                (place - index * height, row["ours"] if implementation == "ours" else row["baselines"][implementation])
                for place, row in enumerate(rows)
                if implementation == "ours" or implementation in row["baselines"]
            ]
            axis.barh(*zip(*places, strict=True), height=height, label=implementation)
        axis.set_yticks([place - 0.3 for place in range(len(rows))], [row["case"] for row in rows], fontsize=7)
        axis.set_title(name)
        axis.set_xlabel(f"TFLOP/s, {record['card']}")
        axis.legend(fontsize=7)
    figure.tight_layout()
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=120)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("--every", action="store_true", help="every length from 512 to 32768, instead of 1k, 4k, 16k")
    parser.add_argument("--portable", action="store_true", help="our Triton kernels beside FlashAttention-2")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--processes", type=int, default=8, help="that compile at the same time")
    parser.add_argument("--seconds", type=float, default=100, help="begin no measurement later than this")
    parser.add_argument("--plot", type=Path, help="draw this result file instead of measuring")
    arguments = parser.parse_args()
    if arguments.plot is not None:
        print(plot(arguments.plot))
        return
    torch.manual_seed(0)
    lengths = (512, 1024, 2048, 4096, 8192, 16384, 32768) if arguments.every else (1024, 4096, 16384)
    every = portable_shapes(lengths) if arguments.portable else shapes(lengths)
    name = "attention_portable" if arguments.portable else "attention"
    cases = [shape for shape in every if arguments.only in str(shape)]
    start = time.monotonic()
    compile_first(cases, arguments.processes)
    print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    with side_stream():
        left = arguments.seconds - (time.monotonic() - start)
        compare(cases, left, lambda rows: write_results(name, rows, folder=arguments.output))


if __name__ == "__main__":
    main()
