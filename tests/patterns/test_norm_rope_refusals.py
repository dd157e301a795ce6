"""Near misses. Each is refused with its reason, or only what is exact is fused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from exactness import assert_exact, capture, find, reasons_of, sites_of
from spellings import HALF, Attention, B, D, H, S, added_in_place, halves, inputs, rms
from torch import fx

from fusion_pass import FusionBackend, FusionConfig
from fusion_pass.patterns.facts import Refused
from fusion_pass.patterns.layout import operand


def refused(reason: str, **spelling) -> None:
    found = reasons_of(Attention(**spelling), *inputs())
    assert found
    assert all(reason in r for r in found), found


@pytest.mark.parametrize(
    "norm",
    [
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(2, keepdim=True) + 1e-6) * w,
        lambda x, w: x * torch.rsqrt(x[..., :HALF].pow(2).mean(-1, keepdim=True) + 1e-6) * w,
        lambda x, w: x / (torch.sqrt(x.pow(2).mean(-1, keepdim=True)) + 1e-6) * w,
        lambda x, w: x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-6) * w,
        lambda x, w: x * torch.rsqrt(x.roll(1, 2).pow(2).mean(-1, keepdim=True) + 1e-6) * w,
        lambda x, w: x * torch.rsqrt(x.mean(-1, keepdim=True) + 1e-6) * w,
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-12 * torch.ones(1)) * w,
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) - -1e-12) * w,
        lambda x, w: (
            x * torch.rsqrt(torch.addcmul(x.pow(2).mean(-1, keepdim=True), *torch.ones(2, 1, 1, 1), value=1e-12)) * w
        ),
        lambda x, w: x * torch.rsqrt(torch.div(x.pow(2).sum(-1, keepdim=True), D, rounding_mode="floor") + 1e-6) * w,
        lambda x, w: x / (torch.linalg.vector_norm(x, 1, dim=-1, keepdim=True) / D**0.5) * w,
        lambda x, w: x / (torch.linalg.vector_norm(x, ord=4, dim=-1, keepdim=True) / D**0.5) * w,
        lambda x, w: x / (torch.norm(x, p=3, dim=-1, keepdim=True) / D**0.5) * w,
    ],
    ids=(
        "over_heads",
        "over_half",
        "eps_outside_root",
        "of_another",
        "of_next_head",
        "not_squared",
        "tiny_eps_computed",
        "tiny_eps_subtracted",
        "tiny_eps_by_addcmul",
        "mean_rounded_down",
        "sum_of_magnitudes",
        "fourth_root",
        "cube_root",
    ),
)
def test_wrong_norm(norm):
    refused("not provably by RMSNorm or LayerNorm", norm=norm)


def test_sum_instead_of_mean():
    """Sum of squares is a mean of squares with another weight and eps, which are not in the graph."""
    refused("not provably", norm=lambda x, w: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) * w)


def test_second_reader_of_the_normalised_tensor():
    class Twice(Attention):
        def one(self, x, w, c, s):
            n = rms(x, w)
            self.kept.append(n)
            return halves(n, c, s).transpose(1, 2)

        def forward(self, *args):
            self.kept = []
            return super().forward(*args), self.kept[0].sum()

    found = reasons_of(Twice(), *inputs())
    assert any("also read outside it" in r for r in found), found


def test_two_different_eps():
    class TwoEps(Attention):
        def one(self, x, w, c, s):
            return halves(rms(x, w, 1e-5 if w is self.q_weight else 1e-6), c, s).transpose(1, 2)

    found = reasons_of(TwoEps(), *inputs())
    assert len(found) == 1
    assert "two different eps" in found[0]


def test_each_weight_is_taken_from_its_own_chain():
    """A model that normalises q with k's weight gets just that."""

    class Swapped(Attention):
        def one(self, x, w, c, s):
            return super().one(x, self.k_weight if w is self.q_weight else self.q_weight, c, s)

    (site,) = sites_of(Swapped(), *inputs())
    assert "k_weight" in site.call.tensors["q_weight"].node.name
    assert "q_weight" in site.call.tensors["k_weight"].node.name


@pytest.mark.parametrize("change", ["mul", "seq", "view"])
def test_in_place_between_norm_and_rotation(change):
    def write(x):
        if change == "mul":
            return x.mul_(2.0)
        if change == "seq":
            x[:, 4:] = x[:, 4:] * 2
            return x
        x[..., :3].add_(1.0)
        return x

    module, args = capture(Attention(between=write, norm=lambda x, w: rms(x, w) * 1.0), *inputs())
    sites, refusals = find(module)
    assert refusals or all(s.call.options.get("norm", "none") == "none" for s in sites)


def eight_bits(x):
    return x.to(torch.float8_e4m3fn).to(torch.float32)


@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_rounding_to_eight_bits_stays_where_it_is(place):
    """Other casts round what a kernel does not round; this one is a quantisation."""
    (site,) = sites_of(Attention(**{place: eight_bits}), *inputs())
    assert site.call.options["norm"] == ("none" if place == "between" else "rms")
    rounding = {node for node in site.region if "float8" in str(node.args)}
    assert not rounding


@pytest.mark.parametrize(
    ("factor", "dtype"),
    [(1.5, torch.float), (1.5, torch.long), ([2.0] * D, torch.float)],
    ids=["number", "cut_to_an_integer", "lanes"],
)
def test_weight_that_is_multiplied_by_a_constant(factor, dtype):
    """The product is no tensor of the graph where the factor is behind the norm."""
    refused("The weight of the norm is not a tensor", norm=lambda x, w: rms(x, w) * torch.tensor(factor, dtype=dtype))


@pytest.mark.parametrize("shape", [(B, 1, 1, D), (1, S, 1, D), (B, S, 1, D)], ids=["batch", "token", "both"])
def test_weight_of_each_token(shape):
    """As where another network modulates the norm. The operator takes one weight for all of them."""
    weight = torch.rand(shape) + 0.5
    refused("The weight of the norm is not a tensor", norm=lambda x, w: rms(x, 1.0) * weight)


def test_query_of_another_dtype():
    """The casts cost nothing inside of a call, so each tensor is read as it is: by two calls."""

    def model(q, k, w, c, s):
        return halves(rms(q.float(), w), c, s), halves(rms(k, w), c, s)

    angle = torch.randn(1, S, 1, HALF).repeat(1, 1, 1, 2)
    q, k = torch.randn(2, B, S, H, D)
    sites = sites_of(model, q.bfloat16(), k, torch.rand(D), angle.cos(), angle.sin())
    assert [site.fusion for site in sites] == ["norm_rope", "norm_rope"]


def test_fractions_cut_to_integers():
    """`torch.full((1,), 1.9, dtype=torch.long)` is 1."""

    def cut(q, c, s):
        return halves(q, c * 1.9, s * torch.full((1,), 1.9, dtype=torch.long))

    refused("cos^2 + sin^2 differs", rotate=cut)
    assert sites_of(Attention(rotate=lambda q, c, s: halves(q, c * 1.9, s * torch.full((1,), 1.9))), *inputs())


def test_bits_read_as_numbers():
    """`view(dtype=...)` moves nothing and changes every number: what is rotated is not what was normalised."""
    module, _ = capture(Attention(between=lambda x: x.view(dtype=torch.int32).float()), *inputs())
    (site,), _ = find(module)
    assert site.call.options["norm"] == "none"


def test_rotation_written_into_the_normalised_tensor():
    class CogVideoX(Attention):
        def one(self, x, w, c, s):
            q = F.layer_norm(x, (D,), w, None, 1e-6).transpose(1, 2)
            q[:, :, 2:] = halves(q[:, :, 2:], c.transpose(1, 2)[:, :, 2:], s.transpose(1, 2)[:, :, 2:])
            return q

    found = reasons_of(CogVideoX(), *inputs())
    assert len(found) == 2
    assert all("written back" in r for r in found), found


def test_halves_that_are_provably_different():
    def rotate(q, c, s):
        return halves(q, torch.cat((c[..., :HALF], c[..., HALF:] * c[..., HALF:]), -1), s)

    refused("different angles", rotate=rotate)


def test_two_angles_a_pair():
    """Ernie-Image has the angles of adjacent lanes and rotates halves."""

    def rotate(q, c, s):
        return halves(q, *(table[..., :HALF].repeat_interleave(2, -1) for table in (c, s)))

    refused("different angles", rotate=rotate)


def test_reflection():
    refused("reflection", rotate=lambda q, c, s: q * c + torch.cat((q[..., HALF:], q[..., :HALF]), -1) * s)


def test_rotated_lanes_with_a_gap():
    """The outer lanes are rotated and those between them kept: no rotary_dim and rotary_start say that."""

    def rotate(q, c, s):
        a, kept, b = q.split((4, D - 8, 4), -1)
        c, s = c[..., :4], s[..., :4]
        return torch.cat((a * c - b * s, kept, b * c + a * s), -1)

    refused("not one block of even width", rotate=rotate)


@pytest.mark.parametrize("tail", [lambda x: 2 * x, lambda x: -x, lambda x: x.flip(-1)], ids=["twice", "minus", "moved"])
def test_lanes_beside_the_rotated_ones_that_do_not_pass_through(tail):
    def rotate(q, c, s):
        x = q[..., :HALF]
        swapped = torch.cat((-x[..., HALF // 2 :], x[..., : HALF // 2]), -1)
        c, s = (torch.cat((t[..., : HALF // 2],) * 2, -1) for t in (c, s))
        return torch.cat((x * c + swapped * s, tail(q[..., HALF:])), -1)

    sites = sites_of(Attention(rotate=rotate, norm=None), *inputs())
    assert all(
        site.call.options["rotary_dim"] == HALF == site.outputs[0].node.meta["example_value"].shape[-1]
        for site in sites
    )


def test_layer_norm_with_a_weight_stored_around_one():
    refused("has no operator", norm=lambda x, w: F.layer_norm(x, (D,), None, None, 1e-6) * (1 + w))


def test_layer_norm_with_a_bias_that_is_no_tensor():
    """Fused without its bias, the call would be wrong by 0.5 everywhere."""
    refused("The bias of the norm", norm=lambda x, w: F.layer_norm(x, (D,), w, None, 1e-6) + 0.5)


def test_norm_after_the_rotation_whose_weight_is_of_each_batch():
    """The rotation is fused; the norm, whose weight is multiplied into the factor of the row, stays."""

    def model(x, w, c, s):
        y = halves(x, c, s)
        return y * (torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * w)

    angle = torch.randn(1, S, 1, HALF).repeat(1, 1, 1, 2)
    (site,) = sites_of(model, torch.randn(2, S, H, D), torch.rand(2, 1, 1, D), angle.cos(), angle.sin())
    assert site.fusion == "rope"


def test_operand_with_an_axis_that_plays_no_role():
    node = fx.Graph().placeholder("x")
    node.meta["example_value"] = torch.empty(2, S, 2, H // 2, D)
    with pytest.raises(Refused, match="'x' has an axis of unknown role"):
        operand(node, {"batch": 0, "sequence": 1, "heads": None}, H, D)


def test_product_written_into_one_number():
    """Nothing of it has lanes, and nothing is found."""

    def model(x, y):
        out = torch.empty(1, 1, 1)
        out[:] = x * y
        return out.squeeze() + 1

    assert sites_of(model, *torch.randn(2, 1, 1, 1)) == []


def test_exchanged_tables():
    refused("exchanged", rotate=lambda q, c, s: halves(q, s, c))


def test_sine_of_another_angle():
    refused("one angle", rotate=lambda q, c, s: halves(q, c, s * s))


def test_tables_along_heads():
    def rotate(q, c, s):
        return halves(q, c[:, :H].transpose(1, 2), s[:, :H].transpose(1, 2))

    refused("differ between heads", rotate=rotate)


def test_tables_of_each_head():
    """LTX-2 gives each head a part of the frequencies of the whole row."""
    tables = torch.randn(2, 1, S, H, D)
    refused("differ between heads", rotate=lambda q, c, s: added_in_place(q, *tables))


def test_product_that_is_read_before_the_rest_is_added():
    def rotate(q, c, s):
        x, c, s = q.unflatten(-1, (2, HALF)), c[..., None, :HALF], s[..., None, :HALF]
        out = x * c
        early = out.sum()
        out[..., :1, :].addcmul_(-s, x[..., 1:, :])
        out[..., 1:, :].addcmul_(s, x[..., :1, :])
        return out.flatten(-2) + early

    refused("also read outside it, by 'early", rotate=rotate)


@pytest.mark.parametrize(
    "rotate",
    [
        lambda q, c, s: halves(q, c, s) + q.clamp(-1, 1),
        lambda q, c, s: halves(q, c, s) * q,
        lambda q, c, s: halves(q, c, s).clamp(-1, 1) * q,
    ],
    ids=("residual", "squared", "clamped"),
)
def test_what_follows_the_rotation_stays_in_the_graph(rotate):
    """The rotation is inside and is fused; what reads its input and its result beside that is left alone."""
    (site,) = sites_of(Attention(rotate=rotate, norm=None), *inputs())
    assert all(output.node.target is not torch.mul for output in site.outputs)


@pytest.mark.parametrize(
    "rotate",
    [
        lambda q, c, s: q * c + torch.cat((-q[:, :, H // 2 :], q[:, :, : H // 2]), 2) * s,
        lambda q, c, s: q * c + torch.cat((-q.roll(1, 1)[..., HALF:], q[..., :HALF]), -1) * s,
        lambda q, c, s: halves(q * q, c, s) + q,
        lambda q, c, s: q * c + torch.cat((-q[..., HALF:], q[..., :HALF]), -1) * s + 1.0,
    ],
    ids=("over_heads", "previous_token", "of_the_square", "shifted"),
)
def test_no_wrong_match(rotate):
    module, args = capture(Attention(rotate=rotate, norm=None), *inputs())
    sites, _ = find(module)
    assert_exact(module, args, sites)


@pytest.mark.parametrize(
    "mix",
    [
        lambda q, c, s: q * c + (q.roll(1, -1) + q.roll(2, -1)) * s,
        lambda q, c, s: q * c + q.sum(-1, keepdim=True) * s,
        lambda q, c, s: q * c + q * s,
        lambda q, c, s: q * c + (q[..., :1] + q[..., 1:2]) * s,
    ],
    ids=["three_lanes", "all_lanes", "one_lane", "three_lanes_of_one_table"],
)
def test_other_mixtures_are_none_of_our_business(mix):
    found = find(capture(Attention(rotate=mix, norm=None), *inputs())[0])
    assert found == ([], [])


def attend(*qkv):
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv))


@pytest.mark.parametrize(
    "model",
    [
        lambda x, y, c, s: attend(halves(x, c, s), y, x) + attend(x, halves(y, c, s), y),
        lambda x, y, c, s: attend(halves(x, c, s) + halves(y, c, s), x, y),
    ],
    ids=["of_two_attentions", "both_of_the_query"],
)
def test_rotations_that_are_no_pair(model):
    angle = torch.randn(1, S, 1, HALF).repeat(1, 1, 1, 2)
    found = sites_of(model, *torch.randn(2, B, S, H, D), angle.cos(), angle.sin())
    assert [site.fusion for site in found] == ["rope", "rope"]


@pytest.mark.parametrize("end", [lambda x: x, lambda x: x * 1.0], ids=["itself", "a product"])
def test_query_that_is_made_of_the_rotated_key(end):
    """One call cannot read its own result, so there are two."""

    def model(x, v, w, c, s):
        k = halves(rms(x, w), c, s)
        q = halves(rms(end(k), w), c, s)
        return attend(q, k, v)

    angle = torch.randn(1, S, 1, HALF).repeat(1, 1, 1, 2)
    settings = FusionConfig(allow_reference=True, fusions=("norm_rope",), expect=2)
    compiler = FusionBackend(settings, inner=lambda module, _: module.forward)
    inputs = *torch.randn(2, B, S, H, D), torch.rand(D), angle.cos(), angle.sin()
    torch.testing.assert_close(torch.compile(model, backend=compiler)(*inputs), model(*inputs))


def test_table_written_before_the_call():
    """The sine is changed after q was rotated and before k is: one call cannot read both."""

    class Changed(Attention):
        def forward(self, x, cos, sin, inv):
            self.count = 0
            self.table = sin.clone()
            return super().forward(x, cos, self.table, inv)

        def one(self, x, w, c, s):
            out = super().one(x, w, c, s)
            self.table[: S // 2] = 0.5
            return out

    module, args = capture(Changed(given_tables=True), *inputs())
    sites, _ = find(module)
    assert not [s for s in sites if len(s.outputs) == 2]


@pytest.mark.parametrize("read", [False, True])
def test_second_reader_of_a_packed_part(read):
    """One call for the whole projection makes the views of it redundant; if another reads one of them, q and k are
    passed as they are."""

    def model(x, weight, q_weight, k_weight, c, s):
        q, k, v = (x @ weight).view(2, S, 3 * H, D).split(H, dim=2)
        q_out, k_out = (halves(rms(x, w), c, s).transpose(1, 2) for x, w in ((q, q_weight), (k, k_weight)))
        return q_out, k_out, v.transpose(1, 2), q.sum() if read else None

    norms = [torch.rand(D, requires_grad=True) for _ in range(2)]
    angle = torch.randn(1, S, 1, HALF).repeat(1, 1, 1, 2)
    weight = torch.randn(32, 3 * H * D, requires_grad=True)
    found = sites_of(model, torch.randn(2, S, 32), weight, *norms, angle.cos(), angle.sin())
    assert [site.fusion for site in found] == ["qk_norm_rope" if read else "qkv_norm_rope"]


TAKEN_FOR_DATA = {
    "cut to integers": lambda x: x.to(torch.int32).float(),
    "a root of some": lambda x: x.pow(0.5).nan_to_num(),
    "a root of a negative number": lambda x: (-x * x).sqrt().nan_to_num(1.0) + x,
    "a mean of roots": lambda x: (x.sqrt().mean(-1, keepdim=True)).nan_to_num(0.5) + x,
}


@pytest.mark.parametrize("name", TAKEN_FOR_DATA)
def test_what_no_number_stands_for(name):
    """It is computed before, and the call reads what comes out."""
    (site,) = sites_of(Attention(before=TAKEN_FOR_DATA[name]), *inputs())
    assert site.fusion == "qk_norm_rope"
    assert site.call.options["norm"] == ("none" if name == "cut to integers" else "rms")


def test_sum_of_integers():
    """`sum(dtype=...)` cuts what it adds, so it is no mean of squares."""

    def norm(x, w):
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True, dtype=torch.int64) / D + 1e-6) * w

    with torch.no_grad():  # there is no gradient of integers
        refused("not provably", norm=norm)


def test_pairs_that_are_conjugated():
    """`conj_physical` changes numbers, `resolve_conj` does not."""

    def rotate(q, c, s):
        pairs = torch.view_as_complex(q.unflatten(-1, (HALF, 2)))
        return torch.view_as_real(pairs.conj_physical() * torch.complex(c[..., :HALF], s[..., :HALF])).flatten(-2)

    refused("a reflection, not a rotation", rotate=rotate, norm=None)


def test_default_eps_in_low_precision():
    """`F.rms_norm` without eps: that of float32 or of the tensor's dtype, by the version of torch."""

    def norm(x, w):
        return F.rms_norm(x, (D,), w)

    given = [x.bfloat16() for x in inputs()]
    low = Attention(lambda q, c, s: halves(q, c.to(q.dtype), s.to(q.dtype)), norm).bfloat16()
    (site,), _ = find(capture(low, *given)[0])
    assert site.call.options["norm"] == "none"
    (site,), _ = find(capture(Attention(norm=norm), *inputs())[0])
    assert site.call.options["eps"] == torch.finfo(torch.float32).eps


DROPPED = {
    "nothing": (lambda x: F.dropout(x, 0.0), True),
    "nothing, given by name": (lambda x: F.dropout(x, p=0.0, training=True), True),
    "outside of training": (lambda x: F.dropout(x, 0.5, False), True),
    "something": (lambda x: F.dropout(x, 0.5), False),
}


@pytest.mark.parametrize("name", DROPPED)
def test_dropout_between_norm_and_rotation(name):
    between, read = DROPPED[name]
    module, values = capture(Attention(between=between), *inputs())
    sites, _ = find(module)
    assert [site.call.options["norm"] for site in sites] == (["rms"] if read else ["none"])
    if read:
        assert_exact(module, values, sites)
