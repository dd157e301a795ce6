"""Sinks of attention written out, as a column of the scores or as a factor of the result; near misses of both."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import written_attention as written
from torch import Tensor
from written_attention import B, H, Model, causal, fused, refused

S = H
"""As many queries as heads: what is one number for each query has the shape of one for each head."""


def given() -> list[Tensor]:
    """q, k, v and sinks `[H]`."""
    return [*written.qkv(tokens=S), torch.randn(H)]


def column(sinks: Tensor) -> Tensor:
    """`[B, H, S, 1]`"""
    return sinks.reshape(1, -1, 1, 1).expand(B, -1, S, -1)


def less_maximum(scores: Tensor) -> Tensor:
    return scores - scores.amax(-1, keepdim=True)


# --- in models --------------------------------------------------------------------------------------------------------


def of_gpt_oss(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = (q @ k.mT) * 0.25
    scores = scores + causal(scores)
    joined = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)], dim=-1)
    joined = joined - joined.max(dim=-1, keepdim=True).values
    return F.softmax(joined, dim=-1, dtype=joined.dtype)[..., :-1] @ v


def as_a_factor(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = (q @ k.mT) * 0.25
    scores = scores + causal(scores)
    scale = (torch.logsumexp(scores, dim=-1) - sinks.view(1, -1, 1)).to(torch.float32).sigmoid()
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return (weights @ v) * scale.unsqueeze(-1).to(q.dtype)


@pytest.mark.parametrize("model", [of_gpt_oss, as_a_factor])
def test_sinks(model: Model) -> None:
    assert fused(model, *given()) == {"scale": 0.25, "causal": "top_left", "sinks": "l_sinks_"}


# --- a column of the scores -------------------------------------------------------------------------------------------


def test_maximum_that_is_taken_off_with_the_column() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return less_maximum(torch.cat([q @ k.mT, column(sinks)], -1)).softmax(-1)[..., :-1] @ v

    assert fused(model, *given())["sinks"] == "l_sinks_"


def test_column_that_differs_by_query_is_refused() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, column: Tensor) -> Tensor:
        return torch.cat([q @ k.mT, column], dim=-1).softmax(-1)[..., :-1] @ v

    assert "is not one number for each head" in refused(model, *given()[:3], torch.randn(B, H, S, 1))


@pytest.mark.parametrize("shape", [(1, 1, -1, 1), (-1, 1, 1, 1)], ids=["of each query", "of each batch"])
def test_numbers_along_another_axis_are_refused(shape: tuple[int, ...]) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return torch.cat([q @ k.mT, sinks.view(shape).expand(H, H, S, 1)], -1).softmax(-1)[..., :-1] @ v

    *tensors, sinks = given()
    batches = [x.repeat(H // B, 1, 1, 1) for x in tensors]
    assert "is not one number for each head" in refused(model, *batches, sinks)


def test_column_in_front_is_refused() -> None:
    """What is cut off is a key."""

    def model(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return torch.cat([column(sinks), q @ k.mT], dim=-1).softmax(-1)[..., :-1] @ v

    refused(model, *given())


def test_column_that_is_kept_is_refused() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return torch.cat([q @ k.mT, column(sinks)], -1).softmax(-1) @ torch.cat([v, v[:, :, :1]], 2)

    assert "The column of the sinks is not cut off" in refused(model, *given())


@pytest.mark.parametrize("copied", [False, True])
def test_sinks_overwritten_before_the_end_are_refused(copied: bool) -> None:
    """After they were joined to the scores, or copied for that, but before the softmax."""

    def model(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        sinks = sinks.clone()
        if copied:
            copy = sinks.reshape(1, -1, 1, 1).to(torch.float32, copy=True)
            sinks.mul_(2.0)
            joined = torch.cat([q @ k.mT, copy.expand(B, -1, S, -1)], dim=-1)
        else:
            joined = torch.cat([q @ k.mT, column(sinks)], dim=-1)
            sinks.mul_(2.0)
        return joined.softmax(-1)[..., :-1] @ v + sinks.sum()

    assert "'sinks', which the attention reads, is overwritten by 'mul_'" in refused(model, *given())


# --- a factor of the result -------------------------------------------------------------------------------------------


def by_sigmoid(argument: Callable[[Tensor, Tensor], Tensor], keepdim: bool = False) -> Model:
    """`argument`: of the sigmoid, from the log-sum-exp of the scores and the sinks."""

    def model(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        scores = q @ k.mT
        factor = argument(torch.logsumexp(scores, -1, keepdim), sinks).sigmoid()
        return (scores.softmax(-1) @ v) * (factor if keepdim else factor.unsqueeze(-1))

    return model


FACTORS = {
    "view": by_sigmoid(lambda lse, sinks: lse - sinks.view(1, H, 1)),
    "two axes": by_sigmoid(lambda lse, sinks: lse - sinks.unsqueeze(-1)),
    "axis by axis": by_sigmoid(lambda lse, sinks: lse - sinks.unsqueeze(0).unsqueeze(-1).expand(B, H, S)),
    "four axes": by_sigmoid(lambda lse, sinks: lse - sinks.view(1, H, 1, 1), keepdim=True),
}


@pytest.mark.parametrize("name", FACTORS)
def test_factor(name: str) -> None:
    assert fused(FACTORS[name], *given())["sinks"] == "l_sinks_"


OTHER_FACTORS = {
    "the other sign": by_sigmoid(lambda lse, sinks: sinks.view(1, H, 1) - lse),
    "one for each query": by_sigmoid(lambda lse, sinks: lse - sinks),
    "one row for all": by_sigmoid(lambda lse, sinks: lse - sinks[None]),
    "an axis too few": by_sigmoid(lambda lse, sinks: lse - sinks.view(1, H, 1), keepdim=True),
    "of whole numbers": by_sigmoid(lambda lse, sinks: lse.long() - sinks.view(1, H, 1)),
    "twice": by_sigmoid(lambda lse, sinks: torch.sub(lse, sinks.view(1, H, 1), alpha=2)),
}


@pytest.mark.parametrize("name", OTHER_FACTORS)
def test_other_factor_is_refused(name: str) -> None:
    assert "also read by 'logsumexp'" in refused(OTHER_FACTORS[name], *given())


# --- scores less their maximum ----------------------------------------------------------------------------------------

TOO_EARLY = {
    "column": lambda s, v, sinks: torch.cat([less_maximum(s), column(sinks)], -1).softmax(-1)[..., :-1] @ v,
    "factor": lambda s, v, sinks: (
        (less_maximum(s).softmax(-1) @ v) * (less_maximum(s).logsumexp(-1, True) - sinks.view(1, H, 1, 1)).sigmoid()
    ),
    "factor of the same": lambda s, v, sinks: (
        ((x := less_maximum(s)).softmax(-1) @ v) * (x.logsumexp(-1, True) - sinks.view(1, H, 1, 1)).sigmoid()
    ),
    "soft cap": lambda s, v, sinks: (5.0 * torch.tanh(less_maximum(s) / 5.0)).softmax(-1) @ v,
}


@pytest.mark.parametrize("name", TOO_EARLY)
def test_maximum_that_is_taken_off_too_early_is_refused(name: str) -> None:
    """A softmax is the same, what is done to the scores before it is not."""
    reason = refused(lambda q, k, v, sinks: TOO_EARLY[name](q @ k.mT, v, sinks), *given())
    assert "stands between the scores" in reason or "also read by" in reason
