"""One rotated tensor: from the node where the rotation ends back to the tensor the operator will read, norm included.

x ──(casts)── norm? ── rotation ── norm? ── end          at most one norm, before or after
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from fusion_pass.graph.effects import Effects
from fusion_pass.graph.evaluate import Evaluator
from fusion_pass.graph.lanes import Opaque
from fusion_pass.graph.region import between, frontier
from fusion_pass.graph.site import Operand, changed
from fusion_pass.graph.vocabulary import CASTS, Size, fake_tensor, holds, operation, sizes

from ..refused import Refused
from .axes import Roles, memory_order, operand, roles_of
from .facts import Norm, Rotation
from .norm_search import norm_after, norm_before
from .rotary import rotation_between
from .rotary_tables import tables_of
from .rotation_places import ends, starts


@dataclass(frozen=True)
class Reading:
    """What one tensor of one attention is, in the terms of the operators (docs/operators.md)."""

    root: fx.Node
    """Where the reading began: the sum, or the write, at which the rotation ends."""
    end: fx.Node
    """What the call replaces: `root`, or what movements, casts and a norm make of it."""
    source: fx.Node
    x: Operand
    """`source` as `[B, S, H, D]`."""
    heads: Size
    head_dim: int
    rotary_dim: int
    rotary_start: int
    pairing: str
    conjugate: bool
    cos: Operand
    sin: Operand
    norm: Norm | None
    norm_first: bool
    norm_scope: str
    names: tuple[str, ...]
    """The roles (`axes.ROLES`) of the axes of `end` in front of the lanes."""
    out_order: str
    out_dtype: torch.dtype
    region: frozenset[fx.Node] = field(repr=False)
    """Every node between `source` and `end`, `end` included."""
    frontier: tuple[fx.Node, ...] = field(repr=False)
    """What `region` reads beside `source`, latest first."""
    mrope_layout: str = "none"
    mrope_section: tuple[int, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)


def transferred(reading: Reading, to: Mapping[fx.Node, fx.Node]) -> Reading:
    """`reading` of one place as the reading of another place that is built the same way."""

    def node(n: fx.Node) -> fx.Node:
        return to.get(n, n)

    def moved(operand: Operand | None) -> Operand | None:
        return None if operand is None else Operand(node(operand.node), operand.steps)

    norm = reading.norm
    if norm is not None:
        eps = node(norm.eps) if isinstance(norm.eps, fx.Node) else norm.eps
        norm = changed(
            norm, start=node(norm.start), end=node(norm.end), eps=eps, weight=moved(norm.weight), bias=moved(norm.bias)
        )
    x, cos, sin = moved(reading.x), moved(reading.cos), moved(reading.sin)
    assert x is not None
    assert cos is not None
    assert sin is not None
    return changed(
        reading,
        root=node(reading.root),
        end=node(reading.end),
        source=node(reading.source),
        x=x,
        cos=cos,
        sin=sin,
        norm=norm,
        region=frozenset(map(node, reading.region)),
        frontier=tuple(map(node, reading.frontier)),
    )


def read(effects: Effects, root_node: fx.Node) -> Reading | None:
    """The reading whose rotation ends at `root_node`, None if there is none.

    Raises `Refused` when it is a rotation that cannot be fused.
    """
    root = Evaluator(effects)
    candidates = ends(effects, root_node)
    for place, end in enumerate(candidates):
        for start in starts(effects, end):
            reading = _settled(root, lambda s=start, e=candidates[place:]: _attempt(root, root_node, s, e))  # type: ignore[misc]
            if reading is not None:
                return reading
    return None


def _settled(root: Evaluator, attempt: Callable[[], Reading | None]) -> Reading | None:
    try:
        return root.settle(attempt)
    except Opaque:
        return None


def _attempt(root: Evaluator, root_node: fx.Node, start: fx.Node, candidates: Sequence[fx.Node]) -> Reading | None:
    """The reading that rotates `start` into the last of `candidates` for which that can be said; None if not even into
    the first.
    """
    best = None
    for end in candidates:
        rotation = rotation_between(root, start, end)
        if rotation is None:
            break
        best = rotation
    return None if best is None else _complete(root, root_node, best)


def _complete(root: Evaluator, root_node: fx.Node, rotation: Rotation) -> Reading:
    effects = root.effects
    _check_not_written_back(effects, rotation)
    norm = norm_before(root, rotation)
    after = None if norm is not None else norm_after(root, rotation)
    source = _uncast(effects, norm.start if norm is not None else rotation.start)
    end = after.end if after is not None else rotation.end
    roles = roles_of(root, rotation)
    tables = tables_of(root, rotation, roles)
    study = root.study(source, lambda x: x)
    region = _with_checks(between(study, end), end)
    shape = sizes(fake_tensor(rotation.end))  # type: ignore[arg-type]
    heads: Size = 1 if roles.heads is None else shape[roles.heads]
    scope = _scope(norm or after, heads, rotation.head_dim)
    names = _names(rotation, roles, after)
    origin = _origin(rotation, roles, norm)
    tensor = fake_tensor(end)
    assert tensor is not None
    return Reading(
        root=root_node,
        end=end,
        source=source,
        x=operand(source, origin, heads, rotation.head_dim),
        heads=heads,
        head_dim=rotation.head_dim,
        rotary_dim=rotation.rotary_dim,
        rotary_start=rotation.rotary_start,
        pairing=rotation.pairing,
        conjugate=tables.conjugate,
        cos=tables.cos,
        sin=tables.sin,
        norm=norm or after,
        norm_first=after is None,
        norm_scope=scope,
        names=names,
        out_order=memory_order(end, list(names)),
        out_dtype=tensor.dtype,
        region=region,
        frontier=tuple(frontier(effects, region, source)),
        mrope_layout=tables.mrope_layout,
        mrope_section=tables.mrope_section,
        notes={"mrope": tables.note} if tables.note else {},
    )


def _with_checks(region: frozenset[fx.Node], end: fx.Node) -> frozenset[fx.Node]:
    """`region` and what export added to check the dtypes of its nodes, which goes with them."""
    readers = {user for node in region - {end} for user in node.users}
    return region | {user for user in readers if operation(user) == "_assert_tensor_metadata"}


def _check_not_written_back(effects: Effects, rotation: Rotation) -> None:
    """CogVideoX rotates the image tokens of q and writes them back into q, whose text tokens stay as they are."""
    for write in effects.writes(rotation.start):
        if effects.order[write] > effects.order[rotation.end] and rotation.end in write.all_input_nodes:
            raise Refused(
                "The rotation is written back into the tensor it was cut from, "
                "whose other tokens are normalised but not rotated."
            )


def _uncast(effects: Effects, node: fx.Node) -> fx.Node:
    """The tensor `node` is a widening cast of: fewer bytes to read, the same numbers."""
    while operation(node) in CASTS and node.args and (before := fake_tensor(node.args[0])) is not None:
        tensor = fake_tensor(node)
        assert tensor is not None
        argument = node.args[0]
        assert isinstance(argument, fx.Node)
        widens = before.is_floating_point() and holds(tensor.dtype, before.dtype)
        if not widens or effects.last_write(argument, node) is not None or before.device != tensor.device:
            break
        node = argument
    return node


def _scope(norm: Norm | None, heads: Size, head_dim: int) -> str:
    if norm is None or norm.width == head_dim:
        return "head"
    if isinstance(heads, int) and norm.width == heads * head_dim:
        return "hidden"
    raise Refused(
        f"The norm is over {norm.width} lanes, which are neither one head ({head_dim}) nor all of them ({heads} heads)."
    )


def _names(rotation: Rotation, roles: Roles, after: Norm | None) -> tuple[str, ...]:
    names = roles.order()
    if after is None:
        return tuple(names)
    # No graph is known that gets here: an axis is lost only among the lanes of a norm over more than the heads, which
    # `_scope` refuses.
    if any(a is None for a in after.axes[:-1]):
        raise Refused("The norm after the rotation changes the axes.")
    return tuple(names[a] for a in after.axes[:-1] if a is not None)


def _origin(rotation: Rotation, roles: Roles, norm: Norm | None) -> dict[str, int | None]:
    """For each role the axis of the tensor the operator reads; None: no axis of its own."""
    origin: dict[str, int | None] = {}
    for role in ("batch", "sequence", "heads"):
        axis = getattr(roles, role)
        if axis is not None:
            axis = rotation.axes[axis]
            if norm is not None:
                axis = norm.axes[axis]
        origin[role] = axis
    return origin
