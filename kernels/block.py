"""`norm_rope_attention`: norm, rotation and attention of one layer as one operator.

    forward     q', k' = norm_rope(q, k)         the attention reads them, then they are dropped
                out, lse = attention(q', k', v)  v is read in place: from the packed qkv, or wherever it is
    backward    q', k' = norm_rope(q, k)         once more
                dq', dk', dv = attention'(...)   dv goes straight into its part of dqkv
                dq, dk = norm_rope'(dq', dk')    and so do dq and dk: nothing is copied together afterwards

Where the attention's kernel adds dq' up in float32 (Hopper, head_dim up to 128) the last step reads that sum, and dk'
in the parts it was computed in: one launch instead of two to four, 2 Hq D e bytes a token less, and one rounding less
(`triton/block_end_kernels.py`).

With `keep` the backward gets q' and k' of the forward: no second run, and as much kept as by two operators but the copy
of v.

Kept from forward to backward: qkv (or q, k, v), out, lse. Two operators keep q' and k' beside them, and from a packed
qkv a copy of v, because an operator may not return a view of its input. With e bytes an element that is

    less kept    (Hq + Hkv) D e bytes a token,  from a packed qkv  (Hq + 2 Hkv) D e
    more moved   2 (Hq + Hkv) D e bytes a token, of the second norm_rope; from a packed qkv 4 Hkv D e less, v's copies

The kernels are those of the parts: `backend` is "auto", one name for both, or two as "triton+hopper".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from . import attention_ops, registry
from .attention_problem import Problem, Unfinished
from .ops import NAMESPACE, split_packed
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
from .streams import Backend, Gradients, GradStream, Stream, Tables, fold_table_gradient

NAME = "norm_rope_attention"

_INPUTS = ("qkv", "q", "k", "v")
_NORM_ROPE = ("cos", "sin", "positions", "q_weight", "k_weight", "q_bias", "k_bias")
_CONDITIONS = ("mask", "sinks", "q_segment_ids", "k_segment_ids", "cu_seqlens_q", "cu_seqlens_k")
TENSORS = (*_INPUTS, *_NORM_ROPE, *_CONDITIONS)
DIFFERENTIABLE = (*_INPUTS, "cos", "sin", "q_weight", "k_weight", "q_bias", "k_bias", "sinks")
"""The order of `output_mask` and of the gradients."""

_PARAMETERS = ("cos", "sin", "q_weight", "k_weight", "q_bias", "k_bias")
_PACKING_OPTIONS = ("num_heads", "num_kv_heads", "head_dim", "packing")
_NORM_ROPE_OPTIONS = (
    "norm", "eps", "norm_scope", "norm_first", "rotary_dim", "rotary_start", "pairing", "conjugate", "mrope_layout",
    "mrope_section",
)  # fmt: skip
_ATTENTION_OPTIONS = ("scale", "causal", "window_left", "window_right", "softcap", "deterministic")

_TENSOR_SCHEMA = ", ".join(f"Tensor? {name}=None" for name in TENSORS)
_OPTION_SCHEMA = """int num_heads=0, int num_kv_heads=0, int head_dim=0, str packing="blocked", str norm="none", \
float? eps=None, str norm_scope="head", bool norm_first=True, int rotary_dim=0, int rotary_start=0, \
str pairing="halves", bool conjugate=False, str mrope_layout="none", int[] mrope_section=[], \
ScalarType? out_dtype=None, float? scale=None, str causal="none", SymInt window_left=-1, SymInt window_right=-1, \
float softcap=0.0, bool deterministic=False"""
SCHEMAS = {
    NAME: (
        f"({_TENSOR_SCHEMA}, *, {_OPTION_SCHEMA}, "
        'bool keep=False, str out_order="bshd", str backend="auto") -> (Tensor, Tensor, Tensor, Tensor)'
    ),
    f"{NAME}_backward": (
        "(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, Tensor? rotated_q, Tensor? rotated_k, "
        f"{_TENSOR_SCHEMA}, *, {_OPTION_SCHEMA}, "
        'bool[] output_mask, str backend="auto") -> Tensor[]'
    ),
}


def norm_rope_attention(
    qkv: Tensor | None = None,
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the attention of normalised and rotated queries and keys.

    Either `qkv` `[B, S, (Hq + 2 Hkv) D]`, with `num_heads`, `num_kv_heads`, `head_dim` and `packing`, or `q`
    `[B, S, Hq, D]`, `k` and `v` `[B, S, Hkv, D]`. The other arguments are those of `qk_norm_rope` and of `attention`,
    with their names and defaults (docs/operators.md, docs/attention.md), as are the errors. Differentiable once.

    `keep`: the backward is given the rotated queries and keys of the forward, instead of computing them again. The
    operator returns them after out and lse (else two empty tensors), without a gradient.
    """
    out, lse, _, _ = getattr(torch.ops.fusion_pass, NAME)(qkv=qkv, q=q, k=k, v=v, **arguments)
    return out, lse


# --- one call -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Call:
    """The checked arguments of one call, with q, k, v as views."""

    given: Mapping[str, Tensor | None]
    options: Mapping[str, Any]
    norm_rope: Options
    q: Tensor
    """`[B, S, Hq, D]`; `[B, S, Hkv, Hq / Hkv, D]` from a grouped packing, whose heads are not evenly apart."""
    k: Tensor
    v: Tensor
    backends: tuple[str, str]
    """Of norm + rotation and of attention."""

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], options: Mapping[str, Any], backend: str) -> _Call:
        given = dict(zip(TENSORS, (*tensors, *(None,) * (len(TENSORS) - len(tensors))), strict=True))
        first, _, second = backend.partition("+")
        chosen = Options(**{name: options[name] for name in _NORM_ROPE_OPTIONS if name in options})
        call = cls(given, options, chosen, *_split(given, options), (first, second or first))
        call._check()
        return call

    def _check(self) -> None:
        (_, _, heads, head_dim), (_, _, kv_heads, _) = self.shapes()
        check_options(self.norm_rope, head_dim)
        check_tables(self.given["cos"], self.given["sin"], self.given["positions"], self.q, self.norm_rope)
        for name, count in (("q", heads), ("k", kv_heads)):
            for kind in ("weight", "bias"):
                label = f"{name}_{kind}"
                check_affine(label, self.given[label], count, head_dim, self.norm_rope, self.q.device)

    @property
    def tables(self) -> Tables | None:
        cos, sin = self.given["cos"], self.given["sin"]
        return None if cos is None or sin is None else Tables(cos, sin, self.given["positions"])

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """`[B, S, Hq, D]` and `[B, S, Hkv, D]`."""
        batch, sequence, kv_heads, head_dim = self.k.shape
        group = self.q.shape[3] if self.q.dim() == 5 else 1
        heads = self.q.shape[2] * group
        return (batch, sequence, heads, head_dim), (batch, sequence, kv_heads, head_dim)

    def empty_rotated(self) -> tuple[Tensor, Tensor]:
        """Unfilled q' and k'."""
        dtype = self.options.get("out_dtype") or self.k.dtype
        q, k = (self.k.new_empty(shape, dtype=dtype) for shape in self.shapes())
        return q, k

    def rotated(self) -> tuple[Tensor, Tensor]:
        """q' and k'."""
        q, k = self.empty_rotated()
        if q.numel() or k.numel():
            streams = (
                Stream(self.q, q, self.given["q_weight"], self.given["q_bias"]),
                Stream(self.k, k, self.given["k_weight"], self.given["k_bias"]),
            )
            self._norm_rope_backend(training=False).forward(streams, self.tables, self.norm_rope, None)
        return q, k

    def problem(self, q: Tensor, k: Tensor) -> Problem:
        """The attention of q' and k'."""
        return attention_ops.problem_of(*self._attention_tensors(q, k), **self._attention_options())  # type: ignore[arg-type]

    def attention_backend(self, op: str, q: Tensor, k: Tensor, grad_lse: Tensor | None) -> Any:
        """The back end of `op`, `attention` or `attention_backward`."""
        options = attention_ops.with_defaults(self._attention_options())
        return attention_ops.choose_backend(op, self.backends[1], self._attention_tensors(q, k), grad_lse, options)

    def _attention_tensors(self, q: Tensor, k: Tensor) -> tuple[Tensor | None, ...]:
        return q, k, self.v, *(self.given[name] for name in _CONDITIONS)

    def _attention_options(self) -> dict[str, Any]:
        return {name: self.options[name] for name in _ATTENTION_OPTIONS if name in self.options}

    def _norm_rope_backend(self, training: bool) -> Backend:
        op = "qkv_norm_rope" if self.given["qkv"] is not None else "qk_norm_rope"
        if self.backends[0] != "auto":
            return cast(Backend, registry.get(op, self.backends[0]).load())
        request = registry.Request(
            op, self.k.device, {"x": self.k.dtype}, {"x": tuple(self.k.shape)}, vars(self.norm_rope), training
        )
        choice = registry.choose(request, allow_reference=True)
        if choice.kernel is None:
            raise RuntimeError(f"no kernel can run {op} here. {choice.sentence()}")
        return cast(Backend, choice.kernel.load())

    # --- backward ---

    def backward(
        self,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        rotated: tuple[Tensor, Tensor] | None,
        needs: Mapping[str, bool],
    ) -> list[Tensor]:
        """The gradients that are needed, in the order of `DIFFERENTIABLE`. `rotated`: q' and k', if they were kept."""
        results = self.empty_gradients(needs)
        dq, dk, dv = self._gradient_parts(results)
        found = self._attention_backward(grad_out, grad_lse, out, lse, rotated, needs, (dq, dk, dv))
        if isinstance(found, Unfinished):
            from .triton import block_end

            streams = self._grad_streams(needs, (found.dq, dq), (found.dk, dk))
            gradients = block_end.finish(found, streams, dv, self.tables, self.norm_rope)
            results.update(self._parameters(gradients))
            grad_sinks = found.sinks
        else:
            grad_q, grad_k, grad_v, grad_sinks = found
            assert grad_v is dv
            if grad_q is not None and grad_k is not None:
                self._turn_back(results, needs, (grad_q, dq), (grad_k, dk))
        if grad_sinks is not None:
            results["sinks"] = grad_sinks
        return [results[name] for name in DIFFERENTIABLE if needs[name]]

    def _attention_backward(
        self,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        rotated: tuple[Tensor, Tensor] | None,
        needs: Mapping[str, bool],
        gradients: tuple[Tensor | None, ...],
    ) -> Unfinished | tuple[Tensor | None, ...]:
        """The gradients of q', k', v and the sinks; unfinished where one launch can finish them and turn them back."""
        q, k = rotated or self.rotated()
        problem = self.problem(q, k)
        kernel = self.attention_backend("attention_backward", q, k, grad_lse)
        if self._why_apart(kernel, needs) is None:
            unfinished = kernel.unfinished_backward(problem, grad_out, grad_lse, out, lse, gradients[2], needs["sinks"])
            if unfinished is not None:
                return cast(Unfinished, unfinished)
        # dq' and dk' always together: norm + rotation is one launch for both.
        turned = any(x is not None for x in gradients[:2]) or any(needs[name] for name in _PARAMETERS)
        wanted = (turned, turned, gradients[2] is not None, needs["sinks"])
        return cast(
            tuple[Tensor | None, ...],
            kernel.backward(problem, grad_out, grad_lse, out, lse, wanted, (None, None, gradients[2])),
        )

    def _why_apart(self, kernel: Any, needs: Mapping[str, bool]) -> str | None:
        """Why the backward of attention and that of norm + rotation are kernels of their own; None if one launch ends
        both (`triton/block_end.py`)."""
        if not hasattr(kernel, "unfinished_backward"):
            return f"{kernel.__name__} writes dq and dk as they are in the end."
        if self.backends[0] not in ("auto", "measured", "triton"):
            return f"norm and rotation are those of {self.backends[0]}; the end of both is a Triton kernel."
        from .triton import block_end

        return block_end.refuses(needs, self.given, self.norm_rope)

    def _turn_back(
        self,
        results: dict[str, Tensor],
        needs: Mapping[str, bool],
        q: tuple[Tensor, Tensor | None],
        k: tuple[Tensor, Tensor | None],
    ) -> None:
        """dq' and dk' become dq and dk, and the gradients of weights, biases and tables are put into `results`."""
        if not q[0].numel():
            for name in DIFFERENTIABLE:
                if needs[name] and name in results:
                    results[name].zero_()
            return
        backend = self._norm_rope_backend(training=True)
        streams = self._grad_streams(needs, q, k)
        gradients = backend.backward(streams, self.tables, self.norm_rope, None, needs["cos"] or needs["sin"])
        results.update(self._parameters(gradients))

    def _grad_streams(
        self, needs: Mapping[str, bool], q: tuple[Tensor, Tensor | None], k: tuple[Tensor, Tensor | None]
    ) -> tuple[GradStream, ...]:
        """The work of the norm's and rotation's backward; of q and k each the gradient and where its result goes."""
        reads_inputs = self.norm_rope.norm != "none" or needs["cos"] or needs["sin"]
        return tuple(
            GradStream(
                grad if grad.stride(-1) == 1 else grad.contiguous(),
                x if reads_inputs else None,
                dx,
                self.given[f"{name}_weight"],
                self.given[f"{name}_bias"],
                needs[f"{name}_weight"],
                needs[f"{name}_bias"],
            )
            for name, x, (grad, dx) in (("q", self.q, q), ("k", self.k, k))
        )

    def _parameters(self, gradients: Gradients) -> dict[str, Tensor]:
        found: dict[str, Tensor | None] = {}
        for index, name in enumerate(("q", "k")):
            found |= {f"{name}_weight": gradients.weights[index], f"{name}_bias": gradients.biases[index]}
        for name, per_token in (("cos", gradients.cos), ("sin", gradients.sin)):
            table = self.given[name]
            if per_token is not None and table is not None:
                found[name] = fold_table_gradient(per_token, table, self.given["positions"], self.norm_rope)
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def empty_gradients(self, needs: Mapping[str, bool]) -> dict[str, Tensor]:
        """Unfilled contiguous gradients of what needs one."""
        present = ((name, self.given[name]) for name in DIFFERENTIABLE if needs[name])
        return {name: x.new_empty(x.shape) for name, x in present if x is not None}

    def _gradient_parts(self, results: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """dq, dk, dv: the parts of dqkv, or tensors of their own."""
        if "qkv" in results:
            return _split({"qkv": results["qkv"]}, self.options)
        return results.get("q"), results.get("k"), results.get("v")


def _split(given: Mapping[str, Tensor | None], options: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as views of a packed tensor, or as they are given."""
    qkv, q, k, v = (given.get(name) for name in _INPUTS)
    if qkv is not None:
        if q is not None or k is not None or v is not None:
            raise ValueError("qkv is given beside q, k or v; pass the packed tensor or the three.")
        sizes = [options.get(name, 0) for name in _PACKING_OPTIONS[:3]]
        packing = options.get("packing", "blocked")
        check_packed(qkv, sizes[0], sizes[1], sizes[2], packing)
        return split_packed(qkv, sizes[0], sizes[1], packing)
    if q is None or k is None or v is None:
        raise ValueError("qkv is missing, and q, k and v are not all given; pass the packed tensor or the three.")
    for name, x in (("q", q), ("k", k)):
        check_heads(name, x)
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q has shape {list(q.shape)} and k {list(k.shape)}; batch, sequence and head_dim must be equal."
        )
    if q.dtype != k.dtype:
        raise TypeError(f"q has dtype {q.dtype} and k {k.dtype}; they must be equal.")
    check_device("k", k, q.device)
    return q, k, v


# --- choice of the kernels -------------------------------------------------------------------------------------------


def parts(request: registry.Request) -> tuple[registry.Request, registry.Request]:
    """The requests of the two operators that this one stands for."""
    shapes: Mapping[str, Any] = request.shapes
    options: Mapping[str, Any] = request.options
    packed = "qkv" in request.dtypes
    inputs = ("qkv",) if packed else ("q", "k")
    dtype = options.get("out_dtype") or request.dtypes[inputs[0]]
    dtypes = {"q": dtype, "k": dtype, "v": request.dtypes["qkv" if packed else "v"]}
    if packed:
        q, k = ((*shapes["qkv"][:2], options[name], options["head_dim"]) for name in _PACKING_OPTIONS[:2])
        attended = {"q": q, "k": k, "v": k}
    else:
        attended = {name: shapes[name] for name in "qkv"}

    def part(op: str, tensors: Sequence[str], names: Sequence[str], rotated: bool) -> registry.Request:
        present = [name for name in tensors if name in request.dtypes]
        return registry.Request(
            op,
            request.device,
            {**{name: request.dtypes[name] for name in present}, **(dtypes if rotated else {})},
            {**{name: shapes[name] for name in present}, **(attended if rotated else {})},
            {name: options[name] for name in names if name in options},
            request.training,
        )

    norm_rope_options = (*_NORM_ROPE_OPTIONS, *(_PACKING_OPTIONS if packed else ()), "out_dtype")
    return (
        part("qkv_norm_rope" if packed else "qk_norm_rope", (*inputs, *_NORM_ROPE), norm_rope_options, False),
        part("attention", _CONDITIONS, (*_ATTENTION_OPTIONS, "out_order"), True),
    )


# --- registration ----------------------------------------------------------------------------------------------------


def _forward(
    *tensors: Tensor | None, keep: bool = False, out_order: str = "bshd", backend: str = "auto", **options: Any
) -> tuple[Tensor, ...]:
    one_of("out_order", out_order, OUT_ORDERS)
    call = _Call.of(tensors, options, backend)
    q, k = call.rotated()
    out, lse = call.attention_backend("attention", q, k, None).forward(call.problem(q, k), out_order)
    return (out, lse, q, k) if keep else (out, lse, q.new_empty(0), k.new_empty(0))


def _forward_fake(
    *tensors: Tensor | None, keep: bool = False, out_order: str = "bshd", backend: str = "auto", **options: Any
) -> tuple[Tensor, ...]:
    one_of("out_order", out_order, OUT_ORDERS)
    call = _Call.of(tensors, options, backend)
    q, k = call.empty_rotated()
    problem = call.problem(q, k)
    out, lse = problem.empty_out(out_order), problem.empty_lse()
    return (out, lse, q, k) if keep else (out, lse, q.new_empty(0), k.new_empty(0))


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    rotated_q: Tensor | None,
    rotated_k: Tensor | None,
    *tensors: Tensor | None,
    output_mask: Sequence[bool],
    backend: str = "auto",
    **options: Any,
) -> list[Tensor]:
    needs = dict(zip(DIFFERENTIABLE, output_mask, strict=True))
    rotated = None if rotated_q is None or rotated_k is None else (rotated_q, rotated_k)
    return _Call.of(tensors, options, backend).backward(grad_out, grad_lse, out, lse, rotated, needs)


def _backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    rotated_q: Tensor | None,
    rotated_k: Tensor | None,
    *tensors: Tensor | None,
    output_mask: Sequence[bool],
    backend: str = "auto",
    **options: Any,
) -> list[Tensor]:
    needs = dict(zip(DIFFERENTIABLE, output_mask, strict=True))
    return list(_Call.of(tensors, options, backend).empty_gradients(needs).values())


def _setup_context(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    needed = dict(zip(TENSORS, ctx.needs_input_grad, strict=False))  # arguments at the end may be missing
    if needed.get("mask", False):
        raise NotImplementedError(f"mask requires a gradient, and {NAME} has none for it; leave this site unfused.")
    out, lse, q, k = output
    ctx.mark_non_differentiable(q, k)
    ctx.set_materialize_grads(False)
    ctx.output_mask = [needed.get(name, False) for name in DIFFERENTIABLE]
    ctx.options = {name: value for name, value in keyword_only_inputs.items() if name not in ("keep", "out_order")}
    ctx.num_inputs = len(inputs)
    kept = (q, k) if keyword_only_inputs["keep"] else (None, None)
    ctx.save_for_backward(out, lse, *kept, *inputs)


def _autograd_backward(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    out, lse, *tensors = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    operator = torch.ops.fusion_pass.norm_rope_attention_backward
    gradients = iter(operator(grad_out, grad_lse, out, lse, *tensors, output_mask=ctx.output_mask, **ctx.options))
    found = {name: next(gradients) for name, needed in zip(DIFFERENTIABLE, ctx.output_mask, strict=True) if needed}
    return tuple(found.get(name) for name in TENSORS[: ctx.num_inputs])


def _no_double_backward(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(
        f"{NAME} cannot be differentiated twice: its backward is a hand-written kernel. Leave this site unfused."
    )


_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
for _name, _real, _fake in ((NAME, _forward, _forward_fake), (f"{NAME}_backward", _backward, _backward_fake)):
    _library.define(_name + SCHEMAS[_name], tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _library.impl(_name, _real, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_library)
torch.library.register_autograd(f"{NAMESPACE}::{NAME}", _autograd_backward, setup_context=_setup_context, lib=_library)
torch.library.register_autograd(f"{NAMESPACE}::{NAME}_backward", _no_double_backward, lib=_library)
registry.register_joined(NAME, parts)
