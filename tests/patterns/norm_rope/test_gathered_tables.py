"""Tables that the graph gathers by position: the call reads what was gathered (docs/reading.md says why)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from exactness import capture, find, sites_of
from spellings import Attention, B, D, H, S, halves, inputs, rms
from torch import Tensor

PLACES = 50

GATHERS = {
    "index": lambda table, positions: table[positions],
    "index_select": lambda table, positions: table.index_select(0, positions.flatten()).view(*positions.shape, -1),
    "gather": lambda table, positions: torch.gather(
        table.expand(len(positions), -1, -1), 1, positions[..., None].expand(-1, -1, table.shape[-1])
    ),
    "embedding": lambda table, positions: F.embedding(positions, table),
}


class Gathered(Attention):
    """Looks the positions `[B, S]` up in a table `[PLACES, D]` of cosines and one of sines, or in one of both."""

    def __init__(self, gather, together: bool) -> None:
        super().__init__()
        self.gather, self.together = gather, together

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
        if self.together:  # GPT-J, vLLM
            cos, sin = self.gather(torch.cat((cos, sin), -1), positions).chunk(2, -1)
        else:
            cos, sin = self.gather(cos, positions), self.gather(sin, positions)
        q, k, v = (p(x).view(B, S, H, D) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (
            self.one(part, w, cos[:, :, None], sin[:, :, None]) for part, w in ((q, self.q_weight), (k, self.k_weight))
        )
        return F.scaled_dot_product_attention(q, k, v.transpose(1, 2))


@pytest.mark.parametrize("together", [False, True], ids=["two_tables", "one_table"])
@pytest.mark.parametrize("gather", GATHERS)
def test_gathered(gather, together):
    positions = torch.randint(0, PLACES, (B, S))
    model = Gathered(GATHERS[gather], together)
    (site,) = sites_of(model, inputs()[0], torch.randn(PLACES, D), torch.randn(PLACES, D), positions)
    assert site.fusion == "qk_norm_rope"
    assert site.call.options["norm"] == "rms"
    assert "positions" not in site.call.tensors


class Computed(Gathered):
    """The table is computed in the graph (ChatGLM): the cosines are looked up at `positions`, the sines at `others`."""

    def forward(self, x: Tensor, angle: Tensor, positions: Tensor, others: Tensor) -> Tensor:
        angle = torch.cat((angle, angle), -1)
        cos, sin = angle.cos()[positions][:, :, None], angle.sin()[others][:, :, None]
        q, k, v = (p(x).view(B, S, H, D) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.one(q, self.q_weight, cos, sin), self.one(k, self.k_weight, cos, sin)
        return F.scaled_dot_product_attention(q, k, v.transpose(1, 2))


OTHERS = {
    "the same": (lambda positions: positions, 1),
    "the same once more": (lambda positions: (positions + 1) - 1, 1),
    "the same, shorter integers": (lambda positions: positions.to(torch.int32), 1),
    "the next": (lambda positions: positions + 1, 0),
    "reversed": (lambda positions: positions.flip(1), 0),
    "written": (lambda positions: positions.clone().zero_(), 0),
}


@pytest.mark.parametrize("name", OTHERS)
def test_gathered_from_a_table_of_the_graph(name):
    """Cosine and sine are of one angle where they are of one place: known of equal positions alone."""
    others, sites = OTHERS[name]

    class Model(Computed):
        def forward(self, x, angle, positions):
            return super().forward(x, angle, positions, others(positions))

    args = inputs()[0], torch.randn(PLACES, D // 2), torch.randint(0, PLACES - 1, (B, S))
    found, _ = find(capture(Model(GATHERS["index"], False), *args)[0])
    assert [site.fusion for site in found] == ["qk_norm_rope"] * sites
    if found:
        sites_of(Model(GATHERS["index"], False), *args)


def one_token(angle: Tensor, w: Tensor, q: Tensor, k: Tensor, here: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """One query and one key `[B, 1, H, D]` at a place of a table each."""
    rows = (torch.cat((row, row), -1)[:, None, None] for row in (angle[here], angle[there]))
    q, k = (halves(rms(x, w), row.cos(), row.sin()) for x, row in zip((q, k), rows, strict=True))
    return q, k


@pytest.mark.parametrize("computed", [False, True])
def test_one_place_is_not_another(computed):
    """Of an index of one element no axis says which place it is."""

    def model(angle, *others):
        return one_token(angle * 2 if computed else angle, *others)

    given = torch.randn(PLACES, D // 2), torch.rand(D) + 0.5, *torch.randn(2, B, 1, H, D)
    places = torch.randint(0, PLACES, (2, 1))
    assert [site.fusion for site in sites_of(model, *given, *places)] == ["norm_rope", "norm_rope"]


def test_rows_that_are_lanes():
    """Of a table whose rows were put in another order all places are known one by one, but not which of them are
    looked up."""

    def model(x: Tensor, angle: Tensor, w: Tensor, places: Tensor) -> Tensor:
        row = angle.flip(0)[places][:, :, None]
        row = torch.cat((row, row), -1)
        return halves(rms(x, w), row.cos(), row.sin())

    given = torch.randn(B, S, H, D), torch.randn(6, D // 2), torch.rand(D) + 0.5, torch.randint(0, 6, (B, S))
    (site,) = sites_of(model, *given)
    assert site.fusion == "norm_rope"
