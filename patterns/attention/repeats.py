"""Layers repeat: the site of one `scaled_dot_product_attention` call, carried over to a call built the same way.

Compared are the call, what `heads.fold` can see above it and the chain of readers below it (`graph/repeats.py`). Beyond
that a site depends on its mask, which has to be the same node for both calls, on gradients being asked for, and on
memory: only calls behind the last write of the graph repeat.
"""

from __future__ import annotations

import torch
from torch import fx

from fusion_pass.graph.effects import Effects
from fusion_pass.graph.repeats import Mapping, Repeats
from fusion_pass.graph.site import Call, Operand, Output, Site, changed
from fusion_pass.graph.vocabulary import CASTS, MOVEMENTS, fake, fake_tensor, layer_of, operation

SDPA = "scaled_dot_product_attention"

_FOLLOWED = MOVEMENTS | CASTS | {SDPA, "repeat_interleave", "cat", "mul", "div"}
"""What a site is read through, upwards and downwards; at anything else the reading ends, whatever it reads."""

_MASK = 3
"""The place of `attn_mask` among the arguments."""


class AttentionRepeats:
    """Sites found in one graph."""

    def __init__(self, effects: Effects) -> None:
        self._effects = effects
        self._by_mask: dict[object, Repeats[Site]] = {}

    def lookup(self, call: fx.Node) -> Site | None:
        """The site of `call`, if an earlier call is built the same way."""
        found = self._places(call).lookup(call) if operation(call) == SDPA else None
        if found is None:
            return None
        site, to = found
        return _moved(site, to, call) if self._is_alike(site, to) else None

    def add(self, call: fx.Node, site: Site) -> None:
        """Remember the site of `call`."""
        if operation(call) == SDPA:
            self._places(call).add(call, site)

    def _places(self, call: fx.Node) -> Repeats[Site]:
        mask = call.args[_MASK] if len(call.args) > _MASK else call.kwargs.get("attn_mask")
        if not isinstance(mask, fx.Node):
            mask = None  # a literal, which is compared with the other arguments
        if mask not in self._by_mask:
            self._by_mask[mask] = Repeats(self._effects, lambda node: operation(node) in _FOLLOWED)
        return self._by_mask[mask]

    def _is_alike(self, site: Site, to: Mapping) -> bool:
        """Whether what the comparison leaves out is the same too."""
        own = [node for node, other in to.items() if node is not other]
        if self._effects.any_writes_behind(min(own, key=self._effects.order.__getitem__)):
            return False
        if not all(node in to and len(node.users) == len(to[node].users) for node in site.region):
            return False
        if any(isinstance(fake(node), torch.SymFloat) for node in own):
            return False  # a factor whose present value is read, and guarded
        if any(
            o is not None and name not in ("q", "k", "v") and o.node in own for name, o in site.call.tensors.items()
        ):
            return False
        return all(_wants_gradient(node) == _wants_gradient(to[node]) for node in site.region)


def _wants_gradient(node: fx.Node) -> bool:
    tensor = fake_tensor(node)
    return tensor is not None and tensor.requires_grad


def _moved(site: Site, to: Mapping, call: fx.Node) -> Site:
    """`site` with the counterpart of every node. What both calls share (the mask and what it is made of) stays."""

    def operand(o: Operand | None) -> Operand | None:
        return None if o is None else Operand(to.get(o.node, o.node), o.steps)

    return changed(
        site,
        layer=layer_of(call),
        call=Call(
            site.call.name,
            {name: operand(o) for name, o in site.call.tensors.items()},
            site.call.options,
            site.call.namespace,
        ),
        outputs=tuple(Output(to[output.node], output.index, output.steps) for output in site.outputs),
        region=frozenset(to[node] for node in site.region),
        anchor=to[site.anchor],
    )
