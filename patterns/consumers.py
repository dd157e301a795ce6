"""Which attention a rotated tensor goes to, and whether as its query or its key."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from torch import fx

from fusion_pass.graph.region import downstream, modelled
from fusion_pass.graph.vocabulary import operation

_FUSED = frozenset("scaled_dot_product_attention flex_attention".split())
WITH_PROJECTIONS = {
    "multi_head_attention_forward": "torch.nn.MultiheadAttention",
    "_native_multi_head_attention": "torch.nn.MultiheadAttention",
    "_transformer_encoder_layer_fwd": "torch.nn.TransformerEncoderLayer",
}
"""Operations that project to queries and keys themselves, and the modules that call them."""

_PLACES = ("query", "key")


@dataclass(frozen=True)
class Use:
    """`attention` is the node that multiplies queries with keys; `place` is 'query', 'key', or '' when it cannot be
    told.
    """

    attention: fx.Node
    place: str


def use_of(node: fx.Node) -> Use | None:
    """The first attention that `node` reaches through movements, casts and scalings; None if it reaches none."""
    return next(uses(node, downstream(node, 64, lambda n: modelled(n) and not attends(n))), None)


def uses(node: fx.Node, reached: Iterable[fx.Node]) -> Iterator[Use]:
    """Every attention among the nodes `reached` from `node`, which are in breadth-first order."""
    before = {node}
    for user in reached:
        if attends(user):
            yield Use(user, _place(user, before))
        before.add(user)


def _place(attention: fx.Node, values: Container[fx.Node]) -> str:
    """Where `attention` reads one of `values`; '' for einsum, whose operands stand in any order."""
    if operation(attention) == "einsum":
        return ""
    first = 1 if operation(attention) == "baddbmm" else 0  # what the product is added to
    for position, place in enumerate(_PLACES, first):
        argument = attention.args[position] if position < len(attention.args) else attention.kwargs.get(place)
        if argument in values:
            return place
    return ""


def attends(node: fx.Node) -> bool:
    """Whether `node` multiplies queries with keys, or may do so."""
    return _attends(operation(node))


def fused(node: fx.Node) -> bool:
    """Whether `node` is a whole attention."""
    return _is_fused(operation(node))


@lru_cache(maxsize=8192)
def _attends(name: str) -> bool:
    return name in ("matmul", "baddbmm", "einsum") or _is_fused(name)


@lru_cache(maxsize=8192)
def _is_fused(name: str) -> bool:
    return name in _FUSED or (("attention" in name or "attn" in name) and name not in WITH_PROJECTIONS)
