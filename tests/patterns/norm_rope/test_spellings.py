"""Every spelling of the rotation and of the norm gives the same site, and the site is exact."""

from __future__ import annotations

import pytest
import torch
from exactness import assert_exact, capture, find, sites_of
from spellings import HALF, NORMS, ROTATIONS, Attention, B, D, H, S, halves, inputs, opposite, rms


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


def _spread(z):
    """As Llama 4's tables: a product of matrices that was transposed."""
    return z.transpose(1, 3).contiguous().transpose(1, 3)


@pytest.mark.parametrize(
    ("of_table", "steps"),
    [
        (lambda z: z, []),
        (_spread, ["contiguous"]),
        (lambda z: z.conj(), ["resolve_conj"]),
        (lambda z: _spread(z).conj(), ["resolve_conj", "contiguous"]),
    ],
    ids=["dense", "spread", "conjugated", "both"],
)
def test_complex_tables_are_seen_as_pairs(of_table, steps):
    """However they lie in memory."""

    def rotate(q, c, _):
        angles = c[..., :HALF]
        z = of_table(torch.polar(torch.ones_like(angles), angles))
        return torch.view_as_real(torch.view_as_complex(q.unflatten(-1, (HALF, 2))) * z).flatten(-2)

    (site,) = sites_of(Attention(rotate), *inputs())
    assert [step.method for step in site.call.tensors["cos"].steps][: len(steps) + 1] == [*steps, "view"]


def test_given_tables_are_passed_whole():
    """Nothing says that the halves of a table that comes from outside are equal, so each lane keeps its own entry."""
    (site,) = sites_of(Attention(given_tables=True), *inputs())
    assert "narrow" not in [step.method for step in site.call.tensors["cos"].steps]


@pytest.mark.parametrize("fewer_axes", [False, True])
@pytest.mark.parametrize("equation", ["...ij,...j->...i", "... h p i j, ... h p j -> ... h p i"])
def test_rotation_by_einsum_of_any_axes(equation, fewer_axes):
    def rotate(q, c, s):
        m = torch.stack((c, -s, s, c), -1)[..., :HALF, :].unflatten(-1, (2, 2))
        x = q.unflatten(-1, (2, HALF)).transpose(-1, -2)
        return torch.einsum(equation, m[0] if fewer_axes else m, x).transpose(-1, -2).flatten(-2)

    (site,) = sites_of(Attention(rotate), *inputs())
    assert site.fusion == "qk_norm_rope"


def test_rotation_by_einsum_of_axes_in_lists():
    """It is not read, and is no error."""

    def rotate(q, c, s):
        c, s = c[..., :HALF], s[..., :HALF]
        m = torch.stack((c, -s, s, c), -1).unflatten(-1, (2, 2))
        return torch.einsum(
            m, [0, 1, 2, 3, 4, 5], q.unflatten(-1, (HALF, 2)), [0, 1, 2, 3, 5], [0, 1, 2, 3, 4]
        ).flatten(-2)

    module, _ = capture(Attention(rotate, norm=None), *inputs())
    assert find(module) == ([], [])


HALVED = {
    "split": lambda x: torch.split(tensor=x, split_size_or_sections=HALF, dim=-1),
    "split of a tensor": lambda x: x.split(split_size=HALF, dim=-1),
    "split of sizes": lambda x: torch.split_with_sizes(input=x, split_sizes=[HALF, HALF], dim=-1),
    "chunk": lambda x: torch.chunk(input=x, chunks=2, dim=-1),
    "tensor_split": lambda x: torch.tensor_split(input=x, sections=2, dim=-1),
    "narrow": lambda x: (torch.narrow(input=x, dim=-1, start=0, length=HALF), x.narrow(-1, start=HALF, length=HALF)),
}


@pytest.mark.parametrize("name", HALVED)
def test_arguments_by_name(name):
    def rotate(q, c, s):
        a, b = HALVED[name](q)
        turned = torch.cat(tensors=(torch.neg(input=b), a), axis=-1)
        return torch.add(input=torch.mul(input=q, other=c), other=turned * s)

    (site,) = sites_of(Attention(rotate), *inputs())
    assert site.fusion == "qk_norm_rope"


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


def test_size_that_turns_out_to_be_a_number():
    """Where a symbol becomes a number on the way, the graph takes it from what `x.size()` gives."""

    def model(x, fixed, q_weight, k_weight, inv_freq):
        batch, length, _ = x.shape
        q, k, v = (x[..., H * D * i : H * D * (i + 1)].view(batch, length, H, D) for i in range(3))
        freqs = torch.arange(length).float()[:, None] * inv_freq
        cos, sin = (
            table[:, None] for table in (torch.cat((freqs, freqs), -1).cos(), torch.cat((freqs, freqs), -1).sin())
        )
        q, k = halves(rms(q, q_weight), cos, sin), halves(rms(k, k_weight), cos, sin)
        return torch.nn.functional.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v))) + fixed

    given = torch.randn(B, S, 3 * H * D), torch.randn(B, 1, 1, 1), *torch.rand(2, D), torch.rand(HALF)
    torch._dynamo.mark_static(given[1])
    module, values = capture(model, *given, dynamic=True)
    assert module.graph.find_nodes(op="call_method", target="size")
    sites, refusals = find(module)
    assert_exact(module, values, sites)
    assert [site.fusion for site in sites] == ["qk_norm_rope"]
    assert refusals == []
