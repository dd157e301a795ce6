"""What a site writes and somebody else reads: the call writes nothing, so the site stays."""

from __future__ import annotations

from collections.abc import Callable

import attention_graphs as graphs
import exactness
import pytest
import torch
from spellings import HALF, B, D, H, S
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Parts = tuple[Tensor, ...]


def filled(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, half: int) -> None:
    a, b = x[..., :HALF], x[..., HALF:]
    if half == 0:
        out[..., :HALF] = a * cos[..., :HALF] - b * sin[..., :HALF]
    else:
        out[..., HALF:] = b * cos[..., HALF:] + a * sin[..., HALF:]


def read_between(x: Tensor, cos: Tensor, sin: Tensor) -> Parts:
    out = torch.zeros(x.shape)
    filled(out, x, cos, sin, 0)
    early = out.clone()
    filled(out, x, cos, sin, 1)
    return out.transpose(1, 2), early


def view_read_behind(x: Tensor, cos: Tensor, sin: Tensor) -> Parts:
    out = torch.zeros(x.shape)
    front = out[:, :3]
    filled(out, x, cos, sin, 0)
    filled(out, x, cos, sin, 1)
    return out.transpose(1, 2), front * 2


def read_before(x: Tensor, cos: Tensor, sin: Tensor) -> Parts:
    out = torch.zeros(x.shape)
    zeros = out.clone()
    filled(out, x, cos, sin, 0)
    filled(out, x, cos, sin, 1)
    return out.transpose(1, 2), zeros


def rotation() -> Parts:
    angle = torch.randn(1, S, 1, HALF).repeat(1, 1, 1, 2)
    return torch.randn(B, S, H, D), angle.cos(), angle.sin()


def views_of_the_result(x: Tensor, cos: Tensor, sin: Tensor) -> Parts:
    out = torch.zeros(x.shape)
    filled(out, x, cos, sin, 0)
    filled(out, x, cos, sin, 1)
    same = out.type_as(x)
    return same.transpose(1, 2) * 2, same[:, :3] * 2


@pytest.mark.parametrize("model", [read_between, view_read_behind])
def test_rotation_read_while_it_is_written(model: Callable[..., Parts]) -> None:
    (reason,) = exactness.reasons_of(model, *rotation())
    assert "'setitem' writes, inside the site, what is read outside it, by " in reason


@pytest.mark.parametrize("model", [read_before, views_of_the_result])
def test_rotation_read_when_it_is_written(model: Callable[..., Parts]) -> None:
    (site,) = exactness.sites_of(model, *rotation())
    assert site.fusion == "rope"


SCORES: dict[str, Callable[..., Parts]] = {
    "scores": lambda q, k, v, out: (torch.matmul(q, k.mT, out=out).softmax(-1) @ v, out + 1),
    "masked scores": lambda q, k, v, out: (torch.add(q @ k.mT, torch.zeros(S), out=out).softmax(-1) @ v, out + 1),
    "scores of the caller": lambda q, k, v, out: (torch.matmul(q, k.mT, out=out).softmax(-1) @ v,),
    "result": lambda q, k, v, out: (torch.matmul((q @ k.mT).softmax(-1), v, out=out), out + 1),
}


@pytest.mark.parametrize("name", SCORES)
def test_attention_that_writes_for_others(name: str) -> None:
    q, k, v = torch.randn(3, B, H, S, D)
    out = torch.empty(B, H, S, D if name == "result" else S)
    module, _ = graphs.captured(SCORES[name], q, k, v, out)
    assert "writes, inside the site, what is read outside it, by " in graphs.refusal(module)


def test_scores_overwritten_behind_their_softmax() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        buffer = torch.empty(B, H, S, S)
        weights = torch.matmul(q, k.mT, out=buffer).softmax(-1)
        buffer.mul_(2.0)
        return weights @ v

    module, _ = graphs.captured(model, *torch.randn(3, B, H, S, D))
    assert "is written in place by 'mul_', in a way that is not followed" in graphs.refusal(module)


def test_attention_that_writes_for_itself() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.matmul(q, k.mT, out=torch.empty(B, H, S, S)).softmax(-1) @ v

    module, inputs = graphs.captured(model, *torch.randn(3, B, H, S, D))
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site)


REGIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "the keys": (lambda k: k.mul_(2.0), True),
    "a view of the keys": (lambda k: k[:, :, 1:].add_(1.0).sum(), True),
    "nothing": (lambda k: k * 2, False),
    "a copy": (lambda k: k.clone().mul_(2.0), False),
}


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", REGIONS)
def test_keys_written_in_a_checkpointed_region(name: str, captured: bool) -> None:
    """A graph of its own, which this one calls. `captured`: the keys are no argument of its function."""
    region, writes = REGIONS[name]

    def model(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = q @ k.mT
        function = (lambda q: region(k) + q) if captured else (lambda q, k: region(k) + q)
        other = checkpoint(function, *((q,) if captured else (q, k)), use_reentrant=False)
        return scores.softmax(-1) @ v, other

    module, _ = graphs.captured(model, *torch.randn(3, B, H, S, D))
    if writes:
        assert "is overwritten by 'tag_activation_checkpoint' before it is finished" in graphs.refusal(module)
    else:
        graphs.site(module)


def copied_over(x: Tensor, cos: Tensor, sin: Tensor) -> Parts:
    """What is copied counts, whether it is given by place or by name, and not what was there."""
    out = x.clone()
    out.copy_(other=x * 2)
    out = out * 1.0
    turned = torch.cat((-out[..., HALF:], out[..., :HALF]), -1)
    return ((out * cos + turned * sin).transpose(1, 2),)


def tables_copied_over(x: Tensor, cos: Tensor, sin: Tensor) -> Parts:
    old, new = torch.ones_like(cos), torch.ones_like(sin)
    old.copy_(cos, True)
    new.copy_(other=sin * 1.0, non_blocking=True)
    turned = torch.cat((-x[..., HALF:], x[..., :HALF]), -1)
    return ((x * (old * 1.0) + turned * (new * 1.0)).transpose(1, 2),)


@pytest.mark.parametrize("model", [copied_over, tables_copied_over], ids=lambda f: f.__name__)
def test_what_is_copied_by_name(model: Callable[..., Parts]) -> None:
    (site,) = exactness.sites_of(model, *rotation())
    assert site.fusion == "rope"


def test_weight_copied_over_by_name() -> None:
    def model(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor) -> Tensor:
        ones = torch.ones_like(weight)
        ones.copy_(other=weight)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * ones
        return x * cos + torch.cat((-x[..., HALF:], x[..., :HALF]), -1) * sin

    (site,) = exactness.sites_of(model, *rotation(), torch.rand(D) + 0.5)
    assert site.call.tensors["weight"] is not None


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float8_e4m3fn, torch.bool])
@pytest.mark.parametrize("copied", [False, True])
def test_rotation_in_memory_of_another_kind(dtype: torch.dtype, copied: bool) -> None:
    """What is read there was cut, or rounded on purpose."""

    def model(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=dtype)
        if copied:
            out[..., :HALF].copy_(x[..., :HALF] * cos[..., :HALF] - x[..., HALF:] * sin[..., :HALF])
            out[..., HALF:].copy_(x[..., HALF:] * cos[..., HALF:] + x[..., :HALF] * sin[..., HALF:])
        else:
            filled(out, x, cos, sin, 0)
            filled(out, x, cos, sin, 1)
        return out.float()

    module, values = exactness.capture(model, *rotation())
    sites, _ = exactness.find(module)
    assert sites == []


@pytest.mark.parametrize("places", [[0, 1], (0, 1)])
def test_places_in_a_list(places: list[int] | tuple[int, int]) -> None:
    """`x[[0, 1]]` are two rows, and `x[0, 1]` is one element: in a list they are not read."""

    def model(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        factor = torch.ones(2, D)
        factor[places] = 0.5
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * torch.cat((factor[0, :1], factor[1, 1:]))
        return x * cos + torch.cat((-x[..., HALF:], x[..., :HALF]), -1) * sin

    module, values = exactness.capture(model, *rotation())
    sites, _ = exactness.find(module)
    exactness.assert_exact(module, values, sites)
    weights = [site.call.tensors["weight"] for site in sites]
    assert (weights == [None]) == isinstance(places, tuple)
