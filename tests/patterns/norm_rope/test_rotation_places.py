"""Where a rotation is looked for: what is left out costs nothing, a sum behind layers is read through all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from exactness import capture
from spellings import HALF, B, D, H, S, halves, tables
from torch import Tensor

from fusion_pass.graph.effects import Effects
from fusion_pass.patterns.norm_rope.rotation_places import roots

WEIGHT = torch.randn(D, D)


def candidates(model: Callable[..., Tensor], *inputs: Tensor) -> list[str]:
    module, _ = capture(model, *inputs)
    return [node.name for node in roots(Effects(module.graph), set())]


def by_small_matrix(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = (table[..., :HALF] for table in (cos, sin))
    matrix = torch.stack((torch.stack((a, -b), -1), torch.stack((b, a), -1)), -2)
    return (matrix @ x.unflatten(-1, (HALF, 2)).unsqueeze(-1)).flatten(-3) + 0.0 * x


@pytest.mark.parametrize("rotate", [halves, by_small_matrix])
def test_sums_of_products(rotate: Callable[..., Tensor]) -> None:
    assert candidates(rotate, torch.randn(B, S, H, D), *tables())


RESIDUALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a product of matrices": lambda x, w: x + x @ w.T,
    "a layer": lambda x, w: x + torch.nn.functional.linear(x, w),
    "in place": lambda x, w: (x @ w.T).add_(x),
}


@pytest.mark.parametrize("name", RESIDUALS)
def test_sums_of_projections_are_left_out(name: str) -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = RESIDUALS[name](x, w)
        return x

    assert candidates(model, torch.randn(B, S, D), WEIGHT) == []
