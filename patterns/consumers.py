"""Which attention a rotated tensor goes to, and whether as its query or its key."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fusion_pass.graph.region import downstream, modelled
from fusion_pass.graph.vocabulary import operation

_FUSED = frozenset("scaled_dot_product_attention flex_attention".split())
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
    reach = {node}
    for user in downstream(node, 64, lambda n: modelled(n) and not _attends(n)):
        if _attends(user):
            for position, place in enumerate(_PLACES):
                argument = user.args[position] if position < len(user.args) else user.kwargs.get(place)
                if argument in reach or argument is node:
                    return Use(user, place)
            return Use(user, "")
        reach.add(user)
    return None


def _attends(node: fx.Node) -> bool:
    name = operation(node)
    return name in _FUSED or name in ("matmul", "baddbmm", "einsum") or "attention" in name or "attn" in name
