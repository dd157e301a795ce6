"""One rotated tensor: from the node where the rotation ends back to the tensor the operator will read, norm included.

x ──(casts)── norm? ── rotation ── norm? ── end          at most one norm, before or after
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from fusion_pass.graph.effects import Effects
from fusion_pass.graph.evaluate import Evaluator
from fusion_pass.graph.lanes import Opaque, product
from fusion_pass.graph.region import between, downstream, frontier, inputs, modelled, upstream
from fusion_pass.graph.site import Operand, changed
from fusion_pass.graph.vocabulary import CASTS, MOVEMENTS, Size, fake_tensor, holds, operation, sizes, written_arguments

from . import mrope, tables
from .facts import Norm, Refused, Rotation
from .layout import Roles, memory_order, operand, roles_of
from .norms import norm_between
from .rotary import equal, rotation_between

_SUMS = frozenset("add sub addcmul cat stack view_as_real sum einsum".split())
_PRODUCTS = frozenset("mul addcmul einsum matmul".split())
_FILLED = frozenset("empty empty_like new_empty zeros zeros_like new_zeros clone mul".split())
"""What makes the memory that a rotation is written into, piece by piece, or added to."""

_REDUCTIONS = frozenset("mean rms_norm layer_norm norm vector_norm var var_mean normalize l2_norm rsqrt".split())

_HOMOGENEOUS = MOVEMENTS | CASTS | frozenset({"mul", "div", "add", "sub", "neg", "cat", "sum", "mean"})
"""No norm is made of these alone: it needs a root."""

_FOLLOWED = MOVEMENTS - {"expand", "getitem", "split", "chunk", "unbind", "narrow", "select", "slice"} | CASTS

_CHAIN = 6
"""Movements and casts that are followed after a rotation."""


@dataclass(frozen=True)
class Reading:
    """What one tensor of one attention is. `x` is `[B, S, H, D]`; `names` are the roles of the axes of `end` before
    the last.
    """

    root: fx.Node
    end: fx.Node
    source: fx.Node
    x: Operand
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
    out_order: str
    out_dtype: torch.dtype
    region: frozenset[fx.Node] = field(repr=False)
    frontier: tuple[fx.Node, ...] = field(repr=False)
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


def roots(effects: Effects, taken: Container[fx.Node]) -> Iterator[fx.Node]:
    """Nodes at which a rotation may end, last first: sums of products, and the last write of memory filled piece by
    piece. Those in `taken`, which may grow on the way, are left out.
    """
    sums = frozenset(effects.doing(_SUMS))
    writers = frozenset(node for node in effects.writers if node.op != "call_module")
    for node in sorted(sums | writers, key=effects.order.__getitem__, reverse=True):
        if node in taken:
            continue
        if (node in sums and _is_features(fake_tensor(node)) and _adds(node) and _mixes(node)) or (
            node in writers and _ends_filling(node, effects)
        ):
            yield node


def _is_features(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.dim() >= 3 and tensor.is_floating_point()


def _adds(node: fx.Node) -> bool:
    """Whether this is not just a number added, as the eps of every norm is."""
    return len(node.all_input_nodes) > 1 or operation(node) not in ("add", "sub")


def _mixes(node: fx.Node) -> bool:
    """Whether a product of two tensors is near: without one there is no rotation."""
    queue, seen = [(node, 0)], {node}
    while queue:
        current, depth = queue.pop()
        name = operation(current)
        if name in _PRODUCTS and sum(fake_tensor(n) is not None for n in current.all_input_nodes) > 1:
            return True
        if depth < 5 and (current is node or modelled(current)):
            fresh = [n for n in current.all_input_nodes if n not in seen]
            seen.update(fresh)
            queue += [(n, depth + 1) for n in fresh]
    return False


def _ends_filling(node: fx.Node, effects: Effects) -> bool:
    target = written_arguments(node)[0]
    storage = effects.storage(target)
    if storage is None:
        return False
    origin = effects.origin[storage]
    return operation(origin) in _FILLED and effects.writes(target)[-1] is node


def read(effects: Effects, root_node: fx.Node) -> Reading | None:
    """The reading whose rotation ends at `root_node`, None if there is none.

    Raises `Refused` when it is a rotation that cannot be fused.
    """
    root = Evaluator(effects)
    ends = _ends(effects, root_node)
    for place, end in enumerate(ends):
        for start in _starts(effects, end):
            reading = _settled(root, lambda s=start, e=ends[place:]: _attempt(root, root_node, s, e))  # type: ignore[misc]
            if reading is not None:
                return reading
    return None


def _settled(root: Evaluator, attempt: Callable[[], Reading | None]) -> Reading | None:
    try:
        return root.settle(attempt)
    except Opaque:
        return None


def _attempt(root: Evaluator, root_node: fx.Node, start: fx.Node, ends: Sequence[fx.Node]) -> Reading | None:
    """The reading that rotates `start` into the last of `ends` for which that can be said; None if not even into the
    first.
    """
    best = None
    for end in ends:
        rotation = rotation_between(root, start, end)
        if rotation is None:
            break
        best = rotation
    return None if best is None else _complete(root, root_node, best)


def _ends(effects: Effects, root: fx.Node) -> list[fx.Node]:
    """`root` and the movements and casts that alone read it, nearest first.

    Up to a cast that widens: who computes in a wider dtype from here on (GPT-J its scores) reads rounded values, and an
    attention takes them as they are.
    """
    chain = [root]
    if written_arguments(root):
        origin = effects.origin[effects.storage(written_arguments(root)[0])]  # type: ignore[index]
        readers = [u for u in origin.users if effects.order[u] > effects.order[root]]
        chain = [u for u in readers if operation(u) in _FOLLOWED and len(readers) == 1]
        if not chain:
            return []
    while len(chain) <= _CHAIN:
        users = list(chain[-1].users)
        if (
            len(users) != 1
            or operation(users[0]) not in _FOLLOWED
            or not users[0].args
            or users[0].args[0] is not chain[-1]
            or _widens(users[0], chain[-1])
        ):
            break
        chain.append(users[0])
    return [node for node in chain if (tensor := fake_tensor(node)) is not None and tensor.dim() > 1]


def _widens(cast: fx.Node, read: fx.Node) -> bool:
    wide, narrow = fake_tensor(cast), fake_tensor(read)
    return wide is not None and narrow is not None and wide.dtype != narrow.dtype and holds(wide.dtype, narrow.dtype)


def _starts(effects: Effects, end: fx.Node) -> Iterator[fx.Node]:
    """Nodes that `end` may be a rotation of: of its size, nearest first."""
    tensor = fake_tensor(end)
    assert tensor is not None
    shape = sizes(tensor)
    total = product(shape)
    for node in _shared(effects, end):
        candidate = fake_tensor(node)
        if candidate is not None and candidate.is_floating_point() and candidate.dim() >= 2:
            s = sizes(candidate)
            if s[-1] == shape[-1] and product(s) == total:
                yield node


def _shared(effects: Effects, end: fx.Node) -> Iterator[fx.Node]:
    """What a mixture of lanes may be a mixture of: nodes that lead to `end` on more than one way, nearest first."""
    mixed = end
    while len(read := _values_read(effects, mixed)) == 1 and operation(mixed) != "sum":
        mixed = read[0]
    if len(read) < 2 or operation(mixed) in ("mul", "matmul", "einsum"):
        yield from upstream(effects, mixed)
        return
    ways: dict[fx.Node, int] = {}
    for parent in read:
        for node in [parent, *upstream(effects, parent)]:
            ways[node] = ways.get(node, 0) + 1
    yield from sorted((n for n, w in ways.items() if w > 1), key=effects.order.__getitem__, reverse=True)


def _values_read(effects: Effects, node: fx.Node) -> list[fx.Node]:
    return [n for n in inputs(effects, node) if fake_tensor(n) is not None or written_arguments(n)]


def _complete(root: Evaluator, root_node: fx.Node, rotation: Rotation) -> Reading:
    effects = root.effects
    _check_not_written_back(effects, rotation)
    norm = _norm_before(root, rotation)
    after = None if norm is not None else _norm_after(root, rotation)
    source = _uncast(effects, norm.start if norm is not None else rotation.start)
    end = after.end if after is not None else rotation.end
    roles = roles_of(root, rotation)
    conjugate, cos, sin = _tables(root, rotation, roles)
    by_row, note = None, ""
    if rotation.cos.shape[1] * 2 == rotation.rotary_dim:
        sign = -1 if conjugate else 1
        wanted = (rotation.cos, sign * rotation.sin)
        by_row = mrope.rows(root, wanted, (cos, sin), rotation.end, [rotation.response], [roles.batch, roles.sequence])
        note = "" if by_row is not None else mrope.note(root, rotation.cos, cos, rotation.end)
    if by_row is not None:
        cos, sin = by_row.cos, by_row.sin
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
        conjugate=conjugate,
        cos=cos,
        sin=sin,
        norm=norm or after,
        norm_first=after is None,
        norm_scope=scope,
        names=names,
        out_order=memory_order(end, list(names)),
        out_dtype=tensor.dtype,
        region=region,
        frontier=tuple(frontier(effects, region, source)),
        mrope_layout="none" if by_row is None else by_row.layout,
        mrope_section=() if by_row is None else by_row.section,
        notes={"mrope": note} if note else {},
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


def _tables(root: Evaluator, rotation: Rotation, roles: Roles) -> tuple[bool, Operand, Operand]:
    study = root.study(rotation.start, lambda x: x)
    region = between(study, rotation.end)
    nodes = tables.candidates(frontier(root.effects, region, rotation.start))
    order = [roles.batch, roles.sequence]
    values = [rotation.response]
    cos = tables.find(root, rotation.cos, nodes, rotation.end, values, order)
    if cos is None:
        raise Refused("No tensor of the graph holds the cosines of the rotation along [batch, sequence, lanes].")
    for sign in (1, -1):
        sin = tables.find(root, sign * rotation.sin, nodes, rotation.end, values, order)
        if sin is not None:
            check_tables(root, rotation, cos, sin)
            return sign < 0, cos, sin
    raise Refused("No tensor of the graph holds the sines of the rotation along [batch, sequence, lanes].")


def check_tables(root: Evaluator, rotation: Rotation, cos: Operand, sin: Operand) -> None:
    """Raise unless the tables can be cosines and sines of one angle a pair. Tables that are graph inputs are taken as
    they are.
    """
    computed = [name for name in (_trigonometry(root, cos.node), _trigonometry(root, sin.node)) if name]
    if rotation.cos.shape[1] == rotation.rotary_dim and computed:
        raise Refused(
            "The tables are computed in the graph, and their entries for the two lanes of a pair are not seen to be "
            "equal; by two different angles it would be no rotation."
        )
    if len(computed) < 2:
        return
    if computed[0] == {"sin"} and computed[1] == {"cos"}:
        raise Refused("cos and sin are exchanged: the tensor in the place of the cosines is computed by sin.")
    if any(isinstance(s.key, tuple) and s.key[0] == "sealed" for s in rotation.response.axes):
        return
    square = rotation.cos**2 + rotation.sin**2
    if not equal(square, square[:, :1] * (square * 0 + 1)):
        raise Refused("The tables are not cosines and sines of one angle: cos^2 + sin^2 differs between lanes.")


def _trigonometry(root: Evaluator, node: fx.Node) -> set[str]:
    names = {operation(n) for n in [node, *upstream(root.effects, node)]}
    return names & {"cos", "sin", "polar", "exp"}


def _norm_before(root: Evaluator, rotation: Rotation) -> Norm | None:
    end = rotation.start

    def one_tensor(node: fx.Node) -> bool:
        # Joint attention concatenates streams that were normalised each on its own, or rotates some of the normalised
        # tokens: a norm is not looked for behind either.
        return modelled(node) and not root.opaque(node)

    if root.opaque(end) or not any(
        operation(node) in _REDUCTIONS for node in [end, *upstream(root.effects, end, one_tensor)]
    ):
        return None
    norm = _first_norm(root, end, one_tensor)
    if norm is None:
        raise Refused(
            "The rotated tensor is normalised before, but not provably by RMSNorm or LayerNorm "
            "over the lanes of one head or of all heads."
        )
    return norm


def _first_norm(root: Evaluator, end: fx.Node, through: Callable[[fx.Node], bool]) -> Norm | None:
    tensor = fake_tensor(end)
    assert tensor is not None
    total = product(sizes(tensor))
    for start in upstream(root.effects, end, through):
        candidate = fake_tensor(start)
        if (
            candidate is None
            or not candidate.is_floating_point()
            or candidate.dim() < 2
            or product(sizes(candidate)) != total
        ):
            continue
        norm = _norm(root, start, end)
        if norm is not None:
            return norm
    return None


def _norm(root: Evaluator, start: fx.Node, end: fx.Node) -> Norm | None:
    try:
        region = between(root.study(start, lambda x: x), end)
        read = frontier(root.effects, region, start)
        if all(operation(node) in _HOMOGENEOUS for node in region) or _goes_around(root.effects, start, read):
            return None
        return norm_between(root, start, end, read)
    except Opaque:
        return None


def _goes_around(effects: Effects, start: fx.Node, read: Sequence[fx.Node]) -> bool:
    """Whether what `start` is computed from also enters the region behind it, as x does where x^2 is the start: what
    comes out is then no function of `start` and weights."""
    total = _elements(start)
    origins = set(upstream(effects, start, limit=12))
    return any(node in origins and _elements(node) == total for node in read)


def _elements(node: fx.Node) -> Size | None:
    tensor = fake_tensor(node)
    return None if tensor is None else product(sizes(tensor))


def _norm_after(root: Evaluator, rotation: Rotation) -> Norm | None:
    reach = downstream(rotation.end, 24, lambda n: modelled(n) and operation(n) != "cat")
    if not any(operation(n) in _REDUCTIONS for n in reach):
        return None
    tensor = fake_tensor(rotation.end)
    assert tensor is not None
    total = product(sizes(tensor))
    for end in sorted(reach, key=root.effects.order.__getitem__, reverse=True):
        candidate = fake_tensor(end)
        if candidate is None or not candidate.is_floating_point() or product(sizes(candidate)) != total:
            continue
        if candidate.dim() != tensor.dim() or sizes(candidate)[-1] != rotation.head_dim:
            continue
        try:
            norm = _norm(root, rotation.end, end)
        except Refused:
            continue  # the last factor may be no weight: the norm itself may end earlier
        if norm is not None:
            return norm
    return None


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
