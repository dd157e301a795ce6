"""Keys that are written into a cache, of which alone the attention knows: still one call for q and k of the layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from exactness import sites_of
from spellings import HALF, B, D, H, S, halves, rms
from torch import Tensor

PLACES = 20


def copied(cache: Tensor, keys: Tensor, places: Tensor) -> Tensor:
    cache[:, :, 2 : 2 + S].copy_(keys)
    return cache[:, :, : 2 + S]


def assigned(cache: Tensor, keys: Tensor, places: Tensor) -> Tensor:
    cache[:, :, places] = keys
    return cache


WRITES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "slice": copied,
    "setitem": assigned,
    "index_copy_": lambda cache, keys, places: cache.index_copy_(2, places, keys),
}

Inputs = tuple[Tensor, ...]


def inputs() -> Inputs:
    torch.manual_seed(0)
    angle = torch.randn(S, HALF).repeat(1, 2)
    caches = torch.randn(2, B, H, PLACES, D)
    return *torch.randn(3, B, H, S, D), *torch.randn(2, D), angle.cos(), angle.sin(), *caches, torch.arange(2, 2 + S)


def model(write: str, keys_first: bool = False, eps: float = 1e-6) -> Callable[..., Tensor]:
    def run(*args: Tensor) -> Tensor:
        q, k, v, q_weight, k_weight, cos, sin, key_cache, value_cache, places = args
        if keys_first:
            k = halves(rms(k, k_weight, eps), cos, sin)
        q = halves(rms(q, q_weight), cos, sin)
        if not keys_first:
            k = halves(rms(k, k_weight, eps), cos, sin)
        keys, values = WRITES[write](key_cache, k, places), WRITES[write](value_cache, v, places)
        return F.scaled_dot_product_attention(q, keys, values)

    return run


@pytest.mark.parametrize("keys_first", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_query_and_key_are_one_call(write: str, keys_first: bool) -> None:
    with torch.no_grad():
        (site,) = sites_of(model(write, keys_first), *inputs())
    assert site.fusion == "qk_norm_rope"
    weight = site.call.tensors["q_weight"]
    assert weight is not None
    assert "3" in weight.node.name  # the fourth argument


def test_another_eps_makes_it_two() -> None:
    with torch.no_grad():
        sites = sites_of(model("slice", eps=1e-5), *inputs())
    assert [site.fusion for site in sites] == ["norm_rope", "norm_rope"]


def test_keys_that_nobody_reads_are_not_computed() -> None:
    def without(*args: Tensor) -> Tensor:
        q, k, v, q_weight, k_weight, cos, sin, keys, values, _ = args
        halves(rms(k, k_weight), cos, sin)
        return F.scaled_dot_product_attention(halves(rms(q, q_weight), cos, sin), keys, values)

    with torch.no_grad():
        sites = sites_of(without, *inputs())
    assert {len(site.outputs) for site in sites} == {1}


def test_keys_that_are_rotated_behind_the_attention() -> None:
    """No attention reads them at all, and the queries are read before they are there."""

    def later(*args: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, q_weight, k_weight, cos, sin, keys, values, _ = args
        out = F.scaled_dot_product_attention(halves(rms(q, q_weight), cos, sin), keys, values)
        return out, halves(rms(k + out, k_weight), cos, sin)

    with torch.no_grad():
        sites = sites_of(later, *inputs())
    assert [site.fusion for site in sites] == ["norm_rope", "norm_rope"]
