"""The cases of the norm + rotation kernels, and their check against the reference back end in float64.

A case is a set of streams with their tables, strided as an operator would pass them. `check_forward` and
`check_backward` fill results and memory with NaN, run the Ascend back end and compare with the reference computed in
float64 from the same inputs; the reference in float32 says how exact float32 arithmetic is for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fusion_pass.kernels import reference
from fusion_pass.kernels.ascend.platform import Platform
from fusion_pass.kernels.options import Options
from fusion_pass.kernels.streams import Copy, GradStream, Stream, Tables

from .closeness import poisoned_memory

SECTIONS = {128: (24, 20, 20), 64: (11, 11, 10), 32: (6, 5, 5)}


@dataclass(frozen=True)
class Case:
    """One call. `heads` are those of each stream; `packed`: they are views of one buffer that ends with `copy_heads`
    more."""

    name: str
    heads: tuple[int, ...] = (4, 2)
    head_dim: int = 64
    batch: int = 1
    sequence: int = 13
    dtype: torch.dtype = torch.float32
    table_dtype: torch.dtype = torch.float32
    options: Options = field(default_factory=lambda: Options(norm="rms", eps=1e-6, rotary_dim=64))
    entries: str = "pair"
    """pair: one table entry a pair; lane: one a lane, the halves different; half: one a lane, the halves equal."""
    gather: bool = False
    packed: bool = True
    grouped: bool = False
    weight: str = "row"
    bias: bool = False
    copy_heads: int = 0
    order: str = "bshd"
    shared_table: bool = False
    """One table for all batches."""
    one_buffer: bool = False
    """cos and sin are the halves of a `[3, tokens, rotary_dim]` buffer, as vLLM keeps them."""


def rope(head_dim: int = 64, **changes: Any) -> Options:
    options = Options(norm="rms", eps=1e-6, rotary_dim=head_dim)
    return replace(options, **changes)


def mrope(layout: str, rotary_dim: int, **changes: Any) -> Options:
    return rope(rotary_dim, mrope_layout=layout, mrope_section=SECTIONS[rotary_dim], **changes)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

CASES = (
    Case("plain"),
    Case("bf16", dtype=BF16, table_dtype=BF16, bias=True, copy_heads=2),
    Case("fp16", dtype=FP16, table_dtype=FP16, options=rope(norm="rms_one_plus"), copy_heads=2),
    Case("mrope sectioned", (16, 2), 128, options=mrope("sectioned", 128), entries="half", copy_heads=2),
    Case("mrope interleaved", (16, 2), 128, options=mrope("interleaved", 128), copy_heads=2),
    Case(
        "mrope interleaved bf16 partial",
        (2, 1),
        256,
        dtype=BF16,
        options=mrope("interleaved", 64),
        bias=True,
        copy_heads=1,
    ),
    Case("mrope sectioned partial start", (4, 2), 96, options=mrope("sectioned", 64, rotary_start=32), entries="lane"),
    Case("mrope, cos|sin in one buffer", (4, 2), 128, options=mrope("interleaved", 64), one_buffer=True),
    Case("mrope gather", (4, 2), 64, batch=2, sequence=13, options=mrope("interleaved", 64), gather=True),
    Case("gather", (4, 2), 64, batch=2, sequence=13, options=rope(), gather=True, entries="half"),
    Case("partial", (4, 2), 80, options=rope(32)),
    Case("one entry a lane", options=rope(), entries="lane"),
    Case("conjugate", options=rope(conjugate=True)),
    Case("adjacent", options=rope(pairing="adjacent"), entries="lane"),
    Case("adjacent to halves", options=rope(pairing="adjacent_to_halves")),
    Case("mrope adjacent", options=mrope("interleaved", 64, pairing="adjacent"), entries="half"),
    Case("rotate first", options=rope(norm_first=False), bias=True),
    Case("layer norm", options=rope(norm="layer", eps=1e-5), bias=True),
    Case("layer norm, rotate first", options=rope(norm="layer", eps=1e-5, norm_first=False), bias=True),
    Case("norm alone", options=Options(norm="rms", eps=1e-6)),
    Case("rotation alone", options=Options(rotary_dim=64), weight="none"),
    Case("no weight", weight="none"),
    Case("weight a head", weight="heads", bias=True),
    Case("one stream", heads=(5,), packed=False),
    Case("batch first", (4, 2), batch=3, sequence=17, order="bhsd", shared_table=True),
    Case("batch of one token", (4, 2), batch=33, sequence=1, shared_table=True),
    Case("grouped", (8, 2), grouped=True, copy_heads=2),
    Case("96 + 8 heads", (96, 8), 128, sequence=5, dtype=BF16, options=mrope("interleaved", 128), copy_heads=8),
    Case("128 + 8 heads", (128, 8), 128, sequence=5, options=mrope("sectioned", 128), copy_heads=8),
    Case("heads that no tile divides", (71, 1), 128, sequence=5, options=rope(128), copy_heads=1),
    Case("zero eps", (71, 1), 128, sequence=5, options=rope(128, eps=0.0)),
    Case("head_dim 72", (6, 3), 72, options=rope(72)),
    Case("head_dim 192", (6, 3), 192, options=rope(64, rotary_start=128)),
)

FEW_CORES = Platform("few", cube_cores=2, vector_cores=4)
"""So that 13 tokens are several a core, unevenly."""

TOKEN_COUNTS = (0, 1, 47, 48, 49, 100, 1000)


def make(
    case: Case, seed: int
) -> tuple[list[Tensor], list[Tensor | None], list[Tensor | None], Tables | None, Tensor | None]:
    """Inputs of each stream, their weights and biases, the tables, and the tensor to copy."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    B, S, D, o = case.batch, case.sequence, case.head_dim, case.options
    copied = None
    if case.grouped:
        kv = case.heads[1]
        buffer = normal(B, S, kv, case.heads[0] // kv + 2, D, dtype=case.dtype)
        xs, copied = [buffer[:, :, :, :-2], buffer[:, :, :, -2]], buffer[:, :, :, -1]
    elif case.packed:
        buffer = normal(B, S, sum(case.heads) + case.copy_heads, D, dtype=case.dtype)
        *xs, rest = buffer.split((*case.heads, case.copy_heads), 2)
        copied = rest if case.copy_heads else None
    else:
        xs = [normal(B, S, heads, D, dtype=case.dtype) for heads in case.heads]

    shapes = {"row": lambda heads: (D,), "heads": lambda heads: (heads, D)}
    affine = o.norm != "none" and case.weight != "none"
    weights = [1 + 0.2 * normal(*shapes[case.weight](h)) if affine else None for h in case.heads]
    biases = [0.3 * normal(*shapes[case.weight](h)) if affine and case.bias else None for h in case.heads]

    tables = None
    if o.rotary_dim:
        rows = (3,) if o.mrope_layout != "none" else ()
        tokens = (211,) if case.gather else (*rows, 1 if case.shared_table else B, S)
        entries = o.rotary_dim if case.entries == "lane" else o.rotary_dim // 2
        angle = 3 * normal(*tokens, entries)
        cos, sin = angle.cos().to(case.table_dtype), angle.sin().to(case.table_dtype)
        if case.entries == "half":
            adjacent = o.writes_adjacent
            cos, sin = (t.repeat_interleave(2, -1) if adjacent else torch.cat((t, t), -1) for t in (cos, sin))
        if case.one_buffer:
            cos, sin = torch.cat((cos, sin), -1).chunk(2, -1)
        positions = torch.randint(0, 211, (*rows, B, S), generator=generator) if case.gather else None
        tables = Tables(cos, sin, positions)
    return xs, weights, biases, tables, copied


def as_dtype(value: Any, dtype: torch.dtype | None) -> Any:
    """The same values in `dtype`; None: as they are."""
    if value is None or dtype is None:
        return value
    if isinstance(value, Tables):
        return Tables(value.cos.to(dtype), value.sin.to(dtype), value.positions)
    return value.to(dtype)


def _results(case: Case, like: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """An unfilled result, every element NaN."""
    B, S, D = case.batch, case.sequence, case.head_dim
    if case.order == "bhsd":
        return torch.full((B, heads, S, D), torch.nan, dtype=dtype).transpose(1, 2)
    return torch.full((B, S, heads, D), torch.nan, dtype=dtype)


def run_forward(backend: Any, case: Case, seed: int = 0, dtype: torch.dtype | None = None) -> list[Tensor]:
    """q, k (or x) and the copy; in the dtypes of the case, or all in `dtype`."""
    xs, weights, biases, tables, copied = make(case, seed)
    result = case.dtype if dtype is None else dtype
    outs = [_results(case, x, heads, result) for x, heads in zip(xs, case.heads, strict=True)]
    streams = [
        Stream(as_dtype(x, dtype), out, as_dtype(weight, dtype), as_dtype(bias, dtype))
        for x, out, weight, bias in zip(xs, outs, weights, biases, strict=True)
    ]
    copy = None
    if copied is not None:
        copy = Copy(as_dtype(copied, dtype), torch.full(copied.shape, torch.nan, dtype=result))
    backend.forward(streams, as_dtype(tables, dtype), case.options, copy)
    return outs + ([] if copy is None else [copy.out])


def run_backward(backend: Any, case: Case, seed: int = 0, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """dx of each stream, the copied gradient, and the gradients of weights and biases, by name."""
    xs, weights, biases, tables, copied = make(case, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    streams = []
    for x, w, b, heads in zip(xs, weights, biases, case.heads, strict=True):
        grad = torch.randn((case.batch, case.sequence, heads, case.head_dim), generator=generator).to(case.dtype)
        if case.order == "bhsd":
            grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
        x, grad, w, b = (as_dtype(value, dtype) for value in (x, grad, w, b))
        kept = None if case.options.norm == "none" else x
        streams.append(GradStream(grad, kept, torch.full_like(x, torch.nan), w, b, w is not None, b is not None))
    copy = None
    if copied is not None:
        moved = torch.randn(copied.shape, generator=generator).to(case.dtype)
        copy = Copy(as_dtype(moved, dtype), torch.full_like(as_dtype(copied, dtype), torch.nan))
    gradients = backend.backward(streams, as_dtype(tables, dtype), case.options, copy)
    named = {f"dx{i}": stream.dx for i, stream in enumerate(streams)}
    if copy is not None:
        named["copy"] = copy.out
    named |= {f"dweight{i}": value for i, value in enumerate(gradients.weights) if value is not None}
    named |= {f"dbias{i}": value for i, value in enumerate(gradients.biases) if value is not None}
    return named


HALF_STEP = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}
"""Half the distance of two neighbours, relative: the error of one rounding to nearest."""
SLACK = 4.0
"""How much larger than the reference's the largest float32 error may be: the host adds the lanes of a row one after the
other, PyTorch in a tree."""


def assert_close(actual: Tensor, float32: Tensor, exact: Tensor, name: str, rounding_steps: float) -> None:
    """One rounding of every element to the result's dtype (`rounding_steps` halves of a step), and before it no more
    than the error of the same arithmetic in float32, which is `float32`."""
    assert not actual.isnan().any(), f"{name}: elements were not written"
    if not exact.numel():
        return
    largest = exact.abs().max().item()
    # The reference is lucky in a result of few elements: two steps of the largest value are float32 arithmetic as well.
    arithmetic = max(SLACK * (float32.double() - exact).abs().max().item(), 4 * HALF_STEP[torch.float32] * largest)
    error = (actual.double() - exact).abs()
    worst = (error - rounding_steps * HALF_STEP[actual.dtype] * exact.abs() - arithmetic).max().item()
    assert worst <= 0, f"{name}: error {error.max().item():.3g}, {worst:.3g} more than allowed"


def check_forward(backend: Any, case: Case, seed: int = 0, rounding_steps: float = 1) -> None:
    with poisoned_memory():
        actual = run_forward(backend, case, seed)
    yardstick, exact = (run_forward(reference, case, seed, dtype) for dtype in (torch.float32, torch.float64))
    for i, (a, y, e) in enumerate(zip(actual, yardstick, exact, strict=True)):
        assert_close(a, y, e, f"{case.name}: result {i}", rounding_steps)


def check_backward(backend: Any, case: Case, seed: int = 0, rounding_steps: float = 1) -> None:
    with poisoned_memory():
        actual = run_backward(backend, case, seed)
    yardstick, exact = (run_backward(reference, case, seed, dtype) for dtype in (torch.float32, torch.float64))
    assert actual.keys() == exact.keys()
    for name, a in actual.items():
        assert_close(a, yardstick[name], exact[name], f"{case.name}: {name}", rounding_steps)
