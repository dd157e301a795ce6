"""Tables that are no cosines and sines of one angle a pair, the same for all heads."""

from __future__ import annotations

import torch
from exactness import sites_of
from spellings import HALF, Attention, D, H, S, added_in_place, halves, inputs, refused
from torch import Tensor


def test_exchanged_tables() -> None:
    refused("exchanged", rotate=lambda q, c, s: halves(q, s, c))


def test_sine_of_another_angle() -> None:
    refused("one angle", rotate=lambda q, c, s: halves(q, c, s * s))


def test_fractions_cut_to_integers() -> None:
    """`torch.full((1,), 1.9, dtype=torch.long)` is 1."""

    def cut(q: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return halves(q, c * 1.9, s * torch.full((1,), 1.9, dtype=torch.long))

    refused("cos^2 + sin^2 differs", rotate=cut)
    assert sites_of(Attention(rotate=lambda q, c, s: halves(q, c * 1.9, s * torch.full((1,), 1.9))), *inputs())


def test_halves_that_are_provably_different() -> None:
    def rotate(q: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return halves(q, torch.cat((c[..., :HALF], c[..., HALF:] * c[..., HALF:]), -1), s)

    refused("different angles", rotate=rotate)


def test_two_angles_a_pair() -> None:
    """Ernie-Image has the angles of adjacent lanes and rotates halves."""

    def rotate(q: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return halves(q, *(table[..., :HALF].repeat_interleave(2, -1) for table in (c, s)))

    refused("different angles", rotate=rotate)


def test_tables_along_heads() -> None:
    def rotate(q: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return halves(q, c[:, :H].transpose(1, 2), s[:, :H].transpose(1, 2))

    refused("differ between heads", rotate=rotate)


def test_tables_of_each_head() -> None:
    """LTX-2 gives each head a part of the frequencies of the whole row."""
    tables = torch.randn(2, 1, S, H, D)
    refused("differ between heads", rotate=lambda q, c, s: added_in_place(q, *tables))
