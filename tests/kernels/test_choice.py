"""`measured`: which of CUDA C++ and Triton a call takes, by the table and by a measurement on the machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from norm_rope_cases import Case, make_inputs

from benchmarks.choose_norm_rope import form_of
from benchmarks.norm_rope import SHAPES
from fusion_pass.kernels import ops, registry
from fusion_pass.kernels.card import H100, H200, Card, nearest
from fusion_pass.kernels.choice import autotune, backend, table
from fusion_pass.kernels.choice.form import Form, Site, Size, backward_site, forward_site
from fusion_pass.kernels.registry import Request

ON_AN_H200_ALONE = [s for s in SHAPES if s.norm_scope == "hidden" or "vision" in s.name or "Lumina" in s.name]
"""Measured there, but not on an H100."""
FORM = Form("forward", 128, 2, True, "halves", "none", False, False)
CPU = torch.device("cpu")


def row(form: Form, heads: int, tokens: int, triton: float = 10.0, cuda: float = 9.0) -> table.Row:
    return table.Row("", form, Size(heads, tokens), triton, cuda)


# --- the table -------------------------------------------------------------------------------------------------------


def test_the_nearest_row_decides() -> None:
    rows = (row(FORM, 40, 1024), row(FORM, 40, 16384), row(FORM, 18, 2048))
    assert table.nearest(FORM, Size(36, 3000), rows) is rows[0]
    assert table.nearest(FORM, Size(36, 9000), rows) is rows[1]
    assert table.nearest(FORM, Size(20, 9000), rows) is rows[2]


def test_head_dim_is_the_nearest_of_its_kind() -> None:
    eighty, ninety_six = (row(replace(FORM, head_dim=d), 40, 1024) for d in (80, 96))
    rows = (row(FORM, 40, 1024), eighty, ninety_six)
    assert table.nearest(replace(FORM, head_dim=72), Size(40, 1024), rows) is eighty
    assert table.nearest(replace(FORM, head_dim=192), Size(40, 1024), rows) is ninety_six
    assert table.nearest(replace(FORM, head_dim=256), Size(40, 1024), rows) is rows[0]


@pytest.mark.parametrize(
    "other",
    [{"direction": "backward"}, {"itemsize": 4}, {"norm": False}, {"pairing": "adjacent"},
     {"mrope_layout": "interleaved"}, {"head_dim": 80}],
)  # fmt: skip
def test_no_row_of_another_kind_stands_in(other: dict[str, object]) -> None:
    assert table.nearest(replace(FORM, **other), Size(40, 1024), (row(FORM, 40, 1024),)) is None


@pytest.mark.parametrize("other", [{"moved": True}, {"mrope_layout": "sectioned"}, {"partial": True}])
def test_a_row_of_almost_that_kind_stands_in(other: dict[str, object]) -> None:
    only = row(FORM, 40, 1024)
    assert table.nearest(replace(FORM, **other), Size(40, 1024), (only,)) is only
    assert not only.exact(replace(FORM, **other), Size(40, 1024))


def test_a_hundredth_is_no_reason() -> None:
    assert row(FORM, 40, 1, triton=100, cuda=98.5).faster == "cuda"
    assert row(FORM, 40, 1, triton=100, cuda=99.5).faster == "triton"


def test_there_is_no_table_for_unmeasured_cards() -> None:
    assert table.rows(Card(75, 448)) == ()


@pytest.mark.parametrize(
    ("card", "expected"),
    [(Card(90, 2000), H100), (Card(90, 4800), H200), (Card(90, 0), H100), (Card(100, 8000), None)],
)
def test_a_card_goes_by_the_nearest_memory_of_its_architecture(card: Card, expected: Card | None) -> None:
    assert nearest(card, (H100, H200)) == expected


def test_the_table_of_the_h100_is_of_the_benchmarks_shapes() -> None:
    rows = table.rows(H100)
    forms = {form_of(s, p) for s in SHAPES for p in ("forward", "forward (training)", "backward")
             if s not in ON_AN_H200_ALONE}  # fmt: skip
    assert {r.form for r in rows} == forms
    assert all(r.triton > 0 and r.cuda > 0 for r in rows)
    # Known from every run (docs/kernels.md): interleaved MRoPE and padded head dimensions at many tokens.
    for many in (r for r in rows if r.size.tokens == 16384):
        if many.form.mrope_layout == "interleaved" or many.form.padded:
            assert many.faster == "cuda", many


# --- from a call to its form -----------------------------------------------------------------------------------------


def sites(case: Case) -> tuple[Site, Site]:
    """Of the forward and the backward, tables' gradients not asked for."""
    inputs = make_inputs(case, CPU)
    tensors = inputs.tensors()
    options = dict(case.all_options)
    plan, grad_plan, first = ops._qk_plan, ops._qk_grad_plan, 2
    if case.packing is not None:
        plan, grad_plan, first = ops._qkv_plan, ops._qkv_grad_plan, 1
        options |= {"num_heads": case.heads, "num_kv_heads": case.kv_heads, "head_dim": case.head_dim}
    planned = plan(*tensors, **options)
    mask = [t is not None for i, t in enumerate(tensors) if i != first + 2]
    mask[first : first + 2] = [False, False]
    grads = [torch.empty_like(result) for result in planned.results]
    back = grad_plan(*grads, *tensors, output_mask=mask, in_dtype=case.dtype, **options)
    return (
        forward_site(planned.streams, planned.tables, planned.options, planned.copy),
        backward_site(back.streams, back.tables, back.options, back.copy, False),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_a_call_has_the_form_it_was_measured_under(shape) -> None:  # type: ignore[no-untyped-def]
    """Else the table would never be found."""
    hidden = shape.norm_scope == "hidden"
    options = {name: value for name, value in shape.options.items() if name != "norm_scope" or hidden}
    case = Case("", shape.heads, shape.kv_heads, shape.head_dim, 1, 2, shape.dtype, shape.table_dtype,
                "blocked" if shape.packed else None, per_lane=shape.full_width, options=options)  # fmt: skip
    forward, backward = sites(case)
    training = "forward (training)" if shape.packed else "forward"
    assert (forward.form, backward.form) == (form_of(shape, training), form_of(shape, "backward"))
    assert forward.usual
    assert backward.usual
    assert forward.size == Size(shape.heads + shape.kv_heads, 2)
    rows = table.rows(H200 if shape in ON_AN_H200_ALONE else H100)
    size = Size(forward.size.heads, 256 if "Lumina" in shape.name else 2048)
    row = table.nearest(forward.form, size, rows)
    assert row is not None
    assert row.exact(forward.form, size)


@pytest.mark.parametrize("shape", ON_AN_H200_ALONE, ids=lambda s: s.name)
def test_no_other_row_speaks_for_what_was_not_measured(shape) -> None:  # type: ignore[no-untyped-def]
    """A norm over the row is Triton's on an H100; padded heads go by the H200's rows. Other architectures have none."""
    form, size = form_of(shape, "backward"), Size(shape.heads + shape.kv_heads, 16384)
    assert table.nearest(form, size, table.rows(H100)) is None
    found = table.deciding(form, size, H200)
    assert found is not None
    assert found.form == form
    assert found.faster == "cuda"
    assert table.deciding(form, size, H100) == (None if form.hidden else found)
    assert table.deciding(form, size, Card(80, 2000)) is None


@pytest.mark.parametrize(
    "case", [Case("", affine="wb"), Case("", per_head=True), Case("", positions="shared")], ids=["bias", "row", "rows"]
)
def test_what_no_table_measured_is_unusual(case: Case) -> None:
    assert [site.usual for site in sites(case)] == [False, False]


# --- the choice ------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "card_of", lambda _: H100)
    monkeypatch.delenv(autotune.VARIABLE, raising=False)


def site(form: Form = FORM, tokens: int = 1024, usual: bool = True) -> Site:
    return Site(form, Size(40, tokens), usual, ())


@pytest.mark.usefixtures("on_h100")
def test_the_table_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "rows", lambda _: (row(FORM, 40, 1024), row(FORM, 40, 1, cuda=11.0)))
    assert backend.choice(site(), CPU, pytest.fail) == "cuda"
    assert backend.choice(site(tokens=2), CPU, pytest.fail) == "triton"
    assert backend.choice(site(replace(FORM, itemsize=8)), CPU, pytest.fail) == "triton"
    assert backend.choice(site(usual=False), CPU, pytest.fail) == "triton"


@pytest.mark.usefixtures("on_h100")
def test_forward_and_backward_choose_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 tokens: CUDA C++ forward, Triton backward, as measured; the gradients are those of one back end."""
    calls: list[tuple[str, str]] = []

    def stand_in(name: str) -> SimpleNamespace:
        def forward(*args: object) -> None:
            calls.append((name, "forward"))
            return reference.forward(*args)

        def backward(*args: object) -> object:
            calls.append((name, "backward"))
            return reference.backward(*args)

        return SimpleNamespace(forward=forward, backward=backward)

    reference = registry.get("qk_norm_rope", "reference").load()
    both = (row(FORM, 5, 6), row(replace(FORM, direction="backward"), 5, 6, cuda=20.0))
    monkeypatch.setattr(table, "rows", lambda _: both)
    monkeypatch.setattr(backend, "_backend", stand_in)
    case = Case("", 3, 2, 128, dtype=torch.bfloat16)

    def step(kernels: object) -> list[torch.Tensor]:
        inputs = make_inputs(case, CPU)
        with mock.patch.object(ops, "resolve", return_value=kernels):
            results = torch.ops.fusion_pass.qk_norm_rope(*inputs.tensors(), **case.all_options, backend="reference")
            wanted = [*inputs.x, *(p for p in inputs.parameters if p is not None)]
            return [*results, *torch.autograd.grad(results, wanted, [torch.ones_like(t) for t in results])]

    for ours, expected in zip(step(backend), step(reference), strict=True):
        assert torch.equal(ours, expected)
    assert calls == [("cuda", "forward"), ("triton", "backward")]


def test_one_of_two_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CUDA C++ cannot compute a call, or is not installed, Triton is taken by name, with the reason."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    measured = registry.kernels("qk_norm_rope")[0]
    assert measured.name == "measured"
    assert measured.available() == "it takes the faster of triton and cuda, and here triton and cuda cannot run."
    request = Request("qk_norm_rope", torch.device("cuda"), {}, {"q": (1, 1, 32, 127)}, {"norm": "rms"})
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)):
        assert measured.supports(request) == (
            "only one of the two computes this; cuda: head_dim is 127, it takes even ones up to 512."
        )


# --- the measurement on the machine ----------------------------------------------------------------------------------


@pytest.fixture
def tuning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Allowed, without a device, into a file of its own."""
    path = tmp_path / "folder" / "choice.json"
    monkeypatch.setenv(autotune.VARIABLE, "1")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(autotune, "_file", lambda _: path)
    monkeypatch.setattr(backend, "card_of", lambda _: H100)
    return path


def test_a_measurement_is_made_once_and_kept(tuning: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = mock.Mock(return_value={"triton": 3.0, "cuda": 2.0})
    monkeypatch.setattr(autotune, "measure", measure)
    monkeypatch.setattr(table, "rows", lambda _: ())
    for _ in range(2):
        assert backend.choice(site(), CPU, pytest.fail) == "cuda"
    # Tokens count by their power of two; another number of heads is another call.
    assert backend.choice(site(tokens=1500), CPU, pytest.fail) == "cuda"
    assert measure.call_count == 1
    assert backend.choice(replace(site(), size=Size(41, 1024)), CPU, pytest.fail) == "cuda"
    assert measure.call_count == 2
    assert list(json.loads(tuning.read_text()).values()) == [{"triton": 3.0, "cuda": 2.0}] * 2


def test_a_damaged_file_is_measured_again(tuning: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "measure", lambda *_: {"triton": 1.0, "cuda": 2.0})
    for content in ("{", "[]", json.dumps({site().key(): {"cuda": 1}})):
        tuning.parent.mkdir(exist_ok=True)
        tuning.write_text(content)
        assert autotune.faster(site().key(), CPU, pytest.fail) == "triton"
        assert json.loads(tuning.read_text())[site().key()] == {"triton": 1.0, "cuda": 2.0}


@pytest.mark.usefixtures("tuning")
def test_what_is_in_the_table_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "measure", pytest.fail)
    monkeypatch.setattr(table, "rows", lambda _: (row(FORM, 40, 1024),))
    assert backend.choice(site(tokens=1500), CPU, pytest.fail) == "cuda"


@pytest.mark.usefixtures("tuning")
@pytest.mark.parametrize("why", ["off", "deterministic", "capturing"])
def test_when_nothing_is_measured(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "measure", pytest.fail)
    monkeypatch.setattr(table, "rows", lambda _: ())
    if why == "off":
        monkeypatch.setenv(autotune.VARIABLE, "0")
    elif why == "deterministic":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    else:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert backend.choice(site(), CPU, pytest.fail) == "triton"


# --- on a card -------------------------------------------------------------------------------------------------------

MORE = [
    Case("halves", 8, 2, 128, 2, 300, torch.bfloat16, packing="blocked"),
    Case("interleaved", 8, 2, 128, 1, 700, torch.bfloat16, options={"mrope_layout": "interleaved", "mrope_section": [24, 20, 20]}),  # noqa: E501
    Case("head_dim 80", 4, 4, 80, 1, 513, torch.float16, packing="blocked"),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", MORE, ids=str)
def test_exact_on_a_card(case: Case, device: torch.device) -> None:
    from test_norm_rope_numerics import check

    check(case, "measured", device)


@pytest.mark.gpu
def test_measured_on_a_card(device: torch.device, tuning: Path) -> None:
    """No row speaks for float32: both back ends run, the faster one's result is right, and the file says how fast."""
    from test_norm_rope_numerics import check

    case = Case("", 8, 2, 128, 1, 129)
    check(case, "measured", device)
    known = json.loads(tuning.read_text())
    assert {"direction='forward'" in call for call in known} == {True, False}
    assert all(0 < time < 1e4 for times in known.values() for time in times.values())
