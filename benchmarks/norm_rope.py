"""Speed of the norm + rotation operators: `python -m benchmarks.norm_rope [--quick] [--tokens 2048 16384] [--only
NAME ...]`.

Shapes of real models. Baselines in the same run: the model's own formula, eager and compiled by Inductor; a copy of
equal bytes; Liger-Kernel where it is installed and has the operation. Rows: forward without gradients, forward in
training, backward (of the whole site: dq, dk, dv and dw). The percentage is the least possible traffic (every input
read once, every result written once) over the bandwidth of a 1 GiB copy. Everything is replayed by CUDA graphs; with
`--as-called` it is called from Python, each call timed with what the device waits for the host.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from torch import Tensor

from benchmarks.timing import (
    RESULTS,
    Row,
    Time,
    called_time,
    copy_bandwidth,
    copy_time,
    graph_time,
    host_time,
    sets_for,
    side_stream,
    write_results,
)
from fusion_pass.kernels import qk_norm_rope, qkv_norm_rope


@dataclass(frozen=True)
class Shape:
    """A site of a real model. `entries`: of the tables, per position; MRoPE tables have three rows."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int = 128
    packed: bool = False
    norm: str = "rms"
    pairing: str = "halves"
    rotary_dim: int = 128
    mrope_layout: str = "none"
    mrope_section: Sequence[int] = ()
    norm_scope: str = "head"
    dtype: torch.dtype = torch.bfloat16
    table_dtype: torch.dtype = torch.float32
    full_width: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return {
            "norm": self.norm,
            "eps": None if self.norm == "none" else 1e-6,
            "norm_scope": self.norm_scope,
            "rotary_dim": self.rotary_dim,
            "pairing": self.pairing,
            "mrope_layout": self.mrope_layout,
            "mrope_section": self.mrope_section,
        }

    def table_bytes(self) -> int:
        """Bytes of cos and sin that one token needs (of a MRoPE table only one row counts per entry)."""
        entries = self.rotary_dim if self.full_width else self.rotary_dim // 2
        return 2 * entries * self.table_dtype.itemsize

    def least_bytes(self, tokens: int, direction: str) -> int:
        """The least possible traffic of one call."""
        size = self.dtype.itemsize * self.head_dim
        qk, v = (self.heads + self.kv_heads) * size, self.kv_heads * size if self.packed else 0
        if direction == "forward":
            return tokens * (2 * qk + self.table_bytes())
        if direction == "forward (training)":
            return tokens * (2 * qk + 2 * v + self.table_bytes())
        reads_x = 0 if self.norm == "none" else qk
        return tokens * (2 * qk + reads_x + 2 * v + self.table_bytes())


SECTIONED = {"mrope_layout": "sectioned", "mrope_section": (16, 24, 24)}
INTERLEAVED = {"mrope_layout": "interleaved", "mrope_section": (24, 20, 20)}
SHAPES = [
    Shape("packed MRoPE 32+8", 32, 8, packed=True, **SECTIONED),
    Shape("packed MRoPE 64+8", 64, 8, packed=True, **SECTIONED),
    Shape("packed MRoPE 32+4", 32, 4, packed=True, **SECTIONED),
    Shape("packed MRoPE 16+2", 16, 2, packed=True, **SECTIONED),
    Shape("Qwen3-8B 32+8", 32, 8, table_dtype=torch.bfloat16, full_width=True),
    Shape("Qwen3-0.6B 16+8", 16, 8, table_dtype=torch.bfloat16, full_width=True),
    Shape("Qwen3-VL interleaved 32+8", 32, 8, **INTERLEAVED),
    Shape(
        "Gemma3 16+8 of 256",
        16,
        8,
        256,
        norm="rms_one_plus",
        rotary_dim=256,
        table_dtype=torch.bfloat16,
        full_width=True,
    ),
    Shape("OLMo2 hidden 32+32", 32, 32, norm_scope="hidden", table_dtype=torch.bfloat16, full_width=True),
    Shape("OLMo2 hidden 40+8", 40, 8, norm_scope="hidden", table_dtype=torch.bfloat16, full_width=True),
    Shape("GLM4 partial adjacent 32+2", 32, 2, norm="none", rotary_dim=64, pairing="adjacent"),
    Shape("Llama 32+8", 32, 8, norm="none", table_dtype=torch.bfloat16, full_width=True),
    Shape("Flux adjacent 24+24", 24, 24, pairing="adjacent"),
    Shape("head_dim 64 32+8", 32, 8, 64, packed=True, rotary_dim=64),
    Shape("head_dim 80 16+16", 16, 16, 80, packed=True, rotary_dim=80),
    Shape("head_dim 96 32+8 fp16", 32, 8, 96, packed=True, rotary_dim=96, dtype=torch.float16),
    Shape("Lumina 2 adjacent 24+8 of 96", 24, 8, 96, pairing="adjacent", rotary_dim=96),
    Shape("Wan 14B hidden adjacent 40+40", 40, 40, norm_scope="hidden", pairing="adjacent"),
    Shape("Qwen2.5-VL vision 16+16 of 80", 16, 16, 80, norm="none", rotary_dim=80, full_width=True),
    Shape("Qwen3-VL vision 16+16 of 72", 16, 16, 72, norm="none", rotary_dim=72, full_width=True),
]
DEVICE = "cuda"
BACKENDS = ("auto", "triton", "cuda")
QUICK = ("packed MRoPE 32+8", "packed MRoPE 16+2", "Qwen3-8B 32+8")
TOKENS = (1, 16, 256, 1024, 2048, 4096, 16384, 65536)


def formula(
    shape: Shape, x: Sequence[Tensor], cos: Tensor, sin: Tensor, weights: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """What a model's own code computes, in plain PyTorch."""
    heads, kv_heads, head_dim, rotary = shape.heads, shape.kv_heads, shape.head_dim, shape.rotary_dim
    if shape.packed:
        (qkv,) = x
        q, k, v = qkv.split((heads * head_dim, kv_heads * head_dim, kv_heads * head_dim), -1)
        q, k, v = (t.unflatten(-1, (-1, head_dim)) for t in (q, k, v))
    else:
        (q, k), v = x, None
    if shape.mrope_layout == "sectioned":
        cos, sin = (
            torch.cat([t[row] for row, t in enumerate(table.split(list(shape.mrope_section), -1))], -1)
            for table in (cos, sin)
        )
    elif shape.mrope_layout == "interleaved":
        rows = torch.arange(rotary // 2, device=cos.device)
        limit = torch.tensor(shape.mrope_section, device=cos.device)[rows % 3] * 3
        index = torch.where(rows < limit, rows % 3, 0).expand(1, *cos.shape[1:])
        cos, sin = cos.gather(0, index)[0], sin.gather(0, index)[0]
    if not shape.full_width:
        cos, sin = (
            t.repeat_interleave(2, -1) if shape.pairing == "adjacent" else torch.cat((t, t), -1) for t in (cos, sin)
        )
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)

    def norm(y: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return y
        flat = y.flatten(2) if shape.norm_scope == "hidden" else y
        wide = flat.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        scaled = wide * (1 + weight.float()) if shape.norm == "rms_one_plus" else weight * wide.to(y.dtype)
        return scaled.to(y.dtype).view(y.shape)

    def rotate(y: Tensor) -> Tensor:
        inner, rest = y[..., :rotary], y[..., rotary:]
        if shape.pairing == "adjacent":
            turned = torch.stack((-inner[..., 1::2], inner[..., ::2]), -1).flatten(-2)
        else:
            turned = torch.cat((-inner[..., rotary // 2 :], inner[..., : rotary // 2]), -1)
        return torch.cat(((inner * cos + turned * sin).to(y.dtype), rest), -1)

    q, k = rotate(norm(q, weights[0])), rotate(norm(k, weights[1]))
    return (q, k) if v is None else (q, k, v)


def fused(
    shape: Shape,
    x: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    weights: Sequence[Tensor | None],
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    """The operator."""
    if shape.packed:
        sizes = {"num_heads": shape.heads, "num_kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
        return qkv_norm_rope(x[0], cos, sin, None, *weights, **sizes, **shape.options, backend=backend)
    return qk_norm_rope(x[0], x[1], cos, sin, None, *weights, **shape.options, backend=backend)


def liger(shape: Shape) -> Callable[..., tuple[Tensor, ...]] | None:
    """Liger-Kernel's RMSNorm and RoPE or MRoPE, where they compute the same; v of a packed projection stays a view."""
    norms = {"rms": (0.0, "llama"), "rms_one_plus": (1.0, "gemma")}
    sectioned = shape.mrope_layout == "sectioned"
    rotates = sectioned or (shape.mrope_layout == "none" and shape.full_width and not shape.packed)
    if shape.norm not in norms or shape.norm_scope != "head" or shape.pairing != "halves" or not rotates:
        return None
    offset, casting = norms[shape.norm]
    try:
        from liger_kernel.ops.qwen2vl_mrope import LigerQwen2VLMRopeFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.rope import LigerRopeFunction
    except ImportError:
        return None
    widened: dict[int, Tensor] = {}

    def wide(table: Tensor) -> Tensor:
        """One entry a lane, as Liger takes tables; made once, outside of what is timed."""
        return widened.setdefault(id(table), torch.cat((table, table), -1))

    def run(_: Shape, x: Sequence[Tensor], cos: Tensor, sin: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        rest: tuple[Tensor, ...] = ()
        if shape.packed:
            heads = (shape.heads, shape.kv_heads, shape.kv_heads)
            *x, v = x[0].unflatten(-1, (-1, shape.head_dim)).split(heads, 2)
            rest = (v,)
        q, k = (LigerRMSNormFunction.apply(t, w, 1e-6, offset, casting, False) for t, w in zip(x, weights, strict=True))
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        if sectioned:
            q, k = LigerQwen2VLMRopeFunction.apply(q, k, wide(cos), wide(sin), list(shape.mrope_section))
        else:
            q, k = LigerRopeFunction.apply(q, k, cos, sin)
        return q, k, *rest

    return run


@dataclass
class Data:
    """One input set."""

    x: list[Tensor]
    cos: Tensor
    sin: Tensor
    weights: list[Tensor | None]
    upstream: list[Tensor] = field(default_factory=list)


def make_data(shape: Shape, tokens: int) -> Data:
    """Random inputs; tables of random angles."""
    batch = 4 if tokens % 4 == 0 and tokens >= 4096 and not shape.packed else 1
    sequence = tokens // batch

    def random(*size: int) -> Tensor:
        return torch.randn(*size, device=DEVICE, dtype=shape.dtype).requires_grad_()

    if shape.packed:
        x = [random(batch, sequence, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)]
    else:
        x = [random(batch, sequence, heads, shape.head_dim) for heads in (shape.heads, shape.kv_heads)]
    rows = (3,) if shape.mrope_layout != "none" else ()
    angle = torch.rand(*rows, 1, sequence, shape.rotary_dim // 2, device=DEVICE) * 6.28
    if shape.full_width:
        angle = torch.cat((angle, angle), -1)
    weights: list[Tensor | None] = [None, None]
    if shape.norm != "none":
        sizes = [
            h * shape.head_dim if shape.norm_scope == "hidden" else shape.head_dim
            for h in (shape.heads, shape.kv_heads)
        ]
        weights = [random(size) for size in sizes]
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)[: 3 if shape.packed else 2]
    upstream = [random(batch, sequence, h, shape.head_dim).detach() for h in heads]
    return Data(x, angle.cos().to(shape.table_dtype), angle.sin().to(shape.table_dtype), weights, upstream)


def measure(
    run: Callable[..., tuple[Tensor, ...]], shape: Shape, data: list[Data], as_called: bool = False
) -> dict[str, Time]:
    """Forward without gradients, forward in training, backward. `as_called`: by `called_time`."""

    def forward(d: Data) -> tuple[Tensor, ...]:
        return run(shape, d.x, d.cos, d.sin, d.weights)

    # Kept, so that every input set has its own results, as the copy has: results that are dropped share one piece of
    # memory, which a short call would find in the cache.
    results: dict[int, object] = {}

    def timed(call: Callable[..., object], *columns: Sequence[Any]) -> Time:
        rows = list(enumerate(zip(*columns, strict=True)))
        results.clear()
        calls = [lambda i=i, row=row: results.update({i: call(*row)}) for i, row in rows]
        return called_time(calls[0]) if as_called else graph_time(calls, replays=9, least_us=1200.0)

    result = {}
    with torch.no_grad():
        result["forward"] = timed(forward, data)
    result["forward (training)"] = timed(forward, data)

    def backward(d: Data, outputs: tuple[Tensor, ...]) -> object:
        inputs = [t for t in (*d.x, *d.weights) if t is not None]
        return torch.autograd.grad(outputs, inputs, [u.view(o.shape) if u.shape == o.shape else u.transpose(1, 2) for u, o in zip(d.upstream, outputs, strict=True)], retain_graph=True)  # fmt: skip # noqa: E501

    result["backward"] = timed(backward, data, [forward(d) for d in data])
    return result


def agrees(run: Callable[..., tuple[Tensor, ...]], shape: Shape, data: Data) -> bool:
    """Somebody else's kernels are a baseline only where they run and compute the formula. (Liger-Kernel 0.8.5 does not
    for 64 + 8 heads with MRoPE: its q was off by 12.6.)"""
    arguments = (shape, data.x, data.cos, data.sin, data.weights)
    try:
        with torch.no_grad():
            pairs = zip(run(*arguments), formula(*arguments), strict=True)
            errors = [(a if a.shape == b.shape else a.transpose(1, 2)).sub(b).abs().max().item() for a, b in pairs]
    except Exception as error:
        print(f"{shape.name}: not measured: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
        return False
    if max(errors) > 0.1:
        print(f"{shape.name}: not measured, off by {max(errors):.2g} from the formula", flush=True)
    return max(errors) <= 0.1


def benchmark(
    shape: Shape,
    tokens: int,
    bandwidth: float,
    baselines: Sequence[str],
    backend: str = "auto",
    compiled: Callable[..., tuple[Tensor, ...]] | None = None,
    as_called: bool = False,
) -> list[Row]:
    """All rows of one shape and size. `compiled`: the formula under `torch.compile`, where there is one already."""
    count = 1 if as_called else sets_for(shape.least_bytes(tokens, "forward"), most=32)
    data = [make_data(shape, tokens) for _ in range(count)]
    runs: dict[str, Callable[..., tuple[Tensor, ...]]] = {}
    if "eager" in baselines:
        runs["eager"] = formula
    if "inductor" in baselines:
        runs["inductor"] = compiled or compile_formula()
    alternative = liger(shape) if "liger" in baselines else None
    if alternative is not None and agrees(alternative, shape, data[0]):
        runs["liger"] = alternative
    runs |= {name: partial(fused, backend=name) for name in BACKENDS if name in baselines}
    ours = measure(partial(fused, backend=backend), shape, data, as_called)
    others = {}
    for name, run in runs.items():
        # A back end may refuse a shape.
        with contextlib.suppress(NotImplementedError):
            others[name] = measure(run, shape, data, as_called)
    del data
    torch.cuda.empty_cache()
    rows = []
    for direction, mine in ours.items():
        least = shape.least_bytes(tokens, direction)
        times = {name: result[direction] for name, result in others.items()} | {"copy": copy_time(least, as_called)}
        rows.append(
            Row(
                case=f"{shape.name}, {tokens} tokens",
                pass_=direction,
                unit="us",
                ours=round(mine.median, 2),
                baselines={name: round(t.median, 2) for name, t in times.items()},
                spread=round(mine.spread, 2),
                bandwidth=round(least / mine.median / bandwidth, 3),
                baseline_spreads={name: round(t.spread, 2) for name, t in times.items()},
            )
        )
        ratios = "  ".join(f"{name} {t.median / mine.median:5.2f}x" for name, t in times.items())
        print(
            f"{rows[-1].case:40s} {direction:18s} {mine.median:9.1f} us "
            f"{100 * least / mine.median / bandwidth:5.1f} %  {ratios}",
            flush=True,
        )
    for name, result in others.items():
        together = ("forward (training)", "backward")
        ratio = sum(result[d].median for d in together) / sum(ours[d].median for d in together)
        print(f"{shape.name + f', {tokens} tokens':40s} training together: {ratio:.2f}x {name}", flush=True)
    return rows


def compile_formula() -> Callable[..., tuple[Tensor, ...]]:
    """Inductor's code, for each size its own: code for any number of tokens is up to fourteen times slower."""
    torch._dynamo.reset()
    return torch.compile(formula, dynamic=False)


def configure() -> None:
    """Settings of PyTorch that every process shares."""
    torch._functorch.config.donated_buffer = False  # the backward is run again and again on one graph
    torch._dynamo.config.recompile_limit = 4 * len(TOKENS)


def compile_size(
    shape: Shape, tokens: int, names: Sequence[str], compiled: Callable[..., tuple[Tensor, ...]] | None
) -> None:
    """Run once what will be measured of one size."""
    data = make_data(shape, tokens)
    arguments = (shape, data.x, data.cos, data.sin, data.weights)
    inputs = [t for t in (*data.x, *data.weights) if t is not None]
    runs: list[Callable[..., tuple[Tensor, ...]]] = [partial(fused, backend=name) for name in names if name in BACKENDS]
    for run in runs if compiled is None else [*runs, compiled]:
        # A back end may refuse a shape; what does not fit beside the other processes is compiled when it is measured.
        with contextlib.suppress(NotImplementedError, torch.OutOfMemoryError):
            with torch.no_grad():
                run(*arguments)
            outputs = run(*arguments)
            torch.autograd.grad(outputs, inputs, [torch.randn_like(o) for o in outputs])


def serve(orders: Connection, shape: Shape, sizes: Sequence[int], arguments: argparse.Namespace, until: float) -> None:
    """A process for one shape: compiles every size, as many as can be started until then, and sends which; then
    receives (tokens, bandwidth) and sends the rows, until it receives None."""
    configure()
    torch.manual_seed(0)
    names = (arguments.backend, *arguments.baselines)
    with side_stream():
        compiled = compile_formula() if "inductor" in names else None
        ready = []
        for tokens in sizes:
            if time.time() < until:
                compile_size(shape, tokens, names, compiled)
                ready.append(tokens)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        orders.send(ready)
        while (order := orders.recv()) is not None:
            tokens, bandwidth = order
            baselines, backend, as_called = arguments.baselines, arguments.backend, arguments.as_called
            orders.send(benchmark(shape, tokens, bandwidth, baselines, backend, compiled, as_called))


@contextlib.contextmanager
def side_by_side(
    shapes: Sequence[Shape], sizes: Sequence[int], arguments: argparse.Namespace
) -> Iterator[Callable[[Shape, int, float], list[Row]]]:
    """`benchmark` by one process a shape. They compile at the same time, and measure when they are called: alone."""
    # Not forked: there CUDA fails to initialise.
    context = multiprocessing.get_context("spawn")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # these processes are as many as there are cores
    until = time.time() + arguments.compile_seconds
    workers: dict[str, Connection] = {}
    for shape in shapes:
        workers[shape.name], orders = context.Pipe()
        context.Process(target=serve, args=(orders, shape, sizes, arguments, until), daemon=True).start()
        orders.close()  # so that a process which ends is noticed here
    ready = {name: orders.recv() for name, orders in workers.items()}

    def measure_there(shape: Shape, tokens: int, bandwidth: float) -> list[Row]:
        if tokens not in ready[shape.name]:
            print(f"{shape.name}, {tokens} tokens: not compiled in time", flush=True)
            return []
        workers[shape.name].send((tokens, bandwidth))
        rows: list[Row] = workers[shape.name].recv()
        return rows

    yield measure_there
    for orders in workers.values():
        orders.send(None)


def launch_cost() -> dict[str, float]:
    """Microseconds of host time of one eager call on one token, without and with a recorded gradient."""
    shape = next(shape for shape in SHAPES if shape.name == "Qwen3-8B 32+8")
    data = make_data(shape, 1)
    arguments = (shape, data.x, data.cos, data.sin, data.weights)
    with torch.no_grad():
        inference = host_time(lambda: fused(*arguments))
    return {"inference": round(inference, 1), "training": round(host_time(lambda: fused(*arguments)), 1)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three shapes")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--only", nargs="+", help="names of shapes")
    parser.add_argument(
        "--baselines", nargs="*", default=["eager", "inductor", "liger"], help="also back ends: triton, cuda"
    )
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="the back end that is measured")
    parser.add_argument("--as-called", action="store_true", help="no CUDA graphs: each call as Python makes it")
    parser.add_argument("--parallel", action="store_true", help="one process a shape; they compile side by side first")
    parser.add_argument("--compile-seconds", type=float, default=float("inf"), help="of --parallel, at most about")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no measurement after so many")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    return parser.parse_args()


def main(arguments: argparse.Namespace) -> None:
    start = time.monotonic()
    torch.manual_seed(0)
    configure()
    chosen = arguments.only or (QUICK if arguments.quick else [shape.name for shape in SHAPES])
    shapes = [shape for shape in SHAPES if shape.name in chosen]
    with contextlib.ExitStack() as stack:
        run: Callable[[Shape, int, float], list[Row]]
        run = partial(
            benchmark, baselines=arguments.baselines, backend=arguments.backend, as_called=arguments.as_called
        )
        if arguments.parallel:
            run = stack.enter_context(side_by_side(shapes, arguments.tokens, arguments))
            print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
        bandwidth = copy_bandwidth()
        torch.cuda.empty_cache()
        how = "each call as Python makes it, L2 overwritten before" if arguments.as_called else "by CUDA graphs"
        print(f"{torch.cuda.get_device_name()}: a 1 GiB copy moves {bandwidth / 1e3:.0f} GB/s; rows {how}")
        host = launch_cost()
        print(f"host time of one eager call: {host['inference']} us, {host['training']} us in training", flush=True)
        rows: list[Row] = []
        cases = [(shape, tokens) for tokens in arguments.tokens for shape in shapes]
        for number, (shape, tokens) in enumerate(cases):
            if time.monotonic() - start > arguments.seconds:
                print(f"time is up: {len(cases) - number} of {len(cases)} cases are not measured")
                break
            rows += run(shape, tokens, bandwidth)
            # After every case: a run that is cut short keeps what it measured.
            facts = {"timing": how, "backend": arguments.backend, "copy_gb_s": round(bandwidth / 1e3), "host_us": host}
            write_results("norm_rope_as_called" if arguments.as_called else "norm_rope", rows, facts, arguments.out)
        print(f"{time.monotonic() - start:.0f} s in all")


if __name__ == "__main__":
    given = parse()
    with side_stream():
        main(given)
