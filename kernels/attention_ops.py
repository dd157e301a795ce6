"""The `attention` operator: schema, argument checks, fake, autograd, and the choice of the kernel.

The contract is `docs/attention.md`.
The forward returns (out, lse) and the backward needs nothing else of it, so the two may run on different back ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from . import registry
from .attention_problem import CAUSAL, AttentionBackend, Problem, resolve
from .options import FLOAT_DTYPES, INTEGER_DTYPES, OUT_ORDERS, check_device, one_of
from .recording import Recording
from .registration import Differentiable, register
from .replay import Replay

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
_NUM_GRADIENTS = 4
"""Arguments of `attention_backward` before those: grad_out, grad_lse, out and lse."""


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
    tensors = (q, k, v, mask, sinks, q_segment_ids, k_segment_ids, cu_seqlens_q, cu_seqlens_k)
    options = (scale, causal, window_left, window_right, softcap, deterministic, out_order, backend)
    out, lse = _OPERATOR(tensors, options)
    return out, lse


# --- checks ---


def check_call(tensors: Sequence[Tensor | None], options: Mapping[str, Any]) -> None:
    """`check` of the arguments as the operator has them."""
    given = with_defaults(dict(options))
    limits = (given[name] for name in ("causal", "window_left", "window_right", "softcap"))
    check(*tensors, *limits)  # type: ignore[arg-type]


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


# --- calls ---


@dataclass(slots=True)
class _Forward:
    """A call of `attention`. See `registration.Planned`."""

    tensors: tuple[Tensor | None, ...]
    out_order: str
    backend: str
    options: dict[str, Any]
    recording: Recording | None = None

    def run(self) -> list[Tensor]:
        check_call(self.tensors, self.options)
        kernel = choose_backend("attention", self.backend, self.tensors, None, with_defaults(self.options))
        with _watching(kernel, self.tensors) as self.recording:
            problem = problem_of(*self.tensors, **self.options)  # type: ignore[arg-type]
            return list(kernel.forward(problem, self.out_order))

    def replay(self, arguments: Sequence[Tensor | None], results: Sequence[Tensor]) -> Replay | None:
        return None if self.recording is None else self.recording.replay(results)

    def fake(self) -> list[Tensor]:
        problem = problem_of(*self.tensors, **self.options)  # type: ignore[arg-type]
        return [problem.empty_out(self.out_order), problem.empty_lse()]


@dataclass(slots=True)
class _Backward:
    """A call of `attention_backward`: `gradients` are grad_out, grad_lse, out and lse. See `registration.Planned`."""

    gradients: tuple[Tensor | None, ...]
    tensors: tuple[Tensor | None, ...]
    output_mask: Sequence[bool]
    backend: str
    options: dict[str, Any]
    recording: Recording | None = None

    def run(self) -> list[Tensor]:
        check_call(self.tensors, self.options)
        grad_out, grad_lse, out, lse = self.gradients
        assert grad_out is not None
        assert out is not None
        assert lse is not None
        options = with_defaults(self.options)
        kernel = choose_backend("attention_backward", self.backend, self.tensors, grad_lse, options)
        with _watching(kernel, (*self.gradients, *self.tensors)) as self.recording:
            problem = problem_of(*self.tensors, **self.options)  # type: ignore[arg-type]
            found = kernel.backward(problem, grad_out, grad_lse, out, lse, self.output_mask)
            return [gradient.contiguous() for gradient in found if gradient is not None]

    def replay(self, arguments: Sequence[Tensor | None], results: Sequence[Tensor]) -> Replay | None:
        return None if self.recording is None else self.recording.replay(results)

    def fake(self) -> list[Tensor]:
        inputs = [self.tensors[index] for index in _DIFFERENTIABLE]
        needed = (x for x, wanted in zip(inputs, self.output_mask, strict=True) if wanted)
        return [x.new_empty(x.shape) for x in needed if x is not None]


@contextlib.contextmanager
def _watching(kernel: AttentionBackend, arguments: Sequence[Tensor | None]) -> Iterator[Recording | None]:
    """A recording of what is done inside, for a back end that may be repeated."""
    if not getattr(kernel, "REPEATABLE", False) or torch._C._len_torch_dispatch_stack():
        yield None
        return
    with Recording(arguments) as recording:
        yield recording


def _plan(*tensors: Tensor | None, out_order: str = "bshd", backend: str = "auto", **options: Any) -> _Forward:
    one_of("out_order", out_order, OUT_ORDERS)
    return _Forward((*tensors, *(None,) * (_NUM_TENSORS - len(tensors))), out_order, backend, options)


def _grad_plan(
    *tensors: Tensor | None, output_mask: Sequence[bool], backend: str = "auto", **options: Any
) -> _Backward:
    tensors = (*tensors, *(None,) * (_NUM_GRADIENTS + _NUM_TENSORS - len(tensors)))
    return _Backward(tensors[:_NUM_GRADIENTS], tensors[_NUM_GRADIENTS:], output_mask, backend, options)


def with_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Every option, those left out at their defaults."""
    defaults = {"scale": None, "causal": "none", "window_left": -1, "window_right": -1, "softcap": 0.0}
    return {**defaults, "deterministic": False, **options}


# --- registration ---


def _settings() -> tuple[object, ...]:
    """What the choice of a kernel depends on besides the call."""
    return torch._C._get_deterministic_algorithms(), torch._C._get_cudnn_sdp_enabled()


_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_OPERATOR = register(
    _LIBRARY,
    "attention",
    (SCHEMAS["attention"], SCHEMAS["attention_backward"]),
    (_plan, _grad_plan),
    Differentiable(
        _DIFFERENTIABLE,
        saves_results=True,
        refused={_MASK: "mask requires a gradient, and attention has none for it; leave this site unfused."},
    ),
    _settings,
)
