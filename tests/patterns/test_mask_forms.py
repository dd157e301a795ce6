"""What each way to write a mask becomes, and that its near misses stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attention_graphs as graphs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

B, H, S, D = 2, 2, 9, 8

Mask = Callable[[Tensor, Tensor], Tensor]
"""(q `[B, H, Sq, D]`, k) -> a mask that broadcasts to `[B, H, Sq, Sk]`."""

LOWEST = torch.finfo(torch.float32).min


def rows(q: Tensor) -> Tensor:
    return torch.arange(q.shape[2])[:, None]


def columns(k: Tensor) -> Tensor:
    return torch.arange(k.shape[2])[None, :]


def attend(mask: Mask) -> Callable[..., Tensor]:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask(q, k))

    return model


def proved(mask: Mask, queries: int = S, keys: int = S, dynamic: bool | None = None) -> dict[str, Any]:
    """The arguments the mask becomes. Checks the numbers on the way."""
    torch.manual_seed(0)
    q, k, v = torch.randn(B, H, queries, D), torch.randn(B, H, keys, D), torch.randn(B, H, keys, D)
    module, inputs = graphs.captured(attend(mask), q, k, v, dynamic=dynamic)
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site), place.reason
    return graphs.conditions(place)


def additive(keep: Tensor, value: float = LOWEST, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.where(keep, torch.zeros((), dtype=dtype), value)


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


def test_chunks_become_segments() -> None:
    found = proved(lambda q, k: (columns(k) // 4 == rows(q) // 4) & (columns(k) <= rows(q)))
    assert found["causal"] == "top_left"
    assert found["q_segment_ids"].startswith("floordiv_1")
    assert found["k_segment_ids"].startswith("floordiv.")
    assert "mask" not in found


def test_chunks_whose_numbers_are_overwritten_are_a_mask() -> None:
    def mask(q: Tensor, k: Tensor) -> Tensor:
        chunks, own = columns(k) // 4, rows(q) // 4
        seen = chunks == own
        own.mul_(0)
        return seen

    assert "q_segment_ids" not in proved(mask)


def test_one_chunk_is_no_segment() -> None:
    assert proved(lambda q, k: (columns(k) // 64 == rows(q) // 64) & (columns(k) <= rows(q))) == {"causal": "top_left"}


# --- masks of data ----------------------------------------------------------------------------------------------------


def with_data(
    mask: Callable[..., Tensor], *data: Tensor, dynamic: bool | None = None, queries: int = S
) -> dict[str, Any]:
    def model(q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask(q, k, *given))

    torch.manual_seed(0)
    q, k, v = torch.randn(B, H, queries, D), torch.randn(B, H, S, D), torch.randn(B, H, S, D)
    module, inputs = graphs.captured(model, q, k, v, *data, dynamic=dynamic)
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site), place.reason
    return graphs.conditions(place)


SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [5, 5, 5, 5, 5, 3, 3, 3, 3]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1], [3, 4, 5, 6, 7, 0, 1, 2, 3]])
PADDING = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1, 1]])


def same(ids: Tensor) -> Tensor:
    return (ids[:, :, None] == ids[:, None, :])[:, None]


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


def columns_of(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The ids of the queries and of the keys, as they are broadcast against the scores."""
    return ids[:, None, :, None], ids[:, None, None, :]


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


def test_documents_by_heads_stay_a_mask() -> None:
    found = with_data(lambda q, k, ids: ids[:, :, :, None] == ids[:, :, None, :], SEGMENTS[:, None].repeat(1, H, 1))
    assert found == {"mask": "eq"}


def packed(positions: Tensor) -> Tensor:
    """Document of each token, as Hugging Face counts it."""
    first = positions[:, :1] - 1
    return (torch.diff(positions, prepend=first, dim=-1) != 1).cumsum(-1)


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


def test_padding_is_the_small_mask() -> None:
    def mask(q: Tensor, k: Tensor, padding: Tensor) -> Tensor:
        return (columns(k) <= rows(q)) & padding.bool()[:, None, None, :]

    assert with_data(mask, PADDING) == {"mask": "getitem_2", "causal": "top_left"}


def test_padding_added() -> None:
    """Padded rows may see no key: by finite numbers the softmax of such a row is over all keys, and the mask stays."""

    def padded(value: float, lowest: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def mask(q: Tensor, k: Tensor, padding: Tensor) -> Tensor:
            keys = torch.zeros(()).masked_fill(~padding.bool()[:, None, None, :], value)
            return additive(columns(k) <= rows(q), lowest) + keys

        return mask

    assert with_data(padded(LOWEST, LOWEST), PADDING) == {"mask": "add"}
    assert with_data(padded(-torch.inf, LOWEST), PADDING) == {"mask": "add"}
    hidden = with_data(padded(-torch.inf, -torch.inf), PADDING)
    assert hidden == {"mask": "getitem", "causal": "top_left"}


def test_a_row_that_sees_nothing_is_not_given_numbers() -> None:
    """The padding alone is smaller, but hides by numbers what the mask hides for good."""

    def mask(q: Tensor, k: Tensor, padding: Tensor) -> Tensor:
        numbers = torch.where(padding, 0.0, -1e30)[:, None, None, :]
        return torch.where(columns(k) <= rows(q), numbers, -1e30) == 0.0

    assert with_data(mask, PADDING.bool()) == {"causal": "top_left", "mask": "eq"}


def test_rows_that_see_a_key_need_no_numbers() -> None:
    """On the diagonal, on the bottom-right diagonal, or the first key."""
    window = lambda q, k: additive((columns(k) <= rows(q)) & (columns(k) > rows(q) - 3))  # noqa: E731
    assert proved(window) == {"causal": "top_left", "window_left": 2}
    last = lambda q, k: additive(columns(k) <= rows(q) + k.shape[2] - q.shape[2])  # noqa: E731
    assert proved(last, keys=S + 4) == {"causal": "bottom_right"}
    assert proved(lambda q, k: additive((columns(k) < 1) & (rows(q) >= 0)))["mask"]
    # More queries than keys: the last row of this window, and the first of the shifted diagonal, see nothing.
    assert set(proved(window, queries=S + 4)) == {"mask"}
    assert set(proved(last, queries=S + 4)) == {"mask"}
    assert proved(lambda q, k: additive(columns(k) <= rows(q)), queries=S + 4) == {"causal": "top_left"}


def test_padding_of_unknown_numbers_is_data() -> None:
    """Nothing says that the integers are 0 and 1."""

    def mask(q: Tensor, k: Tensor, padding: Tensor) -> Tensor:
        return additive(columns(k) <= rows(q)) + (1.0 - padding[:, None, None, :].float()) * LOWEST

    assert with_data(mask, PADDING) == {"mask": "add"}


def test_a_mask_of_data_stays() -> None:
    keep = torch.rand(B, 1, S, S) > 0.3
    assert with_data(lambda q, k, keep: keep, keep) == {"mask": "l_given_0_"}
    bias = torch.randn(H, S, S)
    assert with_data(lambda q, k, bias: bias, bias) == {"mask": "l_given_0_"}
    causal_buffer = torch.ones(S, S, dtype=torch.bool).tril()
    assert with_data(lambda q, k, keep: keep, causal_buffer) == {"mask": "l_given_0_"}


def test_data_and_causal_keep_the_whole_mask_and_the_bound() -> None:
    keep = torch.rand(B, 1, S, S) > 0.3
    found = with_data(lambda q, k, keep: keep & (columns(k) <= rows(q)), keep)
    assert found == {"mask": "l_given_0_", "causal": "top_left"}


def test_gradient_of_a_bias_is_refused() -> None:
    def model(q: Tensor, bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=bias)

    module, _ = graphs.captured(model, torch.randn(B, H, S, D), torch.randn(S, S, requires_grad=True))
    assert (
        graphs.refusal(module) == "The bias 'l_bias_' requires a gradient, and the attention operator has none for it."
    )


# --- writes -----------------------------------------------------------------------------------------------------------


def test_a_mask_written_after_it_was_made_is_data() -> None:
    def mask(q: Tensor, k: Tensor) -> Tensor:
        keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        keep[:, 0] = False
        keep[2, 5] = True
        return keep

    assert proved(mask) == {"mask": "keep"}


def test_a_mask_written_in_parts_of_its_making_is_data() -> None:
    def mask(q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        place[4] = 7
        return columns(k) <= place[:, None]

    assert proved(mask) == {"mask": "le"}


def test_a_mask_written_after_the_attention() -> None:
    def model(q: Tensor) -> tuple[Tensor, Tensor]:
        keep = torch.ones(S, S, dtype=torch.bool).tril()
        out = F.scaled_dot_product_attention(q, q, q, attn_mask=keep)
        keep.fill_(True)
        return out, keep

    module, inputs = graphs.captured(model, torch.randn(B, H, S, D))
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site)
    assert graphs.arguments(place)["causal"] == "top_left"
