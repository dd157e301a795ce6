"""`attention` on sm_90: the launchers. See `AttentionBackend` (kernels/attention_problem.py) for the contract."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from ..attention_problem import Problem, Unfinished
from ..attention_reference import sinks_gradient
from .additive import additive, shifted_lse, shifts, values_of_backward, values_of_forward
from .descriptors import fits, readable
from .explicit import bits_of_backward, bits_of_forward, heads_apart
from .plans import Call, NarrowPlan, WidePlan, backward_plan, forward_plan, parts_of, rows_of_accumulator
from .rows import Rows, rows_of_backward, rows_of_forward
from .templates import AnyTemplate, BackwardTemplate

REPEATABLE = True
"""See `recording.py`."""


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
    q, k, v = problem.q, problem.k, problem.v
    o = out if fits(out) else torch.empty_like(out, memory_format=torch.contiguous_format)
    plan = forward_plan(Call.of(problem), (o.shape, o.stride()))
    rows = _rows(problem, plan.template, _shifts(problem), forward=True)
    counter = torch.zeros(1, dtype=torch.int32, device=q.device) if plan.template.dynamic else None
    weights = None if sinks is None else sinks.float()
    address = o.data_ptr()
    plan.launch(
        (
            *(q.data_ptr(), k.data_ptr(), v.data_ptr(), address if plan.template.store_by_tma else q.data_ptr()),
            *(address, lse.data_ptr(), _address(weights), *_addresses(rows), _address(counter)),
        )
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
    """The gradients of q, k, v and the sinks: a kernel that prepares, the main ones, and one that rounds dQ."""
    gradients = problem.gradients((True, True, True), into)
    dq, dk, dv = (x for x in gradients if x is not None)
    sinks = problem.sinks
    if lse.numel() == 0 or problem.k.numel() == 0:
        for gradient in (dq, dk, dv):
            gradient.zero_()
        delta = torch.zeros_like(lse) if grad_lse is None else -grad_lse  # without keys lse is the sink itself
        return _needed((dq, dk, dv, None if sinks is None else sinks_gradient(sinks, lse, delta)), needs)
    problem = _readable(problem)
    call = Call.of(problem)
    parts = parts_of(call)
    written = _writable(dq), _writable(dk, parts), _writable(dv, parts)
    plan, sums, delta_rows = _main(problem, call, grad_out, grad_lse, out, lse, needs, *written)
    if isinstance(plan, NarrowPlan) and needs[0]:
        plan.after.on((*sums, written[0]))
    for given, result in zip((dq, dk, dv), written, strict=True):
        if result.shape != given.shape:
            torch.sum(result.unflatten(2, (-1, parts)), 3, out=given)
        elif given is not result:
            given.copy_(result)
    dsinks = _sinks_gradient(sinks, lse, delta_rows) if needs[3] else None
    return _needed((dq, dk, dv, dsinks), needs)


def unfinished_backward(
    problem: Problem,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dv: Tensor | None,
    needs_sinks: bool,
) -> Unfinished | None:
    """See `Unfinished`; dV is written to `dv` where it can be. None for the head dimensions and sizes whose kernels
    leave nothing to finish."""
    if lse.numel() == 0 or problem.k.numel() == 0 or max(problem.q.shape[3], problem.v.shape[3]) > 128:
        return None
    problem = _readable(problem)
    call = Call.of(problem)
    parts = parts_of(call)
    k, v = problem.k, problem.v
    dk_to, dv_to = (x.new_empty((*x.shape[:2], x.shape[2] * parts, x.shape[3])) for x in (k, v))
    if dv is not None and parts == 1 and fits(dv):
        dv_to = dv
    # Of several sums, to some of which nobody may have added, a kernel of its own makes one.
    dq_to = problem.q.new_empty(problem.q.shape, dtype=torch.float32) if problem.deterministic else None
    plan, sums, delta_rows = _main(
        problem, call, grad_out, grad_lse, out, lse, (True, True, True, needs_sinks), dq_to, dk_to, dv_to
    )
    dsinks = _sinks_gradient(problem.sinks, lse, delta_rows) if needs_sinks else None
    if dq_to is None:
        accumulator, _ = sums
        dq, scale = accumulator[:, :, : lse.shape[2]].transpose(1, 2), problem.scale
    else:
        assert isinstance(plan, NarrowPlan)
        plan.after.on((*sums, dq_to))
        dq, scale = dq_to, 1.0
    return Unfinished(dq, scale, dk_to, dv_to, parts, dsinks)


def _main(
    problem: Problem,
    call: Call,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    needs: Sequence[bool],
    dq_to: Tensor | None,
    dk_to: Tensor,
    dv_to: Tensor,
) -> tuple[NarrowPlan | WidePlan, tuple[Tensor, ...], Tensor]:
    """All but the last kernel: the plan, the float32 sums of dQ `[B, Hq, Sq, D]` with what the kernels count (neither
    above head_dim 128, where `dq_to` is written) and delta by padded rows."""
    q = problem.q
    batch, seq_q, heads, _ = q.shape
    do = grad_out
    if not fits(grad_out):  # the expanded gradient of a sum, for one
        do = q.new_empty((batch, heads, seq_q, problem.v.shape[3])).transpose(1, 2)
    dq = call.q if dq_to is None else (dq_to.shape, dq_to.stride())
    shaped = ((x.shape, x.stride()) for x in (dk_to, dv_to))
    first = ((x.shape, x.stride()) for x in (out, grad_out, do))
    dtype = q.dtype if dq_to is None else dq_to.dtype
    plan = backward_plan(call, *first, dq, *shaped, dq_dtype=dtype, grad_lse=grad_lse is not None)
    of_rows = _shifts(problem)
    if of_rows is not None:
        lse = shifted_lse(lse, of_rows, _tail(problem, lse), heads_apart(problem.seen))
    lse_rows, delta_rows = q.new_empty((2, batch, heads, plan.padded_rows), dtype=torch.float32).unbind()
    accumulator = counter = None
    if isinstance(plan, NarrowPlan):
        accumulator = q.new_empty((batch, heads, rows_of_accumulator(seq_q), q.shape[3]), dtype=torch.float32)
        counter = q.new_empty(plan.counts.size, dtype=torch.int32)
    # Pointers that the kernel does not look at may be any.
    plan.before.on(
        (
            out, grad_out, do, lse, lse if grad_lse is None else grad_lse.contiguous(), lse_rows, delta_rows,
            lse_rows if accumulator is None else accumulator,
            lse_rows if counter is None else counter,
        )
    )  # fmt: skip
    inputs = [x.data_ptr() for x in (q, problem.k, problem.v, do)]
    row_values = lse_rows.data_ptr(), delta_rows.data_ptr()
    results = dk_to.data_ptr(), dv_to.data_ptr()
    if isinstance(plan, NarrowPlan):
        assert accumulator is not None
        assert counter is not None
        rows = _rows(problem, plan.template, of_rows, forward=False)
        order = _address(None if rows is None else rows.order)
        address, counts = accumulator.data_ptr(), counter.data_ptr()
        plan.main((*inputs, address, *results, *row_values, *_addresses(rows), order, counts, address))
        return plan, (accumulator, counter), delta_rows
    of_queries, of_keys = plan.templates
    if needs[0]:
        assert dq_to is not None
        rows = _rows(problem, of_queries, of_rows, forward=True)
        plan.queries((*inputs, dq_to.data_ptr(), *row_values, *_addresses(rows)))
    if needs[1] or needs[2]:
        rows = _rows(problem, of_keys, of_rows, forward=False)
        plan.keys((*inputs, *results, *row_values, *_addresses(rows)))
    return plan, (), delta_rows


def _sinks_gradient(sinks: Tensor | None, lse: Tensor, delta_rows: Tensor) -> Tensor | None:
    """`delta_rows`: padded to whole tiles."""
    return None if sinks is None else sinks_gradient(sinks, lse, delta_rows[:, :, : lse.shape[2]])


def _shifts(problem: Problem) -> Tensor | None:
    """See `additive.shifts`; None where no mask is added."""
    if not additive(problem.seen):
        return None
    return shifts(problem.seen, problem.q.shape[1], problem.k.shape[1])


def _tail(problem: Problem, lse: Tensor) -> Tensor:
    """What float32 has lost of a large lse."""
    from ..triton.attention import tail  # the kernel is that of the other back end, and only additive masks need it

    with torch.cuda.device(lse.device):
        found = tail(problem, lse)
    assert found is not None, "the call has an additive mask"
    return found


def _rows(problem: Problem, template: AnyTemplate, of_rows: Tensor | None, *, forward: bool) -> Rows | None:
    """What the data says of the mask, where it does; the caller keeps it until the launch. `of_rows`: the shifts."""
    if not template.by_data:
        return None
    sizes = problem.q.shape[1], problem.k.shape[1], template.block_m, template.block_n
    order = isinstance(template, BackwardTemplate) and template.deterministic
    if of_rows is not None:
        dtype = torch.float32 if template.mask == "values32" else problem.q.dtype
        if forward:
            return values_of_forward(problem.seen, of_rows, dtype, sizes)
        return values_of_backward(problem.seen, of_rows, dtype, sizes, order=order)
    if template.bits:
        if forward:
            return bits_of_forward(problem.seen, *sizes)
        return bits_of_backward(problem.seen, *sizes, order=order)
    return (rows_of_forward if forward else rows_of_backward)(problem.seen, *sizes)


def _addresses(rows: Rows | None) -> tuple[int, int, int, int]:
    """Of the arrays that every kernel takes."""
    if rows is None:
        return 0, 0, 0, 0
    return rows.low.data_ptr(), rows.high.data_ptr(), rows.labels.data_ptr(), rows.ranges.data_ptr()


def _writable(gradient: Tensor, parts: int = 1) -> Tensor:
    """The gradient, or what is written instead: for tensor maps that cannot write it, or with a head for every part."""
    if parts > 1:
        batch, length, heads, dim = gradient.shape
        return gradient.new_empty((batch, length, heads * parts, dim))
    return gradient if fits(gradient) else torch.empty_like(gradient, memory_format=torch.contiguous_format)


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _readable(problem: Problem) -> Problem:
    """The problem with q, k and v as TMA can read them."""
    q, k, v = problem.q, problem.k, problem.v
    if fits(q) and fits(k) and fits(v):
        return problem
    return dataclasses.replace(problem, q=readable(q), k=readable(k), v=readable(v))


def _needed(gradients: Sequence[Tensor | None], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    return tuple(gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True))
