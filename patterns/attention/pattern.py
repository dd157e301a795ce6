"""The pattern of attention: calls of `scaled_dot_product_attention` and attention written out become one `attention`.

Matches     what `sdpa.py` and `written_out/` read.
Requires    q, k, v of three or four axes, written out also of five; no dropout; masks that can be proved or passed on
            (`masks/`); no write to what the call reads between its use in the model and the call.
Becomes     `attention(q, k, v, ...)` on `[B, S, H, D]`: repeated key heads are folded into groups (`heads.py`), and
            a transpose of the result to `[B, S, H, D]` is part of the site (`result.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import cast

import torch
from torch import fx

from fusion_pass.graph.effects import Effects
from fusion_pass.graph.site import Call, Literal, Refusal, Site
from fusion_pass.graph.vocabulary import fake_tensor, holds, layer_of, operation

from ..consumers import WITH_PROJECTIONS
from ..formulas.reading import IndexReader
from ..masks.masked_scores import Frame, MaskRefused
from ..masks.proof import SeenKeys, prove
from ..refused import Refused, check_written_for_itself
from . import sdpa
from .facts import Attention
from .heads import Heads, fold
from .repeats import AttentionRepeats
from .result import result_of
from .written_out import reading, softmax


class AttentionPattern:
    """`patterns.base.Pattern` for attention."""

    name = "attention"

    def find(self, graph: fx.Graph) -> Iterable[Site | Refusal]:
        """Every site of this fusion in `graph`, and a refusal for every near miss."""
        effects = Effects.of(graph)
        candidates = effects.doing(_READERS)
        if not candidates:
            return []
        index_reader = IndexReader(effects)
        repeats = AttentionRepeats(effects)
        found: list[Site | Refusal] = []
        for node in candidates:
            try:
                site = repeats.lookup(node)
                if site is None:
                    attention = _READERS[operation(node)](effects, node)
                    if attention is None:
                        continue
                    site = _site(effects, index_reader, attention)
                    repeats.add(node, site)
                found.append(site)
            except (Refused, MaskRefused) as reason:
                found.append(Refusal(self.name, layer_of(node), node, str(reason)))
        return found


def _read_whole(effects: Effects, node: fx.Node) -> Attention | None:
    """Dynamo does not look into these functions."""
    module = WITH_PROJECTIONS[operation(node)]
    raise Refused(f"{node.name!r} is all of {module} in one call, its projections included, and is not looked into.")


_READERS: dict[str, Callable[[Effects, fx.Node], Attention | None]] = {
    "scaled_dot_product_attention": sdpa.read,
    **dict.fromkeys(WITH_PROJECTIONS, _read_whole),
    **dict.fromkeys(softmax.ANCHORS, reading.read),
}


def _site(effects: Effects, index_reader: IndexReader, attention: Attention) -> Site:
    result = result_of(effects, attention.result, attention.order, attention.leading)
    anchor = result.output.node
    frame = _frame(attention)
    q, k, v = _folded(effects, attention, anchor)
    dtype = cast(torch.Tensor, fake_tensor(attention.result)).dtype
    for heads, reader in ((q, attention.scores), (k, attention.scores), (v, attention.values)):
        _check_dtype(heads, reader, dtype)
        _check_unwritten(effects, heads.node, heads.folded[-1] if heads.folded else reader, anchor)
    if attention.sinks is not None:
        sinks = attention.sinks.node
        # Often a copy of the sinks, which the scores are joined with: what is written later, that copy does not see.
        first_reader = min(sinks.users, key=effects.order.__getitem__)
        _check_unwritten(effects, sinks, first_reader, anchor)
    _check_kept(effects, anchor)
    seen = prove(index_reader, attention.masks, frame, anchor)
    if attention.is_causal:
        seen = replace(seen, causal="top_left")
    call = Call(
        "attention",
        tensors={
            "q": q.operand(dtype),
            "k": k.operand(dtype),
            "v": v.operand(dtype),
            "mask": seen.mask,
            "sinks": attention.sinks,
            "q_segment_ids": seen.q_segments,
            "k_segment_ids": seen.k_segments,
        },
        options=_options(attention, q.factor * k.factor, seen, result.out_order),
    )
    region = _region(attention, (q, k, v), result.chain)
    check_written_for_itself(effects, region, (anchor,))
    return Site("attention", layer_of(attention.result), call, (result.output,), region, anchor)


def _options(attention: Attention, factor: float, seen: SeenKeys, out_order: str) -> dict[str, Literal]:
    scale = attention.scale
    if factor != 1.0:
        scale = factor * (attention.q.head_dim**-0.5 if scale is None else scale)
    return {
        "scale": scale,
        "causal": seen.causal,
        "window_left": seen.window_left,
        "window_right": seen.window_right,
        "softcap": attention.cap,
        "out_order": out_order,
    }


def _frame(attention: Attention) -> Frame:
    q, k, v = attention.q, attention.k, attention.v
    if not q.batch == k.batch == v.batch:
        raise Refused(
            f"The batch sizes of query, key and value, {q.batch}, {k.batch} and {v.batch}, are not known to be equal."
        )
    if isinstance(k.tokens, int) and isinstance(v.tokens, int) and k.tokens != v.tokens:
        # of symbols the call's shapes decide
        raise Refused(f"There are {k.tokens} keys and {v.tokens} values.")
    return Frame(q.batch, q.heads, q.tokens, k.tokens, attention.leading.grouped)


def _folded(effects: Effects, attention: Attention, anchor: fx.Node) -> tuple[Heads, Heads, Heads]:
    """q, k, v read as far upstream as is exact. The heads of k and v are folded together or not at all."""
    q, k, v = attention.q, attention.k, attention.v
    factors = attention.scale is not None or isinstance(attention.q.head_dim, int)
    far_q = fold(effects, q, attention.scores, anchor, scaled=factors)
    far_k = fold(effects, k, attention.scores, anchor, scaled=factors)
    far_v = fold(effects, v, attention.values, anchor)
    if far_k.groups != far_v.groups:
        return far_q, k, v
    return far_q, far_k, far_v


def _check_dtype(heads: Heads, reader: fx.Node, dtype: torch.dtype) -> None:
    """The operator computes in one dtype: a wider operand may only be narrowed where autocast narrows it too."""
    narrowed = cast(torch.Tensor, fake_tensor(reader)).dtype == dtype
    if heads.dtype != dtype and holds(heads.dtype, dtype) and not narrowed:
        raise Refused(
            f"{heads.node.name!r} is {heads.dtype} and the result of the attention {dtype}; the operator takes one."
        )


def _check_unwritten(effects: Effects, node: fx.Node, reader: fx.Node, anchor: fx.Node) -> None:
    for write in effects.written_between(node, reader, anchor):
        raise Refused(
            f"{node.name!r}, which the attention reads, is overwritten by {write.name!r} before it is finished."
        )


def _check_kept(effects: Effects, result: fx.Node) -> None:
    """The operator keeps its result for its backward, as a product with the values does not."""
    for write in effects.writes(result):
        if cast(torch.Tensor, fake_tensor(result)).requires_grad:
            raise Refused(f"{result.name!r}, which the backward of the operator reads, is written by {write.name!r}.")


def _region(attention: Attention, operands: Iterable[Heads], chain: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """What the call makes redundant. A folded node that others read too stays."""
    region = {*attention.nodes, *chain}
    for heads in operands:
        for node in heads.folded:
            if all(user in region for user in node.users):
                region.add(node)
    return frozenset(region)
