"""Attention written out, for the tests of what reads it: inputs, masks, and the only site or refusal of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attention_graphs as graphs
import pytest
import torch
from torch import Tensor

Model = Callable[..., Any]
"""Of q, k, v `[B, H, S, D]`, and of what else a test hands it."""

B, H, S, D = 2, 4, 7, 8
LOWEST = torch.finfo(torch.float32).min


def qkv(kv_heads: int = H, tokens: int = S) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, heads, tokens, D) for heads in (H, kv_heads, kv_heads)]


def causal(x: Tensor) -> Tensor:
    """0 and the least number, to be added to scores `x`."""
    place = torch.arange(x.shape[-1])
    return torch.where(place[None, :] <= place[:, None], torch.zeros(()), LOWEST)


def hidden(x: Tensor) -> Tensor:
    """The keys behind each query of scores `x`, boolean."""
    return torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)


def repeat_kv(x: Tensor, groups: int) -> Tensor:
    """Each head of `[B, H, S, D]` `groups` times, as Hugging Face writes it."""
    batch, heads, tokens, lanes = x.shape
    return x[:, :, None, :, :].expand(batch, heads, groups, tokens, lanes).reshape(batch, heads * groups, tokens, lanes)


def fused(model: Model, *inputs: Tensor, dynamic: bool | None = None) -> dict[str, Any]:
    """The arguments of the only site, without q, k, v. Checks the numbers on the way."""
    module, given = graphs.captured(model, *inputs, dynamic=dynamic)
    (place,) = graphs.check(module, given)
    assert isinstance(place, graphs.Site), place.reason
    return {name: value for name, value in graphs.arguments(place).items() if name not in ("q", "k", "v", "out_order")}


def assert_form(model: Model, expected: dict[str, Any]) -> None:
    """The only site has these arguments beside q, k and v, and no others."""
    found = fused(model, *qkv())
    assert found.keys() == expected.keys()
    assert all(found[key] == pytest.approx(expected[key]) for key in expected)


def refused(model: Model, *inputs: Tensor) -> str:
    """The reason of the only refusal."""
    module, _ = graphs.captured(model, *inputs)
    return graphs.refusal(module)
