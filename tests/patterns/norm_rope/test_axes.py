"""Which axes are batch, sequence and heads: told from what the tables vary along, and from the lanes of the weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from exactness import assert_exact, capture, find, reasons_of, sites_of
from spellings import HALF, B, D, H, S, halves, rms
from torch import Tensor

Shape = tuple[int, ...]

READ: dict[str, tuple[Shape, Shape]] = {
    "batch, sequence, heads": ((B, S, H, D), (S, 1)),
    "batch, heads, sequence": ((B, H, S, D), (S,)),
    "heads, batch, sequence": ((H, B, S, D), (S,)),
    "sequence, heads": ((S, H, D), (S, 1)),
    "heads, sequence": ((H, S, D), (S,)),
    "batch, sequence": ((B, S, D), (B, S)),
    "sequence, batch": ((S, B, D), (S, 1)),
    "a table of each batch": ((B, H, S, D), (B, 1, S)),
    "a table of each batch, heads last": ((B, S, H, D), (B, S, 1)),
    "one head": ((B, S, 1, D), (S, 1)),
    "one token": ((B, 1, H, D), (1, 1)),
    "one token of each batch": ((B, 1, H, D), (B, 1, 1)),
    "equal sizes": ((S, S, S, D), (S, 1)),
    "equal sizes, heads before": ((S, S, S, D), (S,)),
    "a table along what is called heads": ((B, S, H, D), (H,)),
}

REFUSED: dict[str, tuple[Shape, Shape, str]] = {
    "a table of each head": ((B, H, S, D), (H, S), "The tables differ between heads"),
    "a table of each head of each batch": ((B, H, S, D), (B, H, S), "The tables differ between heads"),
    "one table for all": ((B, S, H, D), (), "The axis of the heads cannot be told"),
    "a table of each batch alone": ((B, S, H, D), (B, 1, 1), "The axis of the heads cannot be told"),
    "sequence in front": ((S, B, H, D), (S, 1, 1), "The axis of the heads cannot be told"),
    "five axes": ((B, S, 2, H, D), (S, 1, 1), "The rotated tensor has 5 axes, 1 of them with a table of their own"),
}


def both(q: Tensor, k: Tensor, w: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    angle = torch.cat((angle, angle), -1)
    q, k = (halves(rms(x * 1.0, w), angle.cos(), angle.sin()) for x in (q, k))
    return q, k


def inputs(shape: Shape, table: Shape) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return *torch.randn(2, *shape), torch.rand(D) + 0.5, torch.randn(*table, HALF)


@pytest.mark.parametrize("name", READ)
def test_read(name: str) -> None:
    (site,) = sites_of(both, *inputs(*READ[name]))
    assert site.fusion == "qk_norm_rope"


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    shape, table, reason = REFUSED[name]
    found = reasons_of(both, *inputs(shape, table))
    assert len(found) == 2
    assert all(reason in r for r in found), found


def test_a_table_alone() -> None:
    """A sequence without batch and heads: what is rotated may be the table of a position itself."""
    assert find(capture(both, *inputs((S, D), (S,)))[0]) == ([], [])


@pytest.mark.parametrize(("turned", "found"), [(lambda x: x.T, 0), (lambda x: x.mT, 1)], ids=["T", "mT"])
@pytest.mark.filterwarnings("ignore:The use of `x.T`")
def test_all_axes_turned_round(turned: Callable[[Tensor], Tensor], found: int) -> None:
    """`x.T` of three axes reverses all of them, which the sizes of a cube do not tell from `x.mT`."""

    def model(x: Tensor, w: Tensor, angle: Tensor) -> Tensor:
        angle = torch.cat((angle, angle), -1)
        return halves(turned(rms(x, w)).mT, angle.cos(), angle.sin())

    module, values = capture(model, torch.randn(D, D, D), torch.rand(D) + 0.5, torch.randn(D, HALF))
    sites, _ = find(module)
    assert_exact(module, values, sites)
    assert len(sites) == found


def test_a_table_that_was_one_axis() -> None:
    """Of the places of a table that is laid out in one axis, symbols tell nothing."""

    def model(q: Tensor, k: Tensor, w: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
        length = q.shape[1]
        angle = torch.arange(length).float()[:, None] * angle.expand(length, HALF).reshape(-1).view(length, HALF)
        return both(q, k, w, angle[:, None])

    given = *torch.randn(2, B, S, H, D), torch.rand(D) + 0.5, torch.randn(1, HALF)
    (site,) = sites_of(model, *given)
    assert site.fusion == "qk_norm_rope"
    for x in given[2:]:
        torch._dynamo.mark_static(x)
    module, values = capture(model, *given, dynamic=True)
    assert_exact(module, values, find(module)[0])


PIECES: dict[str, Callable[[Tensor], Iterable[Tensor]]] = {
    "chunk": lambda x: x.chunk(2, -1),
    "split": lambda x: x.split(3, -1),
    "split of sizes": lambda x: x.split([0, 0], -1),
    "tensor_split": lambda x: x.tensor_split(2, -1),
    "narrow": lambda x: (x.narrow(-1, 0, 0),),
    "unbind": lambda x: x.unsqueeze(-2).unbind(-2),
}


@pytest.mark.parametrize("name", PIECES)
def test_pieces_of_no_lanes(name: str) -> None:
    """A rotation of some lanes that are all, whose other lanes are taken apart and joined to it again."""
    if name == "split" and torch.__version__ < "2.13":
        pytest.skip("torch 2.11: Dynamo itself cannot capture a split of no lanes (IndexError in its fake tensors)")

    def model(q: Tensor, k: Tensor, w: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
        rotated = both(q[..., :D], k[..., :D], w, angle)
        q, k = (torch.cat((y, *PIECES[name](x[..., D:])), -1) for x, y in zip((q, k), rotated, strict=True))
        return q, k

    (site,) = sites_of(model, *inputs((B, H, S, D), (S,)))
    assert site.fusion == "qk_norm_rope"


DEALT: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "back again": (lambda x: x.flatten(0, 1).view(B, S, H, D), 1),
    "in one axis, then in two": (lambda x: x.view(1, B * S, H, D).view(B, S, H, D), 1),
    "in three axes, then in two": (lambda x: x.view(B, 3, S // 3, H, D).view(B, S, H, D), 1),
    "in other rows": (lambda x: x.flatten(0, 1).view(S, B, H, D).transpose(0, 1), 0),
    "in rows of other tokens": (lambda x: x.view(B, 3, S // 3, H, D).transpose(1, 2).reshape(B, S, H, D), 0),
    "in three axes, two of which are one": (lambda x: x.view(B, 3, S // 3, H, D).flatten(0, 1).view(B, S, H, D), 0),
}


@pytest.mark.parametrize("name", DEALT)
def test_tokens_dealt_out_anew(name: str) -> None:
    """Between the norm and the rotation: which token is rotated by which row of the tables."""
    dealt, found = DEALT[name]

    def model(x: Tensor, w: Tensor, angle: Tensor) -> Tensor:
        angle = torch.cat((angle, angle), -1)
        return halves(dealt(rms(x, w)), angle.cos(), angle.sin())

    module, values = capture(model, torch.randn(B, S, H, D), torch.rand(D) + 0.5, torch.randn(S, 1, HALF))
    sites, _ = find(module)
    assert_exact(module, values, sites)
    assert [site.fusion for site in sites if site.fusion != "rope"] == ["norm_rope"] * found
