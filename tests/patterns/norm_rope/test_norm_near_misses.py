"""Norms that are almost what the operators compute: refused with a reason, or left where they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exactness import assert_exact, capture, find, sites_of
from spellings import HALF, Attention, B, D, H, Normalise, S, halves, inputs, refused, rms, tables
from torch import Tensor


@pytest.mark.parametrize(
    "norm",
    [
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(2, keepdim=True) + 1e-6) * w,
        lambda x, w: x * torch.rsqrt(x[..., :HALF].pow(2).mean(-1, keepdim=True) + 1e-6) * w,
        lambda x, w: x / (torch.sqrt(x.pow(2).mean(-1, keepdim=True)) + 1e-6) * w,
        lambda x, w: x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-6) * w,
        lambda x, w: x * torch.rsqrt(x.roll(1, 2).pow(2).mean(-1, keepdim=True) + 1e-6) * w,
        lambda x, w: x * torch.rsqrt(x.mean(-1, keepdim=True) + 1e-6) * w,
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-12 * torch.ones(1)) * w,
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) - -1e-12) * w,
        lambda x, w: (
            x * torch.rsqrt(torch.addcmul(x.pow(2).mean(-1, keepdim=True), *torch.ones(2, 1, 1, 1), value=1e-12)) * w
        ),
        lambda x, w: x * torch.rsqrt(torch.div(x.pow(2).sum(-1, keepdim=True), D, rounding_mode="floor") + 1e-6) * w,
        lambda x, w: x / (torch.linalg.vector_norm(x, 1, dim=-1, keepdim=True) / D**0.5) * w,
        lambda x, w: x / (torch.linalg.vector_norm(x, ord=4, dim=-1, keepdim=True) / D**0.5) * w,
        lambda x, w: x / (torch.norm(x, p=3, dim=-1, keepdim=True) / D**0.5) * w,
    ],
    ids=(
        "over_heads",
        "over_half",
        "eps_outside_root",
        "of_another",
        "of_next_head",
        "not_squared",
        "tiny_eps_computed",
        "tiny_eps_subtracted",
        "tiny_eps_by_addcmul",
        "mean_rounded_down",
        "sum_of_magnitudes",
        "fourth_root",
        "cube_root",
    ),
)
def test_wrong_norm(norm: Normalise) -> None:
    refused("not provably by RMSNorm or LayerNorm", norm=norm)


def test_sum_instead_of_mean() -> None:
    """Sum of squares is a mean of squares with another weight and eps, which are not in the graph."""
    refused("not provably", norm=lambda x, w: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) * w)


def test_sum_of_integers() -> None:
    """`sum(dtype=...)` cuts what it adds, so it is no mean of squares."""

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True, dtype=torch.int64) / D + 1e-6) * w

    with torch.no_grad():  # there is no gradient of integers
        refused("not provably", norm=norm)


@pytest.mark.parametrize(
    ("factor", "dtype"),
    [(1.5, torch.float), (1.5, torch.long), ([2.0] * D, torch.float)],
    ids=["number", "cut_to_an_integer", "lanes"],
)
def test_weight_that_is_multiplied_by_a_constant(factor: float | list[float], dtype: torch.dtype) -> None:
    """The product is no tensor of the graph where the factor is behind the norm."""
    refused("The weight of the norm is not a tensor", norm=lambda x, w: rms(x, w) * torch.tensor(factor, dtype=dtype))


@pytest.mark.parametrize("shape", [(B, 1, 1, D), (1, S, 1, D), (B, S, 1, D)], ids=["batch", "token", "both"])
def test_weight_of_each_token(shape: tuple[int, ...]) -> None:
    """As where another network modulates the norm. The operator takes one weight for all of them."""
    weight = torch.rand(shape) + 0.5
    refused("The weight of the norm is not a tensor", norm=lambda x, w: rms(x, 1.0) * weight)


def test_layer_norm_with_a_weight_stored_around_one() -> None:
    refused("has no operator", norm=lambda x, w: F.layer_norm(x, (D,), None, None, 1e-6) * (1 + w))


def test_layer_norm_with_a_bias_that_is_no_tensor() -> None:
    """Fused without its bias, the call would be wrong by 0.5 everywhere."""
    refused("The bias of the norm", norm=lambda x, w: F.layer_norm(x, (D,), w, None, 1e-6) + 0.5)


def test_norm_after_the_rotation_whose_weight_is_of_each_batch() -> None:
    """The rotation is fused; the norm, whose weight is multiplied into the factor of the row, stays."""

    def model(x: Tensor, w: Tensor, c: Tensor, s: Tensor) -> Any:
        y = halves(x, c, s)
        return y * (torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * w)

    (site,) = sites_of(model, torch.randn(2, S, H, D), torch.rand(2, 1, 1, D), *tables())
    assert site.fusion == "rope"


def test_default_eps_in_low_precision() -> None:
    """`F.rms_norm` without eps: that of float32 or of the tensor's dtype, by the version of torch."""

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x, (D,), w)

    given = [x.bfloat16() for x in inputs()]
    low = Attention(lambda q, c, s: halves(q, c.to(q.dtype), s.to(q.dtype)), norm).bfloat16()
    (site,), _ = find(capture(low, *given)[0])
    assert site.call.options["norm"] == "none"
    (site,), _ = find(capture(Attention(norm=norm), *inputs())[0])
    assert site.call.options["eps"] == torch.finfo(torch.float32).eps


def eight_bits(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).to(torch.float32)


@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_rounding_to_eight_bits_stays_where_it_is(place: str) -> None:
    """Other casts round what a kernel does not round; this one is a quantisation."""
    (site,) = sites_of(Attention(**{place: eight_bits}), *inputs())
    assert site.call.options["norm"] == ("none" if place == "between" else "rms")
    rounding = {node for node in site.region if "float8" in str(node.args)}
    assert not rounding


def test_bits_read_as_numbers() -> None:
    """`view(dtype=...)` moves nothing and changes every number: what is rotated is not what was normalised."""
    module, _ = capture(Attention(between=lambda x: x.view(dtype=torch.int32).float()), *inputs())
    (site,), _ = find(module)
    assert site.call.options["norm"] == "none"


DROPPED = {
    "nothing": (lambda x: F.dropout(x, 0.0), True),
    "nothing, given by name": (lambda x: F.dropout(x, p=0.0, training=True), True),
    "outside of training": (lambda x: F.dropout(x, 0.5, False), True),
    "something": (lambda x: F.dropout(x, 0.5), False),
}


@pytest.mark.parametrize("name", DROPPED)
def test_dropout_between_norm_and_rotation(name: str) -> None:
    between, read = DROPPED[name]
    module, values = capture(Attention(between=between), *inputs())
    sites, _ = find(module)
    assert [site.call.options["norm"] for site in sites] == (["rms"] if read else ["none"])
    if read:
        assert_exact(module, values, sites)


TAKEN_FOR_DATA = {
    "cut to integers": lambda x: x.to(torch.int32).float(),
    "a root of some": lambda x: x.pow(0.5).nan_to_num(),
    "a root of a negative number": lambda x: (-x * x).sqrt().nan_to_num(1.0) + x,
    "a mean of roots": lambda x: (x.sqrt().mean(-1, keepdim=True)).nan_to_num(0.5) + x,
}


@pytest.mark.parametrize("name", TAKEN_FOR_DATA)
def test_what_no_number_stands_for(name: str) -> None:
    """It is computed before, and the call reads what comes out."""
    (site,) = sites_of(Attention(before=TAKEN_FOR_DATA[name]), *inputs())
    assert site.fusion == "qk_norm_rope"
    assert site.call.options["norm"] == ("none" if name == "cut to integers" else "rms")
