"""Which tensor is passed for a table: one that holds its numbers, along the axes of the rotated tensor.

In each graph the rotation reads a tensor that has the numbers of the cosines on one token, for its shape alone, nearer
than the cosines. Taken for the table it would be wrong.
"""

from __future__ import annotations

import torch
from exactness import sites_of
from spellings import HALF, B, D, H, S
from torch import Tensor

from fusion_pass.graph.site import Operand


def rotated(q: Tensor, cos: Tensor, sin: Tensor, like: Tensor) -> Tensor:
    """`spellings.halves`, and the shape of `like` on the way."""
    return q * cos + torch.cat((-q[..., HALF:], q[..., :HALF]), -1).view_as(like).view_as(q) * sin


def tables(*shape: int) -> tuple[Tensor, Tensor]:
    angle = torch.randn(*shape, HALF).repeat(*(1 for _ in shape), 2)
    return angle.cos(), angle.sin()


def cosines(model: object, *args: Tensor) -> Operand:
    """The operand of the only site, which is exact."""
    (site,) = sites_of(model, *args)  # type: ignore[arg-type]
    operand = site.call.tensors["cos"]
    assert operand is not None
    return operand


def test_numbers_that_vary_with_something_else() -> None:
    def model(x: Tensor, cos: Tensor, sin: Tensor, other: Tensor) -> Tensor:
        like = (cos + 0 * other).expand(B, S, H, D)
        return rotated(x, cos, sin, like)

    table = tables(1, S, 1)
    assert "cos" in cosines(model, torch.randn(B, S, H, D), *table, torch.randn(B, S, H, 1)).node.name


def test_numbers_along_an_axis_that_is_two() -> None:
    """Rows of [batch * sequence] tokens, where the rotated tensor has an axis for each."""

    def model(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c, s = cos.view(B, S, 1, D), sin.view(B, S, 1, D)
        like = cos * 1.0
        return rotated(x, c, s, like)

    assert cosines(model, torch.randn(B, S, 1, D), *tables(B * S)).node.name == "c"


def test_numbers_along_an_axis_that_is_another_for_something_else() -> None:
    """The angle varies along the sequence, and `other` along the batch; in `like` both vary along the sequence."""

    def model(x: Tensor, cos: Tensor, sin: Tensor, other: Tensor) -> Tensor:
        zero = 0 * other[:, None, None]
        c, s = cos[None, :, None] + zero, sin[None, :, None] + zero
        like = (cos + 0 * other)[None, :, None].expand(S, S, H, D)
        return rotated(x, c, s, like)

    assert cosines(model, torch.randn(S, S, H, D), *tables(S), torch.randn(S, 1)).node.name == "c"
