"""What a pattern hands to the pass: a site, or the reason why there is none.

A site is data. It names the operator call that a region of the graph becomes, the nodes the call reads and the nodes it
replaces; it changes nothing itself. `rewrite.py` is the only place that turns a site into graph edits.

Movement between a graph node and an operator argument (for example from `[B, H, S, D]` to the operators' `[B, S, H,
D]`) is a chain of `Step`s that need no symbolic size: transpose, permute, unflatten, flatten, unsqueeze, squeeze,
select, narrow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import torch
from torch import fx

Literal: TypeAlias = "bool | int | float | str | torch.dtype | list[int] | None"


R = TypeVar("R")


def changed(record: R, **fields: object) -> R:
    """`dataclasses.replace` for the frozen records of this package: what they hold is copied, not set field by field.
    It is called for each site of each layer."""
    assert fields.keys() <= vars(record).keys(), fields
    copy = object.__new__(type(record))
    vars(copy).update(vars(record), **fields)
    return copy


@dataclass(frozen=True)
class Step:
    """One tensor method applied to a value: `getattr(value, method)(*args)`."""

    method: str
    args: tuple[object, ...] = ()

    @staticmethod
    def reorder(order: Sequence[int]) -> Step:
        """The movement after which axis i is what axis `order[i]` was. `order` is not the order that there is."""
        moved = [place for place, axis in enumerate(order) if axis != place]
        return Step("transpose", tuple(moved)) if len(moved) == 2 else Step("permute", tuple(order))


@dataclass(frozen=True)
class Operand:
    """A node of the graph, seen through pure data movement."""

    node: fx.Node
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Call:
    """An operator call: `torch.ops.<namespace>.<name>(**tensors, **options)`.

    `options` may hold an `fx.Node` where the graph computes a scalar (a `dynamic=True` graph passes eps as
    `tensor.item()`).
    """

    name: str
    tensors: Mapping[str, Operand | None]
    options: Mapping[str, Literal | fx.Node]
    namespace: str = "fusion_pass"


@dataclass(frozen=True)
class Output:
    """Result `index` of the call, moved by `steps`, replaces every use of `node`."""

    node: fx.Node
    index: int
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Site:
    """One place of one graph that becomes one operator call.

    `region` holds every node the fused call makes redundant (for the report, the mutation check and `verify`);
    `anchor` is the last of them in graph order. `layer` is the module path from `nn_module_stack` (or '' when the
    graph has none).
    """

    fusion: str
    layer: str
    call: Call
    outputs: tuple[Output, ...]
    region: frozenset[fx.Node] = field(repr=False)
    anchor: fx.Node
    notes: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What a reader of the report should know beside the call's arguments, by topic."""


@dataclass(frozen=True)
class Refusal:
    """A place that looked like `fusion` and is not touched. `reason` is the sentence a user will read."""

    fusion: str
    layer: str
    anchor: fx.Node
    reason: str
