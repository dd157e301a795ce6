"""Masks that only the data knows, as intervals and labels: against the definition, pair by pair, and the ranges of
tiles against a count over the square. The kernels run in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from attention_oracle import visible
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusion_pass.kernels.attention_problem import resolve

pytest.importorskip("triton")

BLOCK_M, BLOCK_N = 64, 32


def causality(draw: st.DrawFn) -> dict[str, object]:
    return {
        "causal": draw(st.sampled_from(["none", "top_left", "bottom_right"])),
        "window_left": draw(st.sampled_from([-1, 0, 3, 40])),
        "window_right": draw(st.sampled_from([-1, 0, 5])),
    }


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
        **causality(draw),
    }


@st.composite
def segments(draw: st.DrawFn) -> dict[str, object]:
    """Segment ids, in order or not, of one or two batches, and a mask of keys: one run, or with gaps, or neither."""
    batch, queries = draw(st.integers(1, 2)), draw(st.integers(1, 200))
    same = draw(st.booleans())
    keys = queries if same else draw(st.integers(1, 200))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    dtype = draw(st.sampled_from([torch.int64, torch.int32, torch.uint8]))

    def ids(tokens: int) -> Tensor:
        drawn = torch.randint(0, 5, (batch, tokens), generator=generator)
        if draw(st.sampled_from([True, True, False])):
            drawn = drawn.sort(1)[0]
        return (drawn - (2 if dtype.is_signed else 0)).to(dtype)

    made: dict[str, object] = {"queries": queries, "keys": keys, **causality(draw)}
    kind = draw(st.sampled_from(["ids", "mask", "both"]))
    if kind != "mask":
        made["q_segment_ids"] = ids(queries)
        if not same:
            made["k_segment_ids"] = ids(keys)
    if kind != "ids":
        start, end = (torch.randint(0, keys + 1, (batch, 1, 1, 1), generator=generator) for _ in range(2))
        key = torch.arange(keys)
        mask = (key >= start) & (key < end)
        made["mask"] = mask if draw(st.booleans()) else mask | (torch.rand(mask.shape, generator=generator) < 0.1)
    return made


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(packed())
def test_documents(conditions: dict[str, object]) -> None:
    assert not check(conditions)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(segments())
@example({"queries": 5, "keys": 5, "q_segment_ids": torch.tensor([[2**40, 2**40 + 2**32, 2**40, -1, -1]])})
def test_segments_and_masks_of_keys(conditions: dict[str, object]) -> None:
    check(conditions)


@pytest.mark.parametrize(
    ("ids", "shown", "labels"),
    [
        ([0, 0, 1, 1, 4], None, False),
        ([-1, 0, 0, 0, 7], None, False),
        ([1, 1, 0, 0, 2], None, True),
        ([0, 0, 0, 0, 0], [0, 0, 1, 1, 1], False),
        ([0, 0, 0, 0, 0], [1, 1, 1, 0, 0], False),
        ([0, 0, 1, 1, 1], [0, 1, 1, 1, 0], False),
        ([0, 0, 0, 0, 0], [1, 0, 1, 1, 1], True),
        ([0, 0, 0, 0, 0], [0, 0, 0, 0, 0], False),
    ],
)
def test_when_labels_are_compared(ids: list[int], shown: list[int] | None, labels: bool) -> None:
    conditions: dict[str, object] = {"queries": 5, "keys": 5, "q_segment_ids": torch.tensor([ids])}
    if shown is not None:
        conditions["mask"] = torch.tensor(shown, dtype=torch.bool)[None, None, None]
    assert check(conditions) == labels


@pytest.mark.parametrize(("where", "labels"), [(None, False), (280, True), (10, True), (64, True)])
def test_many_chunks(where: int | None, labels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the ids is found by several programs: a step back anywhere counts, between two of them too."""
    from fusion_pass.kernels.hopper import rows

    monkeypatch.setattr(rows, "_CHUNK", 64)
    rows._plan.cache_clear()
    ids = torch.arange(300) // 100
    if where is not None:
        ids[where] = -3
    conditions: dict[str, object] = {"queries": 300, "keys": 300, "causal": "top_left", "q_segment_ids": ids[None]}
    assert check(conditions) == labels
    rows._plan.cache_clear()


def check(conditions: dict[str, object]) -> bool:
    """Everything that `Rows` says against the square of visible pairs. Returns whether some batch compares labels."""
    from fusion_pass.kernels.hopper.rows import rows_of_backward, rows_of_forward

    conditions = {"causal": "none", "window_left": -1, "window_right": -1, **conditions}
    queries, keys = int(conditions.pop("queries")), int(conditions.pop("keys"))  # type: ignore[call-overload]
    batch = max([x.shape[0] for x in conditions.values() if isinstance(x, Tensor) and x.dim() > 1], default=1)
    keep = visible(torch.empty(batch, queries, 1, 8), torch.empty(batch, keys, 1, 8), **conditions)[:, 0]
    seen = resolve(queries, keys, **conditions)  # type: ignore[arg-type]
    forward = rows_of_forward(seen, queries, keys, BLOCK_M, BLOCK_N)
    backward = rows_of_backward(seen, queries, keys, BLOCK_M, BLOCK_N)
    assert torch.equal(forward.low, backward.low)
    assert torch.equal(forward.high, backward.high)
    assert forward.low.shape[1] % 128 == 0
    assert forward.low.shape[0] == batch
    compared = [b for b in range(batch) if "cu_seqlens_q" not in conditions and forward.labels[b, 0]]
    for b in range(batch):
        low, high = forward.low[b, :queries, None], forward.high[b, :queries, None]
        key = torch.arange(keys)
        interval = (key >= low) & (key < high)
        if b in compared:
            for labels in (forward.labels[b], backward.labels[b]):
                rows = labels[4 : 4 + queries]
                columns = labels[4 + forward.low.shape[1] :][:keys]
                assert torch.equal(interval & (rows[:, None] == columns), keep[b])
        else:
            assert torch.equal(interval, keep[b])
        assert backward.order is not None
        check_tiles(keep[b], interval, forward.ranges[b], backward.ranges[b], backward.order[b])
    return bool(compared)


def check_tiles(keep: Tensor, interval: Tensor, forward: Tensor, backward: Tensor, order: Tensor) -> None:
    queries, keys = keep.shape
    tiles, blocks = -(-queries // BLOCK_M), -(-keys // BLOCK_N)
    padded = torch.zeros(tiles * BLOCK_M, blocks * BLOCK_N, dtype=torch.bool)
    padded[:queries, :keys] = keep
    some = padded.view(tiles, BLOCK_M, blocks, BLOCK_N).any(3).any(1)
    padded[queries:] = True  # rows past the end ask for nothing
    every = padded.view(tiles, BLOCK_M, blocks, BLOCK_N).all(3).all(1)
    for tile, (first, last, clear_first, clear_last) in enumerate(forward.tolist()):
        assert all(first <= block < last for block in range(blocks) if some[tile, block])
        assert all(every[tile, block] for block in range(max(first, clear_first), min(last, clear_last)))
    visits: list[list[int]] = [[] for _ in range(tiles)]
    for block, (first, last, clear_first, clear_last) in enumerate(backward.tolist()):
        assert all(first <= tile < last for tile in range(tiles) if some[tile, block])
        assert all(every[tile, block] for tile in range(max(first, clear_first), min(last, clear_last)))
        for tile in range(first, last):
            visits[tile].append(block)
    # The deterministic backward counts on the blocks that visit a tile being consecutive from the first one.
    for tile, visitors in enumerate(visits):
        assert all(b == a + 1 for a, b in pairwise(visitors))
        if visitors:
            assert visitors[0] == order[tile]
