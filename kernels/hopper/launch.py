"""`attention` on sm_90: the launchers. See `AttentionBackend` (kernels/attention_problem.py) for the contract."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from ..attention_problem import Problem
from ..attention_reference import sinks_gradient
from . import prepare
from .build import compile_instance
from .descriptors import DTYPES, fits, readable, rows_map, tensor_map
from .instances import backward_instance, forward_instance
from .rows import Rows, intervals, key_ranges, query_ranges
from .templates import BackwardTemplate, ForwardTemplate, backward_template, forward_template

_LOG2_E = math.log2(math.e)
_L2_BYTES_FOR_KEYS = 32 << 20
"""Of 50 MB: K and V of the heads that run together."""
_ROWS_PER_PROGRAM = 32


def forward(problem: Problem, order: str) -> tuple[Tensor, Tensor]:
    """(out, lse): one kernel, and small ones before it when the mask is in the data."""
    q, k, v = problem.q, problem.k, problem.v
    batch, seq_q, heads, head_dim = q.shape
    seq_k, kv_heads, v_head_dim = k.shape[1], k.shape[2], v.shape[3]
    out, lse = problem.empty_out(order), problem.empty_lse()
    if out.numel() == 0 and lse.numel() == 0:
        return out, lse
    if seq_k == 0:
        out.zero_()
        sinks = problem.sinks
        lse.copy_(lse.new_full((), float("-inf")) if sinks is None else sinks.to(lse.dtype)[None, :, None])
        return out, lse
    template = forward_template_of(problem)
    assert template is not None, "the registry does not choose this back end for such a problem"
    with _on(q):
        tiles = triton.cdiv(seq_q, template.block_m) * batch * heads
        rows = _rows(problem, template)
        ranges = None if rows is None else key_ranges(rows, seq_q, template.block_m, template.block_n)
        q, k, v = readable(q), readable(k), readable(v)
        o = out if fits(out) or not template.store_by_tma else torch.empty_like(out, memory_format=torch.contiguous_format)
        sinks = None if problem.sinks is None else problem.sinks.float()
        kernel = _loaded(template, q.dtype, q.device.index)
        kernel[(min(tiles, _multiprocessors(q.device.index)), 1, 1)](
            tensor_map(q, 64, template.qk_dim),
            tensor_map(k, template.block_n, template.qk_dim),
            tensor_map(v, template.block_n, template.v_dim),
            tensor_map(o, 64, template.v_dim) if template.store_by_tma else tensor_map(q, 64, template.v_dim),
            o,
            *_strides(o),
            v_head_dim,
            lse,
            sinks,
            *_rows_arguments(rows),
            ranges,
            torch.zeros(1, dtype=torch.int32, device=q.device) if template.dynamic else None,
            batch,
            heads,
            heads // kv_heads,
            seq_q,
            seq_k,
            _heads_together(problem) if template.masked else 1,
            *_band(problem),
            0 if rows is None else rows.stride,
            0 if ranges is None or ranges.shape[0] == 1 else ranges.stride(0),
            *_scales(problem),
            template,
            4,
        )
        if o is not out:
            out.copy_(o)
    return out, lse


def backward(
    problem: Problem,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    needs: Sequence[bool],
    into: Sequence[Tensor | None] = (None, None, None),
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v and the sinks: a kernel that prepares, the main one, and one that rounds dQ."""
    q, k, v = problem.q, problem.k, problem.v
    batch, seq_q, heads, head_dim = q.shape
    seq_k, kv_heads, v_head_dim = k.shape[1], k.shape[2], v.shape[3]
    dq, dk, dv = problem.gradients((True, True, True), into)
    assert dq is not None and dk is not None and dv is not None
    sinks = problem.sinks
    if q.numel() == 0 or seq_k == 0 or v_head_dim == 0:
        for gradient in (dq, dk, dv):
            gradient.zero_()
        dsinks = _sinks_gradient_without_keys(problem, lse, grad_lse)
        return _needed((dq, dk, dv, dsinks), needs)
    template = backward_template_of(problem)
    assert template is not None, "the registry does not choose this back end for such a problem"
    with _on(q):
        q, k, v = readable(q), readable(k), readable(v)
        tiles = triton.cdiv(seq_q, template.block_m)
        padded = tiles * template.block_m
        lse_rows = q.new_empty((batch, heads, padded), dtype=torch.float32)
        delta_rows = torch.empty_like(lse_rows)
        accumulator = q.new_empty((batch, heads, seq_q, head_dim), dtype=torch.float32)
        turns = q.new_empty((batch, heads, tiles), dtype=torch.int32) if template.deterministic else None
        do = grad_out
        copy = not fits(grad_out)
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        if copy:
            do = q.new_empty((batch, heads, seq_q, v_head_dim)).transpose(1, 2)
        prepare.before[(padded // _ROWS_PER_PROGRAM * batch * heads,)](
            out, grad_out, do, lse, grad_lse, lse_rows, delta_rows, accumulator, turns,
            *_strides(out), *_strides(grad_out), grad_out.stride(3), heads, seq_q, padded, head_dim, v_head_dim,
            TILE=template.block_m, ROWS=_ROWS_PER_PROGRAM, QK_DIM=triton.next_power_of_2(head_dim), V_DIM=triton.next_power_of_2(v_head_dim),
            HAS_GRAD_LSE=grad_lse is not None, COPY=copy, TURNS=template.deterministic,
        )  # fmt: skip
        rows = _rows(problem, template)
        ranges = first_blocks = None
        if rows is not None:
            ranges, first_blocks = query_ranges(rows, seq_q, seq_k, template.block_m, template.block_n)
        dk_to = dk if fits(dk) else torch.empty_like(k, memory_format=torch.contiguous_format)
        dv_to = dv if fits(dv) else torch.empty_like(v, memory_format=torch.contiguous_format)
        together = _chunk(batch * kv_heads, 16 if template.deterministic else 4 if template.masked else 1)
        kernel = _loaded(template, q.dtype, q.device.index)
        kernel[(together, triton.cdiv(seq_k, template.block_n), batch * kv_heads // together)](
            tensor_map(q, template.block_m, template.qk_lanes),
            tensor_map(k, template.block_n, template.qk_lanes),
            tensor_map(v, template.block_n, template.v_lanes),
            tensor_map(do, template.block_m, template.v_lanes),
            tensor_map(accumulator.transpose(1, 2), template.block_m, template.dq_lanes),
            tensor_map(dk_to, template.block_n, template.qk_lanes),
            tensor_map(dv_to, template.block_n, template.v_lanes),
            rows_map(lse_rows, template.block_m),
            rows_map(delta_rows, template.block_m),
            *_rows_arguments(rows),
            ranges,
            first_blocks,
            turns,
            kv_heads,
            heads // kv_heads,
            seq_q,
            seq_k,
            *_band(problem),
            0 if rows is None else rows.stride,
            0 if ranges is None or ranges.shape[0] == 1 else ranges.stride(0),
            *_scales(problem),
            problem.scale,
            template,
            template.num_warps,
        )
        for given, written in ((dk, dk_to), (dv, dv_to)):
            if given is not written:
                given.copy_(written)
        if needs[0]:
            prepare.after[(triton.cdiv(seq_q, _ROWS_PER_PROGRAM) * batch * heads,)](
                accumulator, dq, *_strides(dq), heads, seq_q, head_dim, problem.scale,
                ROWS=_ROWS_PER_PROGRAM, QK_DIM=triton.next_power_of_2(head_dim),
            )  # fmt: skip
        dsinks = None
        if sinks is not None and needs[3]:
            dsinks = sinks_gradient(sinks, lse, delta_rows[:, :, :seq_q])
    return _needed((dq, dk, dv, dsinks), needs)


def forward_template_of(problem: Problem) -> ForwardTemplate | None:
    """The forward instance for a problem; None when there is none."""
    mask = _mask_kind(problem, 128 if max(problem.q.shape[3], problem.v.shape[3]) <= 128 else 64)
    uneven = mask in ("band", "rows") or problem.seen.right is not None
    dims = problem.q.shape[3], problem.v.shape[3]
    return forward_template(*dims, mask=mask, softcap=problem.softcap > 0, sinks=problem.sinks is not None, uneven=uneven)


def backward_template_of(problem: Problem) -> BackwardTemplate | None:
    """The backward instance for a problem; None when there is none."""
    mask = _mask_kind(problem, 128)
    dims = problem.q.shape[3], problem.v.shape[3]
    return backward_template(*dims, mask=mask, softcap=problem.softcap > 0, deterministic=problem.deterministic)


def _mask_kind(problem: Problem, block_n: int) -> str:
    seen = problem.seen
    if seen.q_segments is not None or seen.positions is not None:
        return "rows"
    if seen.left is not None:
        return "band"
    return "right" if seen.right is not None or problem.k.shape[1] % block_n else "none"


def _band(problem: Problem) -> tuple[int, int]:
    """Keys of a query, relative to its row. A side without a limit gets one past every key."""
    seen, seq_q, seq_k = problem.seen, problem.q.shape[1], problem.k.shape[1]
    low = -(seq_q + seq_k) if seen.left is None else max(seen.offset - seen.left, -(seq_q + seq_k))
    high = seq_k if seen.right is None else min(seen.offset + seen.right, seq_k)
    return low, high


def _scales(problem: Problem) -> tuple[float, float]:
    """(factor to exponents of 2, factor before tanh)."""
    if problem.softcap > 0:
        return problem.softcap * _LOG2_E, problem.scale / problem.softcap
    return problem.scale * _LOG2_E, 0.0


def _rows(problem: Problem, template: ForwardTemplate | BackwardTemplate) -> Rows | None:
    return intervals(problem.seen, problem.q.shape[1], problem.k.shape[1]) if template.by_rows else None


def _rows_arguments(rows: Rows | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if rows is None else (rows.low, rows.high)


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Of batch, head and row of a `[B, S, H, D]` tensor."""
    return x.stride(0), x.stride(2), x.stride(1)


def _heads_together(problem: Problem) -> int:
    """How many query heads run at the same time, so that their K and V stay in L2."""
    k, v = problem.k, problem.v
    group = problem.q.shape[2] // k.shape[2]
    bytes_per_head = k.shape[1] * (k.shape[3] + v.shape[3]) * k.element_size()
    together = 1
    while together * 2 * bytes_per_head <= _L2_BYTES_FOR_KEYS and together * 2 <= k.shape[0] * k.shape[2]:
        together *= 2
    return together * group


@functools.cache
def _chunk(heads: int, wanted: int) -> int:
    """The largest divisor of `heads` up to `wanted` that leaves at most 65535 chunks, the third axis of the grid; else the smallest one."""
    divisors = [n for n in range(1, heads + 1) if heads % n == 0 and heads // n <= 65535]
    return max((n for n in divisors if n <= wanted), default=divisors[0])


def _needed(gradients: Sequence[Tensor | None], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    return tuple(gradient if needed else None for gradient, needed in zip(gradients, needs))


def _sinks_gradient_without_keys(problem: Problem, lse: Tensor, grad_lse: Tensor | None) -> Tensor | None:
    """Without keys lse is the sink itself."""
    if problem.sinks is None:
        return None
    delta = torch.zeros_like(lse) if grad_lse is None else -grad_lse
    return sinks_gradient(problem.sinks, lse, delta)


@functools.cache
def _loaded(template: ForwardTemplate | BackwardTemplate, dtype: torch.dtype, device: int) -> Any:
    """The compiled kernel, one handle per device."""
    if isinstance(template, ForwardTemplate):
        return compile_instance(forward_instance(template, DTYPES[dtype]))
    return compile_instance(backward_instance(template, DTYPES[dtype]))


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _on(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Launch on the device of `x`."""
    return torch.cuda.device(x.device)
