"""The norm + rotation operators in `torch.ops.fusion_pass`: schemas, plans, and the choice of the back end.

`docs/operators.md` is the contract. Every operator is planned the same way: check the arguments, cut them into streams
(`streams.py`), allocate the results. The fake stops there; the real operator then lets one back end fill the results.
`registration.py` makes operators of it.

The backward returns only the gradients that are needed (`output_mask`), in the order of the forward's differentiable
arguments. Gradients are dense and contiguous whatever the strides of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from . import registry
from .options import (
    OUT_ORDERS,
    Options,
    check_affine,
    check_device,
    check_heads,
    check_options,
    check_packed,
    check_tables,
    one_of,
)
from .registration import Differentiable, Operator, register
from .replay import Replay, Work
from .streams import Backend, Copy, Counted, Gradients, GradStream, Stream, Tables, fold_table_gradient

NAMESPACE = "fusion_pass"

# The option that names the back end may not be called `kernel`: Inductor passes an operator's keywords on to
# `FallbackKernel.create(kernel, *args, **kwargs)`.
ROTATION_SCHEMA = """int rotary_dim, int rotary_start=0, str pairing="halves", bool conjugate=False, \
str mrope_layout="none", int[] mrope_section=[]"""
_OPTIONS = f"""str norm, float? eps=None, str norm_scope="head", bool norm_first=True, {ROTATION_SCHEMA}"""
_PACKED = """int num_heads, int num_kv_heads, int head_dim, str packing="blocked\""""
_RESULT = """str out_order="bshd", ScalarType? out_dtype=None, str backend="auto\""""
_GRADIENT = """bool[] output_mask, ScalarType in_dtype, str backend="auto\""""
_TABLES = "Tensor? cos=None, Tensor? sin=None, Tensor? positions=None"
_AFFINE = "Tensor? weight=None, Tensor? bias=None"
_QK_AFFINE = "Tensor? q_weight=None, Tensor? k_weight=None, Tensor? q_bias=None, Tensor? k_bias=None"

SCHEMAS = {
    "qkv_norm_rope": (
        f"(Tensor qkv, {_TABLES}, {_QK_AFFINE}, *, {_PACKED}, {_OPTIONS}, {_RESULT}) -> (Tensor, Tensor, Tensor)"
    ),
    "qkv_norm_rope_backward": (
        f"(Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor? qkv, {_TABLES}, {_QK_AFFINE}, *, "
        f"{_PACKED}, {_OPTIONS}, {_GRADIENT}) -> Tensor[]"
    ),
    "qk_norm_rope": f"(Tensor q, Tensor k, {_TABLES}, {_QK_AFFINE}, *, {_OPTIONS}, {_RESULT}) -> (Tensor, Tensor)",
    "qk_norm_rope_backward": (
        f"(Tensor grad_q, Tensor grad_k, Tensor? q, Tensor? k, {_TABLES}, {_QK_AFFINE}, *, "
        f"{_OPTIONS}, {_GRADIENT}) -> Tensor[]"
    ),
    "norm_rope": f"(Tensor x, {_TABLES}, {_AFFINE}, *, {_OPTIONS}, {_RESULT}) -> Tensor",
    "norm_rope_backward": f"(Tensor grad, Tensor? x, {_TABLES}, {_AFFINE}, *, {_OPTIONS}, {_GRADIENT}) -> Tensor[]",
    "rope": (
        "(Tensor x, Tensor cos, Tensor sin, Tensor? positions=None, Tensor? cu_seqlens=None, "
        f"Tensor? seqlen_offsets=None, *, SymInt seqlen_offset=0, {ROTATION_SCHEMA}, {_RESULT}) -> Tensor"
    ),
    "rope_backward": (
        "(Tensor grad, Tensor? x, Tensor cos, Tensor sin, Tensor? positions=None, Tensor? cu_seqlens=None, "
        f"Tensor? seqlen_offsets=None, *, SymInt seqlen_offset=0, {ROTATION_SCHEMA}, {_GRADIENT}) -> Tensor[]"
    ),
}


# --- planning ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Plan:
    """A checked forward call whose `results` are allocated and not yet filled."""

    op: str
    backend: str
    results: tuple[Tensor, ...]
    streams: tuple[Stream, ...]
    tables: Tables | None
    options: Options
    copy: Copy | None = None
    works: Sequence[Work] | None = None
    scratch: Sequence[Tensor] = ()

    def run(self) -> list[Tensor]:
        """Fill the results and return them."""
        if any(result.numel() for result in self.results):
            chosen = resolve(self.op, self.backend, self.streams[0].x, self.options, training=False)
            tables = tables_for(chosen, self.tables, self.streams[0].x.shape[1])
            self.works = chosen.forward(self.streams, tables, self.options, self.copy)
        return self.fake()

    def replay(self, arguments: Sequence[Tensor | None], results: Sequence[Tensor]) -> Replay | None:
        """See `registration.Planned`."""
        return Replay.of(arguments, results, self.scratch, self.works)

    def fake(self) -> list[Tensor]:
        """The results, as they are."""
        return list(self.results)


@dataclass(slots=True)
class GradPlan:
    """A checked backward call. `dx`: the gradients of the inputs, allocated and not yet filled."""

    op: str
    backend: str
    dx: tuple[Tensor, ...]
    streams: tuple[GradStream, ...]
    tables: Tables | None
    options: Options
    needs_cos: bool
    needs_sin: bool
    copy: Copy | None = None
    works: Sequence[Work] | None = None
    scratch: Sequence[Tensor] = ()

    def run(self) -> list[Tensor]:
        """The gradients that are needed."""
        chosen = resolve(self.op, self.backend, self.streams[0].grad, self.options, training=True)
        needs_tables = self.needs_cos or self.needs_sin
        if self.streams[0].grad.numel():
            tables = tables_for(chosen, self.tables, self.streams[0].grad.shape[1])
            gradients = chosen.backward(self.streams, tables, self.options, self.copy, needs_tables)
            # The tables' gradients are finished here, outside of the launches.
            self.works, self.scratch = None if needs_tables else gradients.works, gradients.scratch
            return self._collect(gradients)
        return [torch.zeros_like(gradient) for gradient in self.fake()]

    def replay(self, arguments: Sequence[Tensor | None], results: Sequence[Tensor]) -> Replay | None:
        """See `registration.Planned`."""
        return Replay.of(arguments, results, self.scratch, self.works)

    def fake(self) -> list[Tensor]:
        """Unfilled gradients of the right shapes, dtypes and strides."""

        def like(tensor: Tensor | None, needed: bool) -> Tensor | None:
            return tensor.new_empty(tensor.shape) if needed and tensor is not None else None

        weights = [like(s.weight, s.needs_weight) for s in self.streams]
        biases = [like(s.bias, s.needs_bias) for s in self.streams]
        tables = self.tables
        cos = like(tables.cos, self.needs_cos) if tables else None
        sin = like(tables.sin, self.needs_sin) if tables else None
        return [g for g in (*self.dx, cos, sin, *weights, *biases) if g is not None]

    def _collect(self, gradients: Gradients) -> list[Tensor]:
        cos = sin = None
        if self.tables is not None and (self.needs_cos or self.needs_sin):
            tables = self.tables.with_positions(self.streams[0].grad.shape[1])
            if self.needs_cos:
                assert gradients.cos is not None
                cos = fold_table_gradient(gradients.cos, tables.cos, tables.positions, self.options)
            if self.needs_sin:
                assert gradients.sin is not None
                sin = fold_table_gradient(gradients.sin, tables.sin, tables.positions, self.options)
        return [g for g in (*self.dx, cos, sin, *gradients.weights, *gradients.biases) if g is not None]


def resolve(op: str, backend: str, x: Tensor, options: Options, training: bool) -> Backend:
    """The back end called `backend`, or for 'auto' the first that serves the call (`reference` if no other does)."""
    if backend != "auto":
        return cast(Backend, registry.get(op, backend).load())
    request = registry.Request(
        op=op.removesuffix("_backward"),
        device=x.device,
        dtypes={"x": x.dtype},
        shapes={"x": tuple(x.shape)},
        options=vars(options),
        training=training,
    )
    choice = registry.choose(request, allow_reference=True)
    if choice.kernel is None:
        raise RuntimeError(f"no kernel can run {op} here. {choice.sentence()}")
    return cast(Backend, choice.kernel.load())


def _tables(
    cos: Tensor | None, sin: Tensor | None, positions: Tensor | None, counted: Counted | None = None
) -> Tables | None:
    return None if cos is None or sin is None else Tables(cos, sin, positions, counted)


def tables_for(backend: Backend, tables: Tables | None, sequence: int) -> Tables | None:
    """The tables as `backend` takes them: with positions, unless it counts them itself."""
    if tables is None or getattr(backend, "COUNTS_POSITIONS", False):
        return tables
    return tables.with_positions(sequence)


def _empty_heads(shape: Sequence[int], dtype: torch.dtype, device: torch.device, order: str = "bshd") -> Tensor:
    """An unfilled [B, S, H, D] whose memory order is `order`."""
    one_of("out_order", order, OUT_ORDERS)
    batch, sequence, heads, head_dim = shape
    if order == "bhsd":  # no view of something else: that could not be written in place where a gradient is recorded
        strides = heads * sequence * head_dim, head_dim, sequence * head_dim, 1
        return torch.empty_strided((batch, sequence, heads, head_dim), strides, dtype=dtype, device=device)
    return torch.empty((batch, sequence, heads, head_dim), dtype=dtype, device=device)


def _unit_lanes(grad: Tensor) -> Tensor:
    """A gradient as a back end takes it: an expanded or transposed last axis is copied, any other strides stay."""
    return grad if grad.stride(-1) == 1 else grad.contiguous()


def split_packed(qkv: Tensor, num_heads: int, num_kv_heads: int, packing: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as views of the packed buffer; q is [B, S, KV, H/KV, D] if grouped, else all are [B, S, heads, D]."""
    head_dim = qkv.shape[-1] // (num_heads + 2 * num_kv_heads)
    if packing == "grouped":
        group = num_heads // num_kv_heads
        rows = qkv.view(*qkv.shape[:-1], num_kv_heads, group + 2, head_dim)
        return rows[:, :, :, :group], rows[:, :, :, group], rows[:, :, :, group + 1]
    heads = qkv.view(*qkv.shape[:-1], num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = heads.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), 2)
    return q, k, v


def _qkv_plan(
    qkv: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    packing: str = "blocked",
    out_order: str = "bshd",
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
    **chosen: Any,
) -> Plan:
    options = Options(**chosen)
    check_packed(qkv, num_heads, num_kv_heads, head_dim, packing)
    check_options(options, head_dim)
    check_tables(cos, sin, positions, qkv, options)
    for name, value, heads in (
        ("q_weight", q_weight, num_heads),
        ("k_weight", k_weight, num_kv_heads),
        ("q_bias", q_bias, num_heads),
        ("k_bias", k_bias, num_kv_heads),
    ):
        check_affine(name, value, heads, head_dim, options, qkv.device)
    q, k, v = split_packed(qkv, num_heads, num_kv_heads, packing)
    batch, sequence, _ = qkv.shape
    dtype = out_dtype or qkv.dtype
    q_out = _empty_heads((batch, sequence, num_heads, head_dim), dtype, qkv.device, out_order)
    k_out = _empty_heads((batch, sequence, num_kv_heads, head_dim), dtype, qkv.device, out_order)
    v_out = _empty_heads((batch, sequence, num_kv_heads, head_dim), qkv.dtype, qkv.device, out_order)
    streams = (Stream(q, q_out, q_weight, q_bias), Stream(k, k_out, k_weight, k_bias))
    results = (q_out, k_out, v_out)
    return Plan("qkv_norm_rope", backend, results, streams, _tables(cos, sin, positions), options, Copy(v, v_out))


def _qkv_grad_plan(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    qkv: Tensor | None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    output_mask: Sequence[bool],
    in_dtype: torch.dtype,
    packing: str = "blocked",
    backend: str = "auto",
    **chosen: Any,
) -> GradPlan:
    batch, sequence = grad_q.shape[:2]
    options = Options(**chosen)
    needs_x, needs_cos, needs_sin, *needs = output_mask
    dqkv = dq = dk = copy = q = k = None
    if qkv is not None:
        q, k, _ = split_packed(qkv, num_heads, num_kv_heads, packing)
    if needs_x:
        width = (num_heads + 2 * num_kv_heads) * head_dim
        dqkv = torch.empty((batch, sequence, width), dtype=in_dtype, device=grad_q.device)
        dq, dk, dv = split_packed(dqkv, num_heads, num_kv_heads, packing)
        copy = Copy(_unit_lanes(grad_v), dv)
    streams = (
        GradStream(_unit_lanes(grad_q), q, dq, q_weight, q_bias, needs[0], needs[2]),
        GradStream(_unit_lanes(grad_k), k, dk, k_weight, k_bias, needs[1], needs[3]),
    )
    tables = _tables(cos, sin, positions)
    dx = () if dqkv is None else (dqkv,)
    return GradPlan("qkv_norm_rope", backend, dx, streams, tables, options, needs_cos, needs_sin, copy)


def _qk_plan(
    q: Tensor,
    k: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    *,
    out_order: str = "bshd",
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
    **chosen: Any,
) -> Plan:
    options = Options(**chosen)
    check_heads("q", q)
    check_heads("k", k)
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q has shape {list(q.shape)} and k {list(k.shape)}; batch, sequence and head_dim must be equal. "
            "Call norm_rope on each of them if they differ."
        )
    if q.dtype != k.dtype:
        raise TypeError(f"q has dtype {q.dtype} and k {k.dtype}; they must be equal.")
    check_device("k", k, q.device)
    check_options(options, q.shape[3])
    check_tables(cos, sin, positions, q, options)
    for name, value, heads in (
        ("q_weight", q_weight, q.shape[2]),
        ("k_weight", k_weight, k.shape[2]),
        ("q_bias", q_bias, q.shape[2]),
        ("k_bias", k_bias, k.shape[2]),
    ):
        check_affine(name, value, heads, q.shape[3], options, q.device)
    dtype = out_dtype or q.dtype
    q_out = _empty_heads(q.shape, dtype, q.device, out_order)
    k_out = _empty_heads(k.shape, dtype, q.device, out_order)
    streams = (Stream(q, q_out, q_weight, q_bias), Stream(k, k_out, k_weight, k_bias))
    return Plan("qk_norm_rope", backend, (q_out, k_out), streams, _tables(cos, sin, positions), options)


def _qk_grad_plan(
    grad_q: Tensor,
    grad_k: Tensor,
    q: Tensor | None,
    k: Tensor | None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    *,
    output_mask: Sequence[bool],
    in_dtype: torch.dtype,
    backend: str = "auto",
    **chosen: Any,
) -> GradPlan:
    needs_q, needs_k, needs_cos, needs_sin, *needs = output_mask
    dq = _empty_heads(grad_q.shape, in_dtype, grad_q.device) if needs_q else None
    dk = _empty_heads(grad_k.shape, in_dtype, grad_k.device) if needs_k else None
    streams = (
        GradStream(_unit_lanes(grad_q), q, dq, q_weight, q_bias, needs[0], needs[2]),
        GradStream(_unit_lanes(grad_k), k, dk, k_weight, k_bias, needs[1], needs[3]),
    )
    dx = tuple(d for d in (dq, dk) if d is not None)
    tables = _tables(cos, sin, positions)
    return GradPlan("qk_norm_rope", backend, dx, streams, tables, Options(**chosen), needs_cos, needs_sin)


def _plan(
    x: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    out_order: str = "bshd",
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
    counted: Counted | None = None,
    **chosen: Any,
) -> Plan:
    options = Options(**chosen)
    check_heads("x", x)
    check_options(options, x.shape[3])
    check_tables(cos, sin, positions, x, options, counted=counted is not None)
    check_affine("weight", weight, x.shape[2], x.shape[3], options, x.device)
    check_affine("bias", bias, x.shape[2], x.shape[3], options, x.device)
    out = _empty_heads(x.shape, out_dtype or x.dtype, x.device, out_order)
    tables = _tables(cos, sin, positions, counted)
    return Plan("norm_rope", backend, (out,), (Stream(x, out, weight, bias),), tables, options)


def _grad_plan(
    grad: Tensor,
    x: Tensor | None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    output_mask: Sequence[bool],
    in_dtype: torch.dtype,
    backend: str = "auto",
    counted: Counted | None = None,
    **chosen: Any,
) -> GradPlan:
    needs_x, needs_cos, needs_sin, needs_weight, needs_bias = output_mask
    dx = _empty_heads(grad.shape, in_dtype, grad.device) if needs_x else None
    stream = GradStream(_unit_lanes(grad), x, dx, weight, bias, needs_weight, needs_bias)
    tables = _tables(cos, sin, positions, counted)
    filled = () if dx is None else (dx,)
    return GradPlan("norm_rope", backend, filled, (stream,), tables, Options(**chosen), needs_cos, needs_sin)


def counted_positions(
    x: Tensor,
    positions: Tensor | None,
    cu_seqlens: Tensor | None,
    seqlen_offsets: Tensor | None,
    seqlen_offset: int,
    mrope_layout: str,
) -> Counted | None:
    """How the positions of `rope` are counted; None where they are given or the tables are aligned with the tokens."""
    for name, value, sequences in (
        ("cu_seqlens", cu_seqlens, None),
        ("seqlen_offsets", seqlen_offsets, x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1),
    ):
        if value is None:
            continue
        check_device(name, value, x.device)
        if value.dim() != 1 or value.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{name} has shape {list(value.shape)} and dtype {value.dtype}; it takes one axis of int32 or int64."
            )
        if sequences is not None and value.shape[0] != sequences:
            raise ValueError(f"{name} has shape {list(value.shape)}; for {sequences} sequences it takes [{sequences}].")
    if cu_seqlens is not None and x.shape[0] != 1:
        raise ValueError(f"x has batch size {x.shape[0]}; with cu_seqlens it takes [1, total tokens, heads, head_dim].")
    # Statically zero means aligned tables; a traced offset is a SymInt and never compared.
    zero = isinstance(seqlen_offset, int) and seqlen_offset == 0
    if cu_seqlens is None and seqlen_offsets is None and zero:
        return None
    if positions is not None:
        raise ValueError("positions is given together with cu_seqlens or seqlen_offset; pass one of them.")
    if mrope_layout != "none":
        raise ValueError(
            f"mrope_layout is {mrope_layout!r}, but cu_seqlens and seqlen_offset count one position a token; "
            "pass positions [3, ...]."
        )
    return Counted(cu_seqlens, seqlen_offsets, seqlen_offset)


def _rope_plan(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seqlen_offsets: Tensor | None = None,
    *,
    seqlen_offset: int = 0,
    mrope_layout: str = "none",
    **chosen: Any,
) -> Plan:
    check_heads("x", x)
    counted = counted_positions(x, positions, cu_seqlens, seqlen_offsets, seqlen_offset, mrope_layout)
    return _plan(x, cos, sin, positions, norm="none", mrope_layout=mrope_layout, counted=counted, **chosen)


def _rope_grad_plan(
    grad: Tensor,
    x: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seqlen_offsets: Tensor | None = None,
    *,
    seqlen_offset: int = 0,
    mrope_layout: str = "none",
    output_mask: Sequence[bool],
    **chosen: Any,
) -> GradPlan:
    counted = counted_positions(grad, positions, cu_seqlens, seqlen_offsets, seqlen_offset, mrope_layout)
    chosen |= {"norm": "none", "mrope_layout": mrope_layout, "counted": counted}
    return _grad_plan(grad, x, cos, sin, positions, output_mask=(*output_mask, False, False), **chosen)


# --- registration --------------------------------------------------------------------------------------------------

LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


def _differentiable(inputs: int, parameters: int, integers: int = 1) -> Differentiable:
    """Of an operator whose arguments are `inputs` streams, cos, sin, `integers` that have no gradient (positions and
    the like), and `parameters` of norms."""
    tables = inputs, inputs + 1

    def linear(options: Mapping[str, Any], needed: Mapping[int, bool]) -> bool:
        # A rotation alone is linear: its input need not outlive the forward.
        return options.get("norm", "none") == "none" and not any(needed[index] for index in tables)

    first = inputs + 2 + integers
    indices = *range(inputs + 2), *range(first, first + parameters)
    return Differentiable(indices, inputs=inputs, linear=linear)


def _register(
    name: str, plan: Callable[..., Plan], grad_plan: Callable[..., GradPlan], differentiable: Differentiable
) -> Operator:
    return register(LIBRARY, name, (SCHEMAS[name], SCHEMAS[f"{name}_backward"]), (plan, grad_plan), differentiable)


OPERATORS = {
    "qkv_norm_rope": _register("qkv_norm_rope", _qkv_plan, _qkv_grad_plan, _differentiable(inputs=1, parameters=4)),
    "qk_norm_rope": _register("qk_norm_rope", _qk_plan, _qk_grad_plan, _differentiable(inputs=2, parameters=4)),
    "norm_rope": _register("norm_rope", _plan, _grad_plan, _differentiable(inputs=1, parameters=2)),
    "rope": _register("rope", _rope_plan, _rope_grad_plan, _differentiable(inputs=1, parameters=0, integers=3)),
}
