"""What the recognisers of attention (`sdpa.py`, `written_out/`) say about a graph."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from fusion_pass.graph.site import Operand

from ..literals import number
from ..masks.masked_scores import MaskTerm
from ..refused import Refused
from .heads import Heads
from .leading import Leading


@dataclass(frozen=True)
class Attention:
    """One attention of a graph, before anything is folded."""

    q: Heads
    k: Heads
    v: Heads
    scale: float | None
    """None: one over the square root of head_dim."""
    cap: float
    masks: tuple[MaskTerm, ...]
    is_causal: bool
    """Causal, top-left, beside the masks."""
    sinks: Operand | None
    result: fx.Node
    order: tuple[int, ...]
    """The axis of `[B, S, H, D]` that each axis of `result` is; of `[B, S, K, G, D]` with two axes of heads; of batch
    and heads in one, as with one head for each batch."""
    nodes: frozenset[fx.Node] = field(repr=False)
    """What computes `result` from q, k, v."""
    scores: fx.Node
    """Reads q and k."""
    values: fx.Node
    """Reads v."""
    leading: Leading
    """Other axes of the scores than batch and heads."""


def check_no_dropout(p: object) -> None:
    """Raise `Refused` unless the dropout probability `p` is known to be 0."""
    known = number(p)
    if known is None:
        raise Refused("The dropout probability of the attention is known only at run time.")
    if known != 0:
        raise Refused(
            f"The attention drops out weights with p = {known}, and no kernel of ours does; set the dropout to 0."
        )
