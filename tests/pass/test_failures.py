"""A bug in a pattern costs its fusions, not the compilation; a bug in a rewrite stops it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
from compiling import backend, capture
from test_rewrite_toy import text
from toy import ScaledSin

import fusion_pass
from fusion_pass import FusionConfig, FusionError, extensions, pipeline, recognise, rewrite, show
from fusion_pass.graph.site import Call, Site
from fusion_pass.report import _warned

FAILURE = recognise.failure
"""The function itself: during a test one stands in its place that raises in any case (tests/conftest.py)."""


@pytest.fixture(autouse=True)
def as_outside_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognise, "failure", FAILURE)
    _warned.clear()


class Failing(ScaledSin):
    """Finds the first site, then fails."""

    name = "failing"

    def find(self, graph: torch.fx.Graph) -> Iterable[Any]:
        yield from super().find(graph)
        raise IndexError("list index out of range\nand more")


def model(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 3.0 + 1


def test_the_others_go_on_and_one_warning_says_what_happened(
    only: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    only(Failing(), ScaledSin())
    compiler, x = backend(), torch.randn(4)
    with caplog.at_level(logging.WARNING, logger="fusion_pass"):
        torch.testing.assert_close(torch.compile(model, backend=compiler)(x), model(x))
        torch._dynamo.reset()
        torch.compile(model, backend=backend())(x)
    (record,) = caplog.records
    (report,) = compiler.reports
    (failed,) = report.failed
    assert failed.reason.startswith(
        "The pattern 'failing' raised IndexError: list index out of range (pass/test_failures.py:"
    )
    assert "on_error='raise' (FUSION_PASS_ON_ERROR=raise) shows the traceback." in failed.reason
    assert failed.reason in record.getMessage()
    assert (failed.fusion, failed.status) == ("failing", "failed")
    assert (report.counts, report.skipped) == ({"scaled_sin": 1}, ())
    assert report.to_dict()["sites"][1] == failed.to_dict()


def test_explain_shows_it(only: Callable[..., None]) -> None:
    only(Failing())
    report = fusion_pass.explain(model, torch.randn(4))
    assert str(report).startswith("failed, failing: The pattern 'failing' raised IndexError")
    assert report.before == report.after
    assert show.counts(report) == "1 failed"
    (status,) = show.sites(report).columns[2].cells
    assert str(status) == "failed"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"on_error": "raise"}, "The pattern 'failing' raised IndexError: list index out of range"),
        ({"strict": True}, "strict is on, but not everything was fused. Fused: {'scaled_sin': 1}. failed, failing: "),
        ({"expect": 2}, "expect is 2, but 1 were fused in this graph. Fused: {'scaled_sin': 1}. failed, failing: "),
    ],
)
def test_what_is_asked_for_stays_loud(only: Callable[..., None], settings: dict[str, Any], sentence: str) -> None:
    only(Failing(), ScaledSin())
    with pytest.raises(Exception, match="FusionError") as caught:
        torch.compile(model, backend=backend(**settings), fullgraph=True)(torch.randn(4))
    assert sentence in str(caught.value)


def test_raise_keeps_the_traceback(only: Callable[..., None]) -> None:
    only(Failing())
    with pytest.raises(FusionError) as caught:
        pipeline.fuse(capture(model, torch.randn(4)), FusionConfig(on_error="raise"))
    assert isinstance(caught.value.__cause__, IndexError)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"anchor": "no node"}, "The pattern 'scaled_sin' raised KeyError: 'no node' "),
        ({"call": lambda site: Call("scaled_sin", {"x": "no operand"}, {}, "fusion_pass_toy")}, "Planning raised "),
    ],
)
def test_a_malformed_site_counts_as_a_failure(only: Callable[..., None], changes: dict[str, Any], what: str) -> None:
    only(ScaledSin(**changes))
    module = capture(model, torch.randn(4))
    before = text(module)
    (failed,) = pipeline.fuse(module, FusionConfig()).failed
    assert failed.reason.startswith(what)
    assert text(module) == before


def test_a_failing_search_for_blocks_leaves_the_parts(toy: ScaledSin, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: torch.fx.Graph, found: list[Site], *, keep: bool) -> Iterable[Any]:
        raise ZeroDivisionError

    monkeypatch.setattr(recognise, "blocks", fail)
    report = pipeline.fuse(capture(model, torch.randn(4)), FusionConfig(whole_block=True))
    assert report.counts == {"scaled_sin": 1}
    assert [site.fusion for site in report.failed] == ["norm_rope_attention"]
    assert pipeline.fuse(capture(model, torch.randn(4)), FusionConfig()).failed == ()


def test_a_rewrite_that_fails_stops_the_compilation(toy: ScaledSin, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph may be half rewritten: no setting lets it be compiled."""

    def fail(plan: Any, views: Any) -> None:
        raise AssertionError("'mul' is read before it is computed")

    monkeypatch.setattr(rewrite, "apply", fail)
    with pytest.raises(FusionError, match=r"Rewriting scaled_sin of 'toy' raised AssertionError: 'mul' is read") as got:
        pipeline.fuse(capture(model, torch.randn(4)), FusionConfig())
    assert "skip_fusions=('scaled_sin',) leaves such places alone." in str(got.value)
    assert pipeline.fuse(capture(model, torch.randn(4)), FusionConfig(skip_fusions=("scaled_sin",))).sites == ()


@pytest.mark.parametrize("value", ["no_such_module_here:PATTERN", "toy:ScaledSin"], ids=["missing", "a class"])
def test_an_entry_point_that_cannot_be_loaded(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "BUILT_IN", (("toy", "ScaledSin"),))
    monkeypatch.setattr(extensions, "entry_points", lambda group: [EntryPoint("mine", value, group)])
    extensions._installed.cache_clear()
    try:
        report = fusion_pass.explain(model, torch.randn(4))
    finally:
        extensions._installed.cache_clear()
    assert report.counts == {"scaled_sin": 1}
    (failed,) = report.failed
    assert failed.reason.startswith(f"The pattern 'mine = {value}' raised ConfigError: it cannot be loaded: ")
