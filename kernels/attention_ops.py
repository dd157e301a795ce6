"""The `attention` operator: schema, argument checks, fake, autograd, and the choice of the kernel.

The contract is `docs/attention.md`.
The forward returns (out, lse) and the backward needs nothing else of it, so the two may run on different back ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from . import registry
from .attention_problem import CAUSAL, AttentionBackend, Problem, resolve
from .options import FLOAT_DTYPES, INTEGER_DTYPES, OUT_ORDERS, check_device, one_of

NAMESPACE = "fusion_pass"

_CONDITIONS = (
    "Tensor? mask=None, Tensor? sinks=None, Tensor? q_segment_ids=None, Tensor? k_segment_ids=None, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None"
)
_OPTIONS = (
    'float? scale=None, str causal="none", SymInt window_left=-1, SymInt window_right=-1, float softcap=0.0, '
    "bool deterministic=False"
)
SCHEMAS = {
    "attention": (
        f"(Tensor q, Tensor k, Tensor v, {_CONDITIONS}, *, {_OPTIONS}, "
        'str out_order="bshd", str backend="auto") -> (Tensor, Tensor)'
    ),
    "attention_backward": (
        f"(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, {_CONDITIONS}, *, "
        f'{_OPTIONS}, bool[] output_mask, str backend="auto") -> Tensor[]'
    ),
}

# Differentiable arguments of `attention`, by position: q, k, v and the sinks. `output_mask` follows this order.
_DIFFERENTIABLE = (0, 1, 2, 4)
_MASK = 3
_NUM_TENSORS = 9


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    q_segment_ids: Tensor | None = None,
    k_segment_ids: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: str = "none",
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    out_order: str = "bshd",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k' + mask) v over the keys each query may see, with the log-sum-exp of each row.

    `q` is [B, Sq, Hq, D], `k` [B, Sk, Hkv, D], `v` [B, Sk, Hkv, Dv]; Hq is a multiple of Hkv. Returns out [B, Sq, Hq,
    Dv] in q's dtype and lse [B, Hq, Sq], float32 (float64 for float64), in natural units. A row that sees no key
    gives 0, lse = -inf and no gradient. Differentiable once, in q, k, v and sinks, through out and lse. See
    `docs/attention.md` for every argument.
    """
    return cast(
        tuple[Tensor, Tensor],
        torch.ops.fusion_pass.attention(
            q,
            k,
            v,
            mask,
            sinks,
            q_segment_ids,
            k_segment_ids,
            cu_seqlens_q,
            cu_seqlens_k,
            scale=scale,
            causal=causal,
            window_left=window_left,
            window_right=window_right,
            softcap=softcap,
            deterministic=deterministic,
            out_order=out_order,
            backend=backend,
        ),
    )


# --- checks ---


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    q_segment_ids: Tensor | None,
    k_segment_ids: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    causal: str,
    window_left: int,
    window_right: int,
    softcap: float,
) -> None:
    """Raise a sentence that names the argument, unless the arguments are those of `docs/attention.md`."""
    one_of("causal", causal, CAUSAL)
    for name, window in (("window_left", window_left), ("window_right", window_right)):
        if window < -1:
            raise ValueError(f"{name} is {window}; it takes a number of keys, or -1 for no limit.")
    if not softcap >= 0:
        raise ValueError(f"softcap is {softcap}; it must be positive, or 0 for none.")
    _check_heads(q, k, v)
    if mask is not None:
        _check_mask(mask, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]), q.device)
    if sinks is not None:
        if sinks.dim() != 1 or sinks.shape[0] != q.shape[2]:
            raise ValueError(f"sinks has shape {list(sinks.shape)}; it takes one logit a query head, [{q.shape[2]}].")
        if sinks.dtype not in FLOAT_DTYPES:
            raise TypeError(f"sinks has dtype {sinks.dtype}; it takes a float dtype.")
        check_device("sinks", sinks, q.device)
    _check_segments(q_segment_ids, k_segment_ids, q, k)
    _check_documents(cu_seqlens_q, cu_seqlens_k, q, k)
    if cu_seqlens_q is not None and q_segment_ids is not None:
        raise ValueError("cu_seqlens_q and q_segment_ids are both given; pass one description of the documents.")


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {list(x.shape)}; it takes [batch, sequence, heads, head_dim].")
        if x.dtype not in FLOAT_DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype}; it takes bfloat16, float16, float32 or float64.")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {x.dtype} and q {q.dtype}; they must be equal.")
        check_device(name, x, q.device)
        if x.stride(3) != 1:
            raise ValueError(
                f"{name} has strides {list(x.stride())}; the last must be 1 (other axes may have any). "
                "Call .contiguous() on it."
            )
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(f"q has shape {list(q.shape)} and k {list(k.shape)}; batch and head_dim must be equal.")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"k has shape {list(k.shape)} and v {list(v.shape)}; only head_dim may differ.")
    if k.shape[2] < 1 or q.shape[2] % k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} heads and k {k.shape[2]}; q takes a multiple of k's.")
    if min(q.shape[3], v.shape[3]) < 1:
        raise ValueError(f"head_dim is {q.shape[3]} for q and {v.shape[3]} for v; it must be positive.")


def _check_mask(mask: Tensor, scores: tuple[int, int, int, int], device: torch.device) -> None:
    if mask.dtype != torch.bool and mask.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"mask has dtype {mask.dtype}; it takes torch.bool (True: seen) or a float dtype (added to scores)."
        )
    fits = 1 <= mask.dim() <= 4 and all(
        size == 1 or size == full for size, full in zip(reversed(mask.shape), reversed(scores), strict=False)
    )
    if not fits:
        raise ValueError(
            f"mask has shape {list(mask.shape)}; it takes one that broadcasts to "
            f"[batch, heads, queries, keys] = {list(scores)}."
        )
    check_device("mask", mask, device)


def _check_segments(q_ids: Tensor | None, k_ids: Tensor | None, q: Tensor, k: Tensor) -> None:
    if q_ids is None:
        if k_ids is not None:
            raise ValueError("k_segment_ids is given without q_segment_ids; pass both.")
        return
    if k_ids is None and k.shape[1] != q.shape[1]:
        raise ValueError(
            f"k_segment_ids is missing, but there are {q.shape[1]} queries and {k.shape[1]} keys; pass it."
        )
    for name, ids, tokens in (("q_segment_ids", q_ids, q.shape[1]), ("k_segment_ids", k_ids, k.shape[1])):
        if ids is None:
            continue
        if ids.dtype not in INTEGER_DTYPES:
            raise TypeError(f"{name} has dtype {ids.dtype}; it takes an integer dtype.")
        if ids.dim() != 2 or ids.shape[1] != tokens or (ids.shape[0] != 1 and ids.shape[0] != q.shape[0]):
            raise ValueError(f"{name} has shape {list(ids.shape)}; it takes [1 or {q.shape[0]}, {tokens}].")
        check_device(name, ids, q.device)


def _check_documents(cu_q: Tensor | None, cu_k: Tensor | None, q: Tensor, k: Tensor) -> None:
    if cu_q is None:
        if cu_k is not None:
            raise ValueError("cu_seqlens_k is given without cu_seqlens_q; pass both.")
        return
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens_q is given, but the batch is {q.shape[0]}; pack the documents into a batch of 1.")
    if cu_k is None and k.shape[1] != q.shape[1]:
        raise ValueError(f"cu_seqlens_k is missing, but there are {q.shape[1]} queries and {k.shape[1]} keys; pass it.")
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if cu is None:
            continue
        if cu.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} has dtype {cu.dtype}; it takes torch.int32 or torch.int64.")
        if cu.dim() != 1 or cu.shape[0] < 1 or cu.shape[0] != cu_q.shape[0]:
            raise ValueError(
                f"{name} has shape {list(cu.shape)}; it takes [documents + 1], the same for queries and keys."
            )
        check_device(name, cu, q.device)


def problem_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    q_segment_ids: Tensor | None = None,
    k_segment_ids: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: str = "none",
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Problem:
    """The checked arguments, resolved."""
    conditions = (q_segment_ids, k_segment_ids, cu_seqlens_q, cu_seqlens_k)
    check(q, k, v, mask, sinks, *conditions, causal, window_left, window_right, softcap)
    seen = resolve(
        q.shape[1],
        k.shape[1],
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        mask=mask,
        q_segment_ids=q_segment_ids,
        k_segment_ids=k_segment_ids,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
    )
    scale = q.shape[3] ** -0.5 if scale is None else scale
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    return Problem(q, k, v, sinks, seen, scale, softcap, deterministic)


# --- choice of the kernel ---

_TENSORS = ("q", "k", "v", "mask", "sinks", "q_segment_ids", "k_segment_ids", "cu_seqlens_q", "cu_seqlens_k")


def choose_backend(
    op: str, backend: str, tensors: Sequence[Tensor | None], grad_lse: Tensor | None, options: dict[str, Any]
) -> AttentionBackend:
    """The named back end, or the first that serves the call (`reference` if no other does)."""
    present = {name: t for name, t in zip(_TENSORS, tensors, strict=False) if t is not None}
    if grad_lse is not None:
        present["grad_lse"] = grad_lse
    request = registry.Request(
        op=op,
        device=present["q"].device,
        dtypes={name: t.dtype for name, t in present.items()},
        shapes={name: tuple(t.shape) for name, t in present.items()},
        options={**options, "deterministic": options["deterministic"] or torch.are_deterministic_algorithms_enabled()},
        training=op == "attention_backward",
    )
    if backend != "auto":
        kernel = registry.get(op, backend)
        reason = kernel.supports(request)
        if reason is not None:
            raise RuntimeError(f"backend={backend!r} cannot run this call of {op}: {reason}")
        return cast(AttentionBackend, kernel.load())
    choice = registry.choose(request, allow_reference=True)
    if choice.kernel is None:
        raise RuntimeError(f"no kernel can run this call of {op}. {choice.sentence()}")
    return cast(AttentionBackend, choice.kernel.load())


# --- registration ---


def _forward(
    *tensors: Tensor | None, out_order: str = "bshd", backend: str = "auto", **options: Any
) -> tuple[Tensor, Tensor]:
    one_of("out_order", out_order, OUT_ORDERS)
    problem = problem_of(*tensors, **options)  # type: ignore[arg-type]
    return choose_backend("attention", backend, tensors, None, with_defaults(options)).forward(problem, out_order)


def _forward_fake(
    *tensors: Tensor | None, out_order: str = "bshd", backend: str = "auto", **options: Any
) -> tuple[Tensor, Tensor]:
    one_of("out_order", out_order, OUT_ORDERS)
    problem = problem_of(*tensors, **options)  # type: ignore[arg-type]
    return problem.empty_out(out_order), problem.empty_lse()


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *tensors: Tensor | None,
    output_mask: Sequence[bool],
    backend: str = "auto",
    **options: Any,
) -> list[Tensor]:
    problem = problem_of(*tensors, **options)  # type: ignore[arg-type]
    kernel = choose_backend("attention_backward", backend, tensors, grad_lse, with_defaults(options))
    gradients = kernel.backward(problem, grad_out, grad_lse, out, lse, output_mask)
    return [g.contiguous() for g in gradients if g is not None]


def _backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *tensors: Tensor | None,
    output_mask: Sequence[bool],
    **options: Any,
) -> list[Tensor]:
    inputs = (tensors[i] if i < len(tensors) else None for i in _DIFFERENTIABLE)
    return [x.new_empty(x.shape) for x, needed in zip(inputs, output_mask, strict=True) if needed and x is not None]


def with_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Every option, those left out at their defaults."""
    defaults = {"scale": None, "causal": "none", "window_left": -1, "window_right": -1, "softcap": 0.0}
    return {**defaults, "deterministic": False, **options}


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]
) -> None:
    needs = ctx.needs_input_grad  # trailing arguments left at their default are missing
    if len(needs) > _MASK and needs[_MASK]:
        raise NotImplementedError("mask requires a gradient, and attention has none for it; leave this site unfused.")
    ctx.set_materialize_grads(False)
    ctx.output_mask = [i < len(needs) and needs[i] for i in _DIFFERENTIABLE]
    ctx.options = {name: value for name, value in keyword_only_inputs.items() if name != "out_order"}
    ctx.num_inputs = len(inputs)
    ctx.save_for_backward(*output, *inputs)


def _autograd_backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    result: list[Tensor | None] = [None] * _NUM_TENSORS
    out, lse, *tensors = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    gradients = iter(
        torch.ops.fusion_pass.attention_backward(
            grad_out, grad_lse, out, lse, *tensors, output_mask=ctx.output_mask, **ctx.options
        )
    )
    for index, needed in zip(_DIFFERENTIABLE, ctx.output_mask, strict=True):
        if needed:
            result[index] = next(gradients)
    return tuple(result[: ctx.num_inputs])


def _no_double_backward(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(
        "attention cannot be differentiated twice: its backward is a hand-written kernel. Leave this site unfused."
    )


_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
for _name, _real, _fake in (("attention", _forward, _forward_fake), ("attention_backward", _backward, _backward_fake)):
    _library.define(_name + SCHEMAS[_name], tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _library.impl(_name, _real, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_library)
torch.library.register_autograd(
    f"{NAMESPACE}::attention", _autograd_backward, setup_context=_setup_context, lib=_library
)
torch.library.register_autograd(f"{NAMESPACE}::attention_backward", _no_double_backward, lib=_library)
