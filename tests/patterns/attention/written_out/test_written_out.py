"""Attention written out as a whole: the products, other readers and writers, and what is done to the weights."""

from __future__ import annotations

import attention_graphs as graphs
import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor
from written_attention import Model, causal, fused, hidden, qkv, refused, repeat_kv


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


PRODUCTS: dict[str, Model] = {
    "einsum": (lambda q, k, v: torch.einsum("bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v)),
    "einsum of sequence-first tensors": (
        lambda q, k, v: torch.einsum(
            "bhqk,bkhd->bqhd",
            torch.einsum("bqhd,bkhd->bhqk", q.transpose(1, 2), k.transpose(1, 2)).softmax(-1),
            v.transpose(1, 2),
        )
    ),
    "einsum of any axes": (
        lambda q, k, v: torch.einsum(
            "... i j, ... j d -> ... i d", torch.einsum("... i d, ... j d -> ... i j", q, k).softmax(-1), v
        )
    ),
    "einsum of any axes, of three": (
        lambda q, k, v: torch.einsum(
            "...ij,...jd->...id", torch.einsum("...id,...jd->...ij", q[0], k[0]).softmax(-1), v[0]
        )
    ),
    "einsum of one head of keys": (
        lambda q, k, v: torch.einsum("bhij,bjd->bhid", torch.einsum("bhid,bjd->bhij", q, k[:, 0]).softmax(-1), v[:, 1])
    ),
    "einsum of one head of keys, sequence first": (
        lambda q, k, v: torch.einsum(
            "bhij,jbd->bihd",
            torch.einsum("bihd,jbd->bhij", q.transpose(1, 2), k[:, 0].transpose(0, 1)).softmax(-1),
            v[:, 1].transpose(0, 1),
        )
    ),
    "bmm": (lambda q, k, v: torch.bmm(torch.bmm(q[0], k[0].transpose(1, 2)).softmax(-1), v[0])),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_product(name: str) -> None:
    assert fused(PRODUCTS[name], *qkv()) == {"scale": 1.0}


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


def test_weights_of_two_tensors_of_values_are_refused() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.mT).softmax(-1)
        return weights @ v + weights @ v.exp()

    assert refused(model, *qkv()) == (
        "The attention weights 'weights' are also read by 'matmul_2'; the fused operator never has them."
    )


def test_einsum_of_fewer_axes_than_scores_is_no_product_of_queries_and_keys() -> None:
    """An operand of the scores, here: a bias of each key."""

    def model(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return (torch.relu(x @ w) + torch.einsum("kd,kd->k", a, b)).softmax(-1) @ x

    square, rows = torch.randn(7, 7), torch.randn(7, 3)
    assert "'relu' (relu) stands between the scores" in refused(model, torch.randn(2, 7, 7), square, rows, rows)


def first_column_zero(scores: Tensor) -> Tensor:
    scores[..., 0] = 0.0
    return scores


REFUSED: dict[str, tuple[Model, str]] = {
    "weights renormalised": (lambda q, k, v: ((q @ k.mT).softmax(-1) * 0.5) @ v, "changes the attention weights"),
    "weights masked after the softmax": (
        lambda q, k, v: (s := (q @ k.mT).softmax(-1)).masked_fill(hidden(s), 0.0) @ v,
        "changes the attention weights",
    ),
    "weights rounded to eight bits": (
        lambda q, k, v: (q @ k.mT).softmax(-1).to(torch.float8_e4m3fn).float() @ v,
        "changes the attention weights",
    ),
    "gradient stopped": (lambda q, k, v: (q @ k.mT).softmax(-1).detach() @ v, "changes the attention weights"),
    "weights written": (
        lambda q, k, v: first_column_zero((q @ k.mT).softmax(-1)) @ v,
        "The attention weights 'softmax' are written in place.",
    ),
    "weights dropped in place": (
        lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.0, True, True) @ v,
        "The attention weights 'softmax' are written in place.",
    ),
    "a wider query": (
        lambda q, k, v: (q @ k.mT).softmax(-1).bfloat16() @ v.bfloat16(),
        "is torch.float32 and the result of the attention torch.bfloat16; the operator takes one.",
    ),
}


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
