"""`attention` on sm_90: the launchers. See `AttentionBackend` (kernels/attention_problem.py) for the contract."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..attention_problem import Problem
from ..attention_reference import sinks_gradient
from . import prepare
from .descriptors import fits, readable
from .plans import ROWS_PER_PROGRAM, BackwardPlan, Call, backward_plan, forward_plan
from .rows import rows_of_backward, rows_of_forward


def forward(problem: Problem, order: str) -> tuple[Tensor, Tensor]:
    """(out, lse): one kernel, and small ones before it when the mask is in the data."""
    out, lse = problem.empty_out(order), problem.empty_lse()
    if lse.numel() == 0:
        return out, lse
    sinks = problem.sinks
    if problem.k.shape[1] == 0:
        out.zero_()
        lse.copy_(lse.new_full((), float("-inf")) if sinks is None else sinks.to(lse.dtype)[None, :, None])
        return out, lse
    problem = _readable(problem)
    q = problem.q
    with torch.cuda.device(q.device):
        o = out if fits(out) else torch.empty_like(out, memory_format=torch.contiguous_format)
        plan = forward_plan(Call.of(problem), (o.shape, o.stride()))
        template = plan.template
        low = high = labels = ranges = None
        strides = 0, 0
        if template.by_rows:
            rows = rows_of_forward(problem.seen, q.shape[1], problem.k.shape[1], template.block_m, template.block_n)
            low, high, labels, ranges, strides = rows.low, rows.high, rows.labels, rows.ranges, rows.strides
        tensors = (q, problem.k, problem.v, o if template.store_by_tma else q)
        plan.kernel[plan.grid](
            *(map_.at(x) for map_, x in zip(plan.maps, tensors, strict=True)),
            o,
            *plan.out_strides,
            lse,
            None if sinks is None else sinks.float(),
            low,
            high,
            labels,
            ranges,
            torch.zeros(1, dtype=torch.int32, device=q.device) if template.dynamic else None,
            *plan.sizes,
            *strides,
            *plan.scales,
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
    gradients = problem.gradients((True, True, True), into)
    dq, dk, dv = (x for x in gradients if x is not None)
    sinks = problem.sinks
    if lse.numel() == 0 or problem.k.numel() == 0:
        for gradient in (dq, dk, dv):
            gradient.zero_()
        delta = torch.zeros_like(lse) if grad_lse is None else -grad_lse  # without keys lse is the sink itself
        return _needed((dq, dk, dv, None if sinks is None else sinks_gradient(sinks, lse, delta)), needs)
    problem = _readable(problem)
    q = problem.q
    batch, seq_q, heads, head_dim = q.shape
    with torch.cuda.device(q.device):
        dk_to, dv_to = (x if fits(x) else torch.empty_like(x, memory_format=torch.contiguous_format) for x in (dk, dv))
        do = grad_out
        if not fits(grad_out):  # the expanded gradient of a sum, for one
            do = q.new_empty((batch, heads, seq_q, problem.v.shape[3])).transpose(1, 2)
        plan = backward_plan(Call.of(problem), *((x.shape, x.stride()) for x in (do, dk_to, dv_to)))
        template = plan.template
        lse_rows, delta_rows = q.new_empty(
            (2, batch, heads, plan.tiles * template.block_m), dtype=torch.float32
        ).unbind()
        accumulator = q.new_empty((batch, heads, seq_q, head_dim), dtype=torch.float32)
        turns = q.new_empty((batch, heads, plan.tiles), dtype=torch.int32) if template.deterministic else None
        _before(plan, out, grad_out, do, lse, grad_lse, lse_rows, delta_rows, accumulator, turns)
        low = high = labels = ranges = order = None
        strides = 0, 0
        if template.by_rows:
            rows = rows_of_backward(problem.seen, seq_q, problem.k.shape[1], template.block_m, template.block_n)
            low, high, labels, ranges, order = rows.low, rows.high, rows.labels, rows.ranges, rows.order
            strides = rows.strides
        tensors = (q, problem.k, problem.v, do, accumulator, dk_to, dv_to, lse_rows, delta_rows)
        plan.kernel[plan.grid](
            *(map_.at(x) for map_, x in zip(plan.maps, tensors, strict=True)),
            low,
            high,
            labels,
            ranges,
            order,
            turns,
            *plan.sizes,
            *strides,
            *plan.scales,
            template,
            template.num_warps,
        )
        for given, written in ((dk, dk_to), (dv, dv_to)):
            if given is not written:
                given.copy_(written)
        if needs[0]:
            _after(plan, accumulator, dq, problem.scale)
        dsinks = sinks_gradient(sinks, lse, delta_rows[:, :, :seq_q]) if sinks is not None and needs[3] else None
    return _needed((dq, dk, dv, dsinks), needs)


def _before(
    plan: BackwardPlan,
    out: Tensor,
    grad_out: Tensor,
    do: Tensor,
    lse: Tensor,
    grad_lse: Tensor | None,
    lse_rows: Tensor,
    delta_rows: Tensor,
    accumulator: Tensor,
    turns: Tensor | None,
) -> None:
    """Launch `prepare.before`."""
    batch, seq_q, heads, v_head_dim = out.shape
    template, padded = plan.template, lse_rows.shape[2]
    arguments = (
        out, grad_out, do, lse, None if grad_lse is None else grad_lse.contiguous(),
        lse_rows, delta_rows, accumulator, turns,
        *_strides(out), *_strides(grad_out), grad_out.stride(3), heads, seq_q, padded, accumulator.shape[3], v_head_dim,
        template.block_m, ROWS_PER_PROGRAM, template.qk_dim, template.v_dim,
        grad_lse is not None, do is not grad_out, template.deterministic,
    )  # fmt: skip
    _launch(plan, prepare.before, (padded // ROWS_PER_PROGRAM * batch * heads, 1, 1), arguments)


def _after(plan: BackwardPlan, accumulator: Tensor, dq: Tensor, scale: float) -> None:
    """Launch `prepare.after`."""
    batch, heads, seq_q, head_dim = accumulator.shape
    arguments = (accumulator, dq, *_strides(dq), heads, seq_q, head_dim, scale, ROWS_PER_PROGRAM, plan.template.qk_dim)
    _launch(plan, prepare.after, (-(-seq_q // ROWS_PER_PROGRAM) * batch * heads, 1, 1), arguments)


def _launch(plan: BackwardPlan, kernel: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
    """Launch a Triton kernel, past its dispatch after the first time: a plan has one specialisation for the same
    numbers and alignments."""
    key = (id(kernel), *(x.data_ptr() % 16 if isinstance(x, Tensor) else x for x in arguments))
    compiled = plan.helpers.get(key)
    if compiled is None:
        plan.helpers[key] = kernel[grid](*arguments, num_warps=4)
    else:
        compiled[grid](*arguments)


def _readable(problem: Problem) -> Problem:
    """The problem with q, k and v as TMA can read them."""
    q, k, v = problem.q, problem.k, problem.v
    if fits(q) and fits(k) and fits(v):
        return problem
    return dataclasses.replace(problem, q=readable(q), k=readable(k), v=readable(v))


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Of batch, head and row of a `[B, S, H, D]` tensor."""
    of_batch, of_row, of_head, _ = x.stride()
    return of_batch, of_head, of_row


def _needed(gradients: Sequence[Tensor | None], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    return tuple(gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True))
