"""Scores in every spelling: scale, softcap, masks; near misses of each are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from written_attention import LOWEST, D, H, Model, S, assert_form, causal, fused, hidden, qkv, refused

FORMS: dict[str, tuple[Model, dict[str, Any]]] = {
    "scale by mul": (lambda q, k, v: ((q @ k.mT) * 0.3).softmax(-1) @ v, {"scale": 0.3}),
    "scale by div": (lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2) / 4.0, -1) @ v, {"scale": 0.25}),
    "scale in place": (lambda q, k, v: (q @ k.mT).div_(4.0).softmax(-1) @ v, {"scale": 0.25}),
    "scale on q": (lambda q, k, v: ((q * 0.3) @ k.mT).softmax(-1) @ v, {"scale": 0.3}),
    "scale on q and k": (lambda q, k, v: ((q / 2) @ (k * 0.5).mT).softmax(-1) @ v, {"scale": 0.25}),
    "no scale": (lambda q, k, v: (q @ k.mT).softmax(-1) @ v, {"scale": 1.0}),
    "transposed by aten": (lambda q, k, v: (q @ torch.ops.aten.mT(k)).softmax(-1) @ v, {"scale": 1.0}),
    "scale on both sides": (lambda q, k, v: (0.5 * (0.5 * (q @ k.mT))).softmax(-1) @ v, {"scale": 0.25}),
    "softcap by div": (
        lambda q, k, v: (torch.tanh((q @ k.mT) * 0.5 / 20.0) * 20.0).softmax(-1) @ v,
        {"scale": 0.5, "softcap": 20.0},
    ),
    "softcap by mul": (
        lambda q, k, v: (20.0 * ((q @ k.mT) * 0.025).tanh()).softmax(-1) @ v,
        {"scale": 0.5, "softcap": 20.0},
    ),
    "softcap and mask": (
        lambda q, k, v: (torch.tanh((s := q @ k.mT) / 20.0) * 20.0 + causal(s)).softmax(-1) @ v,
        {"scale": 1.0, "softcap": 20.0, "causal": "top_left"},
    ),
    "masked_fill": (
        lambda q, k, v: (s := q @ k.mT).masked_fill(hidden(s), float("-inf")).softmax(-1) @ v,
        {"scale": 1.0, "causal": "top_left"},
    ),
    "masked_fill in place": (
        lambda q, k, v: (s := q @ k.mT * 0.5).masked_fill_(hidden(s), LOWEST).softmax(-1) @ v,
        {"scale": 0.5, "causal": "top_left"},
    ),
    "where": (
        lambda q, k, v: torch.where(~hidden(s := q @ k.mT), s, LOWEST).softmax(-1) @ v,
        {"scale": 1.0, "causal": "top_left"},
    ),
    "where the other way": (
        lambda q, k, v: torch.where(hidden(s := q @ k.mT), -1e9, s).softmax(-1) @ v,
        {"scale": 1.0, "causal": "top_left"},
    ),
    "mask added in place": (
        lambda q, k, v: (s := q @ k.mT).add_(causal(s)).softmax(-1) @ v,
        {"scale": 1.0, "causal": "top_left"},
    ),
    "scale after the mask": (
        lambda q, k, v: (0.5 * ((s := q @ k.mT) + causal(s))).softmax(-1) @ v,
        {"scale": 0.5, "causal": "top_left"},
    ),
    "two masks": (
        lambda q, k, v: (
            ((s := q @ k.mT) + causal(s)).masked_fill(~torch.ones(S, S, dtype=torch.bool).triu(-2), -1e9).softmax(-1)
            @ v
        ),
        {"scale": 1.0, "causal": "top_left", "window_left": 2},
    ),
    "baddbmm": (
        lambda q, k, v: torch.bmm(
            torch.baddbmm(torch.empty(H, S, S), q[0], k[0].mT, beta=0.0, alpha=0.25).softmax(-1), v[0]
        ),
        {"scale": 0.25},
    ),
    "baddbmm with a mask": (
        lambda q, k, v: torch.bmm(torch.baddbmm(causal(q[0] @ k[0].mT), q[0], k[0].mT).softmax(-1), v[0]),
        {"scale": 1.0, "causal": "top_left"},
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_form(name: str) -> None:
    assert_form(*FORMS[name])


@pytest.mark.parametrize("name", ["softcap and mask", "where", "scale by div"])
def test_form_at_every_length(name: str) -> None:
    model, expected = FORMS[name]
    assert fused(model, *qkv(), dynamic=True) == expected


def test_scale_computed_from_the_shape() -> None:
    found = fused(lambda q, k, v: (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v, *qkv())
    assert found["scale"] == pytest.approx(D**-0.5)


def first_column_zero(scores: Tensor) -> Tensor:
    scores[..., 0] = 0.0
    return scores


REFUSED: dict[str, tuple[Model, str]] = {
    "a learned temperature": (lambda q, k, v: ((q @ k.mT) * v.mean()).softmax(-1) @ v, "stands between the scores"),
    "softcap above the mask": (
        lambda q, k, v: (20.0 * torch.tanh(((s := q @ k.mT) + causal(s)) / 20.0)).softmax(-1) @ v,
        "tanh",
    ),
    "hidden by a small number": (
        lambda q, k, v: (s := q @ k.mT).masked_fill(hidden(s), -5.0).softmax(-1) @ v,
        "not low enough to hide",
    ),
    "negative scale": (lambda q, k, v: ((q @ k.mT) * -0.25).softmax(-1) @ v, "stands between the scores"),
    "minus another maximum": (
        lambda q, k, v: ((s := q @ k.mT) - s.amax(-2, keepdim=True)).softmax(-1) @ v,
        "stands between the scores",
    ),
    "hidden, and brought back by a factor": (
        lambda q, k, v: ((s := q @ k.mT).masked_fill(hidden(s), -1e9) * 1e-9).softmax(-1) @ v,
        "is not low enough to hide them",
    ),
    "hidden by where, and brought back by a factor": (
        lambda q, k, v: (torch.where(hidden(s := q @ k.mT), -1e10, s) / 1e10).softmax(-1) @ v,
        "is not low enough to hide them",
    ),
    "rounded to eight bits": (
        lambda q, k, v: (q @ k.mT).to(torch.float8_e4m3fn).float().softmax(-1) @ v,
        "stands between the scores",
    ),
    "part of the scores written": (lambda q, k, v: first_column_zero(q @ k.mT).softmax(-1) @ v, "written in place"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    model, reason = REFUSED[name]
    assert reason in refused(model, *qkv())


def test_scores_that_are_read_are_refused() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = q @ k.mT
        return scores.softmax(-1) @ v, scores.sum()

    assert "also read by 'sum_1'" in refused(model, *qkv())


@pytest.mark.parametrize("factor", [0.25, 256**-0.5])
def test_hidden_scores_that_a_factor_leaves_hidden(factor: float) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        return (scores.masked_fill(hidden(scores), -1e9) * factor).softmax(-1) @ v

    assert fused(model, *qkv()) == {"scale": factor, "causal": "top_left"}


@pytest.mark.parametrize("seen", [hidden, lambda scores: torch.randn_like(scores[0, 0]) > 0], ids=["causal", "data"])
def test_truth_values_that_are_added_are_refused(seen: Callable[[Tensor], Tensor]) -> None:
    """True adds 1 to the score and hides nothing."""
    q, k, v = qkv()
    mask = seen(q @ k.mT)
    assert "holds torch.bool and is added to the scores" in refused(
        lambda q, k, v, mask: (q @ k.mT + mask).softmax(-1) @ v, q, k, v, mask
    )
