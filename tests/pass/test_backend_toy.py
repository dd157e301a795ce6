"""The pass through `torch.compile`, with a toy fusion: what is asked for, what is reported, what is left alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import CountingCompiler, backend, eager
from torch.utils.checkpoint import checkpoint
from toy import UNLUCKY, ScaledSin

import fusion_pass
from fusion_pass import ConfigError, FusionBackend, FusionConfig, FusionError
from fusion_pass.report import _warned

pytestmark = pytest.mark.usefixtures("toy")


def once(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x + 1) * 3.0 - 1


def once_and_unlucky(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 3.0 + torch.sin(x) * 13


def nothing(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def gradient(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(function(x).sum(), x)
    return grad


def test_forward_and_backward_run_the_operator() -> None:
    inner = CountingCompiler()
    fused = torch.compile(once, backend=FusionBackend(FusionConfig(), inner=inner), fullgraph=True)
    x = torch.randn(5, 3)
    torch.testing.assert_close(gradient(fused, x), gradient(once, x))
    assert inner.forward["fusion_pass_toy.scaled_sin.default"] == 1
    assert inner.forward["aten.sin.default"] == 0
    assert inner.backward["fusion_pass_toy.scaled_sin_backward.default"] == 1
    assert inner.backward["aten.cos.default"] == 0


def test_the_body_of_a_checkpoint_is_fused_and_recomputed() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(once, torch.sin(x) * 2.0, use_reentrant=False)

    inner = CountingCompiler()
    compiler = FusionBackend(FusionConfig(expect=2), inner=inner)
    x = torch.randn(5, 3)
    torch.testing.assert_close(gradient(torch.compile(model, backend=compiler, fullgraph=True), x), gradient(model, x))
    assert inner.forward["aten.sin.default"] == 0


def test_a_disabled_pass_changes_nothing() -> None:
    compiler = backend(enabled=False)
    x = torch.randn(3)
    torch.testing.assert_close(torch.compile(once, backend=compiler)(x), once(x))
    assert compiler.reports[0].sites == ()


def test_a_deselected_fusion_is_not_looked_for() -> None:
    compiler = backend(skip_fusions=("scaled_sin",))
    torch.compile(once, backend=compiler)(torch.randn(3))
    assert compiler.reports[0].sites == ()


def test_report_on_every_place() -> None:
    compiler = backend()
    torch.compile(once_and_unlucky, backend=compiler)(torch.randn(3))
    (report,) = compiler.reports
    assert report.to_dict() == {
        "sites": [
            {
                "fusion": "scaled_sin",
                "layer": "toy",
                "status": "fused",
                "reason": "",
                "kernel": "custom",
                "arguments": {"x": "float32[3]", "scale": 3.0},
            },
            {
                "fusion": "scaled_sin",
                "layer": "toy",
                "status": "skipped",
                "reason": UNLUCKY,
                "kernel": "",
                "arguments": {},
            },
        ],
        "counts": {"scaled_sin": 1},
    }
    assert str(report) == f"scaled_sin: 1 fused (custom)\n1 left alone, scaled_sin: {UNLUCKY}"


def compile_error(function: Callable[..., Any], **settings: Any) -> str:
    with pytest.raises(Exception, match="FusionError") as caught:
        torch.compile(function, backend=backend(**settings), fullgraph=True)(torch.randn(3))
    assert isinstance(caught.value.__cause__ or caught.value.inner_exception, FusionError)
    return str(caught.value)


def test_strict_raises_with_the_reasons() -> None:
    torch.compile(once, backend=backend(strict=True), fullgraph=True)(torch.randn(3))
    assert f"1 left alone, scaled_sin: {UNLUCKY}" in compile_error(once_and_unlucky, strict=True)


def test_strict_raises_where_nothing_was_found() -> None:
    assert "No place for a fusion was found" in compile_error(nothing, strict=True)


def test_expected_counts() -> None:
    torch.compile(once_and_unlucky, backend=backend(expect={"scaled_sin": 1}), fullgraph=True)(torch.randn(3))
    assert "expect is 2, but 1 were fused" in compile_error(once, expect=2)
    assert "expect is {'scaled_sin': 0}" in compile_error(once, expect={"scaled_sin": 0})
    assert "expect is {'attention': 1}, but {'attention': 0}" in compile_error(once, expect={"attention": 1})
    assert "No place for a fusion was found" in compile_error(nothing, expect=1)


def test_by_default_one_warning_with_the_inventory(caplog: pytest.LogCaptureFixture) -> None:
    _warned.clear()
    with caplog.at_level(logging.WARNING, logger="fusion_pass"):
        torch.compile(once_and_unlucky, backend=backend())(torch.randn(3))
        torch._dynamo.reset()
        torch.compile(once_and_unlucky, backend=backend())(torch.randn(3))
    (record,) = caplog.records
    assert UNLUCKY in record.getMessage()


def test_log_level_says_where_the_summary_goes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="fusion_pass"):
        torch.compile(once, backend=backend(log_level="warning"))(torch.randn(3))
    assert [r.levelname for r in caplog.records if "1 fused" in r.getMessage()] == ["WARNING"]


def test_report_file_holds_all_graphs_of_the_process(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "report.json"
    compiler = backend(report=str(path))
    torch.compile(once, backend=compiler)(torch.randn(3))
    torch.compile(once_and_unlucky, backend=compiler)(torch.randn(3))
    content = json.loads(path.read_text())
    assert content["counts"] == {"scaled_sin": 2}
    assert [site["status"] for site in content["sites"]] == ["fused", "fused", "skipped"]
    assert len({site["graph"] for site in content["sites"]}) == 2


def test_each_rank_writes_its_own_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    torch.compile(once, backend=backend(report=str(tmp_path / "report.json")))(torch.randn(3))
    assert [path.name for path in tmp_path.iterdir()] == ["report.json.rank3"]


def test_explain_reports_and_compiles_nothing() -> None:
    x = torch.randn(3)
    report = fusion_pass.explain(once_and_unlucky, x)
    assert report.counts == {"scaled_sin": 1}
    assert "torch.sin(l_x_)" in report.before
    assert "scaled_sin" not in report.before
    assert "torch.ops.fusion_pass_toy.scaled_sin.default(x = l_x_, scale = 3.0)" in report.after


def test_explain_joins_the_graphs_of_a_model_with_breaks() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = once(x)
        torch._dynamo.graph_break()
        return once(y)

    report = fusion_pass.explain(broken, torch.randn(3))
    assert (report.graphs, report.counts) == (2, {"scaled_sin": 2})


def test_explain_says_that_nothing_was_captured() -> None:
    with torch.compiler.set_stance("force_eager"):
        report = fusion_pass.explain(once, torch.randn(3))
    assert report.graphs == 0
    assert str(report).startswith("Dynamo captured no graph")
    assert str(fusion_pass.explain(nothing, torch.randn(3))) == "no place for a fusion found"


def test_explain_many_times_never_falls_back_to_silence() -> None:
    for _ in range(20):
        assert fusion_pass.explain(once, torch.randn(3)).counts == {"scaled_sin": 1}


def test_the_backend_is_found_by_name() -> None:
    compiled = torch.compile(once, backend="fusion_pass", fullgraph=True)
    x = torch.randn(5, 3)
    torch.testing.assert_close(gradient(compiled, x), gradient(once, x))


def test_a_reset_of_dynamo_reaches_the_cuda_graphs_of_the_backend_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[None] = []
    monkeypatch.setattr("torch._inductor.cudagraph_trees.reset_cudagraph_trees", lambda: resets.append(None))
    torch.compile(once, backend="fusion_pass", fullgraph=True)(torch.randn(5, 3))
    torch._dynamo.reset()
    assert resets


def test_configuration_object_or_settings_not_both() -> None:
    assert fusion_pass.backend(strict=True).config == FusionConfig(strict=True)
    with pytest.raises(ConfigError, match="either a FusionConfig or settings"):
        fusion_pass.backend(FusionConfig(), strict=True)
    with pytest.raises(ConfigError, match="it takes a FusionConfig"):
        fusion_pass.backend({"strict": True})


def test_two_models_in_one_process_keep_their_own_arguments() -> None:
    compiler = backend()
    x = torch.randn(3)
    for scale in (2.0, 5.0):
        torch.compile(lambda x, scale=scale: torch.sin(x) * scale, backend=compiler, fullgraph=True)(x)
    assert [site.arguments["scale"] for report in compiler.reports for site in report.sites] == [2.0, 5.0]


def test_third_party_patterns_are_registered_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusion_pass import extensions

    monkeypatch.undo()
    monkeypatch.setattr(extensions, "BUILT_IN", ())
    extensions._installed.cache_clear()
    try:
        fusion_pass.register(ScaledSin())
        assert fusion_pass.explain(once, torch.randn(3)).counts == {"scaled_sin": 1}
        with pytest.raises(ConfigError, match="registered already"):
            fusion_pass.register(ScaledSin())
        fusion_pass.unregister("scaled_sin")
        assert fusion_pass.explain(once, torch.randn(3)).sites == ()
        with pytest.raises(ConfigError, match="a pattern is an object with a `name`"):
            fusion_pass.register(ScaledSin)
    finally:
        extensions._installed.cache_clear()


class TestInductorOptions:
    """backend="inductor" with our hook in its pre-grad slot."""

    def test_fuses_once_and_reports_the_whole_graph(self) -> None:
        def model(x: torch.Tensor) -> torch.Tensor:
            return checkpoint(once, torch.sin(x) * 2.0, use_reentrant=False)

        options = fusion_pass.inductor_options(expect=2)
        x = torch.randn(5, 3)
        torch.testing.assert_close(gradient(torch.compile(model, options=options), x), gradient(model, x))
        (report,) = options["pre_grad_custom_pass"].reports
        assert report.counts == {"scaled_sin": 2}

    @pytest.mark.parametrize("place", ["config", "options"])
    def test_an_earlier_pass_still_runs_and_its_slot_is_restored(self, place: str) -> None:
        seen: list[torch.fx.Graph] = []
        inductor_config = torch._inductor.config
        own = {"pre_grad_custom_pass": seen.append}
        with inductor_config.patch(own if place == "config" else {}):
            before = inductor_config.pre_grad_custom_pass
            options = fusion_pass.inductor_options(options=own if place == "options" else None)
            torch.compile(once, options=options)(torch.randn(3))
            assert inductor_config.pre_grad_custom_pass is before
        assert len(seen) == 1
        assert len(options["pre_grad_custom_pass"].reports) == 1

    def test_other_options_are_kept(self) -> None:
        options = fusion_pass.inductor_options(options={"triton.cudagraphs": True, "max-autotune": False})
        assert options["triton.cudagraphs"] is True
        assert options["max_autotune"] is False

    def test_asking_twice_is_an_error(self) -> None:
        with pytest.raises(ConfigError, match="call inductor_options once"):
            fusion_pass.inductor_options(options=fusion_pass.inductor_options())


class TestModeAndOptions:
    """The `fusion_pass` backend hands mode and options on to Inductor."""

    def settings_seen(self, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> dict[str, Any]:
        seen: dict[str, Any] = {}

        def fake_compile_fx(module: Any, inputs: Any, config_patches: Any = None, **_: Any) -> Any:
            seen.update(config_patches)
            return eager(module, inputs)

        monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", fake_compile_fx)
        torch.compile(once, backend="fusion_pass", **arguments)(torch.randn(3))
        return seen

    def test_reduce_overhead(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.settings_seen(monkeypatch, mode="reduce-overhead")["triton.cudagraphs"] is True

    def test_options(self, monkeypatch: pytest.MonkeyPatch) -> None:
        options = {"epilogue_fusion": False, "unsafe_marked_cacheable_functions": {"mine": "1"}}
        seen = self.settings_seen(monkeypatch, options=options)
        assert seen["epilogue_fusion"] is False
        assert set(seen["unsafe_marked_cacheable_functions"]) == {"mine", "fusion_pass"}

    def test_a_wrong_option_is_refused_as_inductor_does(self) -> None:
        with pytest.raises(Exception, match="Unexpected optimization option"):
            torch.compile(once, backend="fusion_pass", options={"no_such_option": 1})(torch.randn(3))
