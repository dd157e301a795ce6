"""Mixtures of lanes that are almost a rotation: refused with a reason, or only what is exact is fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import assert_exact, capture, find, sites_of
from spellings import HALF, Attention, D, H, Rotate, S, halves, inputs, refused
from torch import Tensor, fx

from fusion_pass.patterns.norm_rope.axes import operand
from fusion_pass.patterns.refused import Refused


def test_reflection() -> None:
    refused("reflection", rotate=lambda q, c, s: q * c + torch.cat((q[..., HALF:], q[..., :HALF]), -1) * s)


def test_pairs_that_are_conjugated() -> None:
    """`conj_physical` changes numbers, `resolve_conj` does not."""

    def rotate(q: Tensor, c: Tensor, s: Tensor) -> Tensor:
        pairs = torch.view_as_complex(q.unflatten(-1, (HALF, 2)))
        return torch.view_as_real(pairs.conj_physical() * torch.complex(c[..., :HALF], s[..., :HALF])).flatten(-2)

    refused("a reflection, not a rotation", rotate=rotate, norm=None)


def test_rotated_lanes_with_a_gap() -> None:
    """The outer lanes are rotated and those between them kept: no rotary_dim and rotary_start say that."""

    def rotate(q: Tensor, c: Tensor, s: Tensor) -> Tensor:
        a, kept, b = q.split((4, D - 8, 4), -1)
        c, s = c[..., :4], s[..., :4]
        return torch.cat((a * c - b * s, kept, b * c + a * s), -1)

    refused("not one block of even width", rotate=rotate)


@pytest.mark.parametrize("tail", [lambda x: 2 * x, lambda x: -x, lambda x: x.flip(-1)], ids=["twice", "minus", "moved"])
def test_lanes_beside_the_rotated_ones_that_do_not_pass_through(tail: Callable[[Tensor], Tensor]) -> None:
    def rotate(q: Tensor, c: Tensor, s: Tensor) -> Tensor:
        x = q[..., :HALF]
        swapped = torch.cat((-x[..., HALF // 2 :], x[..., : HALF // 2]), -1)
        c, s = (torch.cat((t[..., : HALF // 2],) * 2, -1) for t in (c, s))
        return torch.cat((x * c + swapped * s, tail(q[..., HALF:])), -1)

    sites = sites_of(Attention(rotate=rotate, norm=None), *inputs())
    assert all(
        site.call.options["rotary_dim"] == HALF == site.outputs[0].node.meta["example_value"].shape[-1]
        for site in sites
    )


@pytest.mark.parametrize(
    "rotate",
    [
        lambda q, c, s: q * c + torch.cat((-q[:, :, H // 2 :], q[:, :, : H // 2]), 2) * s,
        lambda q, c, s: q * c + torch.cat((-q.roll(1, 1)[..., HALF:], q[..., :HALF]), -1) * s,
        lambda q, c, s: halves(q * q, c, s) + q,
        lambda q, c, s: q * c + torch.cat((-q[..., HALF:], q[..., :HALF]), -1) * s + 1.0,
    ],
    ids=("over_heads", "previous_token", "of_the_square", "shifted"),
)
def test_no_wrong_match(rotate: Rotate) -> None:
    module, args = capture(Attention(rotate=rotate, norm=None), *inputs())
    sites, _ = find(module)
    assert_exact(module, args, sites)


@pytest.mark.parametrize(
    "mix",
    [
        lambda q, c, s: q * c + (q.roll(1, -1) + q.roll(2, -1)) * s,
        lambda q, c, s: q * c + q.sum(-1, keepdim=True) * s,
        lambda q, c, s: q * c + q * s,
        lambda q, c, s: q * c + (q[..., :1] + q[..., 1:2]) * s,
    ],
    ids=["three_lanes", "all_lanes", "one_lane", "three_lanes_of_one_table"],
)
def test_other_mixtures_are_none_of_our_business(mix: Rotate) -> None:
    found = find(capture(Attention(rotate=mix, norm=None), *inputs())[0])
    assert found == ([], [])


def test_product_written_into_one_number() -> None:
    """Nothing of it has lanes, and nothing is found."""

    def model(x: Tensor, y: Tensor) -> Any:
        out = torch.empty(1, 1, 1)
        out[:] = x * y
        return out.squeeze() + 1

    assert sites_of(model, *torch.randn(2, 1, 1, 1)) == []


def test_operand_with_an_axis_that_plays_no_role() -> None:
    node = fx.Graph().placeholder("x")
    node.meta["example_value"] = torch.empty(2, S, 2, H // 2, D)
    with pytest.raises(Refused, match="'x' has an axis of unknown role"):
        operand(node, {"batch": 0, "sequence": 1, "heads": None}, H, D)
