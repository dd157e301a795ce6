"""Forward and every gradient of `attention` against float64, no worse than eager PyTorch in the same dtype.

Numbers after a case are the bug reports it answers (flash-attention unless named).
"""

from __future__ import annotations

import pytest
import torch
from attention_oracle import Case, Conditions, make_inputs, poisoned_memory, run_eager, run_operator
from torch import Tensor


def options(**values: int | float | str):
    return lambda _generator, _case: values


def random_mask(*shape: int, dtype: torch.dtype = torch.bool, **values: int | float | str):
    def make(generator: torch.Generator, _case: Case) -> Conditions:
        if dtype == torch.bool:
            return {"mask": torch.rand(shape, generator=generator) > 0.4, **values}
        mask = torch.randn(shape, generator=generator)
        return {
            "mask": mask.masked_fill(torch.rand(shape, generator=generator) > 0.7, float("-inf")).to(dtype),
            **values,
        }

    return make


def least_value_mask(generator: torch.Generator, case: Case) -> Conditions:
    """Padding as Hugging Face's eager path writes it."""
    padding = torch.rand(case.batch, 1, 1, case.keys, generator=generator) > 0.6
    return {
        "mask": torch.zeros(padding.shape).masked_fill(padding, torch.finfo(torch.float32).min),
        "causal": "top_left",
    }


def left_padding(hidden: float, **values: int | float | str):
    """Causal and padded on the left in one additive mask: the first rows of a padded sequence see nothing."""

    def make(_generator: torch.Generator, case: Case) -> Conditions:
        padded = torch.tensor([0, 9])[:, None, None, None]
        i, j = torch.arange(case.queries)[:, None], torch.arange(case.keys)
        return {
            "mask": torch.zeros(2, 1, case.queries, case.keys).masked_fill((j > i) | (j < padded), hidden),
            **values,
        }

    return make


def one_key_in_a_window(_generator: torch.Generator, case: Case) -> Conditions:
    """Only key 0 is not hidden, and a window takes it away: the softmax is over the hidden keys of the window."""
    mask = torch.full((case.queries, case.keys), torch.finfo(torch.float32).min)
    mask[:, 0] = 0
    return {"mask": mask, "window_left": 3, "causal": "top_left"}


def segments(ordered: bool, apart: bool = False, **values: int | float | str):
    def make(generator: torch.Generator, case: Case) -> Conditions:
        def ids(tokens: int) -> Tensor:
            drawn = torch.randint(0, 3, (case.batch, tokens), generator=generator)
            return drawn.sort(1)[0] if ordered else drawn

        made = {"q_segment_ids": ids(case.queries), **values}
        return {**made, "k_segment_ids": ids(case.keys)} if apart else made

    return make


def documents(cu_q: list[int], cu_k: list[int] | None = None, **values: int | float | str):
    def make(_generator: torch.Generator, _case: Case) -> Conditions:
        made = {"cu_seqlens_q": torch.tensor(cu_q, dtype=torch.int32), **values}
        return made if cu_k is None else {**made, "cu_seqlens_k": torch.tensor(cu_k, dtype=torch.int32)}

    return make


MASKS = {
    "full": Case(),
    "causal": Case(conditions=options(causal="top_left")),
    "top_left_fewer_queries": Case(queries=21, conditions=options(causal="top_left")),  # 1778, 436
    "top_left_fewer_keys": Case(keys=21, conditions=options(causal="top_left")),
    "bottom_right_fewer_queries": Case(queries=21, conditions=options(causal="bottom_right")),
    "bottom_right_fewer_keys": Case(keys=21, conditions=options(causal="bottom_right")),  # 443: rows see nothing
    "window_right_0": Case(conditions=options(window_right=0)),  # TransformerEngine 3528
    "window_0_0": Case(conditions=options(window_left=0, window_right=0)),
    "window_5_3": Case(keys=50, conditions=options(window_left=5, window_right=3)),
    "window_left": Case(conditions=options(window_left=9, causal="top_left")),
    "window_bottom_right": Case(queries=20, conditions=options(window_left=7, causal="bottom_right")),
    "window_wider_than_keys": Case(conditions=options(window_left=1000, causal="top_left")),
    "mask_per_batch": Case(conditions=random_mask(2, 1, 37, 37)),
    "mask_2d": Case(conditions=random_mask(37, 37, causal="top_left")),
    "mask_keys_only": Case(conditions=random_mask(2, 1, 1, 37)),
    "mask_per_head": Case(conditions=random_mask(1, 2, 37, 37)),
    "mask_queries_only": Case(conditions=random_mask(2, 1, 37, 1)),
    "bias": Case(conditions=random_mask(2, 1, 37, 37, dtype=torch.float32)),
    "bias_per_head": Case(conditions=random_mask(2, 37, 37, dtype=torch.float32)),
    "bias_least_value": Case(conditions=least_value_mask),
    "bias_and_window": Case(conditions=one_key_in_a_window),
    "bias_left_padding": Case(conditions=left_padding(torch.finfo(torch.float32).min)),
    "bias_left_padding_bfloat16": Case(conditions=left_padding(torch.finfo(torch.bfloat16).min)),
    "bias_left_padding_1e9": Case(conditions=left_padding(-1e9)),
    "bias_left_padding_infinite": Case(conditions=left_padding(float("-inf"))),
    "bias_left_padding_softcap": Case(logits=4, conditions=left_padding(torch.finfo(torch.float32).min, softcap=5.0)),
    "bias_left_padding_sinks": Case(sinks=True, conditions=left_padding(torch.finfo(torch.float32).min)),
    "bias_and_softcap": Case(conditions=random_mask(37, 37, dtype=torch.float32, softcap=5.0)),
    "segments": Case(conditions=segments(True, causal="top_left")),
    "segments_any_order": Case(conditions=segments(False)),
    "segments_of_keys": Case(keys=50, conditions=segments(True, apart=True)),
    "segments_and_mask": Case(conditions=lambda g, c: {**segments(True)(g, c), **random_mask(37, 37)(g, c)}),
    "documents": Case(batch=1, conditions=documents([0, 9, 9, 30, 37], causal="top_left")),
    "documents_end_early": Case(batch=1, conditions=documents([0, 9, 30], causal="bottom_right")),  # 2324
    "documents_unequal": Case(
        batch=1, keys=50, conditions=documents([0, 9, 20, 37], [0, 20, 25, 50], causal="bottom_right")
    ),
    "documents_unequal_window": Case(
        batch=1, keys=50, conditions=documents([0, 9, 20, 37], [0, 20, 25, 45], window_left=4, causal="top_left")
    ),
    "documents_cross": Case(batch=1, keys=50, conditions=documents([0, 9, 20, 37], [0, 20, 20, 45])),
}

VALUES = {
    "softcap_5": Case(logits=4, conditions=options(softcap=5.0, causal="top_left")),  # 1065, 1033
    "softcap_30": Case(logits=20, conditions=options(softcap=30.0)),
    "softcap_50": Case(conditions=options(softcap=50.0, window_left=6, causal="top_left")),
    "scale": Case(conditions=options(scale=0.7)),
    "sinks": Case(sinks=True, conditions=options(causal="top_left")),
    "sinks_window": Case(sinks=True, lse_gradient=True, conditions=options(window_left=5, causal="top_left")),
    "sinks_rows_see_nothing": Case(keys=20, sinks=True, conditions=options(causal="bottom_right")),
    "lse_gradient": Case(lse_gradient=True, conditions=options(causal="bottom_right")),
    "lse_gradient_rows_see_nothing": Case(keys=20, lse_gradient=True, conditions=options(causal="bottom_right")),
    "large_logits": Case(
        queries=64 + 17, keys=64 + 17, logits=-30, conditions=options(causal="top_left")
    ),  # pytorch 196678
    "one_query": Case(queries=1, logits=-100, conditions=options(causal="bottom_right")),  # cudnn-frontend 1072
    "one": Case(queries=1, keys=1),  # 334
    "two": Case(queries=2, keys=2, conditions=options(causal="top_left")),
    "three_keys": Case(queries=2, keys=3, head_dim=40),
}

HEADS = {
    f"heads_{heads}_{kv_heads}": Case(
        heads=heads, kv_heads=kv_heads, queries=17, keys=17, conditions=options(causal="top_left")
    )
    for heads, kv_heads in ((1, 1), (3, 3), (7, 1), (8, 2))  # NSA 27, ColossalAI 6428
} | {
    f"head_dim_{head_dim}_{value_dim}": Case(
        queries=18, keys=18, heads=2, head_dim=head_dim, value_dim=value_dim, conditions=options(causal="top_left")
    )
    for head_dim, value_dim in (
        (8, 8),
        (24, 40),  # 2552
        (40, 24),
        (72, 72),  # 2896
        (80, 80),
        (96, 96),
        (104, 104),
        (112, 112),
        (128, 128),
        (192, 128),
        (128, 192),
        (256, 256),  # TransformerEngine 3216: always more than one batch and head
    )
}

CASES = MASKS | VALUES | HEADS


def assert_no_worse_than_eager(case: Case, dtype: torch.dtype, device: torch.device, backend: str) -> None:
    inputs = make_inputs(case, dtype, device)
    with poisoned_memory():
        actual = run_operator(inputs, dtype, backend)
    actual.assert_no_worse(run_eager(inputs, dtype), run_eager(inputs, torch.float64), saturated=abs(case.logits) >= 20)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 32 x 16, so that small tensors have several."""
    from fusion_pass.kernels.triton import attention
    from fusion_pass.kernels.triton.attention_tiles import Tile

    monkeypatch.setattr(attention, "choose_tile", lambda *_: Tile(32, 16, 4, 1))


@pytest.mark.parametrize("name", CASES)
def test_reference(name: str) -> None:
    for dtype in (torch.float16, torch.float32):
        assert_no_worse_than_eager(CASES[name], dtype, torch.device("cpu"), "reference")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels are tested on it")
@pytest.mark.parametrize("name", CASES)
def test_triton_interpreted(name: str, small_tiles: None) -> None:
    # The interpreter cannot multiply bfloat16 matrices. float32 shows errors that half precision hides.
    dtype = torch.float16 if name in HEADS else torch.float32
    assert_no_worse_than_eager(CASES[name], dtype, torch.device("cpu"), "triton")


# Every case in bfloat16; the other dtypes share all of the code but the products.
HARDWARE = [(name, torch.bfloat16) for name in CASES]
HARDWARE += [(name, torch.float16) for name in ("full", "bias", "softcap_30", "head_dim_128_128")]
HARDWARE += [
    (name, torch.float32)
    for name in ("causal", "bias", "softcap_50", "sinks_window", "head_dim_80_80", "head_dim_256_256")
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), HARDWARE, ids=lambda value: str(value).removeprefix("torch."))
def test_triton(name: str, dtype: torch.dtype, device: torch.device) -> None:
    assert_no_worse_than_eager(CASES[name], dtype, device, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["full", "causal", "window_bottom_right", "mask_per_batch", "segments", "documents_unequal"]
)
def test_triton_many_tiles(name: str, device: torch.device) -> None:
    """The same conditions over lengths of several tiles of the real sizes."""
    small = CASES[name]
    lengthened = {37: 1037, 20: 560, 50: 1400}
    queries, keys = lengthened[small.queries], lengthened[small.keys]

    def conditions(generator: torch.Generator, case: Case) -> Conditions:
        made = dict(small.conditions(generator, case))
        for argument, length in (("cu_seqlens_q", queries), ("cu_seqlens_k", keys)):
            if argument in made:
                made[argument] = torch.tensor([0, length // 5, length // 2, length], dtype=torch.int32)
        if "mask" in made:
            made["mask"] = torch.rand(2, 1, queries, keys, generator=generator) > 0.4
        return made

    case = Case(small.batch, queries, keys, 4, 2, 64, 64, conditions=conditions)
    assert_no_worse_than_eager(case, torch.bfloat16, device, "triton")
