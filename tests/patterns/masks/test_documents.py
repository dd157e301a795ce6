"""Packed documents, chunks, and positions within a document; what is related otherwise than by being equal is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from mask_calls import PADDING, POSITIONS, SEGMENTS, B, H, Mask, S, columns, proved, rows, with_data
from torch import Tensor, fx

from fusion_pass.graph.vocabulary import operation


def test_chunks_become_segments() -> None:
    found = proved(lambda q, k: (columns(k) // 4 == rows(q) // 4) & (columns(k) <= rows(q)))
    assert found["causal"] == "top_left"
    assert found["q_segment_ids"].startswith("floordiv_1")
    assert found["k_segment_ids"].startswith("floordiv.")
    assert "mask" not in found


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_a_comparison_by_its_method(name: str) -> None:
    """torch 2.11 captures `==` of tensors as the method `__eq__`."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert operation(graph.call_method(f"__{name}__", (x, 3))) == name


def test_chunks_whose_numbers_are_overwritten_are_a_mask() -> None:
    def mask(q: Tensor, k: Tensor) -> Tensor:
        chunks, own = columns(k) // 4, rows(q) // 4
        seen = chunks == own
        own.mul_(0)
        return seen

    assert "q_segment_ids" not in proved(mask)


def test_chunks_of_all_keys() -> None:
    found = proved(lambda q, k: columns(k) // 64 == rows(q) // 4)
    assert found == {
        "q_segment_ids": "floordiv_1.select(1, 0).unsqueeze(0)",
        "k_segment_ids": "floordiv.select(0, 0).unsqueeze(0)",
    }


def test_one_chunk_is_no_segment() -> None:
    assert proved(lambda q, k: (columns(k) // 64 == rows(q) // 64) & (columns(k) <= rows(q))) == {"causal": "top_left"}


def same(ids: Tensor) -> Tensor:
    return (ids[:, :, None] == ids[:, None, :])[:, None]


def packed(positions: Tensor) -> Tensor:
    """Document of each token, as Hugging Face counts it."""
    first = positions[:, :1] - 1
    return (torch.diff(positions, prepend=first, dim=-1) != 1).cumsum(-1)


def columns_of(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The ids of the queries and of the keys, as they are broadcast against the scores."""
    return ids[:, None, :, None], ids[:, None, None, :]


def test_documents() -> None:
    assert with_data(lambda q, k, ids: same(ids), SEGMENTS) == {"q_segment_ids": "l_given_0_"}
    found = with_data(lambda q, k, ids: same(ids) & (columns(k) <= rows(q)), SEGMENTS, dynamic=True)
    assert found == {"q_segment_ids": "l_given_0_", "causal": "top_left"}


def test_documents_of_one_row() -> None:
    found = with_data(lambda q, k, ids: ids[:, None] == ids[None, :], SEGMENTS[0])
    assert found == {"q_segment_ids": "l_given_0_.unsqueeze(0)"}


def test_documents_of_other_queries() -> None:
    found = with_data(
        lambda q, k, a, b: (a[:, :, None] == b[:, None, :])[:, None], SEGMENTS[:, 2:7], SEGMENTS, queries=5
    )
    assert found == {"q_segment_ids": "l_given_0_", "k_segment_ids": "l_given_1_"}


def test_documents_by_heads_stay_a_mask() -> None:
    found = with_data(lambda q, k, ids: ids[:, :, :, None] == ids[:, :, None, :], SEGMENTS[:, None].repeat(1, H, 1))
    assert found == {"mask": "eq"}


COUNTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "zeros": lambda data, flags: ~(data == 0),
    "flags": lambda data, flags: ~flags,
    "where data is no position": lambda data, flags: data != torch.arange(S),
    "where data is not that of two before": lambda data, flags: torch.cat(
        (data[:, :2] != 0, data[:, 2:] != data[:, :-2]), 1
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_documents_counted_by_something_else_are_documents(name: str) -> None:
    """Their numbers are data; that the positions differ as the tokens do within one is not."""

    def mask(q: Tensor, k: Tensor, data: Tensor, flags: Tensor) -> Tensor:
        return same(COUNTS[name](data, flags).cumsum(-1)) & (data[:, None, None, :] <= data[:, None, :, None])

    assert set(with_data(mask, POSITIONS, PADDING.bool())) == {"q_segment_ids", "mask"}


RELATED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], set[str]]] = {
    "twice": (lambda q, k: 2 * q - 2 * k == 0, {"q_segment_ids"}),
    "the next": (lambda q, k: q - k == 1, {"mask"}),
    "the next, compared": (lambda q, k: q == k + 1, {"q_segment_ids", "k_segment_ids"}),
    "half": (lambda q, k: 2 * q - k == 0, {"mask"}),
    "a sum": (lambda q, k: q + k == 2, {"mask"}),
    "no sum": (lambda q, k: q + k == 0, {"mask"}),
    "opposite": (lambda q, k: q == -k, {"q_segment_ids", "k_segment_ids"}),
    "a position": (lambda q, k: q == torch.arange(S), {"q_segment_ids", "k_segment_ids"}),
    "a position, a difference": (lambda q, k: q - torch.arange(S) == 0, {"mask"}),
    "a chunk, a difference": (lambda q, k: q - torch.arange(S) // 4 == 0, {"mask"}),
    "a number": (lambda q, k: q == torch.full((), 1), {"mask"}),
    "numbers of both": (lambda q, k: q == k * torch.arange(S)[:, None], {"mask"}),
    "numbers of both, the other way": (lambda q, k: q * torch.arange(S) == k, {"mask"}),
    "truth": (lambda q, k: q.bool() == k.bool(), {"mask"}),
    "truth and number": (lambda q, k: q.bool() == k, {"mask"}),
    "in floating point": (lambda q, k: q.float() == k, {"mask"}),
    "of the first token": (lambda q, k: q[:, :, :1] == k, {"mask"}),
    "of the first token, a difference": (lambda q, k: q[:, :, :1] - k == 0, {"mask"}),
    "to the first token": (lambda q, k: q == k[..., :1], {"mask"}),
    "to the first token, a difference": (lambda q, k: q - k[..., :1] == 0, {"mask"}),
    "of the first row": (lambda q, k: q[:1] == k, {"q_segment_ids", "k_segment_ids"}),
    "of the first row, a difference": (lambda q, k: q[:1] - k == 0, {"q_segment_ids", "k_segment_ids"}),
}


def no_difference(a: Tensor, b: Tensor) -> Tensor:
    """`[B, 1, Sq, Sk]` of `[B, Sq]` and `[B, Sk]`, by no comparison of the two."""
    return (a[:, None, :, None] - b[:, None, None, :]) == 0


LONGER = torch.cat([SEGMENTS, SEGMENTS[:, -1:]], 1)

SHAPES: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, dict[str, str]]] = {
    "one row for all": (lambda ids: no_difference(ids, ids), SEGMENTS[:1], {"q_segment_ids": "l_given_0_"}),
    "an axis between": (
        lambda ids: (ids[:, :, :, None] - ids[:, :, None, :]) == 0,
        SEGMENTS[:, None],
        {"q_segment_ids": "l_given_0_.select(1, 0)"},
    ),
    "the second of two": (
        lambda ids: no_difference(ids[:, 1], ids[:, 1]),
        torch.stack([SEGMENTS % 2, SEGMENTS], 1),
        {"q_segment_ids": "l_given_0_.select(1, 1)"},
    ),
    "tokens first": (lambda ids: no_difference(ids.T, ids.T), SEGMENTS.T, {"mask": "eq"}),
    "the first of more": (lambda ids: no_difference(ids[:, :S], ids[:, :S]), LONGER, {"mask": "eq"}),
    "keys that are the first of more": (
        lambda ids: no_difference(torch.zeros(B, S, dtype=torch.long).copy_(ids[:, 1:]), ids[:, :S]),
        LONGER,
        {"mask": "eq"},
    ),
    "queries that are the first of more": (
        lambda ids: no_difference(ids[:, :S], torch.zeros(B, S, dtype=torch.long).copy_(ids[:, 1:])),
        LONGER,
        {"mask": "eq"},
    ),
    "a part of a longer mask": (lambda ids: same(ids)[..., :S, :S], LONGER, {"mask": "getitem_3"}),
    "a part of a larger batch": (lambda ids: same(ids)[:B], torch.cat([SEGMENTS, SEGMENTS]), {"mask": "getitem_3"}),
    "chunks of one row": (
        lambda ids: (torch.arange(S)[None, None, :, None] // 4) == (torch.arange(S)[None, None, None, :] // 4),
        SEGMENTS,
        {
            "q_segment_ids": "floordiv.select(1, 0).select(2, 0)",
            "k_segment_ids": "floordiv_1.select(1, 0).select(1, 0)",
        },
    ),
    "chunks, compared by name": (
        lambda ids: torch.eq(torch.arange(S)[:, None] // 4, other=torch.arange(S) // 4),
        SEGMENTS,
        {"mask": "eq"},
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_documents_by_their_shape(name: str) -> None:
    mask, ids, expected = SHAPES[name]
    assert with_data(lambda q, k, ids: mask(ids), ids) == expected


def test_positions_in_documents_of_another_kind() -> None:
    """`[B, 2, S]`: only the kind of the positions differs."""

    def mask(q: Tensor, k: Tensor, data: Tensor) -> Tensor:
        ids = (torch.diff(data, prepend=data[..., :1] - 1, dim=-1) != 1).cumsum(-1)
        return no_difference(ids[:, 0], ids[:, 1]) & (data[:, None, 1, None, :] <= data[:, None, 0, :, None])

    assert "causal" not in with_data(mask, torch.stack([POSITIONS, POSITIONS.flip(0)], 1))


BESIDE: dict[str, tuple[Mask, set[str]]] = {
    "causality": (lambda q, k, data: columns(k) <= rows(q), {"causal"}),
    "padding": (lambda q, k, data: (data != 7)[:, None, None, :], {"mask"}),
    "the one before": (lambda q, k, data: data[:, None, None, :] - data[:, None, :, None] == -1, {"mask"}),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_else_is_said_beside_documents(name: str) -> None:
    other, arguments = BESIDE[name]
    found = with_data(lambda q, k, data: same(packed(data)) & other(q, k, data), POSITIONS)
    assert found.keys() == {"q_segment_ids"} | arguments


def test_ids_that_are_written_before() -> None:
    def mask(q: Tensor, k: Tensor, ids: Tensor) -> Tensor:
        own = ids.clone()
        own[:, 0] = 7
        return no_difference(own, own)

    assert with_data(mask, SEGMENTS) == {"q_segment_ids": "own"}


def test_ids_that_are_written_behind() -> None:
    def mask(q: Tensor, k: Tensor, ids: Tensor) -> Tensor:
        own = ids % 4
        seen = no_difference(own, own)
        own.fill_(0)
        return seen

    assert with_data(mask, SEGMENTS) == {"mask": "seen"}


def test_positions_with_tokens_first() -> None:
    def mask(q: Tensor, k: Tensor, data: Tensor) -> Tensor:
        ids = (torch.diff(data, prepend=data[:1] - 1, dim=0) != 1).cumsum(0).T
        return no_difference(ids, ids) & (data.T[:, None, None, :] <= data.T[:, None, :, None])

    assert set(with_data(mask, POSITIONS.T.contiguous())) == {"causal", "mask"}


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("name", RELATED)
def test_documents_that_are_related(name: str, counted: bool) -> None:
    """Not only the same document is seen. `counted`: its number counts the breaks in the positions, which proves that
    they differ as the tokens do only where it is the same."""
    related, arguments = RELATED[name]

    def mask(q: Tensor, k: Tensor, data: Tensor) -> Tensor:
        seen = related(*columns_of(packed(data) if counted else data))
        later, earlier = columns_of(data)
        later = later[:1] if name.startswith("of the first row") else later
        return seen & (earlier <= later) if counted else seen

    found = set(with_data(mask, POSITIONS if counted else SEGMENTS % 3))
    if not counted:
        assert found == arguments
    else:
        assert ("causal" in found) == (name == "twice")


def test_positions_in_documents_of_others() -> None:
    def mask(q: Tensor, k: Tensor, a: Tensor, b: Tensor) -> Tensor:
        (first, _), (_, second), (later, earlier) = columns_of(packed(a)), columns_of(packed(b)), columns_of(a)
        return (first == second) & (earlier <= later)

    assert "causal" not in with_data(mask, POSITIONS, POSITIONS.flip(0))


def test_positions_within_a_document_are_distances() -> None:
    def mask(q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        causal = positions[:, None, None, :] <= positions[:, None, :, None]
        window = positions[:, None, None, :] > positions[:, None, :, None] - 3
        return causal & window & same(packed(positions))

    expected = {"q_segment_ids": "cumsum", "causal": "top_left", "window_left": 2}
    assert with_data(mask, POSITIONS) == expected == with_data(mask, POSITIONS, dynamic=True)


def test_what_their_documents_say_of_positions_is_no_mask() -> None:
    """`position - token` is the same all over a document."""

    def mask(q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        first = torch.arange(S) - positions
        return same(packed(positions)) & (first[:, None, None, :] <= first[:, None, :, None])

    assert with_data(mask, POSITIONS) == {"q_segment_ids": "cumsum"}


def test_positions_without_their_documents_are_data() -> None:
    def mask(q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        return positions[:, None, None, :] <= positions[:, None, :, None]

    assert with_data(mask, POSITIONS) == {"mask": "le"}


@pytest.mark.parametrize("breaks", ["step 2", "other positions", "of a sum", "decreases"])
def test_positions_with_other_breaks_are_data(breaks: str) -> None:
    """Segments that do not count the breaks of these positions prove nothing about them."""

    def mask(q: Tensor, k: Tensor, positions: Tensor, others: Tensor) -> Tensor:
        if breaks == "step 2":
            ids = (torch.diff(positions, prepend=positions[:, :1] - 2, dim=-1) != 2).cumsum(-1)
        elif breaks == "other positions":
            ids = packed(others)
        elif breaks == "of a sum":
            ids = packed(positions + others)
        else:
            ids = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) < 1).cumsum(-1)
        return (positions[:, None, None, :] <= positions[:, None, :, None]) & same(ids)

    found = with_data(mask, 3 * POSITIONS, SEGMENTS.cumsum(-1))
    assert "causal" not in found or breaks == "step 2"
    assert breaks == "step 2" or "mask" in found
