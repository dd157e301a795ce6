"""Packed projections: q, k and v are heads of one tensor, in the two orders that the operator knows or in another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from exactness import sites_of
from spellings import HALF, B, D, S, halves, rms
from torch import Tensor


def views(layout: str) -> Callable[..., Tensor]:
    """q, k and v as views of the projection."""

    def model(x: Tensor, projection: Tensor, q_weight: Tensor, k_weight: Tensor, angle: Tensor) -> Tensor:
        angle = torch.cat((angle, angle), -1)[None, :, None]
        qkv = x @ projection
        if layout == "blocked":
            q, k, v = qkv.unflatten(-1, (8, D)).split((4, 2, 2), 2)
        elif layout == "values before keys":
            q, v, k = qkv.unflatten(-1, (8, D)).split((4, 2, 2), 2)
        elif layout == "keys and values in turn":
            q, kv = qkv.unflatten(-1, (8, D)).split((4, 4), 2)
            k, v = kv[:, :, ::2], kv[:, :, 1::2]
        elif layout == "queries in another order":
            q, k, v = qkv.unflatten(-1, (8, D)).split((4, 2, 2), 2)
            q = q.unflatten(2, (2, 2)).transpose(2, 3).flatten(2, 3)
        elif layout == "grouped":
            q, k, v = (part.flatten(2, 3) for part in qkv.unflatten(-1, (2, 4, D)).split((2, 1, 1), 3))
        elif layout == "grouped, keys first":
            k, q, v = (part.flatten(2, 3) for part in qkv.unflatten(-1, (2, 4, D)).split((1, 2, 1), 3))
        elif layout == "three heads for two":
            q, k, v = qkv.unflatten(-1, (7, D)).split((3, 2, 2), 2)
        elif layout == "a gate behind":
            q, k, v, _ = qkv.unflatten(-1, (8, D)).split(2, 2)
        elif layout == "keys that are queries":
            q, _, v = qkv.unflatten(-1, (8, D)).split((4, 2, 2), 2)
            k = q[:, :, :2]
        else:
            q, k, v = qkv[..., D:].unflatten(-1, (7, D)).split((3, 2, 2), 2)
        q, k = (halves(rms(y, w), angle.cos(), angle.sin()) for y, w in ((q, q_weight), (k, k_weight)))
        return q.sum(2) + k.sum(2) + (v * 2).sum(2)

    return model


PACKED = ("blocked", "grouped")
APART = {
    "values before keys": 8,
    "keys and values in turn": 8,
    "queries in another order": 8,
    "grouped, keys first": 8,
    "three heads for two": 7,
    "a gate behind": 8,
    "a gate in front": 8,
    "keys that are queries": 8,
}
"""And how many heads the projection has."""


def inputs(heads: int = 8) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x, projection = torch.randn(B, S, 32), torch.randn(32, heads * D, requires_grad=True)
    return x, projection, *(torch.rand(2, D) + 0.5), torch.randn(S, HALF)


@pytest.mark.parametrize("layout", PACKED)
def test_packed(layout: str) -> None:
    (site,) = sites_of(views(layout), *inputs())
    assert site.fusion == "qkv_norm_rope"
    assert site.call.options["packing"] == layout


@pytest.mark.parametrize("layout", APART)
def test_apart(layout: str) -> None:
    (site,) = sites_of(views(layout), *inputs(APART[layout]))
    assert site.fusion == "qk_norm_rope"


def test_values_that_are_read_before_the_tables_are_there() -> None:
    """The packed call gives the values, and reads tables that are made of them: q and k are one call without them."""

    def model(x: Tensor, projection: Tensor, q_weight: Tensor, k_weight: Tensor, angle: Tensor) -> Tensor:
        q, k, v = (x @ projection).unflatten(-1, (8, D)).split((4, 2, 2), 2)
        angle = torch.cat((angle, angle), -1)[None, :, None] + v.sum((2, 3), keepdim=True)
        q, k = (halves(rms(y, w), angle.cos(), angle.sin()) for y, w in ((q, q_weight), (k, k_weight)))
        return q.sum(2) + k.sum(2) + (v * 2).sum(2)

    (site,) = sites_of(model, *inputs())
    assert site.fusion == "qk_norm_rope"
