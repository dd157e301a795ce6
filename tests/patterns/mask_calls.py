"""Calls of attention with a mask, for the tests of masks: what the mask becomes, the numbers checked on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attention_graphs as graphs
import torch
import torch.nn.functional as F
from torch import Tensor

B, H, S, D = 2, 2, 9, 8

Mask = Callable[..., Tensor]
"""(q `[B, H, Sq, D]`, k, data) -> a mask that broadcasts to `[B, H, Sq, Sk]`."""

LOWEST = torch.finfo(torch.float32).min

SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [5, 5, 5, 5, 5, 3, 3, 3, 3]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1], [3, 4, 5, 6, 7, 0, 1, 2, 3]])
PADDING = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1, 1]])
"""`[B, S]`; where padding is 0, a key is no token."""


def rows(q: Tensor) -> Tensor:
    """`[Sq, 1]`"""
    return torch.arange(q.shape[2])[:, None]


def columns(k: Tensor) -> Tensor:
    """`[1, Sk]`"""
    return torch.arange(k.shape[2])[None, :]


def additive(keep: Tensor, value: float = LOWEST, dtype: torch.dtype = torch.float32) -> Tensor:
    """0 where `keep`, and `value` elsewhere."""
    return torch.where(keep, torch.zeros((), dtype=dtype), value)


def proved(mask: Mask, queries: int = S, keys: int = S, dynamic: bool | None = None) -> dict[str, Any]:
    """The arguments a mask becomes. Checks the numbers on the way."""
    return with_data(mask, queries=queries, keys=keys, dynamic=dynamic)


def with_data(
    mask: Mask, *data: Tensor, queries: int = S, keys: int = S, dynamic: bool | None = None
) -> dict[str, Any]:
    """The same for a mask that is made of `data` too."""

    def model(q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask(q, k, *given))

    torch.manual_seed(0)
    q, k, v = torch.randn(B, H, queries, D), torch.randn(B, H, keys, D), torch.randn(B, H, keys, D)
    module, inputs = graphs.captured(model, q, k, v, *data, dynamic=dynamic)
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site), place.reason
    return graphs.conditions(place)
