"""Variants of the norm over the whole row (`norm_scope="hidden"`)."""

from __future__ import annotations

import torch
from cuda_cases import over_one_head
from norm_rope_cases import CASES, Case
from test_norm_rope_numerics import LARGE

BF16, HALF, FLOAT, DOUBLE = torch.bfloat16, torch.float16, torch.float32, torch.float64
HIDDEN = {"norm_scope": "hidden"}
OLMO = {"dtype": BF16, "per_lane": True, "table_dtype": BF16, "options": HIDDEN}
SECTIONED = {"mrope_layout": "sectioned", "mrope_section": [16, 24, 24]}
INTERLEAVED = {"mrope_layout": "interleaved", "mrope_section": [24, 20, 20]}

# The models: 7B, 1B, 13B, 32B. More tokens than a card has blocks.
OLMO2_7B = Case("olmo2 7B", 32, 32, 128, 2, 300, **OLMO)  # type: ignore[arg-type]
OLMO2_1B = Case("olmo2 1B", 16, 16, 128, 3, 301, **OLMO)  # type: ignore[arg-type]
OLMO2_13B = Case("olmo2 13B", 40, 40, 128, 1, 400, **OLMO)  # type: ignore[arg-type]
OLMO2_32B = Case("olmo2 32B", 40, 8, 128, 1, 500, **OLMO)  # type: ignore[arg-type]
MODELS = [OLMO2_7B, OLMO2_1B, OLMO2_13B, OLMO2_32B]
MORE = [
    *(Case(f"{name}, norm {norm}, affine {affine}", heads, kv_heads, 128, 2, 99, BF16, affine=affine,
           options={**HIDDEN, "norm": norm, "norm_first": first})
      for name, heads, kv_heads in (("a slot a thread", 32, 32), ("two slots a thread", 40, 22))
      for norm, affine, first in (("layer", "wb", True), ("layer", "w", False), ("rms_one_plus", "w", False),
                                  ("rms", "", True))),
    Case("four slots a thread", 64, 64, 128, 1, 150, BF16, options=HIDDEN),
    Case("float32", 32, 32, 128, 1, 150, FLOAT, options=HIDDEN),
    Case("float64", 16, 8, 128, 1, 50, DOUBLE, table_dtype=DOUBLE, options=HIDDEN),
    Case("fp16, adjacent, head_dim 80", 24, 24, 80, 2, 150, HALF, options={**HIDDEN, "pairing": "adjacent"}),
    Case("to halves, partial, norm last", 12, 3, 96, 2, 150, BF16, affine="wb",
         options={**HIDDEN, "pairing": "adjacent_to_halves", "rotary_dim": 32, "rotary_start": 16,
                  "norm_first": False}),
    Case("single lanes, 37 slots", 5, 2, 74, 2, 150, BF16, affine="wb", options={**HIDDEN, "norm": "layer"}),
    Case("heads of 512 lanes in float32", 6, 3, 512, 1, 150, FLOAT, affine="wb", options=HIDDEN),
    Case("no rotation", 8, 8, 64, 2, 150, BF16, options={**HIDDEN, "rotary_dim": 0}),
    Case("blocked, sectioned", 16, 4, 128, 2, 150, BF16, packing="blocked", options={**HIDDEN, **SECTIONED}),
    Case("grouped, interleaved", 16, 4, 128, 2, 150, BF16, packing="grouped", options={**HIDDEN, **INTERLEAVED}),
    Case("blocked, nothing to add up", 16, 4, 128, 1, 150, BF16, packing="blocked", affine="", options=HIDDEN),
    Case("positions", 16, 16, 128, 2, 150, BF16, positions="per sample", options=HIDDEN),
    Case("another order of memory", 16, 16, 128, 3, 150, BF16, memory="bhsd", options={**HIDDEN, "out_order": "bhsd"}),
    Case("results float32", 16, 16, 128, 2, 150, BF16, options={**HIDDEN, "out_dtype": FLOAT}),
    Case("one token", 32, 32, 128, 1, 1, BF16, options=HIDDEN),
    Case("one head each", 1, 1, 64, 2, 70, BF16, options=HIDDEN),
]  # fmt: skip
HIDDEN_CASES = [*(case for case in (*CASES, *LARGE) if not over_one_head(case)), *MODELS, *MORE]
