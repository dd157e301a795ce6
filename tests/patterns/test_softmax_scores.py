"""Near misses of scores, masks and sinks: each was fused once, into another function."""

from __future__ import annotations

from collections.abc import Callable

import attention_graphs as graphs
import pytest
import torch
from torch import Tensor

B, H, D = 2, 4, 8
S = H
"""As many queries as heads: what is one number for each query has the shape of one for each head."""


def qkv() -> list[Tensor]:
    torch.manual_seed(0)
    return list(torch.randn(3, B, H, S, D))


def hidden() -> Tensor:
    return torch.ones(S, S, dtype=torch.bool).triu(1)


def refused(model: Callable[..., Tensor], *inputs: Tensor) -> str:
    module, _ = graphs.captured(model, *inputs)
    return graphs.refusal(module)


# --- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        lambda q, k, v: ((q @ k.mT).masked_fill(hidden(), -1e9) * 1e-9).softmax(-1) @ v,
        lambda q, k, v: (torch.where(hidden(), -1e10, q @ k.mT) / 1e10).softmax(-1) @ v,
    ],
    ids=["masked_fill", "where"],
)
def test_hidden_scores_that_a_factor_brings_back(model: Callable[..., Tensor]) -> None:
    """-1 hides nothing."""
    assert "is not low enough to hide them" in refused(model, *qkv())


@pytest.mark.parametrize("factor", [0.25, 256**-0.5])
def test_hidden_scores_that_a_factor_leaves_hidden(factor: float) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT).masked_fill(hidden(), -1e9) * factor).softmax(-1) @ v

    module, inputs = graphs.captured(model, *qkv())
    (place,) = graphs.check(module, inputs)
    assert graphs.conditions(place) == {"causal": "top_left"}


@pytest.mark.parametrize("grad", [False, True])
def test_row_of_replaced_scores_has_no_gradient(grad: bool) -> None:
    """The first row sees no key. Its result, the mean of all values, is that of an added mask; its gradient is not."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(~hidden().T, -1e9).softmax(-1) @ v

    module, inputs = graphs.captured(model, *(x.requires_grad_(grad) for x in qkv()))
    (place,) = graphs.check(module, inputs)
    if grad:
        assert isinstance(place, graphs.Refusal)
        assert "a row may see no key: it has no gradient then" in place.reason
    else:
        assert isinstance(place, graphs.Site)


@pytest.mark.parametrize("seen", [hidden, lambda: torch.randn(S, S) > 0], ids=["causal", "data"])
def test_truth_values_that_are_added(seen: Callable[[], Tensor]) -> None:
    """True adds 1 to the score and hides nothing."""
    model = lambda q, k, v, mask: ((q @ k.mT) + mask).softmax(-1) @ v  # noqa: E731
    assert "holds torch.bool and is added to the scores" in refused(model, *qkv(), seen())


# --- sinks ------------------------------------------------------------------------------------------------------------


def with_sinks(argument: Callable[[Tensor, Tensor], Tensor], keepdim: bool = False) -> Callable[..., Tensor]:
    """`argument`: of the sigmoid, from the log-sum-exp of the scores and the sinks."""

    def model(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        scores = q @ k.mT
        factor = argument(torch.logsumexp(scores, -1, keepdim), sinks).sigmoid()
        return (scores.softmax(-1) @ v) * (factor if keepdim else factor.unsqueeze(-1))

    return model


NO_SINKS = {
    "one for each query": with_sinks(lambda lse, sinks: lse - sinks),
    "one row for all": with_sinks(lambda lse, sinks: lse - sinks[None]),
    "an axis too few": with_sinks(lambda lse, sinks: lse - sinks.view(1, H, 1), keepdim=True),
    "of whole numbers": with_sinks(lambda lse, sinks: lse.long() - sinks.view(1, H, 1)),
    "twice": with_sinks(lambda lse, sinks: torch.sub(lse, sinks.view(1, H, 1), alpha=2)),
}


@pytest.mark.parametrize("name", NO_SINKS)
def test_factor_that_is_no_sink(name: str) -> None:
    assert "also read by 'logsumexp'" in refused(NO_SINKS[name], *qkv(), torch.randn(H))


SINKS = {
    "view": with_sinks(lambda lse, sinks: lse - sinks.view(1, H, 1)),
    "two axes": with_sinks(lambda lse, sinks: lse - sinks.unsqueeze(-1)),
    "axis by axis": with_sinks(lambda lse, sinks: lse - sinks.unsqueeze(0).unsqueeze(-1).expand(B, H, S)),
    "four axes": with_sinks(lambda lse, sinks: lse - sinks.view(1, H, 1, 1), keepdim=True),
}


@pytest.mark.parametrize("name", SINKS)
def test_factor_that_is_a_sink(name: str) -> None:
    module, inputs = graphs.captured(SINKS[name], *qkv(), torch.randn(H))
    (place,) = graphs.check(module, inputs)
    assert graphs.arguments(place)["sinks"] == "l_sinks_"


def less_maximum(scores: Tensor) -> Tensor:
    return scores - scores.amax(-1, keepdim=True)


def a_sink_beside(scores: Tensor, sinks: Tensor) -> Tensor:
    return torch.cat([scores, sinks.view(1, H, 1, 1).expand(B, H, S, 1)], -1)


SHIFTED = {
    "column": lambda s, v, sinks: a_sink_beside(less_maximum(s), sinks).softmax(-1)[..., :-1] @ v,
    "factor": lambda s, v, sinks: (
        (less_maximum(s).softmax(-1) @ v) * (less_maximum(s).logsumexp(-1, True) - sinks.view(1, H, 1, 1)).sigmoid()
    ),
    "factor of the same": lambda s, v, sinks: (
        ((x := less_maximum(s)).softmax(-1) @ v) * (x.logsumexp(-1, True) - sinks.view(1, H, 1, 1)).sigmoid()
    ),
    "soft cap": lambda s, v, sinks: (5.0 * torch.tanh(less_maximum(s) / 5.0)).softmax(-1) @ v,
}


@pytest.mark.parametrize("name", SHIFTED)
def test_maximum_that_is_taken_off_too_early(name: str) -> None:
    """A softmax is the same, what is done to the scores before it is not."""
    reason = refused(lambda q, k, v, sinks: SHIFTED[name](q @ k.mT, v, sinks), *qkv(), torch.randn(H))
    assert "stands between the scores" in reason or "also read by" in reason


def test_maximum_that_is_taken_off_last() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return less_maximum(a_sink_beside(q @ k.mT, sinks)).softmax(-1)[..., :-1] @ v

    module, inputs = graphs.captured(model, *qkv(), torch.randn(H))
    (place,) = graphs.check(module, inputs)
    assert graphs.arguments(place)["sinks"] == "l_sinks_"


@pytest.mark.parametrize("shape", [(1, 1, -1, 1), (-1, 1, 1, 1)], ids=["of each query", "of each batch"])
def test_column_that_is_no_sink(shape: tuple[int, ...]) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        column = sinks.view(shape).expand(H, H, S, 1)
        return torch.cat([q @ k.mT, column], -1).softmax(-1)[..., :-1] @ v

    four = [x.repeat(2, 1, 1, 1) for x in qkv()]
    assert "is not one number for each head" in refused(model, *four, torch.randn(H))


# --- eight bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        lambda q, k, v: (q @ k.mT).to(torch.float8_e4m3fn).float().softmax(-1) @ v,
        lambda q, k, v: (q @ k.mT).softmax(-1).to(torch.float8_e4m3fn).float() @ v,
    ],
    ids=["scores", "weights"],
)
def test_rounding_to_eight_bits_is_part_of_the_model(model: Callable[..., Tensor]) -> None:
    reason = refused(model, *qkv())
    assert "stands between the scores" in reason or "changes the attention weights" in reason
