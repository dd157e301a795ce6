"""Where a site of attention ends: at the last node behind the attention that is its result moved to `[B, S, H, D]`.

The operator writes `[B, S, H, D]`, in the memory order `bshd` or `bhsd`. Models transpose to it (and some make that
contiguous) before the output projection; what does so is part of the site. Where no such node follows, the operator's
result is moved to the shape of the attention's, in the memory order that gives it the same strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from fusion_pass.graph.effects import Effects
from fusion_pass.graph.site import Output, Step
from fusion_pass.graph.vocabulary import Size, fake_tensor, first_argument, operation

from .heads import keeps_everything, moved_axes
from .leading import Leading, moved_leading


@dataclass(frozen=True)
class Result:
    """What the call replaces."""

    output: Output
    chain: tuple[fx.Node, ...]
    """The nodes from the attention's result to that of the site."""
    out_order: str
    """Of the operator's result in memory."""


def result_of(effects: Effects, node: fx.Node, order: Sequence[int], leading: Leading) -> Result:
    """The result of the attention that ends at `node`.

    `order`: the axis of `[B, S, H, D]` that each axis of `node` is; of `[B, S, K, G, D]` with two axes of heads; of
    both with (0, 1, 3) for `[B, S, D]` or `[B * H, S, D]`.
    """
    if len(order) == 3:
        return _of_three_axes(effects, node, order, leading.merged)
    split = (Step("unflatten", (2, leading.grouped)),) if len(order) == 5 else ()
    return _of_heads(effects, (node,), order, split)


def _of_three_axes(effects: Effects, node: fx.Node, order: Sequence[int], merged: tuple[Size, int] | None) -> Result:
    outer = tuple((0, 1, 3).index(axis) for axis in order)
    moves = () if outer == (0, 1, 2) else (Step("permute", outer),)
    if merged is None:
        return Result(Output(node, 0, (Step("squeeze", (2,)), *moves)), (), "bshd")
    view = None if moves else _split_again(effects, node, merged)
    if view is None:
        steps = (Step("transpose", (1, 2)), Step("flatten", (0, 1)), *moves)
        return Result(Output(node, 0, steps), (node,), "bhsd")
    return _of_heads(effects, (node, view), (0, 2, 1, 3), ())


def _split_again(effects: Effects, node: fx.Node, merged: tuple[Size, int]) -> fx.Node | None:
    """The only reader of `[batch * heads, S, D]`, if it is a view as `[batch, heads, S, D]`."""
    (user,) = node.users if len(node.users) == 1 else (None,)
    if user is None or effects.writes(node) or moved_leading(user, node) != merged:
        return None
    return user if operation(user) == "view" else None


def _of_heads(effects: Effects, begun: tuple[fx.Node, ...], order: Sequence[int], split: tuple[Step, ...]) -> Result:
    """The result behind the last of `begun`, whose axes are `order`. `split`: from `[B, S, H, D]` to its number of
    axes.
    """
    chain = _moved_to_order(effects, begun, order)
    if chain is not None:
        return Result(Output(chain[-1], 0, split), chain, "bshd")
    node = begun[-1]
    return Result(Output(node, 0, (*split, Step.reorder(order))), begun, _memory_order(node, order))


def _moved_to_order(effects: Effects, begun: tuple[fx.Node, ...], order: Sequence[int]) -> tuple[fx.Node, ...] | None:
    """`begun` and the movements that alone read it, up to the last one whose axes are in order; None if none are."""
    axes, chain = list(order), list(begun)
    found = begun if axes == sorted(order) else None
    while len(chain[-1].users) == 1 and not effects.writes(chain[-1]):
        (user,) = chain[-1].users
        if first_argument(user) is not chain[-1]:
            break  # `x.to(result)` moves x
        moved = moved_axes(user)
        if moved is not None:
            axes = [axes[axis] for axis in moved]
        elif not keeps_everything(user):
            break
        chain.append(user)
        if axes == sorted(order):
            found = tuple(chain)
    return found


def _memory_order(node: fx.Node, order: Sequence[int]) -> str:
    """The order that gives the operator's result the strides of `node`, the model's."""
    tensor = cast(torch.Tensor, fake_tensor(node))
    strides = dict(zip(order, tensor.stride(), strict=True))
    try:
        return "bhsd" if bool(strides[2] > strides[1]) else "bshd"
    except Exception:  # strides with symbols of unknown order
        return "bshd"
