"""Masks computed by what the reader of positions does not model: they stay data, and the numbers stay the model's.

Each was chosen so that the obvious reading of it is wrong.
"""

from __future__ import annotations

import attention_graphs as graphs
import pytest
import torch
import torch.nn.functional as F
from mask_calls import Mask, S, columns, proved, rows, with_data
from torch import Tensor


def gathered_at_two_places(q: Tensor, k: Tensor) -> Tensor:
    """`table[n, j, n]` is j."""
    places = torch.arange(S)
    return places[None, :, None].expand(S, S, S)[places, :, places] <= rows(q)


def transposed_in_place(q: Tensor, k: Tensor) -> Tensor:
    keep = columns(k) <= rows(q)
    keep.t_()
    return keep


def written_through_a_view(q: Tensor, k: Tensor) -> Tensor:
    keep = columns(k) > rows(q)
    keep[1:].logical_not_()
    return keep


def written_through_a_view_and_whole(q: Tensor, k: Tensor) -> Tensor:
    keep = columns(k) <= rows(q)
    keep[1].fill_(True)
    return keep.logical_or_(columns(k) > rows(q) + 5)


NOT_READ: dict[str, Mask] = {
    "bits of another dtype": lambda q, k: (
        (torch.ones(S, S, dtype=torch.long).view(torch.float64) > 0.5) | (columns(k) < 1)
    ),
    "positions in floating point": lambda q, k: torch.arange(S, dtype=torch.float32)[None, :] <= rows(q),
    "a split axis": lambda q, k: torch.arange(S * S).view(S, S) <= 40 + columns(k),
    "repeated": lambda q, k: torch.arange(3).repeat(3)[None, :] <= rows(q),
    "gathers at two places": gathered_at_two_places,
    "an index from the end": lambda q, k: torch.arange(S)[torch.arange(S) - 1][None, :] <= rows(q),
    "an index of two cases": lambda q, k: torch.arange(S)[torch.where(torch.arange(S) > 2, 1, 0)][None, :] <= rows(q),
    "differences before one more": lambda q, k: (
        columns(k) <= rows(q) - 1 + torch.diff(torch.arange(S), append=torch.zeros(1, dtype=torch.long))[:, None]
    ),
    "a product of two": lambda q, k: rows(q) * columns(k) <= 4,
    "alpha": lambda q, k: torch.sub(columns(k), rows(q), alpha=2) <= 0,
    "a quotient towards zero": lambda q, k: (
        columns(k) <= rows(q) + torch.div(torch.full((1,), -3), 2, rounding_mode="trunc")
    ),
    "a quotient of a fraction": lambda q, k: columns(k) + torch.full((1, 1), 3.5) // 2 <= rows(q),
    "a negative divisor": lambda q, k: columns(k) // -3 >= rows(q) // -3,
    "bits of a number": lambda q, k: (columns(k) & 1) <= rows(q),
    "second differences": lambda q, k: columns(k) + torch.diff(torch.arange(S + 2), n=2)[None, :] <= rows(q),
    "differences after two elements": lambda q, k: (
        columns(k) <= rows(q) - 1 + torch.diff(torch.arange(S - 1), prepend=torch.full((2,), -1))[:, None]
    ),
    "a bound that is no integer": lambda q, k: torch.arange(1.0, S + 1, dtype=torch.long)[None, :] <= rows(q) + 1,
    "a number that float32 does not hold": lambda q, k: torch.full((S, S), -1e38).triu(1) != -1e38,
    "a number that bfloat16 does not hold": lambda q, k: torch.full((S, S), -1e9, dtype=torch.bfloat16).triu(1) > -1e9,
    "rows in a list": lambda q, k: (columns(k) <= rows(q))[[*range(S)][::-1]],
    "places in a list": lambda q, k: torch.arange(S)[[*range(S)][::-1]][None, :] <= rows(q),
    "transposed in place": transposed_in_place,
    "written through a view": written_through_a_view,
    "written through a view and whole": written_through_a_view_and_whole,
}


@pytest.mark.parametrize("name", NOT_READ)
def test_stays_a_mask(name: str) -> None:
    assert set(proved(NOT_READ[name])) == {"mask"}


def test_positions_that_carry_no_shape() -> None:
    """Another pass may add nodes without a fake tensor."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, columns(k) <= rows(q))

    module, _ = graphs.captured(model, *(torch.randn(2, 4, S, 16) for _ in range(3)))
    assert graphs.conditions(graphs.site(module)) == {"causal": "top_left"}
    for node in module.graph.nodes:
        if node.target is torch.arange:
            node.meta.clear()
    assert set(graphs.conditions(graphs.site(module))) == {"mask"}


def test_two_rows_in_a_list() -> None:
    """`seen[[5, 4]]` are two rows, and `seen[5, 4]` is one element."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, torch.ones(S, S, dtype=torch.bool).tril()[[5, 4]])

    module, given = graphs.captured(model, torch.randn(2, 4, 2, 16), *torch.randn(2, 2, 4, S, 16))
    (place,) = graphs.check(module, given)
    assert isinstance(place, graphs.Site)
    assert set(graphs.conditions(place)) == {"mask"}


def test_an_index_of_unknown_sign() -> None:
    """Keys less queries: from the end, where there are more queries."""
    mask: Mask = lambda q, k: columns(k) <= rows(q) + torch.arange(k.shape[2])[k.shape[2] - q.shape[2]]  # noqa: E731
    assert set(proved(mask, keys=S - 4, dynamic=True)) == {"mask"}


def test_numbers_cut_to_32_bits_are_other_numbers() -> None:
    ids = torch.tensor([[0, 0, 0, 2**32, 2**32, 2**32, 1, 1, 1]]).expand(2, -1).contiguous()

    def mask(q: Tensor, k: Tensor, ids: Tensor) -> Tensor:
        cut = ids.int()
        return (cut[:, :, None] == cut[:, None, :])[:, None]

    assert with_data(mask, ids) == {"q_segment_ids": "cut"}
