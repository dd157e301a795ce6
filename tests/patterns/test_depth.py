"""Long chains of operations, compiled far down Python's stack: what is read is less, and right."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import attention_graphs
import pytest
import torch
import torch.nn.functional as F
from exactness import assert_exact, capture, find
from spellings import HALF, B, D, H, S, halves, rms
from torch import Tensor

T = TypeVar("T")

LENGTHS = (10, 60, 150, 400)


def below(frames: int, function: Callable[[], T]) -> T:
    return function() if frames == 0 else below(frames - 1, function)


def attention(length: int, where: str) -> Callable[..., Tensor]:
    """With `length` steps in the computation of a part of it."""

    def long(x: Tensor, part: str) -> Tensor:
        for _ in range(length if part == where else 0):
            x = x * 1.01 + 0.01
        return x

    def model(q: Tensor, k: Tensor, v: Tensor, w: Tensor, inv_freq: Tensor) -> Tensor:
        q, w = long(q, "query"), long(w, "weight")  # before the tables, which are read for q all the same
        angle = long(torch.arange(S).float()[:, None] * inv_freq, "tables")
        angle = torch.cat((angle, angle), -1)
        q, k = (halves(long(rms(x, w), "normalised"), angle.cos(), angle.sin()) for x in (q, k))
        return F.scaled_dot_product_attention(q, k, v)

    return model


@pytest.mark.parametrize("where", ["query", "weight", "tables"])
@pytest.mark.parametrize("length", LENGTHS)
def test_norm_and_rotation(length: int, where: str) -> None:
    torch.manual_seed(0)
    values = *torch.randn(3, B, H, S, D), torch.rand(D) + 0.5, torch.rand(HALF)
    module, given = capture(attention(length, where), *values)
    for frames in (0, 300):
        sites, refusals = below(frames, lambda: find(module))
        assert_exact(module, given, sites)
        assert [site.fusion for site in sites] == ["qk_norm_rope"]
        assert refusals == []


@pytest.mark.parametrize("length", LENGTHS)
def test_normalised_and_changed_on_a_long_way(length: int) -> None:
    """What depends on the tensor that is studied is never taken for something else, however far away."""
    values = *torch.randn(3, B, H, S, D), torch.rand(D) + 0.5, torch.rand(HALF)
    module, given = capture(attention(length, "normalised"), *values)
    for frames in (0, 300):
        sites, _ = below(frames, lambda: find(module))
        assert_exact(module, given, sites)
        assert all(site.call.options["norm"] == "none" for site in sites)


@pytest.mark.parametrize("length", LENGTHS)
def test_mask(length: int) -> None:
    """Causal, or some rows more than causal, in as many steps; what is behind the last one that is followed is data."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(S)
        seen = place[None, :] <= place[:, None]
        for step in range(length):
            seen = ~(~seen & (place[None, :] < S + step))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    module, given = attention_graphs.captured(model, *torch.randn(3, B, H, S, D))
    for frames in (0, 300):
        (place,) = below(frames, lambda: attention_graphs.check(module, given))
        assert isinstance(place, attention_graphs.Site)
        assert ("causal" in attention_graphs.arguments(place)) == (length == 10)
