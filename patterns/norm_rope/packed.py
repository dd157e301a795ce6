"""Packed projections: q, k and v are lanes of one tensor.

Matches     q and k that are movements of one `[B, S, (num_heads + 2 num_kv_heads) head_dim]` tensor, together with a
            v that is the rest of it.
Requires    heads blocked (all q, all k, all v) or grouped (per kv head its q heads, then k, then v), and a gradient
            to be computed.
Becomes     `qkv_norm_rope`: its backward writes dq, dk and dv into one buffer, where autograd would fill three with
            zeros and add them.

Without a gradient the packed form would only copy v, so q and k are passed as views to `qk_norm_rope` instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import fx

from fusion_pass.graph import lanes, reshape
from fusion_pass.graph.effects import Effects
from fusion_pass.graph.evaluate import Escaped, Evaluator, Study
from fusion_pass.graph.lanes import Opaque, Value
from fusion_pass.graph.region import between, downstream
from fusion_pass.graph.site import Operand, Output, Step
from fusion_pass.graph.vocabulary import MOVEMENTS, fake_tensor, operation, sizes

from .axes import ROLES, result_steps
from .facts import Array
from .pairing import Pair
from .rotary import equal


@dataclass(frozen=True)
class Packed:
    """The packed tensor of a pair, how it is packed, and the node that is v."""

    qkv: fx.Node
    packing: str
    num_heads: int
    num_kv_heads: int
    value: Output
    region: frozenset[fx.Node]
    """Every movement from the packed tensor to q, k and v."""


def packed(effects: Effects, pair: Pair) -> Packed | None:
    """The packed form of `pair`; None if q, k and v are not lanes of one tensor that needs a gradient."""
    node = _root(pair.q.source)
    tensor = fake_tensor(node)
    if node is not _root(pair.k.source) or tensor is None or tensor.dim() != 3 or not tensor.requires_grad:
        return None
    q_heads, k_heads, d = pair.q.heads, pair.k.heads, pair.q.head_dim
    if not isinstance(q_heads, int) or not isinstance(k_heads, int) or sizes(tensor)[2] != (q_heads + 2 * k_heads) * d:
        return None
    root = Evaluator(effects)
    try:
        return root.settle(lambda: _packed(root, pair, node, q_heads, k_heads))
    except (Opaque, Escaped):
        return None


def _root(node: fx.Node) -> fx.Node:
    """What `node` is a movement of."""
    while operation(node) in MOVEMENTS and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _packed(root: Evaluator, pair: Pair, node: fx.Node, q_heads: int, k_heads: int) -> Packed | None:
    d = pair.q.head_dim
    study = root.study(node, lambda x: x)
    places = [_first_lanes(study, _as_heads(study, operand), d) for operand in (pair.q.x, pair.k.x)]
    for packing in ("blocked", "grouped"):
        if q_heads % k_heads:
            continue
        q, k, v = _layout(packing, q_heads, k_heads)
        if places[0] != [h * d for h in q] or places[1] != [h * d for h in k]:
            continue
        value = _find_value(study, [h * d for h in v], d)
        if value is None:
            return None
        ends = [pair.q.source, pair.k.source, value.node]
        region = frozenset().union(*(between(study, end) for end in ends))
        return Packed(node, packing, q_heads, k_heads, value, region)
    return None


def _layout(packing: str, q_heads: int, k_heads: int) -> tuple[list[int], list[int], list[int]]:
    """The place of every q, k and v head in the packed tensor, counted in heads."""
    if packing == "blocked":
        return (
            list(range(q_heads)),
            list(range(q_heads, q_heads + k_heads)),
            list(range(q_heads + k_heads, q_heads + 2 * k_heads)),
        )
    group = q_heads // k_heads
    width = group + 2
    return (
        [(h // group) * width + h % group for h in range(q_heads)],
        [j * width + group for j in range(k_heads)],
        [j * width + group + 1 for j in range(k_heads)],
    )


def _as_heads(study: Study, operand: Operand) -> Value:
    """An operand on one token of the packed tensor, `[B, S, H, D]`."""
    value = study.value(operand.node)
    for step in operand.steps:
        value = _moved(value, step)
    return value  # type: ignore[no-any-return]


def _moved(value: Value, step: Step) -> Value:
    args: tuple[Any, ...] = step.args
    if step.method in ("transpose", "permute"):
        order = list(range(value.rank))
        if step.method == "transpose":
            a, b = args
            order[a], order[b] = order[b], order[a]
        else:
            order = list(args)
        return lanes.permute(value, order)
    if step.method == "unsqueeze":
        return lanes.add_axis(value, args[0])
    if step.method == "unflatten":
        return reshape.view(value, (*value.shape[:-1], *args[1]))
    raise Opaque(step.method)


def _first_lanes(study: Study, value: Value, head_dim: int) -> list[int] | None:
    """For each head of `value` (`[B, S, H, D]`) the lane of the packed tensor it starts at; None unless heads are
    whole and tokens in place.
    """
    expected = (*study.studied.axes[study.source][:2], None, None)
    if value.rank != 4 or value.axes != {study.source: expected}:
        return None
    data = value.data.reshape(len(value.data), -1)
    source = study.studied.data.reshape(len(data), -1)
    places = _places(source, data)
    if places is None or len(places) % head_dim:
        return None
    heads = places.reshape(-1, head_dim)
    if (heads != heads[:, :1] + np.arange(head_dim)).any():
        return None
    return heads[:, 0].tolist()  # type: ignore[no-any-return]


def _places(source: Array, data: Array) -> Array | None:
    order = np.argsort(source[0])
    at = np.minimum(np.searchsorted(source[0][order], data[0]), len(order) - 1)
    places = order[at]
    return places if equal(source[:, places], data) else None


def _find_value(study: Study, first_lanes: list[int], head_dim: int) -> Output | None:
    """The last movement of the packed tensor that is v, with the steps from `[B, S, H, D]` to it."""
    moves = downstream(study.node, 64, lambda n: operation(n) in MOVEMENTS)
    for node in sorted(moves, key=study.effects.order.__getitem__, reverse=True):
        tensor = fake_tensor(node)
        if operation(node) not in MOVEMENTS or tensor is None or study.effects.writes(node):
            continue
        for names, steps in _value_shapes(tensor.dim()):
            try:
                value = study.value(node)
                if not isinstance(value, Value):
                    break
                for step in _inverse(names, len(first_lanes), head_dim):
                    value = _moved(value, step)
            except (Opaque, Escaped):
                continue
            if (
                value.rank == 4
                and value.shape[2:] == (len(first_lanes), head_dim)
                and _first_lanes(study, value, head_dim) == first_lanes
            ):
                return Output(node, 2, steps)
    return None


def _value_shapes(rank: int) -> Iterator[tuple[tuple[str, ...], tuple[Step, ...]]]:
    if rank == 4:
        for names in (ROLES, ("batch", "heads", "sequence")):
            yield names, result_steps(list(names))
    elif rank == 3:
        yield ("batch", "sequence"), (Step("flatten", (2,)),)


def _inverse(names: tuple[str, ...], heads: int, head_dim: int) -> Iterator[Step]:
    if len(names) == 2:
        yield Step("unflatten", (-1, (heads, head_dim)))
    elif names != ROLES:
        yield Step("transpose", (1, 2))
