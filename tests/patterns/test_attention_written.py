"""Attention written out: every form becomes the operator with the right arguments; near misses are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attention_graphs as graphs
import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

B, H, S, D = 2, 4, 7, 8
LOWEST = torch.finfo(torch.float32).min


def qkv(heads: int = H, kv_heads: int = H, grad: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, n, S, D, requires_grad=grad) for n in (heads, kv_heads, kv_heads)]


def causal(x: Tensor) -> Tensor:
    place = torch.arange(x.shape[-1])
    return torch.where(place[None, :] <= place[:, None], torch.zeros(()), LOWEST)


def hidden(x: Tensor) -> Tensor:
    return torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)


def fused(model: Callable[..., Any], *inputs: Tensor, dynamic: bool | None = None) -> dict[str, Any]:
    """The arguments of the only site, without q, k, v. Checks the numbers on the way."""
    module, given = graphs.captured(model, *inputs, dynamic=dynamic)
    (place,) = graphs.check(module, given)
    assert isinstance(place, graphs.Site), place.reason
    return {name: value for name, value in graphs.arguments(place).items() if name not in ("q", "k", "v", "out_order")}


def refused(model: Callable[..., Any], *inputs: Tensor) -> str:
    module, _ = graphs.captured(model, *inputs)
    return graphs.refusal(module)


def repeat_kv(x: Tensor, groups: int) -> Tensor:
    batch, heads, tokens, lanes = x.shape
    return x[:, :, None, :, :].expand(batch, heads, groups, tokens, lanes).reshape(batch, heads * groups, tokens, lanes)


# --- forms ------------------------------------------------------------------------------------------------------------


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.matmul(q, k.transpose(2, 3)) * 0.25 + causal(q @ k.mT)
    return F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def test_snapshot() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = repeat_kv(k, 2), repeat_kv(v, 2)
        weights = torch.matmul(q, k.transpose(2, 3)) * 0.25
        weights = F.softmax(weights + causal(weights), dim=-1, dtype=torch.float32).to(q.dtype)
        weights = F.dropout(weights, p=0.0, training=True)
        return torch.matmul(weights, v).transpose(1, 2).contiguous()

    module, inputs = graphs.captured(model, *qkv(kv_heads=2))
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site)
    assert_expected_inline(
        graphs.show(place),
        """\
contiguous = attention(
    q=l_q_.transpose(1, 2),
    k=l_k_.transpose(1, 2),
    v=l_v_.transpose(1, 2),
    scale=0.25,
    causal=top_left,
)[0]""",
    )


def of_exponentials(scores: Tensor, divide: Callable[[Tensor], Tensor]) -> Tensor:
    return divide(torch.exp(scores - scores.amax(-1, keepdim=True)))


def written_over(scores: Tensor) -> Tensor:
    e = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    return e.div_(e.sum(-1, keepdim=True))


FORMS: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "scale by mul": (lambda q, k, v: ((q @ k.mT) * 0.3).softmax(-1) @ v, {"scale": 0.3}),
    "scale by div": (lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2) / 4.0, -1) @ v, {"scale": 0.25}),
    "scale in place": (lambda q, k, v: (q @ k.mT).div_(4.0).softmax(-1) @ v, {"scale": 0.25}),
    "scale on q": (lambda q, k, v: ((q * 0.3) @ k.mT).softmax(-1) @ v, {"scale": 0.3}),
    "scale on q and k": (lambda q, k, v: ((q / 2) @ (k * 0.5).mT).softmax(-1) @ v, {"scale": 0.25}),
    "no scale": (lambda q, k, v: (q @ k.mT).softmax(-1) @ v, {"scale": 1.0}),
    "transposed by aten": (lambda q, k, v: (q @ torch.ops.aten.mT(k)).softmax(-1) @ v, {"scale": 1.0}),
    "scale on both sides": (lambda q, k, v: (0.5 * (0.5 * (q @ k.mT))).softmax(-1) @ v, {"scale": 0.25}),
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
    "einsum": (
        lambda q, k, v: torch.einsum("bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v),
        {"scale": 1.0},
    ),
    "einsum of sequence-first tensors": (
        lambda q, k, v: torch.einsum(
            "bhqk,bkhd->bqhd",
            torch.einsum("bqhd,bkhd->bhqk", q.transpose(1, 2), k.transpose(1, 2)).softmax(-1),
            v.transpose(1, 2),
        ),
        {"scale": 1.0},
    ),
    "einsum of any axes": (
        lambda q, k, v: torch.einsum(
            "... i j, ... j d -> ... i d", torch.einsum("... i d, ... j d -> ... i j", q, k).softmax(-1), v
        ),
        {"scale": 1.0},
    ),
    "einsum of any axes, of three": (
        lambda q, k, v: torch.einsum(
            "...ij,...jd->...id", torch.einsum("...id,...jd->...ij", q[0], k[0]).softmax(-1), v[0]
        ),
        {"scale": 1.0},
    ),
    "einsum of one head of keys": (
        lambda q, k, v: torch.einsum("bhij,bjd->bhid", torch.einsum("bhid,bjd->bhij", q, k[:, 0]).softmax(-1), v[:, 1]),
        {"scale": 1.0},
    ),
    "einsum of one head of keys, sequence first": (
        lambda q, k, v: torch.einsum(
            "bhij,jbd->bihd",
            torch.einsum("bihd,jbd->bhij", q.transpose(1, 2), k[:, 0].transpose(0, 1)).softmax(-1),
            v[:, 1].transpose(0, 1),
        ),
        {"scale": 1.0},
    ),
    "bmm": (
        lambda q, k, v: torch.bmm(torch.bmm(q[0], k[0].transpose(1, 2)).softmax(-1), v[0]),
        {"scale": 1.0},
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
    model, expected = FORMS[name]
    found = fused(model, *qkv())
    assert found.keys() == expected.keys()
    assert all(found[key] == pytest.approx(expected[key]) for key in expected)


def blind(k: Tensor) -> Tensor:
    """`[B, 1, 1, S]`, from data: hides every key of the first batch and some of the second."""
    last = torch.arange(B)[:, None] == B - 1
    return (last & (k[:, 0, :, 0] < 0)).logical_not()[:, None, None, :]


PADDED: dict[str, tuple[Callable[..., Tensor], Any]] = {
    "masked_fill": (
        lambda q, k, v: (q @ k.mT).masked_fill(blind(k), LOWEST).softmax(-1) @ v,
        "{hidden}.to(torch.bfloat16).mul(-3.3895313892515355e+38)",
    ),
    "masked_fill -1e9": (
        lambda q, k, v: (q @ k.mT).masked_fill(blind(k), -1e9).softmax(-1) @ v,
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


@pytest.mark.parametrize("name", ["softcap and mask", "where", "scale by div"])
def test_form_at_every_length(name: str) -> None:
    model, expected = FORMS[name]
    assert fused(model, *qkv(), dynamic=True) == expected


def test_scale_computed_from_the_shape() -> None:
    assert fused(lambda q, k, v: (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v, *qkv())["scale"] == pytest.approx(
        D**-0.5
    )


SINKS = torch.randn(H)


def sinks_as_a_column(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = (q @ k.mT) * 0.25
    scores = scores + causal(scores)
    column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    joined = torch.cat([scores, column], dim=-1)
    joined = joined - joined.max(dim=-1, keepdim=True).values
    return F.softmax(joined, dim=-1, dtype=joined.dtype)[..., :-1] @ v


def sinks_as_a_factor(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = (q @ k.mT) * 0.25
    scores = scores + causal(scores)
    scale = (torch.logsumexp(scores, dim=-1) - sinks.view(1, -1, 1)).to(torch.float32).sigmoid()
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return (weights @ v) * scale.unsqueeze(-1).to(q.dtype)


@pytest.mark.parametrize("model", [sinks_as_a_column, sinks_as_a_factor])
def test_sinks(model: Callable[..., Tensor]) -> None:
    assert fused(model, *qkv(), SINKS) == {"scale": 0.25, "causal": "top_left", "sinks": "l_sinks_"}


def test_sink_that_differs_by_query_is_refused() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, column: Tensor) -> Tensor:
        return torch.cat([q @ k.mT, column], dim=-1).softmax(-1)[..., :-1] @ v

    assert "is not one number for each head" in refused(model, *qkv(), torch.randn(B, H, S, 1))


def test_wrong_sinks_are_refused() -> None:
    """The column stands first, so what is cut off is a key."""

    def model(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        column = sinks.reshape(1, -1, 1, 1).expand(B, -1, S, -1)
        return torch.cat([column, q @ k.mT], dim=-1).softmax(-1)[..., :-1] @ v

    refused(model, *qkv(), SINKS)


def test_factor_of_other_scores_is_refused() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        scores = q @ k.mT
        factor = (sinks.view(1, -1, 1) - torch.logsumexp(scores, dim=-1)).sigmoid()
        return (scores.softmax(-1) @ v) * factor.unsqueeze(-1)

    assert "also read by 'logsumexp'" in refused(model, *qkv(), SINKS)


# --- heads ------------------------------------------------------------------------------------------------------------

REPEATS: dict[str, Callable[[Tensor], Tensor]] = {
    "repeat_kv": lambda x: repeat_kv(x, 2),
    "unsqueeze": lambda x: x.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2),
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=1),
    "sequence first": lambda x: x.transpose(1, 2).repeat_interleave(2, dim=2).transpose(1, 2),
    "with a cache": lambda x: repeat_kv(torch.cat([x[:, :, :2], x[:, :, 2:] * 1.5], dim=2), 2),
    "with an empty cache": lambda x: repeat_kv(torch.cat([x[:, :, :0], x], dim=2), 2),
}


@pytest.mark.parametrize("name", REPEATS)
def test_repeated_heads_are_folded(name: str) -> None:
    repeat = REPEATS[name]
    module, inputs = graphs.captured(lambda q, k, v: (q @ repeat(k).mT).softmax(-1) @ repeat(v), *qkv(kv_heads=2))
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site)
    assert graphs.heads(place, "k") == graphs.heads(place, "v") == 2


OTHER_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "tiled": lambda x: x.repeat(1, 2, 1, 1),
    "expanded in front": lambda x: x[:, None].expand(-1, 2, -1, -1, -1).reshape(B, H, S, D),
    "rolled": lambda x: repeat_kv(x, 2).roll(1, 1),
    "tokens reversed": lambda x: (
        x[:, :, None, torch.arange(S - 1, -1, -1)].expand(-1, -1, 2, -1, -1).reshape(B, H, S, D)
    ),
    "tokens repeated": lambda x: x.repeat_interleave(2, dim=1)[:, :, :1].repeat_interleave(S, dim=2),
}


@pytest.mark.parametrize("name", OTHER_MAPS)
def test_other_maps_of_heads_stay(name: str) -> None:
    repeat = OTHER_MAPS[name]
    module, inputs = graphs.captured(lambda q, k, v: (q @ repeat(k).mT).softmax(-1) @ repeat(v), *qkv(kv_heads=2))
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site)
    assert graphs.heads(place, "k") == graphs.heads(place, "v") == H


def test_keys_repeated_and_values_not() -> None:
    q, k, _ = qkv(kv_heads=2)
    v = torch.randn(B, H, S, D)
    module, inputs = graphs.captured(lambda q, k, v: (q @ repeat_kv(k, 2).mT).softmax(-1) @ v, q, k, v)
    graphs.check(module, inputs)


# --- near misses ------------------------------------------------------------------------------------------------------


def test_dropout_is_refused() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, training: bool) -> Tensor:
        return F.dropout((q @ k.mT).softmax(-1), 0.1, training) @ v

    assert refused(lambda *x: model(*x, True), *qkv()) == (
        "The attention drops out weights with p = 0.1, and no kernel of ours does; set the dropout to 0."
    )
    assert fused(lambda *x: model(*x, False), *qkv()) == {"scale": 1.0}


def test_weights_that_are_returned_are_refused() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = (q @ k.mT).softmax(-1)
        return weights @ v, weights

    assert refused(model, *qkv()) == (
        "The attention weights 'weights' are also read by 'output' (output_attentions?); "
        "the fused operator never has them."
    )


def test_scores_that_are_read_are_refused() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = q @ k.mT
        return scores.softmax(-1) @ v, scores.sum()

    assert "also read by 'sum_1'" in refused(model, *qkv())


REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "over queries": (lambda q, k, v: (q @ k.mT).softmax(-2) @ v, "not over the keys"),
    "a learned temperature": (lambda q, k, v: ((q @ k.mT) * v.mean()).softmax(-1) @ v, "stands between the scores"),
    "softcap above the mask": (
        lambda q, k, v: (20.0 * torch.tanh(((s := q @ k.mT) + causal(s)) / 20.0)).softmax(-1) @ v,
        "tanh",
    ),
    "weights renormalised": (lambda q, k, v: ((q @ k.mT).softmax(-1) * 0.5) @ v, "changes the attention weights"),
    "weights masked after the softmax": (
        lambda q, k, v: (s := (q @ k.mT).softmax(-1)).masked_fill(hidden(s), 0.0) @ v,
        "changes the attention weights",
    ),
    "hidden by a small number": (
        lambda q, k, v: (s := q @ k.mT).masked_fill(hidden(s), -5.0).softmax(-1) @ v,
        "not low enough to hide",
    ),
    "two masks that may hide a whole row": (
        lambda q, k, v: ((s := q @ k.mT).masked_fill(hidden(s), LOWEST) + k.sum(-1)[:, :, None]).softmax(-1) @ v,
        "hide keys by finite numbers, and a row may see no key",
    ),
    "negative scale": (lambda q, k, v: ((q @ k.mT) * -0.25).softmax(-1) @ v, "stands between the scores"),
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
    "exponentials that are read": (
        lambda q, k, v: of_exponentials(q @ k.mT, lambda e: e / e.sum(-1, keepdim=True) @ v + e.mean()),
        "are also read by 'mean'",
    ),
    "exponentials summed before they are doubled": (lambda q, k, v: _doubled(q @ k.mT) @ v, "is divided by its sum"),
    "logarithms over queries": (lambda q, k, v: F.log_softmax(q @ k.mT, 2).exp() @ v, "not over the keys"),
    "logarithms that are read": (
        lambda q, k, v: (p := F.log_softmax(q @ k.mT, -1)).exp() @ v + p.mean(),
        "are also read by 'mean'",
    ),
    "gradient stopped": (lambda q, k, v: (q @ k.mT).softmax(-1).detach() @ v, "changes the attention weights"),
    "minus another maximum": (
        lambda q, k, v: ((s := q @ k.mT) - s.amax(-2, keepdim=True)).softmax(-1) @ v,
        "stands between the scores",
    ),
    "part of the scores written": (lambda q, k, v: _first_column_zero(q @ k.mT).softmax(-1) @ v, "written in place"),
    "weights written": (
        lambda q, k, v: _first_column_zero((q @ k.mT).softmax(-1)) @ v,
        "The attention weights 'softmax' are written in place.",
    ),
    "weights dropped in place": (
        lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.0, True, True) @ v,
        "The attention weights 'softmax' are written in place.",
    ),
    "column of the sinks kept": (
        lambda q, k, v: torch.cat([q @ k.mT, _column_of_sinks()], -1).softmax(-1) @ torch.cat([v, v[:, :, :1]], 2),
        "The column of the sinks is not cut off",
    ),
    "a wider query": (
        lambda q, k, v: (q @ k.mT).softmax(-1).bfloat16() @ v.bfloat16(),
        "is torch.float32 and the result of the attention torch.bfloat16; the operator takes one.",
    ),
    "two masks of data": (
        lambda q, k, v: (q @ k.mT + k.sum(-1)[:, :, None] + q.sum(-1)[..., None]).softmax(-1) @ v,
        "The scores have two masks of data, ",
    ),
    "a mask of data beside one that is no bound": (
        lambda q, k, v: (
            ((s := q @ k.mT).masked_fill(_every_other(s), -math.inf) + k.sum(-1)[:, :, None]).softmax(-1) @ v
        ),
        "The scores have two masks that cannot be proved, ",
    ),
    "two masks that no tensor holds together": (
        lambda q, k, v: (
            (s := q @ k.mT)
            .masked_fill(_every_other(s), -math.inf)
            .masked_fill(_every_other(s).mT, -math.inf)
            .softmax(-1)
            @ v
        ),
        "No single tensor of the graph holds what the masks ",
    ),
}


def _doubled(scores: Tensor) -> Tensor:
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = e.sum(-1, keepdim=True)
    e.mul_(2.0)
    return e / total


def _every_other(scores: Tensor) -> Tensor:
    """Hides the keys after the middle of a row's past."""
    place = torch.arange(scores.shape[-1])
    return 2 * place[None, :] > place[:, None] + 5


def _column_of_sinks() -> Tensor:
    return SINKS.reshape(1, -1, 1, 1).expand(B, -1, S, -1)


def _first_column_zero(scores: Tensor) -> Tensor:
    scores[..., 0] = 0.0
    return scores


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    model, reason = REFUSED[name]
    assert reason in refused(model, *qkv())


def test_query_overwritten_before_the_end_is_refused() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = q.clone(), k.clone()
        weights = (q @ k.mT).softmax(-1)
        q.mul_(2.0)
        return weights @ v + q

    assert "is overwritten by" in refused(model, *qkv())


@pytest.mark.parametrize("copied", [False, True])
def test_sinks_overwritten_before_the_end_are_refused(copied: bool) -> None:
    """After they were joined to the scores, or copied for that, but before the softmax."""

    def model(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        sinks = sinks.clone()
        if copied:
            column = sinks.reshape(1, -1, 1, 1).to(torch.float32, copy=True)
            sinks.mul_(2.0)
            joined = torch.cat([q @ k.mT, column.expand(B, -1, S, -1)], dim=-1)
        else:
            joined = torch.cat([q @ k.mT, sinks.reshape(1, -1, 1, 1).expand(B, -1, S, -1)], dim=-1)
            sinks.mul_(2.0)
        return joined.softmax(-1)[..., :-1] @ v + sinks.sum()

    assert "'sinks', which the attention reads, is overwritten by 'mul_'" in refused(model, *qkv(), SINKS)


def test_key_overwritten_after_it_was_repeated() -> None:
    """The repeat is a copy, so the key may not be read in its stead."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k.clone()
        many = repeat_kv(k, 2)
        k.mul_(2.0)
        return (q @ many.mT).softmax(-1) @ repeat_kv(v, 2) + k.sum()

    module, inputs = graphs.captured(model, *qkv(kv_heads=2))
    graphs.check(module, inputs)


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
