"""The measurement behind a rotation: what is no function of the lanes alone, and what only looks equal."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from exactness import capture, find, sites_of
from spellings import HALF, B, H, S, halves
from torch import Tensor

from fusion_pass.patterns.norm_rope.rotary import MAX_HEAD_DIM, equal


def test_one_number_is_not_equal_to_the_same_number_in_every_lane() -> None:
    assert equal(np.ones((2, 8)), np.ones((2, 8)))
    assert not equal(np.ones((2, 1)), np.ones((2, 8)))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def tables(lanes: int) -> tuple[Tensor, Tensor]:
    angle = torch.randn(1, S, 1, lanes // 2).repeat(1, 1, 1, 2)
    return angle.cos(), angle.sin()


def test_head_wider_than_any_kernel() -> None:
    lanes = MAX_HEAD_DIM + 2
    assert sites_of(turned, torch.randn(1, S, 1, lanes), *tables(lanes)) == []


def test_lanes_of_unknown_number() -> None:
    def model(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    x = torch.randn(B, S, H, 2 * HALF)
    torch._dynamo.mark_dynamic(x, 3)
    module, _ = capture(model, x, *tables(2 * HALF), dynamic=True)
    assert find(module) == ([], [])


NO_ROTATION: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "the sum of two lanes": lambda x, c, s: x.sum(-1, keepdim=True).expand_as(x) * c[..., :1],
    "of each token's neighbour": lambda x, c, s: x * c + torch.cat((-x[..., 1:], x[..., :1]), -1).roll(1, 1) * s,
}


@pytest.mark.parametrize("name", NO_ROTATION)
def test_two_lanes_that_are_not_rotated(name: str) -> None:
    module, _ = capture(NO_ROTATION[name], torch.randn(B, S, H, 2), *tables(2))
    assert find(module) == ([], [])


def test_rotation_of_a_quotient_that_is_the_tensor_almost_everywhere() -> None:
    """`x * x / x` is NaN at 0, and the rotation of `x` is not."""
    module, _ = capture(lambda x, c, s: halves(x * x / x, c, s), torch.randn(B, S, H, 2 * HALF), *tables(2 * HALF))
    ((site,), _) = find(module)
    operand = site.call.tensors["x"]
    assert operand is not None
    assert operand.node.name == "truediv"
