"""Cases of the Hopper kernels: what may be attended (`MASKS`), what is added to the scores (`ADDED`), options and
values (`VALUES`), numbers of heads and lanes (`HEADS`, `WIDE`), and lengths that choose other tiles (`LONG`, `SHORT`).

Sizes straddle the tiles of 64 and 128 rows. Numbers after a case are the bug reports it answers (flash-attention
unless named).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from attention_oracle import Case, Conditions
from torch import Tensor


def options(**values: int | float | str):
    return lambda _generator, _case: values


def documents(cu_q: list[int], cu_k: list[int] | None = None, **values: int | float | str):
    def make(_generator: torch.Generator, _case: Case) -> Conditions:
        made: dict[str, Tensor | int | float | str] = {"cu_seqlens_q": torch.tensor(cu_q, dtype=torch.int32), **values}
        return made if cu_k is None else {**made, "cu_seqlens_k": torch.tensor(cu_k, dtype=torch.int32)}

    return make


def segments(
    *,
    ordered: bool,
    apart: bool = False,
    shared: bool = False,
    dtype: torch.dtype = torch.int64,
    **values: int | float | str,
):
    """Ids of five documents a batch (one set for all, if `shared`), in any order unless `ordered`."""

    def make(generator: torch.Generator, case: Case) -> Conditions:
        def ids(tokens: int) -> Tensor:
            drawn = torch.randint(-2, 3, (1 if shared else case.batch, tokens), generator=generator).to(dtype)
            return drawn.sort(1)[0] if ordered else drawn

        made = {"q_segment_ids": ids(case.queries), **values}
        return {**made, "k_segment_ids": ids(case.keys)} if apart else made

    return make


def padding(*shown: tuple[int, int], gaps: bool = False, ids: bool = False, **values: int | float | str):
    """A mask that shows the keys `[start, end)` of each batch, all but every seventh with `gaps`."""

    def make(generator: torch.Generator, case: Case) -> Conditions:
        key = torch.arange(case.keys)
        mask = torch.stack([(key >= start) & (key < end) for start, end in shown])[:, None, None]
        made: dict[str, Tensor | int | float | str] = {"mask": mask & (key % 7 != 0) if gaps else mask, **values}
        return {**made, **segments(ordered=True)(generator, case)} if ids else made

    return make


def pairs(
    kind: str,
    *,
    shared: bool = False,
    by_head: bool = False,
    beside: Callable[[torch.Generator, Case], Conditions] | None = None,
    **values: int | float | str,
):
    """A mask with an entry for every query and key, of each batch or `shared`, of each head or of all: at random, with
    rows that see nothing; causal after a padded start; whole blocks of 200 queries and keys, in a chequered pattern; or
    of keys alone. `beside`: segments or documents."""

    def make(generator: torch.Generator, case: Case) -> Conditions:
        batch, heads = 1 if shared else case.batch, case.heads if by_head else 1
        query, key = torch.arange(case.queries)[:, None], torch.arange(case.keys)
        if kind == "random":
            mask = torch.rand(batch, heads, case.queries, case.keys, generator=generator) < 0.5
            mask &= query % 50 != 7
        elif kind == "padded_start":
            start = torch.randint(0, case.keys, (batch, heads, 1, 1), generator=generator)
            mask = (key <= query + case.keys - case.queries) & (key >= start)
        elif kind == "keys":
            mask = torch.rand(batch, heads, 1, case.keys, generator=generator) < 0.5
        else:
            shift = 100 * torch.arange(batch * heads).reshape(batch, heads, 1, 1)
            mask = ((query + shift) // 200 + key // 200) % 2 == 0
        return {"mask": mask, **(beside(generator, case) if beside else {}), **values}

    return make


def added(
    kind: str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    by_head: bool = True,
    shared: bool = True,
    beside: Callable[[torch.Generator, Case], Conditions] | None = None,
    **values: int | float | str,
):
    """A mask that is added. Position biases: numbers at random (`bias`), in some blocks only, with -inf among them
    (`corner`), far above 0 in some rows (`large`), that fall with the distance (`slopes`). Hidden keys: causal after a
    padded start, whose rows before it see nothing else, by -inf (`hidden`) or by the least number of the dtype
    (`least`); keys alone (`keys`)."""

    def make(generator: torch.Generator, case: Case) -> Conditions:
        shape = 1 if shared else case.batch, case.heads if by_head else 1, case.queries, case.keys
        query, key = torch.arange(case.queries)[:, None], torch.arange(case.keys)
        noise = torch.randn(shape, generator=generator)
        if kind == "bias":
            mask = noise
        elif kind == "corner":
            mask = torch.where((query < 130) & (key >= 200), noise, 0.0)
            mask = mask.masked_fill(torch.rand(shape, generator=generator) < 0.01, float("-inf"))
        elif kind == "large":
            mask = torch.where(query % 90 < 3, 3 * noise + 200, noise)
        elif kind == "slopes":
            slope = 2.0 ** -torch.arange(1, shape[1] + 1)[:, None, None]
            mask = (-slope * (query - key).abs()).expand(shape).contiguous()
        elif kind == "keys":
            shown = torch.rand(shape[0], shape[1], 1, case.keys, generator=generator) < 0.7
            mask = torch.where(shown, 0.0, float("-inf"))
        else:
            start = torch.randint(0, case.keys, (*shape[:2], 1, 1), generator=generator)
            hidden = (key > query + case.keys - case.queries) | (key < start)
            mask = torch.zeros(shape).masked_fill(hidden, torch.finfo(dtype).min if kind == "least" else float("-inf"))
        return {"mask": mask.to(dtype), **(beside(generator, case) if beside else {}), **values}

    return make


def case(queries: int, keys: int | None = None, **others: object) -> Case:
    base = Case(
        queries=queries, keys=queries if keys is None else keys, head_dim=128, value_dim=128, heads=4, kv_heads=2
    )
    return dataclasses.replace(base, **others)  # type: ignore[arg-type]


CAUSAL = options(causal="top_left")
BOTTOM = options(causal="bottom_right")

MASKS = {
    "full_256": case(256),
    "full_300": case(300),
    "full_fewer_keys": case(300, 77),
    "full_more_keys": case(77, 700),
    "causal_512": case(512, conditions=CAUSAL),
    "causal_333": case(333, conditions=CAUSAL),
    "top_left_fewer_queries": case(200, 333, conditions=CAUSAL),  # 1778, 436
    "top_left_fewer_keys": case(333, 200, conditions=CAUSAL),
    "bottom_right_fewer_queries": case(200, 333, conditions=BOTTOM),
    "bottom_right_rows_see_nothing": case(500, 200, conditions=BOTTOM),  # 443
    "window_0_0": case(300, conditions=options(window_left=0, window_right=0)),  # TransformerEngine 3528
    "window_right_0": case(300, conditions=options(window_right=0)),
    "window_70_30": case(300, 500, conditions=options(window_left=70, window_right=30)),
    "window_100_causal": case(700, conditions=options(window_left=100, causal="top_left")),
    "window_bottom_right": case(300, 500, conditions=options(window_left=100, causal="bottom_right")),
    "window_wider_than_keys": case(300, conditions=options(window_left=10000, causal="top_left")),
    "window_rows_see_nothing": case(500, 100, conditions=options(window_left=10, causal="top_left")),
    "documents": case(700, batch=1, conditions=documents([0, 9, 9, 300, 301, 700], causal="top_left")),
    "documents_full": case(640, batch=1, conditions=documents([0, 128, 384, 640])),
    "documents_end_early": case(600, batch=1, conditions=documents([0, 90, 300], causal="bottom_right")),  # 2324
    "documents_unequal": case(
        300, 500, batch=1, conditions=documents([0, 90, 200, 300], [0, 200, 250, 500], causal="bottom_right")
    ),
    "documents_rows_see_nothing": case(
        500, 300, batch=1, conditions=documents([0, 190, 400, 500], [0, 100, 250, 300], causal="bottom_right")
    ),
    "documents_window": case(700, batch=1, conditions=documents([0, 90, 400, 700], window_left=50, causal="top_left")),
    "segments_ascend": case(700, conditions=segments(ordered=True, causal="top_left")),
    "segments_any_order": case(500, conditions=segments(ordered=False, causal="top_left")),
    "segments_full": case(640, 384, conditions=segments(ordered=True, apart=True, dtype=torch.int32)),
    "segments_shared": case(300, conditions=segments(ordered=True, shared=True, causal="top_left")),
    "segments_shared_any_order": case(300, conditions=segments(ordered=False, shared=True, causal="top_left")),
    "segments_any_order_full": case(333, 500, conditions=segments(ordered=False, apart=True)),
    "segments_window": case(
        500, 600, conditions=segments(ordered=True, apart=True, window_left=90, causal="bottom_right")
    ),
    "segments_any_order_window": case(500, conditions=segments(ordered=False, window_left=90, window_right=30)),
    "padding_right": case(500, conditions=padding((0, 333), (0, 500), causal="top_left")),
    "padding_left": case(500, conditions=padding((77, 500), (300, 500), causal="top_left")),
    "padding_everything": case(300, conditions=padding((0, 0), (100, 200))),
    "padding_gaps": case(500, conditions=padding((77, 500), (0, 400), gaps=True, causal="top_left")),
    "padding_segments": case(500, conditions=padding((0, 450), (90, 500), ids=True, causal="top_left")),
    "padding_segments_gaps": case(500, conditions=padding((0, 450), (90, 500), ids=True, gaps=True)),
    "pairs_random": case(333, 500, conditions=pairs("random")),
    "pairs_random_shared": case(500, 333, conditions=pairs("random", shared=True)),
    "pairs_random_causal": case(500, conditions=pairs("random", causal="top_left")),
    "pairs_random_window": case(500, 600, conditions=pairs("random", window_left=70, window_right=30)),
    "pairs_padded_start": case(700, conditions=pairs("padded_start")),
    "pairs_chequered": case(700, 900, conditions=pairs("chequered")),
    "heads_random": case(333, 500, conditions=pairs("random", by_head=True)),
    "heads_random_shared": case(500, 333, conditions=pairs("random", by_head=True, shared=True, causal="top_left")),
    "heads_padded_start": case(700, conditions=pairs("padded_start", by_head=True)),
    "heads_chequered": case(700, 900, conditions=pairs("chequered", by_head=True)),
    "heads_keys": case(333, 500, conditions=pairs("keys", by_head=True, window_left=200)),
    "pairs_segments": case(500, conditions=pairs("random", beside=segments(ordered=True), causal="top_left")),
    "pairs_segments_any_order": case(
        333, 500, conditions=pairs("random", by_head=True, beside=segments(ordered=False, apart=True))
    ),
    "pairs_documents": case(
        700, batch=1, conditions=pairs("random", beside=documents([0, 9, 9, 300, 301, 650], causal="top_left"))
    ),
    "pairs_documents_unequal": case(
        300,
        500,
        batch=1,
        conditions=pairs(
            "random", by_head=True, beside=documents([0, 90, 200, 300], [0, 200, 250, 500], causal="bottom_right")
        ),
    ),
    "keys_documents": case(700, batch=1, conditions=pairs("keys", beside=documents([0, 90, 300, 700], window_left=80))),
    "documents_cross": case(300, 500, batch=1, conditions=documents([0, 90, 200, 300], [0, 200, 200, 450])),
}

ADDED = {
    "bias": case(333, 500, conditions=added("bias")),
    "bias_float32": case(500, 333, conditions=added("bias", torch.float32, shared=False)),
    "bias_float16": case(300, conditions=added("bias", torch.float16, by_head=False, shared=False)),
    "bias_causal": case(500, conditions=added("bias", causal="top_left")),
    "bias_window": case(500, 600, conditions=added("bias", window_left=70, window_right=30)),
    "bias_corner": case(700, 900, conditions=added("corner")),
    "bias_large": case(333, 500, conditions=added("large", torch.float32)),
    "bias_slopes": case(700, conditions=added("slopes", causal="top_left")),
    "bias_softcap": case(300, logits=4, conditions=added("bias", softcap=20.0)),
    "bias_lse_gradient": case(300, lse_gradient=True, conditions=added("bias")),
    "bias_segments": case(500, conditions=added("bias", beside=segments(ordered=True), causal="top_left")),
    "bias_documents": case(
        700, batch=1, conditions=added("bias", beside=documents([0, 9, 9, 300, 301, 650], causal="top_left"))
    ),
    "added_hidden": case(700, conditions=added("hidden", by_head=False, shared=False)),
    "added_hidden_heads": case(500, 700, conditions=added("hidden")),
    "added_least": case(700, conditions=added("least", by_head=False, shared=False)),
    "added_least_float32": case(500, conditions=added("least", torch.float32, by_head=False, shared=False)),
    "added_least_heads": case(500, conditions=added("least")),
    "added_least_window": case(500, conditions=added("least", by_head=False, shared=False, window_left=200)),
    "added_keys": case(333, 500, conditions=added("keys", torch.float32, by_head=False, shared=False)),
    "added_one_query": case(1, 300, conditions=added("bias")),
}

VALUES = {
    "softcap_5": case(300, logits=4, conditions=options(softcap=5.0, causal="top_left")),  # 1065, 1033
    "softcap_30": case(300, logits=20, conditions=options(softcap=30.0)),
    "softcap_50_window": case(300, conditions=options(softcap=50.0, window_left=60, causal="top_left")),
    "softcap_pairs": case(300, conditions=pairs("random", softcap=20.0)),
    "sinks_pairs": case(300, sinks=True, lse_gradient=True, conditions=pairs("random")),
    "softcap_documents": case(300, batch=1, conditions=documents([0, 90, 300], softcap=20.0, causal="top_left")),
    "scale": case(300, conditions=options(scale=0.7)),
    "sinks": case(300, sinks=True, conditions=CAUSAL),
    "sinks_window": case(300, sinks=True, lse_gradient=True, conditions=options(window_left=50, causal="top_left")),
    "sinks_rows_see_nothing": case(300, 100, sinks=True, conditions=BOTTOM),
    "lse_gradient": case(300, lse_gradient=True, conditions=CAUSAL),
    "lse_gradient_rows_see_nothing": case(300, 100, lse_gradient=True, conditions=BOTTOM),
    "large_logits": case(192, logits=-30, conditions=CAUSAL),  # pytorch 196678
    "one_query": case(1, 300, logits=-100, conditions=BOTTOM),  # cudnn-frontend 1072
    "one": case(1),  # 334
    "two": case(2, conditions=CAUSAL),
    "three_keys": case(2, 3),
    "one_key": case(300, 1),
}

HEADS = {
    f"heads_{heads}_{kv_heads}": case(200, heads=heads, kv_heads=kv_heads, conditions=CAUSAL)
    for heads, kv_heads in ((1, 1), (3, 3), (4, 1), (7, 1), (8, 2), (32, 4))  # NSA 27, ColossalAI 6428
} | {
    f"head_dim_{head_dim}_{value_dim}": case(
        200, heads=3, kv_heads=3, head_dim=head_dim, value_dim=value_dim, conditions=CAUSAL
    )
    for head_dim, value_dim in (
        (8, 8),
        (24, 40),
        (40, 24),
        (64, 64),
        (72, 72),
        (80, 80),
        (96, 96),
        (104, 104),
        (64, 128),
        (128, 64),
    )  # 2552, 2896
}

# Few blocks of keys (all of the above) are spread over the query heads of a group; here there are enough.
HEADS["heads_8_2_many_blocks"] = case(500, batch=42, heads=8, kv_heads=2, conditions=CAUSAL)

CASES = MASKS | ADDED | VALUES | HEADS
WIDE = {
    f"head_dim_{head_dim}_{value_dim}_{name}": case(300, head_dim=head_dim, value_dim=value_dim, conditions=conditions)
    for head_dim, value_dim in (
        (192, 128),
        (256, 256),
        (160, 160),
    )  # TransformerEngine 3216: always more than one batch and head
    for name, conditions in (
        ("full", options()),
        ("causal", CAUSAL),
        ("window", options(window_left=90, causal="top_left")),
    )
} | {
    "head_dim_256_256_documents": case(
        300, batch=1, head_dim=256, value_dim=256, conditions=documents([0, 9, 9, 200, 300], causal="top_left")
    ),
    "head_dim_256_256_segments": case(300, head_dim=256, value_dim=256, conditions=segments(ordered=True)),
    "head_dim_256_256_segments_any_order": case(
        300, head_dim=256, value_dim=256, conditions=segments(ordered=False, causal="top_left")
    ),
    "head_dim_256_256_pairs": case(300, 500, head_dim=256, value_dim=256, conditions=pairs("random")),
    "head_dim_192_128_documents": case(
        300, batch=1, head_dim=192, value_dim=128, conditions=documents([0, 9, 9, 200, 300], causal="top_left")
    ),
    "head_dim_192_128_segments": case(
        300, head_dim=192, value_dim=128, conditions=segments(ordered=False, causal="top_left")
    ),
    "head_dim_192_128_pairs": case(500, head_dim=192, value_dim=128, conditions=pairs("padded_start")),
    "head_dim_256_256_heads": case(300, 500, head_dim=256, value_dim=256, conditions=pairs("random", by_head=True)),
    "head_dim_256_256_bias": case(300, 500, head_dim=256, value_dim=256, conditions=added("bias")),
    "head_dim_256_256_added_least": case(
        300, head_dim=256, value_dim=256, conditions=added("least", by_head=False, shared=False)
    ),
    "head_dim_192_128_bias": case(
        500, head_dim=192, value_dim=128, conditions=added("bias", torch.float32, causal="top_left")
    ),
    "head_dim_256_256_softcap": case(
        300, head_dim=256, value_dim=256, logits=4, conditions=options(softcap=30.0, causal="top_left")
    ),
}

# Sixteen blocks of keys, in several ways of finding out whose turn it is to add to a tile of dQ.
REPEATED = {
    "full": case(2000, heads=12, kv_heads=12),
    "causal": case(2000, heads=12, kv_heads=12, conditions=CAUSAL),
    "window": case(2000, heads=12, kv_heads=12, conditions=options(causal="top_left", window_left=300)),
    "grouped": case(2000, heads=12, kv_heads=4),
    "grouped_causal": case(2000, 1500, heads=12, kv_heads=4, conditions=BOTTOM),
    "documents": case(2000, batch=1, conditions=documents([0, 300, 301, 1100, 1900], causal="top_left")),
    "segments_any_order": case(2000, conditions=segments(ordered=False)),
    "pairs": case(2000, conditions=pairs("chequered", by_head=True)),
    "bias": case(2000, conditions=added("bias", causal="top_left")),
}

LONG = {
    "square": case(8192, batch=1, heads=2, kv_heads=1, conditions=CAUSAL),
    "top_left": case(8200, 1000, conditions=CAUSAL),
    "bottom_right": case(8200, 1000, conditions=BOTTOM),
    "more_keys": case(8192, 8333, batch=1, heads=2, kv_heads=1, conditions=BOTTOM),
    "softcap": case(8200, 1000, logits=4, conditions=options(softcap=30.0, causal="top_left")),
}

SHORT = {
    "square": case(1024, conditions=CAUSAL),
    "bottom_right": case(1000, 1500, conditions=BOTTOM),
    "rows_see_nothing": case(500, 200, conditions=BOTTOM),
    "fewer_keys": case(1999, 1777, conditions=CAUSAL),
    "softcap": case(700, logits=4, conditions=options(softcap=30.0, causal="top_left")),
    "sinks": case(700, conditions=CAUSAL, sinks=True),
    "many_tiles": case(1024, batch=8, heads=16, kv_heads=4, conditions=CAUSAL),
    "one_query": case(1, 65, conditions=BOTTOM),
}
