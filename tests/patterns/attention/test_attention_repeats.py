"""A second attention that is called like the first, but for what the comparison of the two calls does not look at."""

from __future__ import annotations

from collections.abc import Callable

import attention_graphs as graphs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion_pass.graph.vocabulary import operation

B, H, S, D = 2, 4, 6, 8


def tensors(heads: int = H) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(B, H, S, D), *torch.randn(2, B, heads, S, D)


def both(model: Callable[..., object], *args: Tensor, dynamic: bool | None = None) -> list[graphs.Site]:
    """The sites of both attentions, exact in float64."""
    found = graphs.check(*graphs.captured(model, *args, dynamic=dynamic))
    sites = [place for place in found if isinstance(place, graphs.Site)]
    assert len(sites) == len(found) == 2
    return sites


def test_alike() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ids = torch.arange(S) // 3
        mask = ids[:, None] == ids[None, :]
        return F.scaled_dot_product_attention(q, k, v, mask) + F.scaled_dot_product_attention(q * 2, k, v, mask)

    first, second = both(model, *tensors())
    assert graphs.conditions(first).keys() == graphs.conditions(second).keys()


def test_documents_overwritten_in_between() -> None:
    """The mask was made of them before and stays what it was."""

    def model(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        mask = ids[:, None, :, None] == ids[:, None, None, :]
        first = F.scaled_dot_product_attention(q * 1, k, v, mask)
        ids.zero_()
        return first + F.scaled_dot_product_attention(q * 1, k, v, mask)

    ids = torch.randint(0, 3, (B, S))
    module, _ = graphs.captured(model, *tensors(), ids)
    first, second = (place for place in graphs.places(module) if isinstance(place, graphs.Site))
    assert set(graphs.conditions(first)) == {"q_segment_ids"}
    assert set(graphs.conditions(second)) == {"mask"}


def test_documents_overwritten_behind_the_mask() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        mask = ids[:, None, :, None] == ids[:, None, None, :]
        ids.zero_()
        return F.scaled_dot_product_attention(q, k, v, mask)

    module, inputs = graphs.captured(model, *tensors(), torch.randint(0, 3, (B, S)))
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site)
    assert set(graphs.conditions(place)) == {"mask"}


def test_repeated_keys_that_somebody_else_reads() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        first = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
        keys = k.repeat_interleave(2, 1)
        return first + F.scaled_dot_product_attention(q, keys, v.repeat_interleave(2, 1)), keys

    first, second = both(model, *tensors(H // 2))
    repeats = [sum(operation(node) == "repeat_interleave" for node in site.region) for site in (first, second)]
    assert repeats == [2, 1]


def test_scales_that_are_attributes() -> None:
    """With dynamic shapes Dynamo makes inputs of them: two inputs of one form."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = 0.25, 0.5

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            first = F.scaled_dot_product_attention(q * self.first, k, v, scale=1.0)
            return first + F.scaled_dot_product_attention(q * self.second, k, v, scale=1.0)

    first, second = both(Model(), *tensors(), dynamic=True)
    assert (first.call.options["scale"], second.call.options["scale"]) == (0.25, 0.5)
