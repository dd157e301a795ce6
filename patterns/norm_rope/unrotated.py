"""Norms of q and k that are not part of a fused call, so that a report says what becomes of them.

Matches     a norm whose result reaches an attention as query or key.
Becomes     a refusal when nothing of q and k is rotated; a note on the site when a part is. Joint attention normalises
            each stream on its own and concatenates them before the rotation (Flux) or after it (HunyuanVideo).

Why they are not fused: in the diffusion transformers that have them, what reads such a norm is a concatenation or an
activation. Inductor writes the norm right into that; a call of ours would write it once more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from torch import fx

from fusion_pass.graph.effects import Effects
from fusion_pass.graph.region import downstream, modelled
from fusion_pass.graph.site import Refusal, Site
from fusion_pass.graph.vocabulary import fake_tensor, layer_of, operation

from ..consumers import Use, attends, fused, use_of, uses

_NORMS = frozenset("rms_norm layer_norm l2_norm normalize rsqrt sqrt norm vector_norm".split())
"""One of these is in every norm, whole or as its root."""

_ACTIVATIONS = frozenset("relu elu silu gelu softplus".split())
"""Linear attention (Sana) has one between the norm and the product."""

NOT_ROTATED = (
    "q and k are normalised, but not rotated, before this attention. "
    "A norm alone is left to Inductor, which fuses it with what reads it."
)
NORMS_OUTSIDE = "q and k have parts that are normalised on their own; those norms are left to Inductor"


@dataclass(frozen=True)
class _Norm:
    node: fx.Node
    reached: frozenset[fx.Node]
    """What is computed from it by movement and arithmetic: no projection lies between."""
    uses: tuple[Use, ...]


def unrotated(effects: Effects, places: Sequence[Site | Refusal]) -> list[Site | Refusal]:
    """`places` with a note on the sites beside such norms, and a refusal for every attention whose q and k
    are normalised and never rotated.
    """
    inside = {node for place in places if isinstance(place, Site) for node in place.region}
    norms = list(_norms(effects, inside))
    reached = frozenset[fx.Node]().union(*(norm.reached for norm in norms))
    attentions = {use.attention for norm in norms for use in norm.uses}
    noted, served_ones = [], set[fx.Node]()
    for place in places:
        if isinstance(place, Site):
            served = _attentions(place) & attentions if attentions else set()
            if served or _reads_one_of(place, reached):
                place = replace(place, notes={**place.notes, "norms": NORMS_OUTSIDE})
            served_ones |= served
        noted.append(place)
    refused = {place.layer for place in places if isinstance(place, Refusal)}
    return [*noted, *(refusal for refusal in _refusals(norms, served_ones) if refusal.layer not in refused)]


def _norms(effects: Effects, inside: Collection[fx.Node]) -> Iterator[_Norm]:
    followed = lru_cache(maxsize=None)(_followed)
    for node in effects.doing(_NORMS):
        if node not in inside:
            found = downstream(node, 64, lambda n: followed(n) and n not in inside)
            yield _Norm(node, frozenset(filter(followed, found)), tuple(filter(_of_heads, uses(node, found))))


def _followed(node: fx.Node) -> bool:
    return (modelled(node) and not attends(node)) or operation(node) in _ACTIVATIONS


def _of_heads(use: Use) -> bool:
    """Whether this is a query or a key `[B, H, S, D]`. (Products of experts and image-text scores have fewer axes.)"""
    tensor = fake_tensor(use.attention)
    return bool(use.place) if fused(use.attention) else tensor is not None and tensor.dim() >= 4


def _reads_one_of(site: Site, reached: Collection[fx.Node]) -> bool:
    read = (operand for name, operand in site.call.tensors.items() if name in ("q", "k", "x"))
    return any(operand is not None and operand.node in reached for operand in read)


def _attentions(site: Site) -> set[fx.Node]:
    found = (use_of(output.node) for output in site.outputs)
    return {use.attention for use in found if use is not None}


def _refusals(norms: Sequence[_Norm], served: Collection[fx.Node]) -> Iterator[Refusal]:
    """One for each attention that reads a norm and that no site serves. A product written by hand may also be that with
    the values, so there it takes two norms in one layer.
    """
    whole: dict[fx.Node, fx.Node] = {}
    by_hand: dict[str, list[fx.Node]] = {}
    for norm in norms:
        attentions = {use.attention for use in norm.uses} - {*served}
        for attention in attentions:
            if fused(attention):
                whole.setdefault(attention, norm.node)
        for layer in {layer_of(attention) for attention in attentions if not fused(attention)}:
            by_hand.setdefault(layer, []).append(norm.node)
    places = [(layer_of(attention), first) for attention, first in whole.items()]
    places += [(layer, nodes[0]) for layer, nodes in by_hand.items() if len(nodes) > 1]
    for layer, first in places:
        yield Refusal("qk_norm_rope", layer, first, NOT_ROTATED)
