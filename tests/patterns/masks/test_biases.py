"""A bias that is data beside a mask that hides by finite numbers: ALiBi and causality in BLOOM, MPT and Falcon.

The mask becomes conditions, and the bias a mask of the call, where the bias is bounded: a far one could bring back a
hidden key.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attention_graphs as graphs
import pytest
import torch
from torch import Tensor

from fusion_pass.graph.effects import Effects
from fusion_pass.patterns.masks.ranges import Ranges

B, H, S, D = 2, 4, 7, 8
LOWEST = torch.finfo(torch.float32).min

Model = Callable[..., Tensor]


def qkv() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, H, S, D, requires_grad=True) for _ in range(3)]


def future(scores: Tensor) -> Tensor:
    return torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)


def numbers(scores: Tensor) -> Tensor:
    return torch.zeros(scores.shape[-2:]).masked_fill(future(scores), LOWEST)


def slopes() -> Tensor:
    return torch.pow(torch.full((), 0.25), torch.arange(1, 1 + H))


def of_mpt(tokens: int) -> Tensor:
    """`[H, 1, tokens]`"""
    base = torch.arange(1, H + 1, dtype=torch.int64).float() * (8 / H)
    bias = torch.arange(1 - tokens, 1, dtype=torch.int32).view(1, 1, 1, tokens)
    return (bias * (1.0 / torch.pow(2, base)).view(1, H, 1, 1)).squeeze(0)


def of_bloom(seen: Tensor) -> Tensor:
    """`[B, H, 1, tokens]`"""
    places = ((seen.cumsum(dim=-1) - 1) * seen)[:, None, :]
    return (slopes()[..., None] * places)[:, :, None]


def of_distance(tokens: int) -> Tensor:
    """`[H, tokens, tokens]`"""
    place = torch.arange(tokens)
    return -(place[None, :] - place[:, None]).abs() * slopes()[:, None, None]


def lifted(number: float) -> Tensor:
    """Every other key by `number`, and the others lowered by it."""
    return torch.where(torch.arange(S) % 2 == 0, -number, number)


def past(scores: Tensor) -> Tensor:
    """What lies more than two keys back."""
    return torch.ones(scores.shape[-2:], dtype=torch.bool).tril(-3)


def attention(change: Callable[..., Tensor]) -> Model:
    def model(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
        return change((q @ k.mT) * 0.25, *others).softmax(-1) @ v

    return model


BOUNDED: dict[str, tuple[Model, dict[str, Any]]] = {
    "MPT": (attention(lambda s: (s + of_mpt(s.shape[-1])).masked_fill(future(s), LOWEST)), {}),
    "BLOOM": (
        attention(lambda s: s + of_bloom(torch.ones(s.shape[0], s.shape[-1], dtype=torch.int64)) + numbers(s)),
        {},
    ),
    "by distance": (attention(lambda s: torch.where(future(s), LOWEST, s) + of_distance(s.shape[-1])), {}),
    "added to the mask": (attention(lambda s: s + (of_distance(s.shape[-1]) + numbers(s))), {}),
    "masked (Falcon)": (attention(lambda s: s + of_mpt(s.shape[-1]).masked_fill(future(s), LOWEST)), {}),
    "chosen": (attention(lambda s: s + torch.where(future(s), LOWEST, of_mpt(s.shape[-1]))), {}),
    "chosen the other way": (
        attention(lambda s: s + torch.where(~future(s), of_mpt(s.shape[-1]), torch.full((), LOWEST))),
        {},
    ),
    "chosen by a method": (attention(lambda s: s + of_mpt(s.shape[-1]).where(~future(s), LOWEST)), {}),
    "masked by the largest number that hides": (
        attention(lambda s: s + of_mpt(s.shape[-1]).masked_fill(future(s), -1e8)),
        {},
    ),
    "masked and scaled to the largest number that hides": (
        attention(lambda s: (s + of_mpt(s.shape[-1]).masked_fill(future(s), -2e8)) * 0.5),
        {},
    ),
    "a quarter of the number that hides": (
        attention(lambda s: s + lifted(2.5e7) + torch.where(future(s), -1e8, 0.0)),
        {},
    ),
    "in a window": (
        attention(lambda s: (s + of_mpt(s.shape[-1])).masked_fill(future(s) | past(s), LOWEST)),
        {"window_left": 2},
    ),
}


@pytest.mark.parametrize(("name", "dynamic"), [*((name, None) for name in BOUNDED), ("MPT", True), ("BLOOM", True)])
def test_bounded_bias(name: str, dynamic: bool | None) -> None:
    model, conditions = BOUNDED[name]
    module, inputs = graphs.captured(model, *qkv(), dynamic=dynamic)
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site), place.reason
    found = graphs.conditions(place)
    mask = place.call.tensors["mask"]
    assert mask is not None
    assert {**found, "mask": None} == {"causal": "top_left", "mask": None, **conditions}


def test_scaled_bias() -> None:
    """It is scaled with the scores, in float32."""
    model = attention(lambda s: ((s + of_mpt(s.shape[-1])) * 0.5).masked_fill(future(s), LOWEST))
    module, inputs = graphs.captured(model, *qkv())
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site), place.reason
    found = graphs.arguments(place)
    assert found["scale"] == 0.125
    assert found["mask"].endswith(".to(torch.float32).mul(0.5)")


def test_scaled_bias_of_float64() -> None:
    """It is not rounded to float32 before it is scaled."""

    def model(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return ((q @ k.mT + bias) * 0.3).softmax(-1) @ v

    module, _ = graphs.captured(model, *torch.randn(3, B, H, S, D).double(), torch.randn(H, S, S).double())
    mask = graphs.site(module).call.tensors["mask"]
    assert mask is not None
    assert mask.steps[0].args == (torch.float64,)


PADDED = torch.tensor([[True] * S, [False] * 3 + [True] * (S - 3)])[:, None, None]

HIDDEN = "hide keys by finite numbers, and a row may see no key"

UNBOUNDED: dict[str, tuple[Model, Tensor]] = {
    "data": (attention(lambda s, bias: (s + bias).masked_fill(future(s), LOWEST)), torch.randn(H, 1, S)),
    "a large slope": (
        attention(lambda s, x: (s + of_mpt(S) * 2e38).masked_fill(future(s), LOWEST)),
        torch.zeros(()),
    ),
    "a slope that is data": (
        attention(lambda s, slope: (s + torch.arange(S) * slope[:, None, None]).masked_fill(future(s), LOWEST)),
        torch.randn(H),
    ),
    "a slope that was written": (
        attention(lambda s, x: (s + torch.arange(S) * torch.ones(H, 1, 1).copy_(x)).masked_fill(future(s), LOWEST)),
        torch.randn(H, 1, 1),
    ),
    "hidden by a number of its size": (
        attention(lambda s, x: (s + torch.arange(S) * 1e8).masked_fill(future(s), -1e9)),
        torch.zeros(()),
    ),
    "hidden by twice its size": (
        attention(lambda s, x: s + lifted(5e7) + torch.where(future(s), -1e8, 0.0)),
        torch.zeros(()),
    ),
    "hidden by little more than three times its size": (
        attention(lambda s, x: s + lifted(3e7) + torch.where(future(s), -1e8, 0.0)),
        torch.zeros(()),
    ),
    "hidden by two numbers": (
        attention(lambda s, x: (s + lifted(1e8)).masked_fill(future(s), LOWEST).masked_fill(past(s), -1e8)),
        torch.zeros(()),
    ),
    "hidden by a number that is scaled to its size": (
        attention(lambda s, x: s.masked_fill(future(s), -1e9) * 0.01 + lifted(1e7)),
        torch.zeros(()),
    ),
    "hidden by an added number that is scaled to its size": (
        attention(lambda s, x: (s + torch.where(future(s), -1e10, 0.0)) * 0.01 + lifted(1e8)),
        torch.zeros(()),
    ),
    "scaled to the size of the number that hides": (
        attention(lambda s, x: ((s + lifted(1e7)) * 100).masked_fill(future(s), -1e9)),
        torch.zeros(()),
    ),
    "a row that sees nothing": (
        attention(lambda s, seen: (s + of_mpt(S)).masked_fill(future(s) | ~seen[:, None, None], LOWEST)),
        torch.ones(B, S, dtype=torch.bool),
    ),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_bias_that_may_bring_back_a_hidden_key(name: str) -> None:
    model, other = UNBOUNDED[name]
    module, _ = graphs.captured(model, *qkv(), other)
    assert HIDDEN in graphs.refusal(module)


def test_bias_and_mask_in_one_tensor_are_kept_as_one_where_the_bias_is_not_bounded() -> None:
    module, inputs = graphs.captured(attention(lambda s, bias: s + (bias + numbers(s))), *qkv(), torch.randn(H, 1, S))
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site), place.reason
    assert graphs.conditions(place) == {"mask": "add"}


def written_between(s: Tensor) -> Tensor:
    mask = numbers(s)
    both = of_distance(s.shape[-1]) + mask
    mask.masked_fill_(past(s), LOWEST)
    return s + both


def written_sum(s: Tensor) -> Tensor:
    both = of_distance(s.shape[-1]) + numbers(s)
    both[:, 1:] = 0.0
    return s + both


KEPT_AS_ONE: dict[str, tuple[Model, str]] = {
    "scaled while it is added": (attention(lambda s, seen: s + torch.add(of_mpt(S), numbers(s), alpha=2)), "add"),
    "scaled by the argument between (a deprecated spelling)": (
        attention(lambda s, seen: s + torch.add(numbers(s), 2, of_mpt(S))),
        "add",
    ),
    "written between": (attention(lambda s, seen: written_between(s)), "both"),
    "a sum that is written": (attention(lambda s, seen: written_sum(s)), "both"),
    "masked by a number that hides nothing": (
        attention(lambda s, seen: s + of_mpt(S).masked_fill(future(s), -1e4)),
        "masked_fill",
    ),
    "masked by a number that hides when it is scaled": (
        attention(lambda s, seen: (s + of_mpt(S).masked_fill(future(s), -5e7)) * 2),
        "masked_fill.to(torch.float32).mul(2.0)",
    ),
    "masked by a number that hides nothing when it is scaled": (
        attention(lambda s, seen: (s + of_mpt(S).masked_fill(future(s), -1e9)) * 0.01),
        "masked_fill.to(torch.float32).mul(0.01)",
    ),
    "chosen from two": (attention(lambda s, seen: s + torch.where(future(s), of_distance(S), of_mpt(S))), "where"),
    "chosen by a method from two": (
        attention(lambda s, seen: s + of_mpt(S).where(future(s), of_distance(S))),
        "where",
    ),
    "a row that sees nothing": (
        attention(lambda s, seen: s + of_mpt(S).masked_fill(future(s) | ~seen, LOWEST)),
        "masked_fill",
    ),
}


@pytest.mark.parametrize("name", KEPT_AS_ONE)
def test_bias_and_mask_in_one_tensor_are_kept_as_one(name: str) -> None:
    model, mask = KEPT_AS_ONE[name]
    module, inputs = graphs.captured(model, *qkv(), PADDED)
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site), place.reason
    assert graphs.conditions(place) == {"mask": mask}


def test_bias_beside_a_mask_of_infinities_may_be_anything() -> None:
    model = attention(lambda s, bias: s + bias.masked_fill(future(s), -math.inf))
    module, inputs = graphs.captured(model, *qkv(), torch.randn(H, 1, S))
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site), place.reason
    assert graphs.conditions(place) == {"mask": "l_others_0_", "causal": "top_left"}


def test_bias_and_mask_in_one_tensor_with_a_row_that_sees_no_key() -> None:
    """The first two of the queries see none of the last keys."""
    last: Model = lambda s: torch.ones(s.shape[-2:], dtype=torch.bool).triu(-1)  # noqa: E731
    q, k, v = qkv()
    module, inputs = graphs.captured(
        attention(lambda s: s + of_mpt(S - 2).masked_fill(last(s), LOWEST)), q, k[:, :, 2:], v[:, :, 2:]
    )
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site), place.reason
    assert graphs.conditions(place) == {"mask": "masked_fill"}


def test_small_numbers_beside_a_row_that_sees_no_key() -> None:
    """They hide nothing, and are added as they are."""
    last: Model = lambda s: torch.ones(s.shape[-2:], dtype=torch.bool).triu(-1)  # noqa: E731
    model = attention(lambda s: s.masked_fill(last(s), -math.inf) + torch.where(past(s), -1e4, 0.0))
    q, k, v = qkv()
    module, inputs = graphs.captured(model, q, k[:, :, 2:], v[:, :, 2:])
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site), place.reason
    assert graphs.conditions(place) == {"mask": "where", "causal": "bottom_right"}


# --- scores that are no less than a number ----------------------------------------------------------------------------

RAISED: dict[str, Model] = {
    "max": attention(lambda s: torch.max(s + numbers(s), torch.full((), LOWEST))),
    "maximum": attention(lambda s: torch.maximum(s.masked_fill(future(s), -math.inf), torch.tensor(LOWEST))),
    "clamp": attention(lambda s: (s + numbers(s)).clamp(min=-1e9)),
    "clamp_min": attention(lambda s: s.clamp_min(LOWEST) + numbers(s)),
    "beside a bias": attention(lambda s: (s + of_mpt(S)).masked_fill(future(s), LOWEST).clamp(LOWEST)),
    "and scaled": attention(lambda s: s.masked_fill(future(s), -math.inf).clamp(min=LOWEST) / 8),
}


@pytest.mark.parametrize("name", RAISED)
def test_scores_no_less_than_a_number_that_hides(name: str) -> None:
    module, inputs = graphs.captured(RAISED[name], *qkv())
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site), place.reason
    assert graphs.arguments(place)["causal"] == "top_left"


NOT_RAISED: dict[str, tuple[Model, str]] = {
    "by less": (attention(lambda s, seen: (s + numbers(s)).clamp(min=-100.0)), "stands between the scores"),
    "by a tensor": (attention(lambda s, seen: torch.max(s, seen.float())), "stands between the scores"),
    "from above": (attention(lambda s, seen: (s + numbers(s)).clamp(-1e9, 5.0)), "stands between the scores"),
    "a row that saw nothing": (
        attention(lambda s, seen: s.masked_fill(future(s) | ~seen, -math.inf).clamp(min=LOWEST)),
        "The scores are raised to -3.40282e+38 behind the mask",
    ),
    "and scaled to what hides nothing": (
        attention(lambda s, seen: s.masked_fill(future(s), -math.inf).clamp(min=-1e8) * 1e-8),
        "'masked_fill' replaces hidden scores by a number that is not low enough",
    ),
    "and scaled to what hides nothing, added": (
        attention(lambda s, seen: (s + numbers(s)).clamp(min=-1e8) * 1e-8),
        "'add' replaces hidden scores by a number that is not low enough",
    ),
    "twice, beside a bias of that size": (
        attention(
            lambda s, seen: (
                (s + torch.arange(1, S + 1) * -1e9).masked_fill(future(s), -math.inf).clamp(min=-1e8).clamp(min=-1e30)
            )
        ),
        HIDDEN,
    ),
    "a mask of data": (
        attention(lambda s, seen: (s + seen.float().log()).clamp(min=LOWEST)),
        "The scores are raised to -3.40282e+38 behind the mask",
    ),
}


@pytest.mark.parametrize("name", NOT_RAISED)
def test_scores_no_less_than_a_number_elsewhere(name: str) -> None:
    model, reason = NOT_RAISED[name]
    module, _ = graphs.captured(model, *qkv(), PADDED)
    assert reason in graphs.refusal(module)


# --- ranges -----------------------------------------------------------------------------------------------------------

KNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "arange": lambda x: torch.arange(8) + torch.arange(-3, 5) + torch.arange(1 - x.shape[0], 1),
    "arithmetic": lambda x: (torch.arange(-3, 4) * 3 - 1.5) / torch.arange(2, 9),
    "from a number": lambda x: 1.0 - torch.arange(4) * -2.0,
    "powers": lambda x: torch.pow(torch.arange(1, 6), -2.0) + 2.0 ** torch.arange(-5, 0),
    "logic": lambda x: (x > 0).float() - (x > 1).long(),
    "integers": lambda x: x.to(torch.int8) * 2.0,
    "sums": lambda x: (x > 0).long().cumsum(-1) - (x > 0).float().cumsum(dim=0),
    "moved": lambda x: torch.cat([torch.arange(6.0).view(2, 3).t()[:, 1], torch.full((2,), -4.0)])[None].expand(2, -1),
    "chosen": lambda x: torch.where(x > 0, 3.0, torch.arange(8)) + (x > 0).float().masked_fill(x > 1, -2.0),
    "chosen by a method": lambda x: torch.arange(8.0).where(x > 0, 50.0),
    "distance": lambda x: (torch.arange(8)[None] - torch.arange(8)[:, None]).abs().neg() * 0.5,
    "cut": lambda x: (torch.arange(-5, 0) * 0.1).long(),
}


@pytest.mark.parametrize("name", KNOWN)
def test_range_holds_every_number(name: str) -> None:
    x = torch.randn(8, generator=torch.Generator().manual_seed(0)) * 50
    module, inputs = graphs.captured(KNOWN[name], x)
    ranges, values = Ranges(Effects(module.graph)), graphs.values(module, inputs)
    (result,) = module.graph.find_nodes(op="output")[0].args[0]
    assert ranges.of(result) is not None
    for node in module.graph.nodes:
        found, value = ranges.of(node), values[node.name]
        if found is not None and isinstance(value, Tensor):
            assert found[0] - 1e-6 <= float(value.min()), node.name
            assert float(value.max()) <= found[1] + 1e-6, node.name


UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "data": lambda x: x * 2.0,
    "a quotient by what may be 0": lambda x: 1.0 / torch.arange(-2, 3),
    "a power of what may be negative": lambda x: torch.pow(torch.arange(-2, 3) * 1.0, 3.0),
    "too large for its dtype": lambda x: torch.full((2,), 1e6).half(),
    "too large for a number": lambda x: torch.pow(torch.full((2,), 10.0), torch.arange(2) * 500),
    "infinite": lambda x: torch.full((2,), math.inf),
    "steps": lambda x: torch.arange(0.0, 50.0, 7.0),
    "the bits of integers": lambda x: torch.arange(3, dtype=torch.int32).view(torch.float32),
    "written": lambda x: torch.zeros(8).add_(x),
    "scaled while it is added": lambda x: torch.add(torch.ones(2), torch.ones(2), alpha=1000),
    "complex": lambda x: torch.arange(3).to(torch.complex64).real,
    "exponentials": lambda x: torch.arange(3).exp(),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_range_that_is_not_known(name: str) -> None:
    module, _ = graphs.captured(UNKNOWN[name], torch.randn(8))
    (result,) = module.graph.find_nodes(op="output")[0].args[0]
    assert Ranges(Effects(module.graph)).of(result) is None
