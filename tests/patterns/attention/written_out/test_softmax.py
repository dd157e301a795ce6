"""A softmax in every spelling; what is nearly one is refused, and what is none is passed over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attention_graphs as graphs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from written_attention import B, D, Model, S, assert_form, causal, qkv, refused


def of_exponentials(scores: Tensor, divide: Callable[[Tensor], Tensor]) -> Tensor:
    return divide(torch.exp(scores - scores.amax(-1, keepdim=True)))


def written_over(scores: Tensor) -> Tensor:
    e = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    return e.div_(e.sum(-1, keepdim=True))


FORMS: dict[str, tuple[Model, dict[str, Any]]] = {
    "float32 softmax": (lambda q, k, v: F.softmax((q @ k.mT).float(), -1).type_as(q) @ v, {"scale": 1.0}),
    "minus the maximum": (
        lambda q, k, v: ((s := q @ k.mT) - s.max(-1, keepdim=True)[0]).softmax(-1) @ v,
        {"scale": 1.0},
    ),
    "minus amax": (lambda q, k, v: ((s := q @ k.mT) - s.amax(-1, keepdim=True)).softmax(-1) @ v, {"scale": 1.0}),
    "log_softmax": (lambda q, k, v: F.log_softmax(q @ k.mT, -1).exp() @ v, {"scale": 1.0}),
    "log_softmax and casts": (
        lambda q, k, v: torch.exp((q @ k.mT).log_softmax(3, torch.float32).to(q.dtype)).float() @ v,
        {"scale": 1.0},
    ),
    "minus logsumexp": (lambda q, k, v: ((s := q @ k.mT) - s.logsumexp(-1, keepdim=True)).exp() @ v, {"scale": 1.0}),
    "minus logsumexp, unsqueezed": (
        lambda q, k, v: ((s := q @ k.mT) - torch.logsumexp(s, 3).unsqueeze(-1)).exp() @ v,
        {"scale": 1.0},
    ),
    "exponentials": (
        lambda q, k, v: of_exponentials(q @ k.mT, lambda e: e / e.sum(-1, keepdim=True)) @ v,
        {"scale": 1.0},
    ),
    "exponentials and mask": (
        lambda q, k, v: of_exponentials((s := q @ k.mT) + causal(s), lambda e: e / e.sum(3, True)) @ v,
        {"scale": 1.0, "causal": "top_left"},
    ),
    "exponentials and casts": (
        lambda q, k, v: of_exponentials((q @ k.mT).float(), lambda e: (e / e.sum((-1,)).unsqueeze(-1)).to(q.dtype)) @ v,
        {"scale": 1.0},
    ),
    "exponentials in place": (lambda q, k, v: written_over((q @ k.mT) * 0.5) @ v, {"scale": 0.5}),
    "exponentials, reciprocal": (
        lambda q, k, v: of_exponentials(q @ k.mT, lambda e: e.sum(-1, keepdim=True).reciprocal() * e) @ v,
        {"scale": 1.0},
    ),
    "exponentials, one over": (
        lambda q, k, v: of_exponentials(q @ k.mT, lambda e: e * (1.0 / e.sum(-1, keepdim=True))) @ v,
        {"scale": 1.0},
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_form(name: str) -> None:
    assert_form(*FORMS[name])


def doubled_late(scores: Tensor) -> Tensor:
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = e.sum(-1, keepdim=True)
    e.mul_(2.0)
    return e / total


REFUSED: dict[str, tuple[Model, str]] = {
    "exponentials without a maximum": (
        lambda q, k, v: ((e := torch.exp(q @ k.mT)) / e.sum(-1, keepdim=True)) @ v,
        "no maximum of the row is taken off before",
    ),
    "exponentials less the maximum before the mask": (
        lambda q, k, v: ((e := torch.exp((s := q @ k.mT) - s.amax(-1, True) + causal(s))) / e.sum(-1, True)) @ v,
        "no maximum of the row is taken off before",
    ),
    "exponentials over a sum with an eps": (
        lambda q, k, v: of_exponentials(q @ k.mT, lambda e: e / (e.sum(-1, keepdim=True) + 1e-3)) @ v,
        "is divided by its sum, as in a softmax, but not as",
    ),
    "exponentials that are masked": (
        lambda q, k, v: of_exponentials(q @ k.mT, lambda e: (e := e.tril()) / e.sum(-1, keepdim=True)) @ v,
        "is divided by its sum, as in a softmax, but not as",
    ),
    "exponentials over a sum without a gradient": (
        lambda q, k, v: of_exponentials(q @ k.mT, lambda e: e / e.sum(-1, keepdim=True).detach()) @ v,
        "is divided by its sum, as in a softmax, but not as",
    ),
    "exponentials over the sum of other ones": (
        lambda q, k, v: of_exponentials(q @ k.mT, lambda e: e / (2.0 * e).sum(-1, keepdim=True)) @ v,
        "is divided by its sum, as in a softmax, but not as",
    ),
    "exponentials divided behind the values": (
        lambda q, k, v: of_exponentials(q @ k.mT, lambda e: (e @ v) / e.sum(-1, keepdim=True)),
        "is divided by its sum, as in a softmax, but not as",
    ),
    "exponentials summed before they are doubled": (
        lambda q, k, v: doubled_late(q @ k.mT) @ v,
        "is divided by its sum",
    ),
    "logarithms over queries": (lambda q, k, v: F.log_softmax(q @ k.mT, 2).exp() @ v, "not over the keys"),
    "logarithms that are read": (
        lambda q, k, v: (p := F.log_softmax(q @ k.mT, -1)).exp() @ v + p.mean(),
        "are also read by 'mean'",
    ),
    "exponentials that are read": (
        lambda q, k, v: of_exponentials(q @ k.mT, lambda e: e / e.sum(-1, keepdim=True) @ v + e.mean()),
        "are also read by 'mean'",
    ),
    "over queries": (lambda q, k, v: (q @ k.mT).softmax(-2) @ v, "not over the keys"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    model, reason = REFUSED[name]
    assert reason in refused(model, *qkv())


def test_other_softmaxes_are_none_of_our_business() -> None:
    def router(x: Tensor, w: Tensor, experts: Tensor) -> Tensor:
        weights = (x @ w).softmax(-1)
        return weights * experts

    module, _ = graphs.captured(router, torch.randn(B, S, D), torch.randn(D, 4), torch.randn(4))
    assert graphs.places(module) == []


def test_other_exponentials_are_none_of_our_business() -> None:
    """Decay in linear attention, features of keys that are summed over the keys."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        decay = torch.exp(q @ k.mT - 1.0)
        features = torch.exp(k @ q.mT)
        return (decay * (q @ k.mT)) @ v + (features / features.sum(-2, keepdim=True)) @ v

    module, _ = graphs.captured(model, *qkv())
    assert graphs.places(module) == []
