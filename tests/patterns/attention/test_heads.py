"""Key heads that are repeated for the query heads are folded into groups; other maps of heads are not."""

from __future__ import annotations

from collections.abc import Callable

import attention_graphs as graphs
import pytest
import torch
from torch import Tensor
from written_attention import B, D, H, S, qkv, repeat_kv

REPEATS: dict[str, Callable[[Tensor], Tensor]] = {
    "repeat_kv": lambda x: repeat_kv(x, 2),
    "unsqueeze": lambda x: x.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2),
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=1),
    "sequence first": lambda x: x.transpose(1, 2).repeat_interleave(2, dim=2).transpose(1, 2),
    "with a cache": lambda x: repeat_kv(torch.cat([x[:, :, :2], x[:, :, 2:] * 1.5], dim=2), 2),
    "with an empty cache": lambda x: repeat_kv(torch.cat([x[:, :, :0], x], dim=2), 2),
    "axes from the end": lambda x: x.permute(0, -2, -3, -1).repeat_interleave(repeats=2, dim=-2).transpose(-3, -2),
    "axes by name": lambda x: x.transpose(dim0=1, dim1=2).repeat_interleave(2, 2).permute(dims=(0, 2, 1, 3)),
    "all axes reversed": lambda x: x.permute(3, 2, 1, 0).repeat_interleave(2, 2).permute([3, 2, 1, 0]),
    "twice": lambda x: x[:, :1].repeat_interleave(2, 1).repeat_interleave(2, 1),
    "an upcast": lambda x: repeat_kv(x.bfloat16(), 2).float(),
    "ellipsis": lambda x: x[:, :, None, ...].expand(-1, -1, 2, -1, -1).reshape(B, H, S, D),
    "copied": lambda x: repeat_kv(x, 2).contiguous(),
    "viewed": lambda x: x.view(B, 2, 1, S, D).expand(-1, -1, 2, -1, -1).reshape(B, H, S, D),
    "matrices turned": lambda x: x.mT.repeat_interleave(2, 1).mT,
}


def attention_of(repeat: Callable[[Tensor], Tensor]) -> graphs.Site:
    """The attention of queries with keys and values of two heads, each of which `repeat` makes those of the queries."""
    module, inputs = graphs.captured(lambda q, k, v: (q @ repeat(k).mT).softmax(-1) @ repeat(v), *qkv(kv_heads=2))
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site)
    return place


@pytest.mark.parametrize("name", REPEATS)
def test_repeated_heads_are_folded(name: str) -> None:
    place = attention_of(REPEATS[name])
    assert graphs.heads(place, "k") == graphs.heads(place, "v") == (1 if name == "twice" else 2)


OTHER_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "tiled": lambda x: x.repeat(1, 2, 1, 1),
    "expanded in front": lambda x: x[:, None].expand(-1, 2, -1, -1, -1).reshape(B, H, S, D),
    "rolled": lambda x: repeat_kv(x, 2).roll(1, 1),
    "tokens reversed": lambda x: (
        x[:, :, None, torch.arange(S - 1, -1, -1)].expand(-1, -1, 2, -1, -1).reshape(B, H, S, D)
    ),
    "tokens repeated": lambda x: x.repeat_interleave(2, dim=1)[:, :, :1].repeat_interleave(S, dim=2),
    "each as often as a tensor says": lambda x: x.repeat_interleave(torch.tensor([1, 3]), 1, output_size=H),
    "of one batch, repeated": lambda x: x[:1].repeat(1, 2, 1, 1).repeat_interleave(B, dim=0),
    "tokens doubled": lambda x: x.repeat(1, 2, 1, 1).repeat_interleave(2, dim=2),
    "each copy another": lambda x: (x[:, :, None] * torch.tensor([1.0, 2.0]).view(2, 1, 1)).reshape(B, H, S, D),
    "through other strides": lambda x: (
        x.as_strided((B, 2, 1, S, D), (2 * S * D, S * D, 1, 1, S)).expand(-1, -1, 2, -1, -1).reshape(B, H, S, D)
    ),
    "of one batch": lambda x: x[:1, :, None].expand(B, -1, 2, -1, -1).reshape(B, H, S, D),
    "tokens doubled by a view": lambda x: (
        x.repeat(1, 2, 1, 1)[:, :, None].expand(-1, -1, 2, -1, -1).reshape(B, H, 2 * S, D)
    ),
    "by name": lambda x: torch.repeat_interleave(input=x, repeats=2, dim=1),
    "a view by name": lambda x: torch.reshape(input=x[:, :, None].expand(-1, -1, 2, -1, -1), shape=(B, H, S, D)),
    "a new axis by name": lambda x: torch.unsqueeze(input=x, dim=2).expand(-1, -1, 2, -1, -1).reshape(B, H, S, D),
    "a copy by name": lambda x: torch.clone(input=repeat_kv(x, 2)),
    "heads reversed": lambda x: repeat_kv(x.flip(1), 2)[:, [0, 1, 3, 2]],
    "added to nothing": lambda x: torch.cat([repeat_kv(x, 2)[:, :2], repeat_kv(x, 2)[:, 2:]], 1),
}


@pytest.mark.parametrize("name", OTHER_MAPS)
def test_other_maps_of_heads_stay(name: str) -> None:
    place = attention_of(OTHER_MAPS[name])
    assert graphs.heads(place, "k") == graphs.heads(place, "v") == H


def test_keys_repeated_and_values_not() -> None:
    q, k, _ = qkv(kv_heads=2)
    v = torch.randn(B, H, S, D)
    module, inputs = graphs.captured(lambda q, k, v: (q @ repeat_kv(k, 2).mT).softmax(-1) @ v, q, k, v)
    graphs.check(module, inputs)


def test_key_overwritten_after_it_was_repeated() -> None:
    """The repeat is a copy, so the key may not be read in its stead."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k.clone()
        many = repeat_kv(k, 2)
        k.mul_(2.0)
        return (q @ many.mT).softmax(-1) @ repeat_kv(v, 2) + k.sum()

    module, inputs = graphs.captured(model, *qkv(kv_heads=2))
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site)
    assert graphs.heads(place, "k") == H


FOLDED: dict[str, tuple[Callable[[Tensor], Tensor], str, float | None]] = {
    "an empty cache": (lambda x: torch.cat([x[:, :, :0], x], dim=2), "qkv", None),
    "an empty cache, its axis by place": (lambda x: torch.cat([x[:, :, :0], x], -2), "qkv", None),
    "no lanes": (lambda x: torch.cat([x[..., :0], x], -1), "", None),
    "an upcast by type": (lambda x: x.bfloat16().type(torch.float32), "", None),
    "a softmax that widens": (lambda x: x.bfloat16().softmax(-1, dtype=torch.float32), "", None),
    "a rounding": (lambda x: x.to(torch.bfloat16).float(), "", None),
    "a factor": (lambda x: x * 2, "qk", 4 * D**-0.5),
    "a factor in front": (lambda x: 2 * x, "qk", 4 * D**-0.5),
    "a divisor": (lambda x: x / 2, "qk", 0.25 * D**-0.5),
    "a divided number": (lambda x: 2 / x, "", None),
    "a factor for each lane": (lambda x: x * torch.arange(D), "", None),
    "another tensor's empty cache": (lambda x: torch.cat([x[:, :, :0], x, x[:, :, :1] * 0], 2)[:, :, :S], "", None),
}


@pytest.mark.parametrize("name", FOLDED)
def test_what_is_read_through(name: str) -> None:
    """What is done to q, k and v alike, which of them are read upstream of it, and the scale that it leaves."""
    change, folded, scale = FOLDED[name]
    module, inputs = graphs.captured(
        lambda *qkv: torch.nn.functional.scaled_dot_product_attention(*map(change, qkv)), *qkv()
    )
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site)
    found = graphs.arguments(place)
    given = "".join(name for name in "qkv" if found[name].startswith(("l_", "q", "k", "v")))
    assert (given, found.get("scale")) == (folded, scale)


@pytest.mark.parametrize("factor", [0.5, None])
def test_factor_where_the_number_of_lanes_is_not_known(factor: float | None) -> None:
    """The default scale is no number then, and nothing can be multiplied into it."""
    q, k, v = qkv()
    for x in (q, k, v):
        torch._dynamo.mark_dynamic(x, 3)
    module, inputs = graphs.captured(
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q * 2, k, v, scale=factor), q, k, v
    )
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site)
    assert graphs.arguments(place).get("scale") == (1.0 if factor else None)


def test_heads_of_three_axes_that_are_expanded() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x[:1, None].expand(-1, B, -1, -1).reshape(B, S, D) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    module, inputs = graphs.captured(model, *(x[:, 0] for x in qkv()))
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site)


def test_divisor_that_is_zero() -> None:
    module, _ = graphs.captured(
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q / 0.0, k * 0.0, v), *qkv()
    )
    found = graphs.arguments(graphs.site(module))
    assert [found["q"].split(".")[0], found["k"].split(".")[0], found.get("scale")] == ["truediv", "mul", None]


UPCASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "float": lambda x: x.float(),
    "double": lambda x: x.double(),
    "to": lambda x: x.to(torch.float32),
    "type": lambda x: x.type(torch.float32),
    "type_as": lambda x: x.type_as(torch.ones(1)),
    "_to_copy": lambda x: torch.ops.aten._to_copy(x, dtype=torch.float32),
}


@pytest.mark.parametrize("name", UPCASTS)
def test_upcast_for_the_scores(name: str) -> None:
    """The operator computes in float32 at least, whatever the model casts q and k to."""
    widened = UPCASTS[name]
    module, _ = graphs.captured(
        lambda q, k, v: (widened(q) @ widened(k).mT).softmax(-1).to(v.dtype) @ v, *(x.bfloat16() for x in qkv())
    )
    found = graphs.arguments(graphs.site(module))
    assert [found[name] for name in "qkv"] == [f"l_{name}_.transpose(1, 2)" for name in "qkv"]


def test_values_of_a_wider_dtype() -> None:
    """The scores of half precision are in the result's dtype from the softmax on: q and k are widened for the call."""
    q, k, v = qkv()
    module, _ = graphs.captured(lambda q, k, v: (q @ k.mT).float().softmax(-1) @ v, q.bfloat16(), k.bfloat16(), v)
    found = graphs.arguments(graphs.site(module))
    assert [found[name].endswith(".to(torch.float32)") for name in "qkv"] == [True, True, False]


def merged(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


@pytest.mark.parametrize("lanes_first", [False, True])
def test_batch_and_heads_in_one_axis_that_is_never_split(lanes_first: bool) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k if lanes_first else k.mT
        scores = torch.bmm(q, k).view(B, H, S, S).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf)
        return torch.bmm(scores.softmax(-1).view(B * H, S, S), v)

    q, k, v = map(merged, qkv())
    module, inputs = graphs.captured(model, q, k.mT.contiguous() if lanes_first else k, v)
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site), place.reason
    assert [graphs.heads(place, name) for name in "qkv"] == [H] * 3


def test_rows_of_batch_and_heads_in_another_order() -> None:
    """Row `b * heads + h`, as the scores are split, is made of what was row `h * batch + b` before."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).reshape(B * H, S, D) for x in (q, k, v))
        scores = torch.bmm(q, k.mT).view(B, H, S, S) + torch.zeros(S)
        return torch.bmm(scores.softmax(-1).view(B * H, S, S), v)

    module, inputs = graphs.captured(model, *qkv())
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site), place.reason
    assert [graphs.heads(place, name) for name in "qkv"] == [H] * 3
