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


def test_key_overwritten_after_it_was_repeated() -> None:
    """The repeat is a copy, so the key may not be read in its stead."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k.clone()
        many = repeat_kv(k, 2)
        k.mul_(2.0)
        return (q @ many.mT).softmax(-1) @ repeat_kv(v, 2) + k.sum()

    module, inputs = graphs.captured(model, *qkv(kv_heads=2))
    graphs.check(module, inputs)
