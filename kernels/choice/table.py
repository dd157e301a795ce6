"""The measurements, and which of them speaks for a call.

One file a card (`TABLES`), written by `python -m benchmarks.choose_norm_rope`: for each form, number of heads and
number of tokens the microseconds of either back end, inputs rotated out of the cache. A card without a file goes by
the one of its architecture whose memory is nearest in speed.

A call is decided by the row whose form is the call's and whose size is nearest (of the heads first, then of the
tokens, by ratio). Where that form was not measured the one with the nearest head_dim stands in, then one that differs
in whether v is moved, in sectioned MRoPE, or in whether some lanes pass. Size of the elements, norm and what it is
over, pairing, interleaved MRoPE and padding of head_dim decide too much: no other row stands in for them. Padded heads
that a card's file has no row for go by the other card of its architecture: Triton computes lanes without data on any.
A call without a row is Triton's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .. import card
from ..card import Card
from .form import Form, Size

TABLES = {card.H100: "h100", card.H200: "h200"}
"""The measured cards, and their files' names."""

FASTER = 0.99
"""CUDA C++ is taken where its time is below this fraction of Triton's: a hundredth is what two runs differ by."""


@dataclass(frozen=True)
class Row:
    """One measurement, in microseconds. `model`: whose shape it is."""

    model: str
    form: Form
    size: Size
    triton: float
    cuda: float

    @property
    def faster(self) -> str:
        """The name of the back end to take."""
        return "cuda" if self.cuda < FASTER * self.triton else "triton"

    def exact(self, form: Form, size: Size) -> bool:
        """This is a measurement of the call itself, or of one with at most twice or half as many tokens."""
        return form == self.form and size.heads == self.size.heads and _ratio(size.tokens, self.size.tokens) < 0.7


@cache
def rows(of: Card) -> tuple[Row, ...]:
    """The measurements to go by on a card; none where none is of its architecture."""
    measured = card.nearest(of, TABLES)
    if measured is None:
        return ()
    return tuple(
        Row(shape["model"], Form(**shape["form"]), Size(shape["heads"], tokens), triton, cuda)
        for shape in json.loads(path_of(measured).read_text())["shapes"]
        for tokens, triton, cuda in shape["microseconds"]
    )


def deciding(form: Form, size: Size, of: Card) -> Row | None:
    """The row that speaks for a call on a card."""
    row = nearest(form, size, rows(of))
    if row is None and form.padded and not form.hidden:
        others = [other for other in TABLES if other.architecture == of.architecture]
        row = nearest(form, size, [row for other in others for row in rows(other)])
    return row


def path_of(measured: Card) -> Path:
    """The file of one of `TABLES`."""
    return Path(__file__).with_name(f"{TABLES[measured]}.json")


def nearest(form: Form, size: Size, among: Sequence[Row]) -> Row | None:
    """The row that speaks for a call; None if no form is near enough."""
    near = [row for row in among if _decisive(row.form) == _decisive(form)]
    return min(near, key=lambda row: _distance(form, size, row), default=None)


def _decisive(form: Form) -> tuple[object, ...]:
    interleaved = form.mrope_layout == "interleaved"
    return form.direction, form.itemsize, form.norm, form.hidden, form.pairing, interleaved, form.padded


def _distance(form: Form, size: Size, row: Row) -> tuple[float, ...]:
    return (
        _ratio(form.head_dim, row.form.head_dim),
        form.moved != row.form.moved,
        form.mrope_layout != row.form.mrope_layout,
        form.partial != row.form.partial,
        _ratio(size.heads, row.size.heads),
        _ratio(size.tokens, row.size.tokens),
    )


def _ratio(a: int, b: int) -> float:
    return abs(math.log(max(a, 1) / b))
