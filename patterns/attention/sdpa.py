"""Calls of `scaled_dot_product_attention`.

Matches     `F.scaled_dot_product_attention` in all argument forms.
Requires    q, k, v of three axes or of four; no dropout; `is_causal` and `scale` known when the graph is compiled.
Becomes     `Attention`, whose scores and values are read by the call itself.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from fusion_pass.graph.effects import Effects
from fusion_pass.graph.vocabulary import fake_tensor

from ..literals import number
from ..masks.masked_scores import MaskTerm, Meaning
from ..refused import Refused
from .facts import Attention, check_no_dropout
from .heads import Heads
from .leading import Leading

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def read(effects: Effects, node: fx.Node) -> Attention:
    """The attention that the call `node` computes. Raises `Refused` for one that cannot be fused."""
    given: dict[str, Any] = {**dict(zip(_ARGUMENTS, node.args, strict=False)), **node.kwargs}
    q, k, v = (given.get(name) for name in ("query", "key", "value"))
    unknown = given.keys() - set(_ARGUMENTS)
    if unknown or not all(fake_tensor(x) is not None for x in (q, k, v, node)):
        raise Refused(
            f"The call {node.name!r} has arguments that are not known: {sorted(unknown) or 'tensors of no shape'}."
        )
    ranks = {cast(torch.Tensor, fake_tensor(x)).dim() for x in (q, k, v, node)}
    if ranks not in ({3}, {4}):
        raise Refused(f"Query, key and value have {sorted(ranks)} axes; attention is fused for three or four.")
    check_no_dropout(given.get("dropout_p", 0.0))
    mask, causal, scale = given.get("attn_mask"), given.get("is_causal", False), given.get("scale")
    if not isinstance(causal, bool):
        raise Refused("is_causal is known only at run time.")
    masks: tuple[MaskTerm, ...] = ()
    if isinstance(mask, fx.Node):
        if causal:
            raise Refused("attn_mask and is_causal are both given, which scaled_dot_product_attention does not take.")
        tensor = fake_tensor(mask)
        boolean = tensor is not None and tensor.dtype == torch.bool
        masks = (MaskTerm(mask, node, Meaning.SEEN if boolean else Meaning.ADDED),)
    if scale is not None and number(scale) is None:
        raise Refused(f"The scale {scale} is known only at run time.")
    order = (0, 2, 1, 3) if ranks == {4} else (0, 1, None, 2)
    return Attention(
        q=Heads(cast(fx.Node, q), order),
        k=Heads(cast(fx.Node, k), order),
        v=Heads(cast(fx.Node, v), order),
        scale=number(scale),
        cap=0.0,
        masks=masks,
        is_causal=causal,
        sinks=None,
        result=node,
        order=(0, 2, 1, 3) if ranks == {4} else (0, 1, 3),
        nodes=frozenset({node}),
        scores=node,
        values=node,
        leading=Leading(),
    )
