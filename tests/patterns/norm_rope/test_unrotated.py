"""Norms of q and k outside of a fused call: refused with a reason, or named on the site that they stand beside."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from exactness import assert_exact, capture, find
from spellings import Attention, B, D, H, S, halves, inputs, rms
from torch import Tensor

from fusion_pass import zoo
from fusion_pass.patterns.norm_rope.unrotated import NORMS_OUTSIDE, NOT_ROTATED


def places(function, *args):
    module, actual = capture(function, *args)
    sites, refusals = find(module)
    assert_exact(module, actual, sites)
    return [(s.fusion, s.notes.get("norms")) for s in sites], [r.reason for r in refusals]


class Unrotated(Attention):
    """Normalises q and k and rotates neither. `last`: what stands between norm and attention."""

    def __init__(self, norm=rms, last=lambda x: x) -> None:
        super().__init__(norm=norm)
        self.last = last

    def one(self, x: Tensor, w: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.last(self.norm(x, w)).transpose(1, 2)


@pytest.mark.parametrize("norm", [rms, lambda x, w: F.layer_norm(x, (D,), w), lambda x, w: F.normalize(x, dim=-1) * w])
@pytest.mark.parametrize("last", [lambda x: x, lambda x: torch.cat((x, x[:, :3]), 1), F.relu])
def test_normalised_and_not_rotated(norm, last):
    assert places(Unrotated(norm, last), *inputs()) == ([], [NOT_ROTATED])


class ByHand(Unrotated):
    """The same with the attention written out; `values` are normalised too."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, inv_freq: Tensor) -> Tensor:
        q, k, v = (p(x).view(B, S, H, D) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (self.one(part, w, cos, sin) for part, w in ((q, self.q_weight), (k, self.k_weight)))
        return torch.softmax(q @ k.transpose(-1, -2), -1) @ rms(v, self.k_weight).transpose(1, 2)


def test_attention_written_by_hand():
    assert places(ByHand(), *inputs()) == ([], [NOT_ROTATED])


def test_a_norm_of_the_values_is_none_of_q_and_k():
    assert places(ByHand(norm=lambda x, w: x * w), *inputs()) == ([], [])
    rotated = Attention()
    rotated.v_proj = torch.nn.Sequential(rotated.v_proj, torch.nn.RMSNorm(H * D))
    assert places(rotated, *inputs()) == ([("qk_norm_rope", None)], [])


def test_a_norm_before_the_projections_is_none_of_q_and_k():
    model = Attention(norm=None)
    assert places(lambda x, *rest: model(F.rms_norm(x, (32,)), *rest), *inputs()) == ([("qk_norm_rope", None)], [])


class Joint(Attention):
    """The first tokens are another stream, normalised on its own; rotated after it is joined, or not at all."""

    def __init__(self, rotate_all: bool) -> None:
        super().__init__()
        self.rotate_all = rotate_all

    def one(self, x: Tensor, w: Tensor, c: Tensor, s: Tensor) -> Tensor:
        text, image = rms(x[:, :3] * 1.0, w), rms(x[:, 3:] * 1.0, w * 2)
        if self.rotate_all:
            return halves(torch.cat((text, image), 1), c, s).transpose(1, 2)
        return torch.cat((text, halves(image, c[:, 3:], s[:, 3:])), 1).transpose(1, 2)


@pytest.mark.parametrize("rotate_all", [True, False])
def test_streams_normalised_on_their_own_are_named(rotate_all):
    sites, refusals = places(Joint(rotate_all), *inputs())
    assert not refusals
    assert sites
    assert {note for _, note in sites} == {NORMS_OUTSIDE}


@pytest.mark.parametrize(("name", "attentions"), [("sd3", 2), ("sana", 2)])
def test_models(name, attentions):
    """SD3 has one more block than asked for; Sana's linear attention and its attention to the text are one each."""
    pytest.importorskip("diffusers")
    model, keywords = zoo.build(name)
    module, _ = capture(model, **keywords)
    assert [(r.fusion, r.reason) for r in find(module)[1]] == [("qk_norm_rope", NOT_ROTATED)] * attentions
