"""Masks that stay masks: padding, data, and what is written."""

from __future__ import annotations

from collections.abc import Callable

import attention_graphs as graphs
import pytest
import torch
import torch.nn.functional as F
from mask_calls import LOWEST, PADDING, B, D, H, S, additive, columns, proved, rows, with_data
from torch import Tensor


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


def test_padding_of_unknown_numbers_is_data() -> None:
    """Nothing says that the integers are 0 and 1."""

    def mask(q: Tensor, k: Tensor, padding: Tensor) -> Tensor:
        return additive(columns(k) <= rows(q)) + (1.0 - padding[:, None, None, :].float()) * LOWEST

    assert with_data(mask, PADDING) == {"mask": "add"}


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
    assert proved(window, keys=S + 4) == {"causal": "top_left", "window_left": 2}
    both = lambda q, k: last(q, k) + additive(columns(k) > rows(q) + k.shape[2] - q.shape[2] - 3)  # noqa: E731
    assert proved(both, keys=S + 4) == {"causal": "bottom_right", "window_left": 2}
    assert proved(lambda q, k: additive((columns(k) < 1) & (rows(q) >= 0)))["mask"]
    # More queries than keys: the last row of this window, and the first of the shifted diagonal, see nothing.
    assert set(proved(window, queries=S + 4)) == {"mask"}
    assert set(proved(last, queries=S + 4)) == {"mask"}
    assert proved(lambda q, k: additive(columns(k) <= rows(q)), queries=S + 4) == {"causal": "top_left"}


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


def test_a_mask_of_each_head_beside_causality() -> None:
    heads = torch.tensor([True, False])[:, None, None]
    found = with_data(lambda q, k, heads: (columns(k) <= rows(q)) & heads, heads)
    assert found == {"mask": "l_given_0_", "causal": "top_left"}


@pytest.mark.parametrize(
    ("value", "first", "expected"),
    [
        (-torch.inf, False, {"mask": "keys", "causal": "top_left"}),
        (LOWEST, True, {"mask": "keys", "causal": "top_left"}),
        (LOWEST, False, {"mask": "both"}),
    ],
)
def test_padding_whose_truths_are_overwritten(value: float, first: bool, expected: dict[str, str]) -> None:
    """What is left of them are the numbers. `first`: every row sees the first key."""

    def mask(q: Tensor, k: Tensor, padding: Tensor) -> Tensor:
        seen = padding.bool()[:, None, None, :]
        if first:
            seen = seen | (columns(k) < 1)
        keys = torch.where(seen, 0.0, value)
        both = keys + additive(columns(k) <= rows(q), value)
        seen.fill_(True)
        return both

    assert with_data(mask, PADDING) == expected


REPEATED: dict[str, tuple[Tensor, tuple[int, ...]]] = {
    "queries": (PADDING.bool()[:, None, None, :], (B, 1, S, S)),
    "heads": (PADDING.bool()[:, None, None, :], (B, H, 1, S)),
    "batches": (PADDING.bool()[:1, None, None, :], (B, 1, 1, S)),
    "keys": (PADDING.bool()[:, None, :, None], (B, 1, S, S)),
    "one row": (PADDING.bool()[0], (S, S)),
}


@pytest.mark.parametrize("name", REPEATED)
def test_the_smallest_mask_is_what_was_repeated(name: str) -> None:
    data, shape = REPEATED[name]
    found = with_data(lambda q, k, keep: keep.expand(shape) & (columns(k) <= rows(q)), data)
    assert found == {"mask": "l_given_0_", "causal": "top_left"}


def test_a_smaller_tensor_that_hides_more() -> None:
    """Of the padding nothing is left but the mask, and what was made of it."""

    def mask(q: Tensor, k: Tensor, data: Tensor) -> Tensor:
        known = data > 0.3
        less = known & (data < 0.8)
        seen = known.expand_as(less) & (columns(k) <= rows(q))
        known.fill_(True)
        return seen

    assert with_data(mask, torch.rand(B, 1, 1, S)) == {"mask": "seen", "causal": "top_left"}


def test_a_mask_without_axes_is_none_of_the_scores() -> None:
    found = with_data(lambda q, k, keep: keep & (columns(k) <= rows(q)), torch.tensor(True))
    assert found == {"mask": "and_", "causal": "top_left"}


def test_a_mask_that_had_five_axes() -> None:
    found = with_data(lambda q, k, keep: (keep & (columns(k) <= rows(q)))[:, 0], PADDING.bool()[:, None, None, None])
    assert found == {"mask": "getitem_2", "causal": "top_left"}


def test_a_bias_written_before_it_is_added() -> None:
    def mask(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
        bias = bias * 2.0
        bias[:, 0] = 1.0
        return bias

    assert with_data(mask, torch.randn(S, S)) == {"mask": "bias"}


def test_a_sum_of_truths_is_one_mask() -> None:
    """A key is seen where one of them says so."""
    found = with_data(lambda q, k, keep: keep + (columns(k) <= rows(q)), torch.rand(B, 1, S, S) > 0.3)
    assert found == {"mask": "add"}


def test_gradient_of_a_bias_is_refused() -> None:
    def model(q: Tensor, bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=bias)

    module, _ = graphs.captured(model, torch.randn(B, H, S, D), torch.randn(S, S, requires_grad=True))
    assert (
        graphs.refusal(module) == "The bias 'l_bias_' requires a gradient, and the attention operator has none for it."
    )
    module, _ = graphs.captured(model, torch.randn(B, H, S, D), torch.randn(S, S, requires_grad=True), grad=False)
    assert graphs.conditions(graphs.site(module)) == {"mask": "l_bias_"}


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
