"""Attention as an eager model writes it, independently of `kernels/`: the oracle in float64, the yardstick in the
dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fusion_pass.kernels import attention

Conditions = Mapping[str, "Tensor | int | float | str"]


@dataclass(frozen=True)
class Case:
    """Sizes and conditions of one call. `conditions` makes keyword arguments of `attention` from a seeded generator."""

    batch: int = 2
    queries: int = 37
    keys: int = 37
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    value_dim: int = 16
    sinks: bool = False
    lse_gradient: bool = False
    logits: float = 1.0
    """Factor on q: large values make large logits."""
    conditions: Callable[[torch.Generator, Case], Conditions] = field(default=lambda _generator, _case: {})


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    grad_out: Tensor
    grad_lse: Tensor | None
    conditions: Conditions

    def leaves(self, dtype: torch.dtype) -> list[Tensor]:
        """q, k, v and the sinks, in `dtype`, as fresh leaves."""
        tensors = [self.q, self.k, self.v] + ([] if self.sinks is None else [self.sinks])
        return [t.detach().to(dtype).requires_grad_() for t in tensors]


@dataclass(frozen=True)
class Error:
    """How far a value is from the oracle: norms of the difference, of the oracle, and of as many ones."""

    difference: float
    size: float
    ones: float


@dataclass
class Results:
    """Everything a call computes, by name."""

    values: dict[str, Tensor]

    def error(self, oracle: Results) -> dict[str, Error]:
        """Of each value, over the ordinary entries of the oracle. An infinite lse must agree exactly, and one near
        finfo.min, which would drown the others, as a number."""
        errors = {}
        for name, expected in oracle.values.items():
            actual = self.values[name].to(expected)
            usual = ordinary(expected)
            torch.testing.assert_close(actual[~usual], expected[~usual], rtol=1e-6, atol=0)
            difference = (actual[usual] - expected[usual]).norm().item()
            errors[name] = Error(difference, expected[usual].norm().item(), expected.numel() ** 0.5)
        return errors

    def assert_no_worse(self, eager: Results, oracle: Results, saturated: bool = False) -> None:
        """Every value at least as near to the oracle as eager's in the same dtype, up to `SLACK` and a floor of a
        rounding.
        """
        dtype = self.values["out"].dtype
        eps = torch.finfo(dtype).eps
        allowed = eager.error(oracle)
        lse = oracle.values["lse"]
        largest = lse[ordinary(lse)].abs().max().item()
        for name, error in self.error(oracle).items():
            # Eager may be luckier than one rounding of the result, above all in few results.
            floor = (eps if error.ones <= 16 else 8 * eps if dtype == torch.float32 else eps / 16) * error.size
            if saturated or error.size < 1e-6 * error.ones:
                # One key takes all of the softmax and dq is the difference of two equal numbers. delta, one of them,
                # comes from the rounded `out` (as in every flash attention): eps of it stays. In float32 it is the
                # rounding of the stored lse that stays in exp(s - lse), as in every flash attention: eps |lse|.
                floor = eps * max(error.ones, error.size) * (max(32.0, largest) if dtype == torch.float32 else 1.0)
            limit = max(SLACK[dtype] * allowed[name].difference, floor)
            assert error.difference <= limit, (name, error, allowed[name])


def ordinary(values: Tensor) -> Tensor:
    """Where neither infinite nor the log-sum of hidden keys."""
    return values.abs() < 1e6


# Eager rounds scores and probabilities to the dtype, we only the probabilities: in half precision we are nearer to
# float64 everywhere, up to how the roundings fall. In float32 the exponent passes through base 2 and through the
# stored lse: a few more roundings of 6e-8 each.
SLACK = {torch.float16: 1.1, torch.bfloat16: 1.1, torch.float32: 4.0}


def make_inputs(case: Case, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Inputs:
    """Random tensors, exactly representable in `dtype`; every head and batch differs."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    conditions = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in case.conditions(generator, case).items()
    }
    return Inputs(
        q=normal(case.batch, case.queries, case.heads, case.head_dim) * case.logits,
        k=normal(case.batch, case.keys, case.kv_heads, case.head_dim),
        v=normal(case.batch, case.keys, case.kv_heads, case.value_dim),
        sinks=normal(case.heads) if case.sinks else None,
        grad_out=normal(case.batch, case.queries, case.heads, case.value_dim),
        grad_lse=torch.randn(case.batch, case.heads, case.queries, generator=generator).to(device)
        if case.lse_gradient
        else None,
        conditions=conditions,
    )


def run_operator(inputs: Inputs, dtype: torch.dtype, backend: str) -> Results:
    """Forward and all gradients of the operator."""
    leaves = inputs.leaves(dtype)
    q, k, v, *sinks = leaves
    out, lse = attention(q, k, v, sinks=sinks[0] if sinks else None, backend=backend, **inputs.conditions)
    return _collect(inputs, leaves, out, lse)


def run_eager(inputs: Inputs, dtype: torch.dtype) -> Results:
    """The same by autograd through `eager`."""
    leaves = inputs.leaves(dtype)
    q, k, v, *sinks = leaves
    out, lse = eager(q, k, v, sinks[0] if sinks else None, **inputs.conditions)
    return _collect(inputs, leaves, out, lse)


def _collect(inputs: Inputs, leaves: list[Tensor], out: Tensor, lse: Tensor) -> Results:
    outputs, grads = [out], [inputs.grad_out.to(out.dtype)]
    if inputs.grad_lse is not None:
        outputs.append(lse.masked_fill(lse.detach().isinf(), 0))
        grads.append(inputs.grad_lse.to(lse.dtype))
    gradients = torch.autograd.grad(outputs, leaves, grads)
    names = ("dq", "dk", "dv", "dsinks")
    return Results({"out": out.detach(), "lse": lse.detach(), **dict(zip(names, gradients, strict=False))})


def eager(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, **conditions: object) -> tuple[Tensor, Tensor]:
    """Products in the dtype of q, softmax in float32 (float64 for float64), probabilities rounded to the dtype of v."""
    group = q.shape[2] // k.shape[2]
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scale = conditions.get("scale", q.shape[3] ** -0.5)
    scores = torch.matmul(queries, keys.transpose(2, 3)) * scale
    softcap = conditions.get("softcap", 0.0)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    mask = conditions.get("mask")
    keep = visible(q, k, **conditions)
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if isinstance(mask, Tensor) and mask.dtype != torch.bool:
        wide = wide + mask
        keep = keep & (mask > float("-inf"))
    empty = ~keep.any(-1, keepdim=True)
    wide = wide.masked_fill(~keep, float("-inf"))
    if sinks is not None:
        column = sinks.to(wide.dtype)[None, :, None, None].expand(*wide.shape[:3], 1)
        wide = torch.cat([wide, column], -1)
        empty = torch.zeros_like(empty)
    wide = wide.masked_fill(empty, 0)
    lse = torch.logsumexp(wide, -1).masked_fill(empty[..., 0], float("-inf"))
    probabilities = torch.softmax(wide, -1).masked_fill(empty, 0)[..., : k.shape[1]]
    return torch.matmul(probabilities.to(v.dtype), values).transpose(1, 2), lse


def visible(q: Tensor, k: Tensor, **conditions: object) -> Tensor:
    """[B, Hq, Sq, Sk] booleans by the definition in docs/attention.md, one pair at a time in effect."""
    batch, queries, heads, _ = q.shape
    keys = k.shape[1]
    i = torch.arange(queries, device=q.device)[:, None]
    j = torch.arange(keys, device=q.device)[None, :]
    causal, diagonal = conditions.get("causal", "none"), i + torch.zeros_like(j)
    keep = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    cu_q = conditions.get("cu_seqlens_q")
    if isinstance(cu_q, Tensor):
        cu_k = conditions.get("cu_seqlens_k", cu_q)
        assert isinstance(cu_k, Tensor)
        keep = torch.zeros_like(keep)
        for document in range(len(cu_q) - 1):
            q0, q1, k0, k1 = (int(cu[document + n]) for cu in (cu_q, cu_k) for n in (0, 1))
            keep[q0:q1, k0:k1] = True
            diagonal[q0:q1] += k1 - q1 if causal == "bottom_right" else k0 - q0
    elif causal == "bottom_right":
        diagonal = diagonal + keys - queries
    left, right = conditions.get("window_left", -1), conditions.get("window_right", -1)
    if causal != "none":
        right = 0
    if right != -1:
        keep = keep & (j - diagonal <= right)
    if left != -1:
        keep = keep & (diagonal - j <= left)
    keep = keep.expand(batch, heads, queries, keys)
    q_ids = conditions.get("q_segment_ids")
    if isinstance(q_ids, Tensor):
        k_ids = conditions.get("k_segment_ids", q_ids)
        assert isinstance(k_ids, Tensor)
        keep = keep & (q_ids[:, None, :, None] == k_ids[:, None, None, :])
    mask = conditions.get("mask")
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        keep = keep & mask
    return keep


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every buffer that PyTorch allocates starts as NaN (integers: their largest value)."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan().item()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
