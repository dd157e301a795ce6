"""From what is read to calls: which tensors are one call, and who else reads or writes what it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exactness import capture, find, reasons_of, sites_of
from spellings import HALF, Attention, B, D, H, Rotate, S, halves, inputs, refused, rms, tables
from torch import Tensor

from fusion_pass import FusionBackend, FusionConfig


def test_second_reader_of_the_normalised_tensor() -> None:
    class Twice(Attention):
        def one(self, x: Tensor, w: Tensor, c: Tensor, s: Tensor) -> Tensor:
            n = rms(x, w)
            self.kept.append(n)
            return halves(n, c, s).transpose(1, 2)

        def forward(self, *args: Tensor) -> Any:
            self.kept = []
            return super().forward(*args), self.kept[0].sum()

    found = reasons_of(Twice(), *inputs())
    assert any("also read outside it" in r for r in found), found


def test_product_that_is_read_before_the_rest_is_added() -> None:
    def rotate(q: Tensor, c: Tensor, s: Tensor) -> Tensor:
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
def test_what_follows_the_rotation_stays_in_the_graph(rotate: Rotate) -> None:
    """The rotation is inside and is fused; what reads its input and its result beside that is left alone."""
    (site,) = sites_of(Attention(rotate=rotate, norm=None), *inputs())
    assert all(output.node.target is not torch.mul for output in site.outputs)


@pytest.mark.parametrize("read", [False, True])
def test_second_reader_of_a_packed_part(read: bool) -> None:
    """One call for the whole projection makes the views of it redundant; if another reads one of them, q and k are
    passed as they are."""

    def model(x: Tensor, weight: Tensor, q_weight: Tensor, k_weight: Tensor, c: Tensor, s: Tensor) -> Any:
        q, k, v = (x @ weight).view(2, S, 3 * H, D).split(H, dim=2)
        q_out, k_out = (halves(rms(x, w), c, s).transpose(1, 2) for x, w in ((q, q_weight), (k, k_weight)))
        return q_out, k_out, v.transpose(1, 2), q.sum() if read else None

    norms = [torch.rand(D, requires_grad=True) for _ in range(2)]
    weight = torch.randn(32, 3 * H * D, requires_grad=True)
    found = sites_of(model, torch.randn(2, S, 32), weight, *norms, *tables())
    assert [site.fusion for site in found] == ["qk_norm_rope" if read else "qkv_norm_rope"]


def test_two_different_eps() -> None:
    class TwoEps(Attention):
        def one(self, x: Tensor, w: Tensor, c: Tensor, s: Tensor) -> Tensor:
            return halves(rms(x, w, 1e-5 if w is self.q_weight else 1e-6), c, s).transpose(1, 2)

    found = reasons_of(TwoEps(), *inputs())
    assert len(found) == 1
    assert "two different eps" in found[0]


def test_each_weight_is_taken_from_its_own_chain() -> None:
    """A model that normalises q with k's weight gets just that."""

    class Swapped(Attention):
        def one(self, x: Tensor, w: Tensor, c: Tensor, s: Tensor) -> Tensor:
            return super().one(x, self.k_weight if w is self.q_weight else self.q_weight, c, s)

    (site,) = sites_of(Swapped(), *inputs())
    assert "k_weight" in site.call.tensors["q_weight"].node.name
    assert "q_weight" in site.call.tensors["k_weight"].node.name


def test_query_of_another_dtype() -> None:
    """The casts cost nothing inside of a call, so each tensor is read as it is: by two calls."""

    def model(q: Tensor, k: Tensor, w: Tensor, c: Tensor, s: Tensor) -> Any:
        return halves(rms(q.float(), w), c, s), halves(rms(k, w), c, s)

    q, k = torch.randn(2, B, S, H, D)
    sites = sites_of(model, q.bfloat16(), k, torch.rand(D), *tables())
    assert [site.fusion for site in sites] == ["norm_rope", "norm_rope"]


def attend(*qkv: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv))


@pytest.mark.parametrize(
    "model",
    [
        lambda x, y, c, s: attend(halves(x, c, s), y, x) + attend(x, halves(y, c, s), y),
        lambda x, y, c, s: attend(halves(x, c, s) + halves(y, c, s), x, y),
    ],
    ids=["of_two_attentions", "both_of_the_query"],
)
def test_rotations_that_are_no_pair(model: Callable[..., Any]) -> None:
    found = sites_of(model, *torch.randn(2, B, S, H, D), *tables())
    assert [site.fusion for site in found] == ["rope", "rope"]


ALMOST_A_PAIR: dict[str, Callable[..., Any]] = {
    "other tables": lambda q, k, v, w, c, s, others: attend(halves(rms(q, w), c, s), halves(rms(k, w), *others), v),
    "other tables, keys nobody attends to": lambda q, k, v, w, c, s, others: (
        attend(halves(rms(q, w), c, s), k, v),
        halves(rms(k, w), *others),
    ),
    "one of them normalised": lambda q, k, v, w, c, s, others: attend(halves(rms(q, w), c, s), halves(k, c, s), v),
    "one of them normalised, keys nobody attends to": lambda q, k, v, w, c, s, others: (
        attend(halves(rms(q, w), c, s), k, v),
        halves(k, c, s),
    ),
}


@pytest.mark.parametrize("name", ALMOST_A_PAIR)
def test_queries_and_keys_that_are_no_pair(name: str) -> None:
    model = ALMOST_A_PAIR[name]

    def run(q: Tensor, k: Tensor, v: Tensor, w: Tensor, c: Tensor, s: Tensor, *others: Tensor) -> Any:
        return model(q, k, v, w, c, s, others)

    found = sites_of(run, *torch.randn(3, B, S, H, D), torch.rand(D) + 0.5, *tables(), *tables())
    assert [len(site.outputs) for site in found] == [1, 1]


def test_rotations_that_nobody_reads() -> None:
    """As a tracer may leave them that does not drop what is dead."""
    module, _ = capture(lambda q, k, c, s: (halves(q, c, s), halves(k, c, s)), *torch.randn(2, B, S, H, D), *tables())
    (output,) = module.graph.find_nodes(op="output")
    output.args = ((),)
    sites, refusals = find(module)
    assert not refusals
    assert all(not out.node.users for site in sites for out in site.outputs)


@pytest.mark.parametrize("end", [lambda x: x, lambda x: x * 1.0], ids=["itself", "a product"])
def test_query_that_is_made_of_the_rotated_key(end: Callable[[Tensor], Tensor]) -> None:
    """One call cannot read its own result, so there are two."""

    def model(x: Tensor, v: Tensor, w: Tensor, c: Tensor, s: Tensor) -> Any:
        k = halves(rms(x, w), c, s)
        q = halves(rms(end(k), w), c, s)
        return attend(q, k, v)

    settings = FusionConfig(allow_reference=True, fusions=("norm_rope",), expect=2)
    compiler = FusionBackend(settings, inner=lambda module, _: module.forward)
    inputs = *torch.randn(2, B, S, H, D), torch.rand(D), *tables()
    torch.testing.assert_close(torch.compile(model, backend=compiler)(*inputs), model(*inputs))


@pytest.mark.parametrize("change", ["mul", "seq", "view"])
def test_in_place_between_norm_and_rotation(change: str) -> None:
    def write(x: Tensor) -> Tensor:
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


def test_rotation_written_into_the_normalised_tensor() -> None:
    class CogVideoX(Attention):
        def one(self, x: Tensor, w: Tensor, c: Tensor, s: Tensor) -> Tensor:
            q = F.layer_norm(x, (D,), w, None, 1e-6).transpose(1, 2)
            q[:, :, 2:] = halves(q[:, :, 2:], c.transpose(1, 2)[:, :, 2:], s.transpose(1, 2)[:, :, 2:])
            return q

    found = reasons_of(CogVideoX(), *inputs())
    assert len(found) == 2
    assert all("written back" in r for r in found), found


def test_table_written_before_the_call() -> None:
    """The sine is changed after q was rotated and before k is: one call cannot read both."""

    class Changed(Attention):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor, inv: Tensor) -> Any:
            self.count = 0
            self.table = sin.clone()
            return super().forward(x, cos, self.table, inv)

        def one(self, x: Tensor, w: Tensor, c: Tensor, s: Tensor) -> Tensor:
            out = super().one(x, w, c, s)
            self.table[: S // 2] = 0.5
            return out

    module, args = capture(Changed(given_tables=True), *inputs())
    sites, _ = find(module)
    assert not [s for s in sites if len(s.outputs) == 2]
