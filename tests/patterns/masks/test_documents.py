"""Packed documents, chunks, and positions within a document; what is related otherwise than by being equal is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from mask_calls import PADDING, POSITIONS, SEGMENTS, H, S, columns, proved, rows, with_data
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
    "of the first row": (lambda q, k: q[:1] == k, {"q_segment_ids", "k_segment_ids"}),
    "of the first row, a difference": (lambda q, k: q[:1] - k == 0, {"q_segment_ids", "k_segment_ids"}),
}


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
