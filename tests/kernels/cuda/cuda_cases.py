"""Variants with a norm over a head, or none, and what the `cuda` back end would launch for a variant, prepared without
a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from norm_rope_cases import CASES, Case, make_inputs
from test_norm_rope_numerics import LARGE

from fusion_pass.kernels import ops
from fusion_pass.kernels.card import H100, Card
from fusion_pass.kernels.cuda.norm_rope import BackwardWork, forward_work
from fusion_pass.kernels.replay import Work

BF16, HALF, DOUBLE = torch.bfloat16, torch.float16, torch.float64
SECTIONED = {"mrope_layout": "sectioned", "mrope_section": [16, 24, 24]}
INTERLEAVED = {"mrope_layout": "interleaved", "mrope_section": [24, 20, 20]}

BESIDE_THE_SUMS = Case("dx of the last tokens beside the sums", 32, 8, 128, 1, 1024, BF16)
INTERLEAVED_MROPE = Case("staged, interleaved", 32, 8, 128, 3, 200, BF16, options=INTERLEAVED)
# Where x and g come through shared memory, on a card whose memory is fast enough: several sequences, heads that fill no
# warp, a single token.
STAGED = [
    Case("staged, tables ahead", 32, 8, 128, 4, 300, BF16, per_lane=True, table_dtype=BF16),
    Case("staged, adjacent", 24, 24, 128, 3, 257, BF16, options={"pairing": "adjacent"}),
    Case("staged, half a warp of heads", 16, 2, 128, 1, 999, BF16, packing="grouped"),
    Case("staged, head_dim 96", 32, 8, 96, 2, 333, HALF, packing="blocked"),
    Case("staged, head_dim 256", 16, 8, 256, 2, 200, BF16, per_lane=True, table_dtype=BF16,
         options={"norm": "rms_one_plus"}),
    INTERLEAVED_MROPE,
    Case("staged, one token", 5, 2, 128, 1, 1, BF16),
    Case("staged, row a head, float32", 7, 3, 128, 2, 400, per_head=True, options={"norm_first": False}),
    Case("staged, positions, layer", 12, 4, 80, 2, 600, BF16, positions="per sample", options={"norm": "layer"}),
]  # fmt: skip
# The tables, too: rows and sections of them, every place where an entry may stand.
STAGED_TABLES = [
    Case("staged tables, sectioned", 32, 4, 128, 1, 700, BF16, packing="blocked", options=SECTIONED),
    Case("staged tables, sectioned, entry a lane", 16, 3, 128, 2, 300, BF16, packing="blocked", per_lane=True,
         table_dtype=BF16, options=SECTIONED),
    Case("staged tables, sectioned, adjacent", 11, 2, 128, 1, 500, BF16, packing="blocked",
         options={**SECTIONED, "pairing": "adjacent"}),
    Case("staged tables, sectioned, adjacent, entry a lane", 11, 2, 128, 2, 300, BF16, packing="blocked", per_lane=True,
         table_dtype=BF16, options={**SECTIONED, "pairing": "adjacent"}),
    Case("staged tables, bf16, partial", 8, 4, 128, 2, 300, BF16, packing="blocked", per_lane=True, table_dtype=BF16,
         options={"rotary_dim": 64, "rotary_start": 32}),
    Case("staged tables, one a sample", 9, 1, 96, 3, 250, HALF, packing="blocked", table_batch=3),
    Case("staged tables, grouped, norm last", 16, 4, 80, 2, 300, BF16, packing="grouped",
         options={"norm_first": False}),
    Case("staged tables, one token", 16, 2, 128, 1, 1, BF16, packing="blocked", options=SECTIONED),
]  # fmt: skip
# Heads that fill no whole number of warps, so that a warp of the forward has heads of two tokens; many cases above are
# such, too.
FLAT = [
    Case("flat, layer", 5, 2, 128, 2, 77, BF16, options={"norm": "layer"}),
    Case("flat, row a head, norm last", 7, 2, 64, 2, 63, HALF, per_head=True, options={"norm_first": False}),
    Case("flat, partial, sectioned", 16, 2, 128, 2, 65, BF16, packing="blocked",
         options={"mrope_layout": "sectioned", "mrope_section": [8, 12, 12], "rotary_dim": 64, "rotary_start": 32}),
    Case("flat, grouped, entry a lane", 14, 7, 256, 3, 43, BF16, packing="grouped", per_lane=True, table_dtype=BF16),
    Case("flat, adjacent, one a sample", 10, 3, 128, 3, 55, BF16, table_batch=3, options={"pairing": "adjacent"}),
    Case("flat, to halves", 6, 3, 128, 1, 65, BF16, options={"pairing": "adjacent_to_halves"}),
    Case("flat, heads of 80, grouped", 14, 7, 80, 2, 61, BF16, packing="grouped"),
    Case("flat, heads of 72, entry a lane", 4, 3, 72, 3, 43, BF16, per_lane=True),
    Case("flat, heads of 112, sectioned, row a head", 5, 2, 112, 2, 45, HALF, packing="blocked", per_head=True,
         options={"mrope_layout": "sectioned", "mrope_section": [16, 20, 20]}),
]  # fmt: skip
# What the shared cases leave out: vectors of every width, and every kind of number of threads a head.
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
    Case("no norm, to halves", 4, 2, 128, 2, 9, BF16, packing="blocked",
         options={"norm": "none", "pairing": "adjacent_to_halves"}),
    Case("no norm, grouped, entry a lane", 6, 2, 64, 2, 50, BF16, packing="grouped", per_lane=True,
         options={"norm": "none", "pairing": "adjacent"}),
    Case("no norm, results float32", 4, 2, 64, 2, 9, BF16, packing="blocked",
         options={"norm": "none", "out_dtype": torch.float32}),
    Case("grouped, row a head", 4, 2, 64, 2, 300, BF16, per_head=True, affine="wb", packing="grouped"),
    BESIDE_THE_SUMS,
    *STAGED,
    *STAGED_TABLES,
    *FLAT,
    *(Case(f"head_dim {d}, bf16", 4, 1, d, 2, 9, BF16, packing="blocked") for d in (32, 48, 64, 80, 96, 112, 192, 256)),
]  # fmt: skip


def over_one_head(case: Case) -> bool:
    """Its norm is; hidden_cases.py has the others."""
    return case.all_options.get("norm_scope") != "hidden"


CUDA_CASES = [case for case in (*CASES, *MORE, *LARGE) if over_one_head(case)]
MODEL_SIZE = [case for case in LARGE if over_one_head(case)]


def prepared(case: Case, overlaps: bool = True, card: Card = H100) -> Iterator[Work]:
    """The launches of the forward and of the backward with every gradient, on an H100's number of multiprocessors.
    `overlaps`: as on sm_90 and later. `card`: what tiles are for."""
    inputs = make_inputs(case, torch.device("cpu"))
    tensors = inputs.tensors()
    options: dict[str, Any] = dict(case.all_options)
    plan, grad_plan = ops._qk_plan, ops._qk_grad_plan
    if case.packing is not None:
        plan, grad_plan = ops._qkv_plan, ops._qkv_grad_plan
        sizes = {"num_heads": case.heads, "num_kv_heads": case.kv_heads, "head_dim": case.head_dim}
        options |= {**sizes, "packing": case.packing}
    planned = plan(*tensors, **options)
    yield forward_work(planned.streams, planned.tables, planned.options, planned.copy, card)
    positions = len(inputs.x) + 2
    mask = [t is not None for i, t in enumerate(tensors) if i != positions]
    grads = [torch.empty_like(result) for result in planned.results]
    options = {name: value for name, value in options.items() if not name.startswith("out_")}
    back = grad_plan(*grads, *tensors, output_mask=mask, in_dtype=case.dtype, **options)
    needs_tables = back.needs_cos or back.needs_sin
    backward = BackwardWork(back.streams, back.tables, back.options, back.copy, needs_tables, 132, overlaps, card)
    yield from backward.works


def by_kernel(case: Case, card: Card = H100) -> dict[str, Work]:
    """`prepared`, by the name of the kernel."""
    return {work.launch.instance.kernel: work for work in prepared(case, card=card)}  # type: ignore[attr-defined]
