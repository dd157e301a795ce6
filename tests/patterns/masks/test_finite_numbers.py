"""Keys hidden by finite numbers, and rows that see no key."""

from __future__ import annotations

import attention_graphs as graphs
import pytest
import torch
from torch import Tensor
from written_attention import LOWEST, B, Model, S, fused, hidden, qkv, refused


def blind(k: Tensor) -> Tensor:
    """`[B, 1, 1, S]`, from data: hides every key of the first batch and some of the second."""
    last = torch.arange(B)[:, None] == B - 1
    return (last & (k[:, 0, :, 0] < 0)).logical_not()[:, None, None, :]


PADDED: dict[str, tuple[Model, str]] = {
    "masked_fill": (
        lambda q, k, v: (q @ k.mT).masked_fill(blind(k), LOWEST).softmax(-1) @ v,
        "{hidden}.to(torch.bfloat16).mul(-3.3895313892515355e+38)",
    ),
    "masked_fill -1e9": (
        lambda q, k, v: (q @ k.mT).masked_fill(blind(k), -1e9).softmax(-1) @ v,
        "{hidden}.to(torch.bfloat16).mul(-3.3895313892515355e+38)",
    ),
    "masked_fill, scaled": (
        lambda q, k, v: ((q @ k.mT * 2.0).masked_fill(blind(k), LOWEST) * 0.5).softmax(-1) @ v,
        "{hidden}.to(torch.bfloat16).mul(-3.3895313892515355e+38)",
    ),
    "where": (
        lambda q, k, v: torch.where(~blind(k), q @ k.mT, LOWEST).softmax(-1) @ v,
        "{seen}.logical_not().to(torch.bfloat16).mul(-3.3895313892515355e+38)",
    ),
    "added": (
        lambda q, k, v: ((q @ k.mT) + torch.zeros(()).masked_fill(blind(k), LOWEST)).softmax(-1) @ v,
        "{number}",
    ),
    "added to a causal mask": (
        lambda q, k, v: (
            (s := q @ k.mT) + torch.where(~hidden(s) & ~blind(k), torch.zeros(()), LOWEST)
        ).softmax(-1) @ v,
        "{where}",
    ),
    "masked_fill with -inf": (
        lambda q, k, v: (q @ k.mT).masked_fill(blind(k), -torch.inf).softmax(-1) @ v,
        "{hidden}.logical_not()",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PADDED)
def test_a_row_of_hidden_keys_keeps_the_numbers_it_was_given(name: str) -> None:
    """The softmax of a row of nothing but finfo.min is uniform, over all keys: `fused` compares it with the graph. The
    NaN of -inf becomes 0 (docs/attention.md)."""
    model, mask = PADDED[name]
    found = fused(model, *qkv())
    names = {"hidden": "getitem_2", "seen": "invert", "number": "masked_fill", "where": "where"}
    assert found == {"scale": 1.0, "mask": mask.format(**names)}


@pytest.mark.parametrize(
    ("number", "factor", "hides"), [(-1e8, 1.0, True), (-2e8, 0.5, True), (-5e7, 2.0, False), (-1e9, 0.05, False)]
)
def test_number_that_hides_before_and_after_it_is_scaled(number: float, factor: float, hides: bool) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        return ((scores + torch.where(hidden(scores), number, 0.0)) * factor).softmax(-1) @ v

    assert ("mask" not in fused(model, *qkv())) == hides


CHOSEN: dict[str, Model] = {
    "else data": lambda s, bias: torch.where(hidden(s), bias, 0.0),
    "or data": lambda s, bias: torch.where(hidden(s), 0.0, bias),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_zero_or_data_is_data(name: str) -> None:
    model: Model = lambda q, k, v, bias: (q @ k.mT + CHOSEN[name](q @ k.mT, bias)).softmax(-1) @ v  # noqa: E731
    assert fused(model, *qkv(), torch.randn(S)) == {"scale": 1.0, "mask": "where"}


@pytest.mark.parametrize("turned", [False, True])
def test_numbers_of_that_size_which_hide_nothing(turned: bool) -> None:
    """A key that is seen may have them."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        odd = torch.arange(S) % 2 == 1
        lowered = torch.where(~odd, 0.0, -9e7) if turned else torch.where(odd, -9e7, 0.0)
        return (scores + lowered + torch.where(hidden(scores), -1e8, 0.0)).softmax(-1) @ v

    assert "hide keys by finite numbers, and a row may see no key" in refused(model, *qkv())


@pytest.mark.parametrize("grad", [False, True])
def test_row_of_replaced_scores_has_no_gradient(grad: bool) -> None:
    """The first row sees no key. Its result, the mean of all values, is that of an added mask; its gradient is not."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (s := q @ k.mT).masked_fill(~hidden(s).mT, -1e9).softmax(-1) @ v

    module, inputs = graphs.captured(model, *(x.requires_grad_(grad) for x in qkv()))
    (place,) = graphs.check(module, inputs)
    if grad:
        assert isinstance(place, graphs.Refusal)
        assert "a row may see no key: it has no gradient then" in place.reason
    else:
        assert isinstance(place, graphs.Site)


def test_two_masks_that_may_hide_a_whole_row_are_refused() -> None:
    """The second is data, as large as it likes."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        return (scores.masked_fill(hidden(scores), LOWEST) + k.sum(-1)[:, :, None]).softmax(-1) @ v

    assert "hide keys by finite numbers, and a row may see no key" in refused(model, *qkv())
