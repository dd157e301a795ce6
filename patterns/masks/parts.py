"""A bias and a mask that the graph has put into one tensor, taken apart (ALiBi and causality: BLOOM, Falcon).

Matches     `bias + mask`; `bias.masked_fill(m, c)`; `where(m, bias, c)`, with a number in either place.
Requires    c hides a key: it is what the operator takes for -inf, or less. No write to the tensor or its parts.
Becomes     two masks of the same scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import fx

from fusion_pass.graph.effects import Effects
from fusion_pass.graph.vocabulary import fake_tensor, operation
from fusion_pass.kernels.attention_problem import mask_floor

from ..literals import constant
from .masked_scores import MaskTerm, Meaning


def take_apart(effects: Effects, mask: MaskTerm) -> list[MaskTerm]:
    """The bias and the mask that an additive `mask` is made of; else `mask` alone."""
    node = mask.node
    find = _RULES.get(operation(node))
    if mask.meaning is not Meaning.ADDED or find is None or node.kwargs:
        return [mask]
    parts = find(effects, mask, *node.args)
    return [mask] if parts is None or any(effects.writes(n) for n in (node, *(p.node for p in parts))) else parts


def _summands(_: Effects, mask: MaskTerm, *args: object) -> list[MaskTerm] | None:
    # Three arguments are a deprecated spelling: `torch.add(x, alpha, y)`.
    parts = [replace(mask, node=a) for a in args if isinstance(a, fx.Node)]
    return parts if len(parts) == len(args) == 2 else None


def _filled(effects: Effects, mask: MaskTerm, x: object, chosen: object, value: object) -> list[MaskTerm] | None:
    """`x.masked_fill(m, c)`, and `where(m, x, c)` with a number in either place: x, and c where m says."""
    node, meaning = mask.node, Meaning.HIDDEN
    if operation(node) == "where":
        chosen, x = (x, chosen) if node.op == "call_function" else (chosen, x)
        meaning = Meaning.SEEN
        if constant(effects, value) is None:
            x, value, meaning = value, x, Meaning.HIDDEN
    number = constant(effects, value)
    if not isinstance(x, fx.Node) or not isinstance(chosen, fx.Node) or number is None:
        return None
    floor = mask_floor(cast(torch.Tensor, fake_tensor(node)).dtype)
    if not number <= floor or not number * mask.factor <= floor:
        return None
    return [replace(mask, node=x), replace(mask, node=chosen, meaning=meaning, hidden=number)]


_RULES: dict[str, Callable[..., list[MaskTerm] | None]] = {
    "add": _summands,
    "masked_fill": _filled,
    "where": _filled,
}
