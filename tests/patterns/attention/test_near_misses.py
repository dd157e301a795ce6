"""Attention written out that is almost what the operator computes. Whatever is fused gives the numbers of the graph."""

from __future__ import annotations

from collections.abc import Callable

import attention_graphs as graphs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

B, H, S, D = 2, 4, 6, 6
"""As many lanes as tokens: an axis taken for another shows in the numbers, not in the shapes."""

HIDDEN = float("-inf")

Model = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of q, k, v `[B, H, S, D]` and data `[B, H, S, S]`."""


def rows(x: Tensor) -> Tensor:
    return torch.arange(x.shape[2])[:, None]


def columns(x: Tensor) -> Tensor:
    return torch.arange(x.shape[2])[None, :]


def causal(x: Tensor) -> Tensor:
    return columns(x) <= rows(x)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) * 0.3


def sink(x: Tensor) -> Tensor:
    """`[B, H, S, 1]`, one number for each head."""
    return x[0, :, 0, 0].view(1, -1, 1, 1).expand(B, -1, S, 1)


def with_sink(parts: Callable[[Tensor, Tensor], Tensor], cut: int = 1) -> Model:
    return lambda q, k, v, x: parts(scores(q, k), sink(x)).softmax(-1)[..., :-cut] @ v


def changed(change: Callable[[Tensor, Tensor], Tensor]) -> Model:
    """Scores and data become other scores."""
    return lambda q, k, v, x: change(scores(q, k), x).softmax(-1) @ v


def rescaled(factor: Callable[[Tensor, Tensor], Tensor]) -> Model:
    """A factor of the scores and of one number for each head."""

    def model(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        s = scores(q, k)
        return (s.softmax(-1) @ v) * factor(s, x[0, :, 0, 0].unsqueeze(-1))

    return model


def added_by_product(q: Tensor, k: Tensor, v: Tensor, x: Tensor, **factors: float) -> Tensor:
    q, k, v, x = (y.flatten(0, 1) for y in (q, k, v, x))
    return torch.baddbmm(x, q, k.mT, **factors).softmax(-1) @ v


def overwritten_number(s: Tensor, x: Tensor) -> Tensor:
    number = torch.tensor(HIDDEN)
    number.fill_(0.5)
    return torch.where(x > 0, s, number)


LOWEST = torch.finfo(torch.float32).min


def written_twice(s: Tensor, x: Tensor) -> Tensor:
    s.mul_(2.0)
    s.add_(x)
    return s


def written_and_overwritten(s: Tensor, x: Tensor) -> Tensor:
    s[:, :, 1:].mul_(2.0)
    s.add_(x)
    return s


def share_of_earlier_scores(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    s = scores(q, k)
    total = s.logsumexp(-1)
    s.mul_(2.0)
    return (s.softmax(-1) @ v) * (total - x[0, :, 0, 0].unsqueeze(-1)).sigmoid().unsqueeze(-1)


def of_three_axes(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    q, k, v = q[:, 0], k[:, 0], v[:, 0]
    s = q @ k.mT
    return (s.softmax(-1) @ v) * (s.logsumexp(-1) - x[0, 0, 0]).sigmoid().unsqueeze(-1)


def without_its_first_key(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    return torch.cat((scores(q, k), sink(x)), -1).softmax(-1)[..., 1:] @ v


def without_its_last_query(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    weights = torch.cat((scores(q, k), sink(x)), -1).softmax(-1)
    return weights[:, :, :-1] @ torch.cat((v, v[:, :, :1]), 2)


def written_as_a_row(s: Tensor, x: Tensor) -> Tensor:
    s.view(-1).mul_(2.0)
    return s


READ: dict[str, Model] = {
    "plain": changed(lambda s, x: s),
    "a product that adds": lambda *args: added_by_product(*args, alpha=0.3),
    "a product that adds nothing": lambda *args: added_by_product(*args, alpha=0.3, beta=0),
    "a sink": with_sink(lambda s, column: torch.cat((s, column), -1)),
    "a sink by its share": rescaled(lambda s, x: (s.logsumexp(-1) - x).sigmoid().unsqueeze(-1)),
    "a number in a tensor": changed(lambda s, x: torch.where(x > 0, s, torch.tensor(HIDDEN).to(s.dtype))),
    "written twice": changed(written_twice),
    "any axes": lambda q, k, v, x: torch.einsum("...qd,...kd->...qk", q, k).softmax(-1) @ v,
    "letters": lambda q, k, v, x: torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1) @ v,
    "letters, values in front": lambda q, k, v, x: torch.einsum("bhkd,bhqk->bhqd", v, scores(q, k).softmax(-1)),
    "letters of three that move": lambda q, k, v, x: torch.einsum(
        "hqk,hkd->qhd", torch.einsum("hqd,hkd->hqk", q[0], k[0]).softmax(-1), v[0]
    ),
    "less the maximum": changed(lambda s, x: s - s.amax(-1, keepdim=True)),
    "beside a tensor that takes the result's dtype": lambda q, k, v, x: v.to(scores(q, k).softmax(-1) @ v).transpose(
        1, 2
    ),
    "beside a tensor that takes the result's shape": lambda q, k, v, x: v.view_as(
        scores(q, k).softmax(-1) @ v
    ).transpose(1, 2),
}

NOT_READ: dict[str, Model] = {
    "a product that adds a half": lambda *args: added_by_product(*args, beta=0.5),
    "written in part, then whole": changed(written_and_overwritten),
    "twice the mask": changed(lambda s, x: torch.add(s, x, alpha=2)),
    "letters of two lanes": lambda q, k, v, x: (
        torch.einsum("bhqde,bhkde->bhqk", q.unflatten(-1, (2, -1)), k.unflatten(-1, (2, -1))).softmax(-1) @ v
    ),
    "letters without heads": lambda q, k, v, x: torch.einsum("bqd,bhkd->bhqk", q[:, 0], k).softmax(-1) @ v,
    "any axes, of which one has more": lambda q, k, v, x: (
        torch.einsum("...qd,...kd->...qk", q, k[:1, 0]).softmax(-1) @ v
    ),
    "any axes of one": lambda q, k, v, x: torch.einsum("...qd,hkd->...qk", q, k[0]).softmax(-1) @ v,
    "a sum over any axes": lambda q, k, v, x: torch.einsum("bhqd,bgkd->bhqk", q, k).softmax(-1) @ v,
    "letters without a batch": lambda q, k, v, x: torch.einsum("bhqd,hkd->bhqk", q, k[0]).softmax(-1) @ v,
    "values without a batch": lambda q, k, v, x: torch.einsum("bhqk,hkd->bhqd", scores(q, k).softmax(-1), v[0]),
    "letters of three": lambda q, k, v, x: (
        torch.einsum("bhqd,bhkd,h->bhqk", q, k, x[0, :, 0, 0]).softmax(-1) @ v
    ),
    "one key for all": lambda q, k, v, x: (q @ k[0, 0].T).softmax(-1) @ v,
    "a hidden score of data": changed(lambda s, x: torch.where(causal(s), s, x[0, 0, 0, 0] - 1e9)),
    "a hidden score that is overwritten": changed(overwritten_number),
    "hidden weights of another function": changed(lambda s, x: s.sigmoid().masked_fill(~causal(s), HIDDEN)),
    "less a number": changed(lambda s, x: s - 5.0),
    "less the maximum of the columns": changed(lambda s, x: s - s.amax(-2, keepdim=True)),
    "a sink that a mask reaches": with_sink(lambda s, column: torch.cat((s, column), -1) + rows(s)),
    "two sinks": with_sink(lambda s, column: torch.cat((s, column, column), -1), cut=2),
    "a sink in front of the queries": lambda q, k, v, x: (
        torch.cat((scores(q, k), x[..., :1, :]), 2).softmax(-1)[:, :, :-1] @ v
    ),
    "a sink that is computed": with_sink(
        lambda s, column: torch.cat((s, (column[:1, :, :1] * 2).expand(B, H, S, 1)), -1)
    ),
    "a sink beside the maximum": with_sink(lambda s, column: torch.cat((s - s.amax(-1, keepdim=True), column), -1)),
    "a share of a share": rescaled(lambda s, x: (s.logsumexp(-1) - x).sigmoid().sigmoid().unsqueeze(-1)),
    "a share of every query": rescaled(lambda s, x: (s.logsumexp(-1) - x * rows(s).T).sigmoid().unsqueeze(-1)),
    "a share of keys": rescaled(lambda s, x: (s.logsumexp(-2) - x).sigmoid().unsqueeze(-1)),
    "a share of every lane": rescaled(lambda s, x: (s.logsumexp(-1) - x).sigmoid().unsqueeze(-2)),
    "a share that is squared": rescaled(lambda s, x: (s.logsumexp(-1) - x).square().sigmoid().unsqueeze(-1)),
    "weights of the transposed": lambda q, k, v, x: scores(q, k).softmax(-1).mT @ v,
    "all by name": lambda q, k, v, x: torch.matmul(
        input=F.softmax(input=torch.matmul(input=q, other=k.mT), dim=-1), other=v
    ),
    "scores by name": lambda q, k, v, x: torch.matmul(input=q, other=k.mT).softmax(-1) @ v,
    "a cast by name": lambda q, k, v, x: torch.clone(input=scores(q, k)).softmax(-1) @ v,
    "a least number by name": lambda q, k, v, x: (
        torch.clamp(input=scores(q, k).masked_fill(~causal(x), LOWEST), min=LOWEST).softmax(-1) @ v
    ),
    "a cap by name": lambda q, k, v, x: torch.tanh(input=scores(q, k)).softmax(-1) @ v,
    "a column by name": with_sink(lambda s, column: torch.cat(tensors=(s, column), dim=-1)),
    "a maximum by name": lambda q, k, v, x: (
        (s := scores(q, k)) - torch.amax(input=s, dim=-1, keepdim=True)
    ).softmax(-1) @ v,
    "values by name": lambda q, k, v, x: torch.matmul(input=scores(q, k).softmax(-1), other=v),
    "a share by name": lambda q, k, v, x: torch.mul(
        input=(s := scores(q, k)).softmax(-1) @ v, other=(s.logsumexp(-1) - x[:, :, :, 0]).sigmoid()[..., None]
    ),
    "a tensor that takes the weights' dtype": lambda q, k, v, x: x.to(scores(q, k).softmax(-1)) @ v,
    "a tensor of the weights' type": lambda q, k, v, x: x.type_as(scores(q, k).softmax(-1)) @ v,
    "a share of earlier scores": share_of_earlier_scores,
    "a share in eight bits": rescaled(
        lambda s, x: (s.logsumexp(-1) - x).to(torch.float8_e4m3fn).float().sigmoid().unsqueeze(-1)
    ),
    "a share of three axes": of_three_axes,
    "without its first key": without_its_first_key,
    "without its last query": without_its_last_query,
    "written as a row": changed(written_as_a_row),
    "values summed over the queries": lambda q, k, v, x: (
        torch.einsum("bhqk,bhkd->bhd", scores(q, k).softmax(-1), v)
    ),
    "a sink cut to an integer": with_sink(lambda s, column: torch.cat((s, column.to(torch.int64).to(s.dtype)), -1)),
    "a share of the bits of a number": rescaled(
        lambda s, x: (s.logsumexp(-1) - x.to(torch.half).view(torch.bfloat16).float()).sigmoid().unsqueeze(-1)
    ),
    "values in front": lambda q, k, v, x: v @ scores(q, k).softmax(-1),
}  # fmt: skip


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return *torch.randn(3, B, H, S, D), torch.randn(B, H, S, S)


@pytest.mark.parametrize("name", READ)
def test_read(name: str) -> None:
    (place,) = graphs.check(*graphs.captured(READ[name], *inputs()))
    assert isinstance(place, graphs.Site)


@pytest.mark.parametrize("name", NOT_READ)
def test_not_read(name: str) -> None:
    found = graphs.check(*graphs.captured(NOT_READ[name], *inputs()))
    assert not any(isinstance(place, graphs.Site) for place in found), graphs.show(found[0])  # type: ignore[arg-type]
