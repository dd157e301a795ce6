"""Calls for the vendor's attention operators, as a problem and as the request that the registry sees."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from fusion_pass.kernels import registry
from fusion_pass.kernels.attention_problem import Problem, resolve

from . import device

B, N2, D = 2, 2, 16

VISIBLE = [
    {"causal": causal, "window_left": left, "window_right": right}
    for causal, left, right in itertools.product(("none", "top_left", "bottom_right"), (-1, 0, 3), (-1, 0, 2))
]


def problem_of(
    queries: int, keys: int, group: int, dtype: torch.dtype, mask: Tensor | None, visible: Any, sinks: bool = False
) -> Problem:
    generator = torch.Generator().manual_seed(queries * 1000 + keys)

    def normal(length: int, heads: int) -> Tensor:
        return torch.randn((B, heads, length, D), generator=generator).to(dtype).transpose(1, 2)

    seen = resolve(queries, keys, mask=mask, **visible)
    sink = torch.randn(N2 * group, generator=generator).to(dtype) if sinks else None
    return Problem(normal(queries, N2 * group), normal(keys, N2), normal(keys, N2), sink, seen, 0.3, 0.0)


def request_of(problem: Problem, op: str, visible: Any, **more: Any) -> registry.Request:
    present = {"q": problem.q, "k": problem.k, "v": problem.v}
    if problem.seen.mask is not None:
        present["mask"] = problem.seen.mask
    if problem.sinks is not None:
        present["sinks"] = problem.sinks
    return registry.Request(
        op=op,
        device=device.stand_in(),
        dtypes={n: t.dtype for n, t in present.items()} | more.pop("dtypes", {}),
        shapes={n: tuple(t.shape) for n, t in present.items()},
        options={**visible, "softcap": 0.0, "deterministic": False, **more},
        training=op == "attention_backward",
    )
