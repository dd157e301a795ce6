"""Where a rotation may be in a graph: the nodes at which one may end, and those it may be a rotation of.

These are candidates only: `rotary.py` proves. Leaving one out loses a fusion, never a proof.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import torch
from torch import fx

from fusion_pass.graph.arithmetic import is_projection
from fusion_pass.graph.effects import Effects
from fusion_pass.graph.lanes import product
from fusion_pass.graph.region import inputs, modelled, upstream
from fusion_pass.graph.vocabulary import CASTS, MOVEMENTS, fake_tensor, first_argument, holds, operation, sizes
from fusion_pass.graph.writes import written_arguments

_SUMS = frozenset("add sub addcmul cat stack view_as_real sum einsum".split())
"""What ends a rotation: `x cos + rotated(x) sin`, or its two halves joined."""

_PRODUCTS = frozenset("mul addcmul einsum matmul".split())
"""What multiplies lanes with cos and sin."""

_FILLED = frozenset("empty empty_like new_empty zeros zeros_like new_zeros clone mul".split())
"""What makes the memory that a rotation is written into, piece by piece, or added to."""

_FOLLOWED = MOVEMENTS - {"expand", "getitem", "split", "chunk", "unbind", "narrow", "select", "slice"} | CASTS
"""What may follow a rotation and belong to it: all of its numbers, moved or cast."""

_CHAIN = 6
"""How many of these are followed."""

# --- ends -------------------------------------------------------------------------------------------------------------


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
    """Whether a product of two tensors is near, with no projection between: without one there is no rotation."""
    queue, seen = [(node, 0)], {node}
    while queue:
        current, depth = queue.pop()
        name = operation(current)
        if name == "matmul" and _projects(current):
            continue
        if name in _PRODUCTS and sum(fake_tensor(n) is not None for n in current.all_input_nodes) > 1:
            return True
        if depth < 5 and (current is node or modelled(current)):
            fresh = [n for n in current.all_input_nodes if n not in seen]
            seen.update(fresh)
            queue += [(n, depth + 1) for n in fresh]
    return False


def _projects(matmul: fx.Node) -> bool:
    left = fake_tensor(first_argument(matmul))
    return left is not None and is_projection(sizes(left)[-1])


def _ends_filling(node: fx.Node, effects: Effects) -> bool:
    target = written_arguments(node)[0]
    storage = effects.storage(target)
    if storage is None:
        return False
    origin = effects.origin[storage]
    return operation(origin) in _FILLED and effects.writes(target)[-1] is node


def ends(effects: Effects, root: fx.Node) -> list[fx.Node]:
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


# --- starts -----------------------------------------------------------------------------------------------------------


def starts(effects: Effects, end: fx.Node) -> Iterator[fx.Node]:
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
