"""Masks of packed documents as intervals: against the definition, pair by pair, and the ranges of tiles against a
count over the square."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from attention_oracle import visible
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_pass.kernels.attention_problem import resolve

pytest.importorskip("triton")


@st.composite
def packed(draw: st.DrawFn) -> dict[str, object]:
    documents = draw(st.integers(0, 5))
    lengths = st.lists(st.integers(0, 90), min_size=documents, max_size=documents)
    q_lengths = draw(lengths)
    same = draw(st.booleans())
    k_lengths = q_lengths if same else draw(lengths)
    cu = [torch.tensor([0, *x]).cumsum(0).int() for x in (q_lengths, k_lengths)]
    tail = draw(st.integers(0, 30))
    return {
        "queries": max(1, sum(q_lengths) + tail),
        "keys": max(1, (sum(q_lengths) if same else sum(k_lengths)) + tail),
        "cu_seqlens_q": cu[0],
        **({} if same else {"cu_seqlens_k": cu[1]}),
        "causal": draw(st.sampled_from(["none", "top_left", "bottom_right"])),
        "window_left": draw(st.sampled_from([-1, 0, 3, 40])),
        "window_right": draw(st.sampled_from([-1, 0, 5])),
    }


@settings(max_examples=60, deadline=None)
@given(packed())
def test_intervals_and_ranges(conditions: dict[str, object]) -> None:
    from fusion_pass.kernels.hopper.rows import intervals, key_ranges, query_ranges

    queries, keys = int(conditions.pop("queries")), int(conditions.pop("keys"))  # type: ignore[call-overload]
    keep = visible(torch.empty(1, queries, 1, 8), torch.empty(1, keys, 1, 8), **conditions)[0, 0]
    rows = intervals(resolve(queries, keys, **conditions), queries, keys)  # type: ignore[arg-type]
    low, high = rows.low[0, :queries], rows.high[0, :queries]
    key = torch.arange(keys)
    assert torch.equal((key >= low[:, None]) & (key < high[:, None]), keep)
    assert rows.low.shape[1] % 128 == 0

    block_m, block_n = 64, 32
    tiles, blocks = -(-queries // block_m), -(-keys // block_n)
    padded = torch.zeros(tiles * block_m, blocks * block_n, dtype=torch.bool)
    padded[:queries, :keys] = keep
    some = padded.view(tiles, block_m, blocks, block_n).any(3).any(1)
    padded[queries:] = True  # rows past the end ask for nothing
    every = padded.view(tiles, block_m, blocks, block_n).all(3).all(1)

    for tile, (first, last, clear_first, clear_last) in enumerate(
        key_ranges(rows, queries, block_m, block_n)[0].tolist()
    ):
        assert all(first <= block < last for block in range(blocks) if some[tile, block])
        assert all(every[tile, block] for block in range(max(first, clear_first), min(last, clear_last)))
    ranges, first_blocks = query_ranges(rows, queries, keys, block_m, block_n)
    visits: list[list[int]] = [[] for _ in range(tiles)]
    for block, (first, last, clear_first, clear_last) in enumerate(ranges[0].tolist()):
        assert all(first <= tile < last for tile in range(tiles) if some[tile, block])
        assert all(every[tile, block] for tile in range(max(first, clear_first), min(last, clear_last)))
        for tile in range(first, last):
            visits[tile].append(block)
    # The deterministic backward counts on the blocks that visit a tile being consecutive from the first one.
    for tile, visitors in enumerate(visits):
        assert all(b == a + 1 for a, b in pairwise(visitors))
        if visitors:
            assert visitors[0] == first_blocks[0, tile]
