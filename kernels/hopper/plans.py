"""What a launch needs that does not change from call to call: the kernel, its grid, its tensor maps but for the
address, its numbers.

Computed once for every combination of shapes, strides and options and kept, so that a call costs little more than its
launches.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch

from ..attention_problem import Problem
from .build import compile_instance
from .descriptors import DTYPES, Map, rows_map, tensor_map
from .instances import backward_instance, forward_instance
from .rows import by_rows
from .templates import BackwardTemplate, ForwardTemplate, backward_template, forward_template

_LOG2_E = math.log2(math.e)
_L2_BYTES_FOR_KEYS = 32 << 20
"""Of 50 MB: K and V of the heads that run together in the forward."""
ROWS_PER_PROGRAM = 32
"""Of the kernels in prepare.py."""

Axes = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """The part of a `Problem` that decides a plan; hashable."""

    q: tuple[Axes, Axes]
    """Shape and strides."""
    k: tuple[Axes, Axes]
    v: tuple[Axes, Axes]
    dtype: torch.dtype
    device: int
    offset: int
    left: int | None
    right: int | None
    data: str | None
    """Kind of mask that only the data knows: "rows" or "segments" (templates.MASKS)."""
    sinks: bool
    scale: float
    softcap: float
    deterministic: bool

    @classmethod
    def of(cls, problem: Problem) -> Call:
        """The call of a problem."""
        q, k, v, seen = problem.q, problem.k, problem.v, problem.seen
        return cls(
            (q.shape, q.stride()), (k.shape, k.stride()), (v.shape, v.stride()), q.dtype, q.device.index,
            seen.offset, seen.left, seen.right, _data(problem),
            problem.sinks is not None, problem.scale, problem.softcap, problem.deterministic,
        )  # fmt: skip

    def mask(self, block_n: int) -> str:
        """Kind of mask (templates.MASKS)."""
        if self.data is not None:
            return self.data
        if self.left is not None:
            return "band"
        return "right" if self.right is not None or self.k[0][1] % block_n else "none"

    def band(self) -> tuple[int, int]:
        """Keys of a query, relative to its row. A side without a limit is past every key."""
        seq_q, seq_k = self.q[0][1], self.k[0][1]
        low = -(seq_q + seq_k) if self.left is None else max(self.offset - self.left, -(seq_q + seq_k))
        high = seq_k if self.right is None else min(self.offset + self.right, seq_k)
        return low, high

    def scales(self) -> tuple[float, float]:
        """(factor to exponents of 2, factor before tanh)."""
        if self.softcap > 0:
            return self.softcap * _LOG2_E, self.scale / self.softcap
        return self.scale * _LOG2_E, 0.0


def _data(problem: Problem) -> str | None:
    if not by_rows(problem.seen):
        return None
    return "segments" if problem.seen.documents is None else "rows"


@dataclass(frozen=True)
class ForwardPlan:
    """`maps`: of q, k, v and out, in the kernel's order."""

    template: ForwardTemplate
    kernel: Any
    grid: tuple[int, int, int]
    maps: tuple[Map, Map, Map, Map]
    out_strides: tuple[int, int, int, int]
    sizes: tuple[int, ...]
    scales: tuple[float, float]


@dataclass(frozen=True)
class BackwardPlan:
    """`maps`: of q, k, v, dO, dQ (the accumulator), dK, dV, LSE, delta. `helpers`: the kernels of prepare.py once
    Triton has specialised them."""

    template: BackwardTemplate
    kernel: Any
    grid: tuple[int, int, int]
    maps: tuple[Map, ...]
    tiles: int
    sizes: tuple[int, ...]
    scales: tuple[float, float, float]
    helpers: dict[tuple[object, ...], Any] = field(default_factory=dict)


def forward_template_of(call: Call) -> ForwardTemplate | None:
    """The forward instance for a call; None when there is none."""
    head_dim, v_head_dim = call.q[0][3], call.v[0][3]
    mask = call.mask(128 if max(head_dim, v_head_dim) <= 128 else 64)
    uneven = mask in ("band", "rows", "segments") or call.right is not None
    return forward_template(head_dim, v_head_dim, mask=mask, softcap=call.softcap > 0, sinks=call.sinks, uneven=uneven)


def backward_template_of(call: Call) -> BackwardTemplate | None:
    """The backward instance for a call; None when there is none."""
    dims = call.q[0][3], call.v[0][3]
    return backward_template(*dims, mask=call.mask(128), softcap=call.softcap > 0, deterministic=call.deterministic)


@functools.lru_cache(maxsize=1024)
def forward_plan(call: Call, out: tuple[Axes, Axes]) -> ForwardPlan:
    """The plan of a forward; `out`: shape and strides of the output."""
    template = forward_template_of(call)
    assert template is not None, "the registry does not choose this back end for such a call"
    (batch, seq_q, heads, _), (_, seq_k, kv_heads, _) = call.q[0], call.k[0]
    tiles = -(-seq_q // template.block_m) * batch * heads
    size = call.dtype.itemsize
    q = tensor_map(*call.q, call.dtype, 64, template.qk_dim)
    # Without a buffer for O there is no map either; the kernel does not look at the argument.
    o = tensor_map(*out, call.dtype, 64, template.v_dim) if template.store_by_tma else q
    return ForwardPlan(
        template=template,
        kernel=_loaded(template, call.dtype, call.device),
        grid=(min(tiles, torch.cuda.get_device_properties(call.device).multi_processor_count), 1, 1),
        maps=(
            q,
            tensor_map(*call.k, call.dtype, template.block_n, template.qk_dim),
            tensor_map(*call.v, call.dtype, template.block_n, template.v_dim),
            o,
        ),
        out_strides=(out[1][0], out[1][2], out[1][1], out[0][3]),
        sizes=(
            batch,
            heads,
            heads // kv_heads,
            seq_q,
            seq_k,
            _heads_together(call, size) if template.masked else 1,
            *call.band(),
        ),
        scales=call.scales(),
    )


@functools.lru_cache(maxsize=1024)
def backward_plan(call: Call, do: tuple[Axes, Axes], dk: tuple[Axes, Axes], dv: tuple[Axes, Axes]) -> BackwardPlan:
    """The plan of a backward; shape and strides of dO, dK and dV."""
    template = backward_template_of(call)
    assert template is not None, "the registry does not choose this back end for such a call"
    (batch, seq_q, heads, head_dim), (_, seq_k, kv_heads, _) = call.q[0], call.k[0]
    tiles = -(-seq_q // template.block_m)
    accumulator = (batch, seq_q, heads, head_dim), (heads * seq_q * head_dim, head_dim, seq_q * head_dim, 1)
    rows = rows_map(tiles * batch * heads, template.block_m)
    together = _chunk(batch * kv_heads, _heads_of_a_chunk(template))
    queries, keys = (template.block_m, template.qk_lanes), (template.block_n, template.qk_lanes)
    values = template.block_n, template.v_lanes
    return BackwardPlan(
        template=template,
        kernel=_loaded(template, call.dtype, call.device),
        grid=(together, -(-seq_k // template.block_n), batch * kv_heads // together),
        maps=(
            tensor_map(*call.q, call.dtype, *queries),
            tensor_map(*call.k, call.dtype, *keys),
            tensor_map(*call.v, call.dtype, *values),
            tensor_map(*do, call.dtype, template.block_m, template.v_lanes),
            tensor_map(*accumulator, torch.float32, template.block_m, template.dq_lanes),
            tensor_map(*dk, call.dtype, *keys),
            tensor_map(*dv, call.dtype, *values),
            rows,
            rows,
        ),
        tiles=tiles,
        sizes=(kv_heads, heads // kv_heads, seq_q, seq_k, *call.band()),
        scales=(*call.scales(), call.scale),
    )


@functools.cache
def _loaded(template: ForwardTemplate | BackwardTemplate, dtype: torch.dtype, device: int) -> Any:
    """The compiled kernel, one handle per device."""
    if isinstance(template, ForwardTemplate):
        return compile_instance(forward_instance(template, DTYPES[dtype]))
    return compile_instance(backward_instance(template, DTYPES[dtype]))


def _heads_together(call: Call, size: int) -> int:
    """How many query heads run at the same time in the forward, so that their K and V stay in L2."""
    (batch, seq_k, kv_heads, head_dim), v_head_dim = call.k[0], call.v[0][3]
    bytes_per_head = seq_k * (head_dim + v_head_dim) * size
    together = 1
    while together * 2 * bytes_per_head <= _L2_BYTES_FOR_KEYS and together * 2 <= batch * kv_heads:
        together *= 2
    return together * (call.q[0][2] // kv_heads)


def _heads_of_a_chunk(template: BackwardTemplate) -> int:
    """Key/value heads that run at the same time in the backward: causal GQA 32/8 at 8k 529 TFLOP/s with 2, 492 with
    4."""
    return 2 if template.masked and not template.deterministic else 4


def _chunk(heads: int, wanted: int) -> int:
    """The largest divisor of `heads` up to `wanted` that leaves at most 65535 chunks, the third axis of the grid;
    else the smallest one."""
    divisors = [n for n in range(1, heads + 1) if heads % n == 0 and heads // n <= 65535]
    return max((n for n in divisors if n <= wanted), default=divisors[0])
