"""The cases of our own flash attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusion_pass.kernels.attention_problem import Problem, resolve

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class FlashCase:
    """One call."""

    name: str
    queries: int = 70
    keys: int = 70
    dtype: torch.dtype = FP32
    batch: int = 1
    heads: tuple[int, int] = (2, 1)
    head_dim: int = 64
    visible: dict[str, Any] = field(default_factory=dict)
    softcap: float = 0.0
    sinks: bool = False
    mask: str = "none"
    segments: bool = False


CAUSAL = {"causal": "top_left"}

CASES = (
    FlashCase("full", keys=150, batch=2, heads=(4, 2)),
    FlashCase("causal", visible=CAUSAL),
    FlashCase("causal bottom right", queries=40, keys=150, visible={"causal": "bottom_right"}),
    FlashCase("rows without keys", queries=150, keys=40, visible={"causal": "bottom_right"}),
    FlashCase("window", 200, 200, visible={"causal": "top_left", "window_left": 20}),
    FlashCase("window both sides", 200, 150, visible={"window_left": 9, "window_right": 33}),
    FlashCase("softcap", softcap=5.0, visible=CAUSAL),
    FlashCase("sinks", sinks=True, visible=CAUSAL),
    FlashCase("sinks and rows without keys", queries=90, keys=40, sinks=True, visible={"causal": "bottom_right"}),
    FlashCase("boolean mask", mask="bool"),
    FlashCase("additive mask", mask="add", visible=CAUSAL),
    FlashCase("additive mask with a row of the least number", mask="least"),
    FlashCase("segments", segments=True, visible=CAUSAL),
    FlashCase("bf16", dtype=BF16, head_dim=128, queries=100, keys=140, visible=CAUSAL),
    FlashCase("fp16 wide", dtype=FP16, head_dim=256, visible=CAUSAL),
    FlashCase("head_dim 80", head_dim=80, visible=CAUSAL),
    FlashCase("one query", queries=1, keys=130, dtype=BF16),
)


def make(case: FlashCase, seed: int) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def normal(length: int, heads: int) -> Tensor:
        shape = (case.batch, heads, length, case.head_dim)
        return torch.randn(shape, generator=generator).to(case.dtype).transpose(1, 2)

    mask = ids = None
    if case.mask != "none":
        mask = torch.rand((case.batch, 1, case.queries, case.keys), generator=generator) > 0.3
        mask[..., 3, :] = False
        if case.mask in ("add", "least"):
            bias = torch.randn((1, case.heads[0], case.queries, case.keys), generator=generator)
            hidden = -torch.inf if case.mask == "add" else torch.finfo(torch.float32).min
            mask = torch.where(mask, bias, hidden)
    if case.segments:
        ids = (torch.arange(case.queries) // 23 % 2).to(torch.int32).expand(case.batch, -1)
    visible = {"causal": "none", "window_left": -1, "window_right": -1, **case.visible}
    seen = resolve(case.queries, case.keys, mask=mask, q_segment_ids=ids, **visible)
    sinks = torch.randn(case.heads[0], generator=generator) if case.sinks else None
    q, k, v = normal(case.queries, case.heads[0]), normal(case.keys, case.heads[1]), normal(case.keys, case.heads[1])
    return Problem(q, k, v, sinks, seen, case.head_dim**-0.5, case.softcap)
