"""Norm + rotation and the attention it feeds as one site: which pairs are joined, and that one computes both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from exactness import TOLERANCE, capture, errors
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

from fusion_pass.graph.site import Operand, Refusal, Site, Step
from fusion_pass.patterns.attention.pattern import AttentionPattern
from fusion_pass.patterns.block import Block, blocks
from fusion_pass.patterns.norm_rope.pattern import NormRope

B, S, D = 2, 9, 16

Model = Callable[..., Any]
"""Of q, k, v `[B, heads, S, D]`."""


def qkv(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, heads, S, D, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]


def tables(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angle = torch.arange(S)[:, None] * 0.5 ** torch.arange(D // 2)
    return torch.cat([angle.cos()] * 2, -1).to(dtype), torch.cat([angle.sin()] * 2, -1).to(dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1) * sin


def rotated(*tensors: Tensor) -> list[Tensor]:
    cos, sin = tables(tensors[0].dtype)
    return [turned(x, cos, sin) for x in tensors]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)


def packed(change: Callable[[Tensor], Tensor] = lambda v: v) -> Model:
    """From one projection; `change` is done to its values."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, v)], -1)
        queries, keys, values = (x.unflatten(-1, (-1, D)).transpose(1, 2) for x in x.split((4 * D, 2 * D, 2 * D), -1))
        return attend(*rotated(queries, keys), change(values))

    return model


def places_of(model: Model, *inputs: Tensor) -> tuple[fx.GraphModule, list[Any], list[Site | Refusal]]:
    module, given = capture(model, *inputs)
    return module, given, [*NormRope().find(module.graph), *AttentionPattern().find(module.graph)]


def joined(model: Model, *inputs: Tensor) -> list[Block]:
    """The blocks of `model`, each checked to be exact."""
    module, given, places = places_of(model, *inputs)
    found = list(blocks(module.graph, places))
    assert all(error <= TOLERANCE for _, error in errors(module, given, [block.site for block in found]))
    return found


def written_behind(q: Tensor, k: Tensor, v: Tensor) -> Any:
    k = k * 2
    out = attend(*rotated(q, k), v)
    k.add_(1.0)
    return out, k


def two_layers(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return attend(*rotated(attend(*rotated(q, k), v), k), v)


def no_grad_behind(q: Tensor, k: Tensor, v: Tensor) -> Any:
    out = attend(*rotated(q, k), v)
    with torch.no_grad():
        return out * 2


def with_weights(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """A scale, and a mask of data."""
    queries, keys = rotated(q, k)
    mask = v.detach().sum(-1)[:, :1, None]
    return nn.functional.scaled_dot_product_attention(queries, keys, v, mask, scale=0.5, enable_gqa=True)


JOINED: dict[str, tuple[Model, int]] = {
    "q and k": (lambda q, k, v: attend(*rotated(q, k), v), 1),
    "q, k and v of one projection": (packed(), 1),
    "two layers": (two_layers, 2),
    "an input that is written behind": (written_behind, 1),
    "no gradient behind": (no_grad_behind, 1),
    "a mask and a scale": (with_weights, 1),
    "contiguous": (lambda q, k, v: attend(*(x.contiguous() for x in rotated(q, k)), v), 1),
    "to the same dtype": (lambda q, k, v: attend(*(x.float() for x in rotated(q, k)), v), 1),
}


@pytest.mark.parametrize("name", JOINED)
def test_joined(name: str) -> None:
    model, count = JOINED[name]
    found = joined(model, *qkv())
    assert len(found) == count
    assert not any(block.site.call.options["keep"] for block in found)


def input_written_between(q: Tensor, k: Tensor, v: Tensor) -> Any:
    k = k * 2
    queries, keys = rotated(q, k)
    k.zero_()
    return attend(queries, keys, v), k


def table_written_between(q: Tensor, k: Tensor, v: Tensor) -> Any:
    cos, sin = tables()
    queries, keys = turned(q, cos, sin), turned(k, cos, sin)
    cos.zero_()
    return attend(queries, keys, v), cos


def gradient_stopped_between(q: Tensor, k: Tensor, v: Tensor) -> Any:
    queries, keys = rotated(q, k)
    with torch.no_grad():
        return attend(queries, keys, v)


def transposed_between(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """As many tokens as heads."""
    queries, keys = rotated(*(x.repeat_interleave(5, 1)[:, :S] for x in (k, v)))
    values = v.repeat_interleave(5, 1)[:, :S]
    return nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (queries, keys, values)))


def read_by_its_mask(q: Tensor, k: Tensor, v: Tensor) -> Any:
    queries, keys = rotated(q, k)
    return attend(queries, keys, v, keys.detach().sum(-1)[:, :1, None])


def queries_read_twice(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """By two attentions with the same keys."""
    queries, keys = rotated(q, k)
    return attend(queries, keys, v) + attend(queries, keys, 2 * v)


APART: dict[str, Model] = {
    "queries read by the caller": lambda q, k, v: (attend((r := rotated(q, k))[0], r[1], v), r[0]),
    "keys read by the caller": lambda q, k, v: (attend((r := rotated(q, k))[0], r[1], v), r[1]),
    "read by the mask": read_by_its_mask,
    "read by two attentions": queries_read_twice,
    "an input that is written between": input_written_between,
    "a table that is written between": table_written_between,
    "a gradient that is stopped between": gradient_stopped_between,
    "keys that are values": lambda q, k, v: attend((r := rotated(q, k))[0], r[1], r[1]),
    "transposed between": transposed_between,
    "other values than the projection's": packed(lambda v: v * 2),
    "values in another order": packed(lambda v: v.flip(1)),
    "cast between": lambda q, k, v: attend(*(x.double() for x in rotated(q, k)), v.double()),
}


@pytest.mark.parametrize("name", APART)
def test_apart(name: str) -> None:
    module, _, places = places_of(APART[name], *qkv())
    names = [place.call.name for place in places if isinstance(place, Site)]
    assert {"attention", "qkv_norm_rope" if "values " in name else "qk_norm_rope"} <= set(names)
    assert not list(blocks(module.graph, places))


def test_queries_alone() -> None:
    """No operator has them and their attention."""
    module, _, places = places_of(lambda q, k, v: attend(*rotated(q), k, v), *qkv())
    assert [place.call.name for place in places if isinstance(place, Site)] == ["rope", "attention"]
    assert not list(blocks(module.graph, places))


def test_cast_of_half_precision_between() -> None:
    """To the dtype that is the default one."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(*(x.float() for x in rotated(q, k)), v.float())

    module, _, places = places_of(model, *qkv(torch.bfloat16))
    assert [place.call.name for place in places if isinstance(place, Site)] == ["qk_norm_rope", "attention"]
    assert not list(blocks(module.graph, places))
    (block,) = joined(lambda q, k, v: attend(*rotated(q, k), v), *qkv(torch.bfloat16))
    assert block.site.call.options["out_dtype"] == torch.bfloat16


STEPS: dict[str, tuple[tuple[Step, ...], bool]] = {
    "there and back": ((Step("transpose", (1, 2)), Step("transpose", (1, 2))), True),
    "there": ((Step("transpose", (1, 2)),), False),
    "more axes": ((Step("unsqueeze", (0,)),), False),
    "other strides": ((Step("contiguous"),), False),
    "for other sizes": ((Step("view", (2, 18, 4, 16)),), False),
    "for other axes": ((Step("transpose", (3, 4)), Step("transpose", (3, 4))), False),
    "of another number of arguments": ((Step("transpose", (1,)),), False),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_between(name: str) -> None:
    """Whatever steps another pattern gives."""
    steps, nothing = STEPS[name]
    module, _, places = places_of(JOINED["q and k"][0], *qkv())
    norm_rope, attention = (place for place in places if isinstance(place, Site))
    queries, keys = norm_rope.outputs
    changed = replace(norm_rope, outputs=(queries, replace(keys, steps=(*keys.steps, *steps))))
    assert bool(list(blocks(module.graph, [changed, attention]))) == nothing


@pytest.mark.parametrize("name", ["k", "v"])
def test_operands_of_another(name: str) -> None:
    """Each has to be the result in its place."""
    module, _, places = places_of(packed(), *qkv())
    norm_rope, attention = (place for place in places if isinstance(place, Site))
    assert norm_rope.call.name == "qkv_norm_rope"
    assert list(blocks(module.graph, places))
    queries = attention.call.tensors["q"]
    for other in (None, queries, attention.call.tensors["v" if name == "k" else "k"]):
        call = replace(attention.call, tensors={**attention.call.tensors, name: other})
        assert not list(blocks(module.graph, [norm_rope, replace(attention, call=call)]))


def test_what_norm_and_rotation_compute_is_read_by_the_attention() -> None:
    """As another operand, or as a part of it."""
    module, _, places = places_of(JOINED["q and k"][0], *qkv())
    norm_rope, attention = (place for place in places if isinstance(place, Site))
    inner = next(node for node in norm_rope.region if node not in [output.node for output in norm_rope.outputs])
    sinks = replace(attention.call, tensors={**attention.call.tensors, "sinks": Operand(inner)})
    assert not list(blocks(module.graph, [norm_rope, replace(attention, call=sinks)]))
    assert not list(blocks(module.graph, [norm_rope, replace(attention, region=attention.region | {inner})]))


def test_sites_of_others() -> None:
    """An operator of the same name, and a place that is refused."""
    module, _, places = places_of(JOINED["q and k"][0], *qkv())
    norm_rope, attention = (place for place in places if isinstance(place, Site))
    refusal = Refusal("attention", "", attention.anchor, "for no reason")
    assert list(blocks(module.graph, [refusal, attention, norm_rope]))
    for one, other in ((norm_rope, attention), (attention, norm_rope)):
        foreign = replace(one, call=replace(one.call, namespace="other"))
        assert not list(blocks(module.graph, [foreign, other]))


def test_one_site_says_all() -> None:
    module, _, places = places_of(with_weights, *qkv())
    norm_rope, attention = (place for place in places if isinstance(place, Site))
    norm_rope, attention = replace(norm_rope, notes={"a": "1"}), replace(attention, notes={"b": "2"}, layer="layer")
    ((site, *parts),) = (
        (block.site, block.norm_rope, block.attention)
        for block in blocks(module.graph, [attention, norm_rope], keep=True)
    )
    assert parts == [norm_rope, attention]
    assert (site.fusion, site.layer, site.anchor) == ("norm_rope_attention", "layer", attention.anchor)
    assert site.region == norm_rope.region | attention.region
    assert (site.outputs, site.notes) == (attention.outputs, {"a": "1", "b": "2"})
    given = {
        **{name: operand and f"{operand.node.name} {operand.steps}" for name, operand in site.call.tensors.items()},
        **site.call.options,
    }
    assert_expected_inline(
        "\n".join(f"{name}={value}" for name, value in given.items() if value is not None),
        """\
q=l_q_ (Step(method='transpose', args=(1, 2)),)
k=l_k_ (Step(method='transpose', args=(1, 2)),)
cos=to (Step(method='narrow', args=(1, 0, 8)), Step(method='unsqueeze', args=(0,)))
sin=to_1 (Step(method='narrow', args=(1, 0, 8)), Step(method='unsqueeze', args=(0,)))
v=l_v_ (Step(method='transpose', args=(1, 2)),)
mask=mask ()
norm=none
rotary_dim=16
rotary_start=0
pairing=halves
conjugate=False
mrope_layout=none
mrope_section=[]
out_dtype=torch.float32
scale=0.5
causal=none
window_left=-1
window_right=-1
softcap=0.0
out_order=bhsd
keep=True""",
    )
