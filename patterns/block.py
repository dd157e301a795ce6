"""The whole block: a site of norm + rotation and the site of the attention it feeds become one site.

Matches     a `qk_norm_rope` or `qkv_norm_rope` site whose results are the queries and keys (packed: and the values) of
            one `attention` site.
Requires    nobody else reads the results; the attention takes them as the operator gives them, with no cast and no
            reordering between; nothing that norm + rotation reads is written, and the grad mode does not change, before
            the attention ends.
Becomes     `norm_rope_attention`, at the attention's place.

What does not match stays two sites; that is no refusal, both are fused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from fusion_pass.graph.effects import Effects
from fusion_pass.graph.gradients import GRAD_MODE
from fusion_pass.graph.site import Call, Operand, Refusal, Site, Step
from fusion_pass.graph.vocabulary import fake_tensor

FUSION = "norm_rope_attention"

_RESULTS = {"qk_norm_rope": ("q", "k"), "qkv_norm_rope": ("q", "k", "v")}
"""The operands of the attention that the results of each operator are."""


@dataclass(frozen=True)
class Block:
    """A joined site and the two it stands for."""

    site: Site
    norm_rope: Site
    attention: Site


def blocks(graph: fx.Graph, places: Iterable[Site | Refusal], *, keep: bool = False) -> Iterator[Block]:
    """Every pair of sites that one operator can replace. `keep`: it keeps the rotated queries and keys for its
    backward."""
    sites = [place for place in places if isinstance(place, Site) and place.call.namespace == "fusion_pass"]
    producers = {site.outputs[0].node: site for site in sites if site.call.name in _RESULTS}
    effects: Effects | None = None
    for attention in sites:
        queries = attention.call.tensors["q"] if attention.call.name == "attention" else None
        norm_rope = producers.get(queries.node) if queries is not None else None
        if norm_rope is None or not _feeds(norm_rope, attention):
            continue
        effects = effects or Effects(graph)
        if _may_move(effects, norm_rope, attention):
            yield Block(_joined(norm_rope, attention, keep), norm_rope, attention)


def _feeds(norm_rope: Site, attention: Site) -> bool:
    """Whether the results are read by the attention alone, each for one operand and as it comes out of the operator."""
    results = _RESULTS[norm_rope.call.name]
    for output, name in zip(norm_rope.outputs, results, strict=True):
        operand = attention.call.tensors[name]
        if operand is None or operand.node is not output.node:
            return False
        if not _is_nothing((*output.steps, *operand.steps), cast(torch.Tensor, fake_tensor(output.node)).dtype):
            return False
        if any(user not in attention.region and user not in norm_rope.region for user in output.node.users):
            return False
    tensors = attention.call.tensors.items()
    others = {operand.node for name, operand in tensors if operand is not None and name not in results}
    return not norm_rope.region & (attention.region | others)


def _is_nothing(steps: Sequence[Step], dtype: torch.dtype) -> bool:
    """Whether the steps leave a tensor of `dtype` as it is. Tried on one whose four sizes differ."""
    before = torch.empty(2, 3, 5, 7, device="meta", dtype=dtype)
    after = before
    try:
        for step in steps:
            after = getattr(after, step.method)(*step.args)
    except (RuntimeError, IndexError, TypeError):  # steps for other sizes are steps
        return False
    return (after.shape, after.stride(), after.dtype) == (before.shape, before.stride(), before.dtype)


def _may_move(effects: Effects, norm_rope: Site, attention: Site) -> bool:
    """Whether norm + rotation may be computed where the attention ends."""
    node = norm_rope.anchor
    while node is not attention.anchor:
        node = node.next
        if node.target in GRAD_MODE:
            return False
    operands = [operand.node for operand in norm_rope.call.tensors.values() if operand is not None]
    return not any(
        write not in norm_rope.region
        for operand in operands
        for write in effects.written_between(operand, norm_rope.anchor, attention.anchor)
    )


def _joined(norm_rope: Site, attention: Site, keep: bool) -> Site:
    results = _RESULTS[norm_rope.call.name]
    tensors: dict[str, Operand | None] = dict(norm_rope.call.tensors)
    tensors |= {name: operand for name, operand in attention.call.tensors.items() if name not in results}
    options = {name: value for name, value in norm_rope.call.options.items() if name != "out_order"}
    return Site(
        FUSION,
        attention.layer,
        Call(FUSION, tensors, {**options, **attention.call.options, "keep": keep}),
        attention.outputs,
        norm_rope.region | attention.region,
        attention.anchor,
        {**norm_rope.notes, **attention.notes},
    )
