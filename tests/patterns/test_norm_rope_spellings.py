"""Every spelling of the rotation and of the norm gives the same site, and the site is exact."""

from __future__ import annotations

import pytest
import torch
from exactness import sites_of
from spellings import NORMS, ROTATIONS, Attention, D, halves, inputs, opposite


@pytest.mark.parametrize("norm_last", [False, True], ids=("norm_first", "norm_last"))
@pytest.mark.parametrize("rotate", ROTATIONS, ids=lambda f: f.__name__)
def test_rotation(rotate, norm_last):
    (site,) = sites_of(Attention(rotate, norm_last=norm_last), *inputs())
    options = site.call.options
    assert site.fusion == "qk_norm_rope"
    assert (options["norm"], options["eps"], options["norm_first"]) == ("rms", 1e-6, not norm_last)
    assert (options["pairing"], options["rotary_dim"], options["rotary_start"], options["conjugate"]) == (
        "halves",
        D,
        0,
        False,
    )
    assert site.call.tensors["q_weight"].node is not site.call.tensors["k_weight"].node


@pytest.mark.parametrize("norm_last", [False, True], ids=("norm_first", "norm_last"))
@pytest.mark.parametrize("name", NORMS)
def test_norm(name, norm_last):
    (site,) = sites_of(Attention(norm=NORMS[name], norm_last=norm_last), *inputs())
    options = site.call.options
    kind = {"one_plus": "rms_one_plus", "layer": "layer", "layer_by_hand": "layer"}.get(name, "rms")
    eps = {"no_eps": 0.0, "tiny_eps": 1e-12, "eps_tensor": 1e-12}.get(name, 1e-6)
    assert (options["norm"], options["eps"], options["norm_first"]) == (kind, eps, not norm_last)


def test_opposite_sign_is_the_conjugate():
    (site,) = sites_of(Attention(opposite), *inputs())
    assert site.call.options["conjugate"] is True


def test_given_tables_are_passed_whole():
    """Nothing says that the halves of a table that comes from outside are equal, so each lane keeps its own entry."""
    (site,) = sites_of(Attention(given_tables=True), *inputs())
    assert "narrow" not in [step.method for step in site.call.tensors["cos"].steps]


def test_without_norm():
    (site,) = sites_of(Attention(norm=None), *inputs())
    assert site.call.options["norm"] == "none"
    assert "q_weight" not in site.call.tensors


def test_scale_after_the_rotation_stays_in_the_graph():
    (site,) = sites_of(Attention(after=lambda q: q * 0.25), *inputs())
    assert len(site.outputs) == 2


@pytest.mark.parametrize("grad", [True, False])
def test_bfloat16(grad):
    model = Attention(lambda q, c, s: halves(q, c.to(q.dtype), s.to(q.dtype))).bfloat16()
    x, cos, sin, inv = inputs()
    with torch.set_grad_enabled(grad):
        (site,) = sites_of(model, x.bfloat16(), cos, sin, inv)
    assert site.call.options["out_dtype"] is torch.bfloat16
