"""Every variant that the `cuda` back end takes against float64, forward and each gradient (on hardware)."""

from __future__ import annotations

import pytest
import torch
from norm_rope_cases import CASES, Case
from test_norm_rope_numerics import LARGE, check, poisoned_memory  # noqa: F401  the fixture poisons `torch.empty`

from fusion_pass.kernels.cuda.norm_rope import unsupported
from fusion_pass.kernels.options import Options

BF16, HALF, DOUBLE = torch.bfloat16, torch.float16, torch.float64
INTERLEAVED = {"mrope_layout": "interleaved", "mrope_section": [24, 20, 20]}

# What the shared cases leave out: slots of every kind of vector and every number of threads a head.
MORE = [
    Case("bf16, vectors of 8, adjacent", head_dim=64, dtype=BF16, options={"pairing": "adjacent"}, packing="blocked"),
    Case("bf16, adjacent, entry a lane", head_dim=64, dtype=BF16, per_lane=True, table_dtype=BF16,
         options={"pairing": "adjacent"}),
    Case("fp16, to halves", head_dim=128, dtype=HALF, options={"pairing": "adjacent_to_halves"}),
    Case("bf16, to halves, partial", head_dim=96, dtype=BF16, affine="wb",
         options={"pairing": "adjacent_to_halves", "rotary_dim": 32, "rotary_start": 64, "norm": "layer"}),
    Case("bf16, to halves, partial, norm last", head_dim=96, dtype=BF16, affine="wb",
         options={"pairing": "adjacent_to_halves", "rotary_dim": 32, "rotary_start": 16, "norm_first": False}),
    Case("fp64, many slots", head_dim=256, dtype=DOUBLE, table_dtype=DOUBLE, affine="wb", options={"norm": "layer"}),
    Case("two lanes a pair only", head_dim=6, dtype=BF16, options={"pairing": "adjacent"}),
    Case("single lanes, 37 slots", head_dim=74, dtype=BF16, affine="wb", options={"norm": "layer"}),
    Case("interleaved, bf16", 8, 2, 128, 2, 9, BF16, packing="blocked", options=INTERLEAVED),
    Case("interleaved, bf16, adjacent, entry a lane", 8, 2, 128, 2, 9, BF16, per_lane=True,
         options={**INTERLEAVED, "pairing": "adjacent"}),
    Case("one token a sample", 4, 2, 64, 7, 1, BF16, packing="blocked", positions="per sample"),
    Case("conjugate, positions", 4, 2, 64, 2, 5, HALF, positions="shared", options={"norm": "none", "conjugate": True}),
    Case("one stream has a row a head", 4, 2, 64, 2, 300, BF16, per_head=True, affine="wb", packing="grouped"),
]  # fmt: skip
ALL = [
    case
    for case in (*CASES, *MORE, *LARGE)
    if unsupported(Options(**{k: v for k, v in case.all_options.items() if not k.startswith("out_")}), case.head_dim)
    is None
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", ALL, ids=str)
def test_on_gpu(case: Case, device: torch.device) -> None:
    check(case, "cuda", device)
