"""What each way to write causality and windows becomes, and that their near misses stay what they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mask_calls import LOWEST, Mask, additive, columns, proved, rows
from torch import Tensor


def written_twice(q: Tensor, k: Tensor) -> Tensor:
    keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    keep.tril_()
    keep.logical_and_(columns(k) <= rows(q) + 3)
    return keep


CAUSAL: dict[str, Mask] = {
    "comparison": lambda q, k: columns(k) <= rows(q),
    "other side": lambda q, k: rows(q) >= columns(k),
    "strict": lambda q, k: columns(k) < rows(q) + 1,
    "difference": lambda q, k: rows(q) - columns(k) >= 0,
    "negated": lambda q, k: ~(columns(k) > rows(q)),
    "tril of ones": lambda q, k: torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(),
    "tril of a float": lambda q, k: torch.tril(torch.ones(q.shape[2], k.shape[2])).bool(),
    "tril compared with 0": lambda q, k: torch.tril(torch.ones(q.shape[2], k.shape[2])) != 0,
    "triu at most 0": lambda q, k: torch.triu(torch.ones(q.shape[2], k.shape[2]), 1) <= 0,
    "triu less than 1": lambda q, k: torch.triu(torch.ones(q.shape[2], k.shape[2]), 1) < 1,
    "tril more than 0": lambda q, k: torch.tril(torch.ones(q.shape[2], k.shape[2])) > 0,
    "tril at least 1": lambda q, k: torch.tril(torch.ones(q.shape[2], k.shape[2])) >= 1,
    "where as a method": lambda q, k: torch.zeros(q.shape[2], k.shape[2]).where(columns(k) <= rows(q), LOWEST),
    "from the third on": lambda q, k: torch.arange(k.shape[2] + 2)[None, 2:] - 2 <= rows(q),
    "the last": lambda q, k: torch.arange(11)[None, -9:] - 2 <= rows(q),
    "the third of three rows": lambda q, k: torch.arange(k.shape[2])[None].expand(3, -1)[2][None] <= rows(q),
    "axes behind all others": lambda q, k: (torch.arange(q.shape[2])[None, ..., None] >= columns(k))[0],
    "one row repeated": lambda q, k: columns(k).repeat(q.shape[2], 1) <= rows(q),
    "triu inverted": lambda q, k: ~torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1),
    "triu of -inf": lambda q, k: torch.full((q.shape[2], k.shape[2]), float("-inf")).triu(1),
    "triu in place": lambda q, k: torch.full((q.shape[2], k.shape[2]), LOWEST).triu_(1),
    "where": lambda q, k: additive(columns(k) <= rows(q)),
    "where -1e9": lambda q, k: additive(columns(k) <= rows(q), -1e9),
    "masked_fill": lambda q, k: torch.zeros(q.shape[2], k.shape[2]).masked_fill(columns(k) > rows(q), float("-inf")),
    "masked_fill in place": lambda q, k: torch.zeros(q.shape[2], k.shape[2]).masked_fill_(columns(k) > rows(q), LOWEST),
    "written twice": written_twice,
    "differences": lambda q, k: columns(k) <= rows(q) - 1 + torch.diff(torch.arange(k.shape[2] + 1))[None, :],
    "product of two truths": lambda q, k: (columns(k) <= rows(q)) * (columns(k) <= rows(q) + 3),
    "product with the lowest": lambda q, k: (1.0 - (columns(k) <= rows(q)).float()) * LOWEST,
    "four axes": lambda q, k: (columns(k) <= rows(q))[None, None].expand(q.shape[0], 1, -1, -1),
    "transposed": lambda q, k: (torch.arange(q.shape[2])[None] >= torch.arange(k.shape[2])[:, None]).transpose(0, 1),
    "wider window than keys": lambda q, k: (columns(k) <= rows(q)) & (columns(k) > rows(q) - 4096),
    "and with all true": lambda q, k: (columns(k) <= rows(q)) & (rows(q) >= 0),
    "int32": lambda q, k: columns(k).to(torch.int32) <= rows(q).to(torch.int32),
    "sum of two": lambda q, k: additive(columns(k) <= rows(q)) + additive(columns(k) <= rows(q) + 3),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_causal(name: str) -> None:
    assert proved(CAUSAL[name]) == {"causal": "top_left"}


@pytest.mark.parametrize("name", ["comparison", "tril of ones", "where", "four axes", "masked_fill"])
def test_causal_at_every_length(name: str) -> None:
    assert proved(CAUSAL[name], dynamic=True) == {"causal": "top_left"}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (9, 5)])
def test_bottom_right(queries: int, keys: int, dynamic: bool | None) -> None:
    def mask(q: Tensor, k: Tensor) -> Tensor:
        return columns(k) <= rows(q) + (k.shape[2] - q.shape[2])

    assert proved(mask, queries, keys, dynamic) == {"causal": "bottom_right"}
    assert proved(CAUSAL["comparison"], queries, keys, dynamic) == {"causal": "top_left"}


def test_bottom_right_with_window() -> None:
    def mask(q: Tensor, k: Tensor) -> Tensor:
        place = rows(q) + (k.shape[2] - q.shape[2])
        return (columns(k) <= place) & (place - columns(k) < 3)

    assert proved(mask, 5, 9) == proved(mask, 5, 9, True) == {"causal": "bottom_right", "window_left": 2}


SYMBOLIC: dict[str, Mask] = {
    "to the right": lambda q, k: columns(k) <= rows(q) + 2 * (k.shape[2] - q.shape[2]),
    "to the left": lambda q, k: rows(q) - columns(k) < k.shape[2] - 3,
    "two to the right": lambda q, k: (columns(k) <= rows(q) + 3) & (columns(k) <= rows(q) + k.shape[2] - q.shape[2]),
}


@pytest.mark.parametrize("name", SYMBOLIC)
@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (9, 5)])
def test_window_of_symbolic_width_is_a_mask(name: str, queries: int, keys: int) -> None:
    assert set(proved(SYMBOLIC[name], queries, keys, dynamic=True)) == {"mask"}


WINDOWS: dict[str, tuple[Mask, dict[str, Any]]] = {
    "w": (lambda q, k: (columns(k) <= rows(q)) & (columns(k) > rows(q) - 4), {"causal": "top_left", "window_left": 3}),
    "w - 1": (
        lambda q, k: (columns(k) <= rows(q)) & (columns(k) > rows(q) - 3),
        {"causal": "top_left", "window_left": 2},
    ),
    "inclusive": (
        lambda q, k: (columns(k) <= rows(q)) & (columns(k) >= rows(q) - 4),
        {"causal": "top_left", "window_left": 4},
    ),
    "triu and tril": (
        lambda q, k: torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril().triu(-3),
        {"causal": "top_left", "window_left": 3},
    ),
    "both sides": (lambda q, k: (rows(q) - columns(k)).abs() <= 2, {"window_left": 2, "window_right": 2}),
    "unequal sides": (
        lambda q, k: (columns(k) - rows(q) <= 3) & (rows(q) - columns(k) <= 1),
        {"window_left": 1, "window_right": 3},
    ),
    "to the right only": (lambda q, k: columns(k) - rows(q) <= 2, {"window_right": 2}),
    "to the left only": (lambda q, k: rows(q) - columns(k) < 3, {"window_left": 2}),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_window(name: str) -> None:
    mask, expected = WINDOWS[name]
    assert proved(mask) == expected


@pytest.mark.parametrize("name", ["w", "triu and tril", "both sides"])
def test_window_at_every_length(name: str) -> None:
    mask, expected = WINDOWS[name]
    assert proved(mask, dynamic=True) == expected


def test_full() -> None:
    assert proved(lambda q, k: torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)) == {}
    assert proved(lambda q, k: torch.zeros(q.shape[2], k.shape[2])) == {}
    assert proved(lambda q, k: (rows(q) >= 0) & (columns(k) >= 0)) == {}


NEAR_MISSES: dict[str, tuple[Mask, dict[str, Any]]] = {
    "anti-causal": (lambda q, k: columns(k) >= rows(q), {"window_left": 0}),
    "rows and columns swapped": (lambda q, k: (columns(k) <= rows(q)).transpose(0, 1), {"window_left": 0}),
    "one key more": (lambda q, k: columns(k) <= rows(q) + 1, {"window_right": 1}),
    "causal without the diagonal": (lambda q, k: columns(k) < rows(q), {"causal": "top_left", "mask": "lt"}),
    "not causal": (lambda q, k: columns(k) > rows(q), {"mask": "gt"}),
    "a ring": (lambda q, k: (rows(q) - columns(k)).abs() >= 2, {"mask": "ge"}),
    "prefix": (lambda q, k: (columns(k) <= rows(q)) | (columns(k) < 3), {"mask": "or_"}),
    "a limit on keys": (lambda q, k: columns(k).expand(q.shape[2], -1) < 5, {"mask": "lt"}),
    "causal and a limit on keys": (
        lambda q, k: (columns(k) <= rows(q)) & (columns(k) < 5),
        {"causal": "top_left", "mask": "lt"},
    ),
    "every other key": (lambda q, k: 2 * columns(k) <= rows(q), {"mask": "le"}),
    "not low enough": (lambda q, k: additive(columns(k) <= rows(q), -1e4), {"mask": "where"}),
    "a bonus": (lambda q, k: additive(columns(k) <= rows(q), 1.0), {"mask": "where"}),
    "visible at 1": (lambda q, k: torch.where(columns(k) <= rows(q), 1.0, LOWEST), {"mask": "where"}),
    "floating-point positions": (lambda q, k: columns(k).bfloat16() <= rows(q).bfloat16(), {"mask": "le"}),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss(name: str) -> None:
    mask, expected = NEAR_MISSES[name]
    assert proved(mask) == expected


@pytest.mark.parametrize("name", ["causal without the diagonal", "one key more", "prefix", "anti-causal"])
def test_near_miss_at_every_length(name: str) -> None:
    mask, expected = NEAR_MISSES[name]
    assert proved(mask, dynamic=True) == expected
