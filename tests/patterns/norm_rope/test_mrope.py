"""MRoPE: rows picked in the layer become three-row tables; rows picked once per model stay picked. Three different
positions throughout.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from exactness import sites_of
from spellings import HALF, B, D, H, S, halves
from torch import nn

from fusion_pass import zoo
from fusion_pass.patterns.norm_rope.mrope import layout_of

SECTIONS = {"sectioned": (2, 3, 3), "interleaved": (4, 2, 2)}


def sectioned(table):
    """transformers 4.57, Qwen2-VL: `cos.split(section * 2)`, row i % 3 of piece i."""
    return torch.cat([piece[i % 3] for i, piece in enumerate(table.split(SECTIONS["sectioned"] * 2, dim=-1))], dim=-1)


def interleaved(table):
    """Qwen3-VL: rows H and W written into every third lane of row T."""
    half = table[0][..., :HALF].clone()
    for row in (1, 2):
        lanes = slice(row, SECTIONS["interleaved"][row] * 3, 3)
        half[..., lanes] = table[row][..., lanes]
    return torch.cat((half, half), -1)


class PerLayer(nn.Module):
    def __init__(self, pick, pairing="halves"):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(32, H * D, bias=False), nn.Linear(32, H * D, bias=False)
        self.pick, self.pairing = pick, pairing

    def rotate(self, x, cos, sin):
        if self.pairing == "halves":
            return halves(x, cos, sin)
        cos, sin = cos[..., :HALF], sin[..., :HALF]
        a, b = x[..., 0::2], x[..., 1::2]
        pair = (a * cos - b * sin, b * cos + a * sin)
        return torch.stack(pair, -1).flatten(-2) if self.pairing == "adjacent" else torch.cat(pair, -1)

    def forward(self, x, positions, inv_freq):
        freqs = positions[..., None].float() * inv_freq
        emb = torch.cat((freqs, freqs), -1)
        cos, sin = (self.pick(t).unsqueeze(1) for t in (emb.cos(), emb.sin()))
        q, k = (p(x).view(B, S, H, D).transpose(1, 2) for p in (self.q_proj, self.k_proj))
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        return F.scaled_dot_product_attention(q, k, k)


@pytest.mark.parametrize("pairing", ["halves", "adjacent", "adjacent_to_halves"])
@pytest.mark.parametrize("pick", [sectioned, interleaved], ids=lambda f: f.__name__)
def test_rows_picked_in_the_layer(pick, pairing):
    torch.manual_seed(0)
    positions = torch.stack([torch.randint(0, 50, (B, S)) for _ in range(3)])
    (site,) = sites_of(PerLayer(pick, pairing), torch.randn(B, S, 32), positions, torch.rand(HALF))
    options = site.call.options
    assert (options["mrope_layout"], options["mrope_section"]) == (pick.__name__, list(SECTIONS[pick.__name__]))
    assert options["pairing"] == pairing
    assert not site.notes


def in_other_order(table):
    """Row W first: no layout of the operators."""
    return torch.cat([piece[2 - i % 3] for i, piece in enumerate(table.split([3, 3, 2] * 2, dim=-1))], dim=-1)


def test_rows_picked_in_the_layer_in_an_order_that_the_operator_does_not_have():
    positions = torch.stack([torch.randint(0, 50, (B, S)) for _ in range(3)])
    (site,) = sites_of(PerLayer(in_other_order), torch.randn(B, S, 32), positions, torch.rand(HALF))
    assert site.call.options["mrope_layout"] == "none"
    assert site.notes == {
        "mrope": "rows selected in the layer (in an order of its own); the call reads the selected tables"
    }


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("qwen2_vl", "sectioned, section [2, 3, 3]"),
        ("qwen3_vl", "interleaved, section [4, 2, 2]"),
        ("ernie4_5_vl", "in an order of its own"),
    ],
)
def test_rows_picked_once_for_the_model(name, order):
    """The picked tables are a third of the bytes, in every layer: the call reads them, and the report says so."""
    pytest.importorskip("transformers")
    model, inputs = zoo.build(name, layers=2)
    for site in sites_of(model, **inputs):
        assert site.call.options["mrope_layout"] == "none"
        assert site.notes == {
            "mrope": f"rows selected once for the model ({order}); the call reads the selected tables"
        }


def test_layouts():
    assert layout_of([0, 0, 1, 1, 1, 2, 2, 2]) == ("sectioned", (2, 3, 3))
    assert layout_of([0, 1, 2, 0, 1, 2, 0, 0]) == ("interleaved", (4, 2, 2))
    assert layout_of([1, 0, 2, 0]) is None  # ERNIE's order has no operator
