"""Single nodes of an attention written out, as all that read it ask of them."""

from __future__ import annotations

from torch import fx

from fusion_pass.graph.effects import Effects
from fusion_pass.graph.vocabulary import Size, fake_tensor, first_argument, in_place, sizes

from ...refused import Refused

CASTS = frozenset(
    "to _to_copy float half bfloat16 double type type_as contiguous clone alias convert_element_type".split()
)
"""Operations that change the dtype or the memory of scores and weights. (`detach` stops their gradient.)"""

MAX_STEPS = 24
"""Operations between one product and the other."""


def rank_of(node: object) -> int:
    """Number of axes of a tensor node, 0 for others."""
    tensor = fake_tensor(node)
    return 0 if tensor is None else tensor.dim()


def shape_of(node: object) -> tuple[Size, ...]:
    """The shape of a tensor node, () for others."""
    tensor = fake_tensor(node)
    return () if tensor is None else sizes(tensor)


def keeps_numbers(node: fx.Node) -> bool:
    """Whether a cast leaves floating-point numbers what they are, up to rounding. Rounding to eight bits is meant."""
    before, after = fake_tensor(first_argument(node)), fake_tensor(node)
    return all(x is not None and x.is_floating_point() and x.itemsize > 1 for x in (before, after))


def reduces_last(node: fx.Node, rank: int) -> bool:
    """Whether a reduction of a tensor of `rank` axes is over the last one, which goes or stays."""
    given = [*node.args[1:], *(value for name, value in node.kwargs.items() if name != "dtype")]
    dims = (-1, rank - 1, [-1], [rank - 1], (-1,), (rank - 1,))
    return (
        rank_of(first_argument(node)) == rank
        and bool(given)
        and given[0] in dims
        and all(isinstance(a, bool) for a in given[1:])
    )


def version_read(effects: Effects, node: fx.Node, reader: fx.Node) -> fx.Node:
    """The node whose result `reader` sees in `node`: the last in-place operation on it, or `node` itself.

    Raises `Refused` for any other write.
    """
    write = effects.last_write(node, reader)
    if write is None:
        return node
    if in_place(write) is None or write.args[0] is not node:
        raise Refused(f"{node.name!r} is written in place by {write.name!r}, in a way that is not followed.")
    return write
