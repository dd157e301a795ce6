"""Planning and rewriting: a site is rewritten whole or left untouched, and every way to fail has its sentence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiling import capture
from expecttest import assert_expected_inline
from toy import ScaledSin

from fusion_pass import FusionConfig, pipeline, plan
from fusion_pass.graph.site import Call, Operand, Output, Site, Step


def text(module: torch.fx.GraphModule) -> str:
    """The graph, one node a line, without types."""
    body = module.code.strip().splitlines()[1:]
    return "\n".join(line.split(";")[0].strip() for line in body)


def fuse(module: torch.fx.GraphModule) -> str:
    """Run the pass; the reason of the only place, empty when it was fused."""
    (site,) = pipeline.fuse(module, FusionConfig()).sites
    return site.reason


def untouched(module: torch.fx.GraphModule) -> tuple[str, str]:
    """The graph's text before and after the pass refused, and the reason."""
    before = text(module)
    reason = fuse(module)
    assert text(module) == before
    module.graph.lint()
    return reason


def test_before_and_after(toy: ScaledSin) -> None:
    module = capture(lambda x: torch.sin(x) * 3.0 + 1, torch.randn(4))
    assert_expected_inline(
        text(module),
        """\
l_x_ = L_x_
sin = torch.sin(l_x_)
mul = sin * 3.0
add = mul + 1
return (add,)""",
    )
    assert fuse(module) == ""
    assert_expected_inline(
        text(module),
        """\
l_x_ = L_x_
scaled_sin_default = torch.ops.fusion_pass_toy.scaled_sin.default(x = l_x_, scale = 3.0)
add = scaled_sin_default + 1
return (add,)""",
    )


def test_new_nodes_carry_fake_values_and_provenance(toy: ScaledSin) -> None:
    module = capture(lambda x: torch.sin(x) * 3.0 + 1, torch.randn(4, requires_grad=True))
    fuse(module)
    (call,) = module.graph.find_nodes(op="call_function", target=torch.ops.fusion_pass_toy.scaled_sin.default)
    assert call.meta["example_value"].shape == (4,)
    assert call.meta["example_value"].requires_grad
    assert "stack_trace" in call.meta


def test_data_movement_around_the_call(only: Callable[..., None]) -> None:
    transposed = (Step("transpose", (0, 1)),)
    only(
        ScaledSin(
            call=lambda site: Call(
                "scaled_sin",
                {"x": Operand(site.call.tensors["x"].node, transposed)},
                site.call.options,
                "fusion_pass_toy",
            ),
            outputs=lambda site: (Output(site.anchor, 0, transposed),),
        )
    )
    x = torch.randn(4, 3)
    module = capture(lambda x: torch.sin(x) * 3.0 + 1, x)
    assert fuse(module) == ""
    assert text(module).count(".transpose(0, 1)") == 2
    torch.testing.assert_close(module(x)[0], torch.sin(x) * 3 + 1)


def read_and_given_through(before: Step, after: Step) -> ScaledSin:
    """The toy with its operand moved by `before` and its result by `after`."""
    return ScaledSin(
        call=lambda site: Call(
            "scaled_sin", {"x": Operand(site.call.tensors["x"].node, (before,))}, site.call.options, "fusion_pass_toy"
        ),
        outputs=lambda site: (Output(site.anchor, 0, (after,)),),
    )


def test_movement_that_the_next_site_takes_back_is_left_out(only: Callable[..., None]) -> None:
    only(read_and_given_through(Step("permute", ((1, 2, 0),)), Step("permute", (2, 0, 1))))
    x = torch.randn(2, 3, 4)
    module = capture(lambda x: torch.sin(torch.sin(x) * 3.0) * 2.0, x)
    assert pipeline.fuse(module, FusionConfig()).counts == {"scaled_sin": 2}
    assert_expected_inline(
        text(module),
        """\
l_x_ = L_x_
permute = l_x_.permute((1, 2, 0))
scaled_sin_default = torch.ops.fusion_pass_toy.scaled_sin.default(x = permute, scale = 3.0)
scaled_sin_default_1 = torch.ops.fusion_pass_toy.scaled_sin.default(x = scaled_sin_default, scale = 2.0)
permute_2 = scaled_sin_default_1.permute(2, 0, 1)
return (permute_2,)""",
    )
    torch.testing.assert_close(module(x)[0], torch.sin(torch.sin(x) * 3.0) * 2.0)


@pytest.mark.parametrize(
    ("movement", "before", "after", "taken_back"),
    [
        (lambda x: x.transpose(0, 1), Step("transpose", (1, 0)), Step("transpose", (0, 1)), True),
        (lambda x: torch.transpose(x, -1, 0), Step("transpose", (0, 2)), Step("transpose", (0, 2)), True),
        (lambda x: x.permute((1, 2, 0)), Step("permute", (2, 0, 1)), Step("permute", (1, 2, 0)), True),
        (lambda x: x.transpose(0, 1), Step("transpose", (1, 2)), Step("transpose", (1, 2)), False),
        (lambda x: x.permute(1, 2, 0), Step("permute", (1, 2, 0)), Step("permute", (2, 0, 1)), False),
        (
            lambda x: torch.transpose(input=x, dim0=0, dim1=1),
            Step("transpose", (1, 0)),
            Step("transpose", (0, 1)),
            False,
        ),
        (lambda x: x.permute(dims=(1, 0, 2)), Step("transpose", (1, 0)), Step("transpose", (0, 1)), False),
        (lambda x: x.view(3, 3, 3), Step("transpose", (0, 1)), Step("transpose", (0, 1)), False),
        (lambda x: x.transpose(0, 1), Step("flatten"), Step("unflatten", (0, (3, 3, 3))), False),
    ],
)
def test_what_counts_as_taken_back(
    only: Callable[..., None],
    movement: Callable[[torch.Tensor], torch.Tensor],
    before: Step,
    after: Step,
    taken_back: bool,
) -> None:
    only(read_and_given_through(before, after))
    x = torch.randn(3, 3, 3)
    module = capture(lambda x: torch.sin(movement(x)) * 3.0, x)
    assert fuse(module) == ""
    assert ("scaled_sin.default(x = l_x_," in text(module)) is taken_back
    torch.testing.assert_close(module(x)[0], torch.sin(movement(x)) * 3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"call": lambda site: Call("no_such_op", {}, {})}, "The operator fusion_pass::no_such_op is not registered."),
        (
            {"outputs": lambda site: (Output(site.anchor, 0, (Step("flatten"),)),)},
            "'mul' has shape [4, 3], the call gives [12].",
        ),
        (
            {"outputs": lambda site: (Output(site.anchor, 0, (Step("double"),)),)},
            "'mul' has dtype torch.float32, the call gives torch.float64.",
        ),
        (
            {"call": lambda site: Call("scaled_sin", dict(site.call.tensors), {"scale": "three"}, "fusion_pass_toy")},
            "scaled_sin does not take these arguments: ",
        ),
        (
            {"outputs": lambda site: (Output(site.anchor, 0, (Step("unflatten", (0, (5, -1))),)),)},
            "scaled_sin does not take these arguments: ",
        ),
    ],
)
def test_a_site_that_does_not_fit_is_left_untouched(
    only: Callable[..., None], changes: dict[str, Any], reason: str
) -> None:
    only(ScaledSin(**changes))
    assert untouched(capture(lambda x: torch.sin(x) * 3.0 + 1, torch.randn(4, 3))).startswith(reason)


def test_a_second_reader_of_an_inner_value(toy: ScaledSin) -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        sine = torch.sin(x)
        return sine * 3.0 + sine

    reason = untouched(capture(both, torch.randn(4)))
    assert reason == "'sine' is computed inside the site and also read outside it, by 'add'."


def two_results(write: bool) -> Callable[..., Any]:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        a = torch.sin(x) * 3.0
        early = a + 1
        if write:
            y.add_(1)
        b = torch.cos(x)
        return early, b

    return function


class LateAnchor(ScaledSin):
    """A site whose result is read before its anchor: the anchor is the cosine further down."""

    def find(self, graph: torch.fx.Graph) -> Any:
        for site in super().find(graph):
            (cosine,) = graph.find_nodes(op="call_function", target=torch.cos)
            yield dataclasses.replace(site, anchor=cosine)


def test_a_result_read_before_the_anchor_moves_the_call_up(only: Callable[..., None]) -> None:
    only(LateAnchor())
    x, y = torch.randn(4), torch.randn(4)
    module = capture(two_results(write=False), x, y)
    assert fuse(module) == ""
    module.graph.lint()
    torch.testing.assert_close(module(x)[0], torch.sin(x) * 3 + 1)


def test_but_not_across_a_write_to_memory(only: Callable[..., None]) -> None:
    only(LateAnchor())
    reason = untouched(capture(two_results(write=True), torch.randn(4), torch.randn(4)))
    assert reason == "'early' reads a result before the site ends, and memory is written in between."


def test_nor_before_what_the_call_reads(only: Callable[..., None]) -> None:
    class ReadsItsAnchor(LateAnchor):
        def find(self, graph: torch.fx.Graph) -> Any:
            for site in super().find(graph):
                call = Call("scaled_sin", {"x": Operand(site.anchor)}, site.call.options, "fusion_pass_toy")
                yield dataclasses.replace(site, call=call)

    only(ReadsItsAnchor())
    reason = untouched(capture(two_results(write=False), torch.randn(4), torch.randn(4)))
    assert reason == "'b', which the call reads, is computed only after a result of the site is read."


def test_an_operand_inside_of_another_site(only: Callable[..., None]) -> None:
    """The second sine's call reads the first sine, which the first call leaves nothing of."""

    def call(site: Site) -> Call:
        read = site.call.tensors["x"].node
        inner = read.args[0] if read.op == "call_function" else read
        return Call("scaled_sin", {"x": Operand(inner)}, site.call.options, "fusion_pass_toy")

    only(ScaledSin(call=call))
    module = capture(lambda x: torch.sin(torch.sin(x) * 3.0) * 2.0, torch.randn(4))
    report = pipeline.fuse(module, FusionConfig())
    assert report.counts == {"scaled_sin": 1}
    assert report.reasons == {"scaled_sin: 'sin', which the call needs, became part of another fusion.": 1}
    module.graph.lint()


@pytest.mark.parametrize("step", [Step("clone"), Step("transpose", (0, 1))], ids=["copy", "view"])
def test_two_sites_share_views_of_what_they_read_and_no_copies(only: Callable[..., None], step: Step) -> None:
    """A copy made for the first call does not see what is written before the second."""
    back = (step,) if step.method == "transpose" else ()
    only(
        ScaledSin(
            call=lambda site: Call(
                "scaled_sin",
                {"x": Operand(site.call.tensors["x"].node, (step,))},
                site.call.options,
                "fusion_pass_toy",
            ),
            outputs=lambda site: (Output(site.anchor, 0, back),),
        )
    )

    def function(x: torch.Tensor) -> Any:
        x = x.clone()
        first = torch.sin(x) * 3.0
        x.add_(1)
        return first, torch.sin(x) * 2.0

    x = torch.randn(3, 3)
    module = capture(function, x)
    assert pipeline.fuse(module, FusionConfig()).counts == {"scaled_sin": 2}
    assert sum(node.target == step.method for node in module.graph.nodes) == 3
    torch.testing.assert_close(module(x), function(x))


def test_a_write_that_the_call_does_not_name_stays(only: Callable[..., None]) -> None:
    """The call reads the memory that `add_` has written, and nobody reads what `add_` returns any more."""
    only(
        ScaledSin(
            call=lambda site: Call(
                "scaled_sin",
                {"x": Operand(site.call.tensors["x"].node.args[0])},
                site.call.options,
                "fusion_pass_toy",
            )
        )
    )

    def function(x: torch.Tensor) -> Any:
        y = x.clone()
        z = y.add_(1.0)
        return torch.sin(z) * 3.0, y

    x = torch.randn(4)
    module = capture(function, x)
    assert fuse(module) == ""
    torch.testing.assert_close(module(x), function(x))


def test_a_change_of_grad_mode_inside_the_site(only: Callable[..., None]) -> None:
    def function(x: torch.Tensor) -> Any:
        a = torch.sin(x) * 3.0
        with torch.no_grad():
            b = torch.cos(x)
        return a, b

    only(LateAnchor())
    assert untouched(capture(function, torch.randn(4, requires_grad=True))) == "The grad mode changes inside the site."


def test_of_two_overlapping_sites_the_larger_wins(only: Callable[..., None]) -> None:
    class SmallSin(ScaledSin):
        name = "small"

    only(SmallSin(fusion="small", region=lambda site: frozenset({site.anchor})), ScaledSin())
    module = capture(lambda x: torch.sin(x) * 3.0 + 1, torch.randn(4))
    report = pipeline.fuse(module, FusionConfig())
    assert report.counts == {"scaled_sin": 1}
    assert report.reasons == {"small: The place is part of a larger fusion.": 1}


def test_a_site_that_reads_the_result_of_another(toy: ScaledSin) -> None:
    module = capture(lambda x: torch.sin(torch.sin(x) * 3.0) * 2.0, torch.randn(4))
    assert pipeline.fuse(module, FusionConfig()).counts == {"scaled_sin": 2}
    assert "torch.sin" not in text(module)
    x = torch.randn(4)
    torch.testing.assert_close(module(x)[0], torch.sin(torch.sin(x) * 3) * 2)


class TestStrides:
    """The toy operator's result has the strides of its input; `contiguous` as an output step makes them differ from
    the original's."""

    @pytest.fixture(autouse=True)
    def other_strides(self, only: Callable[..., None]) -> None:
        only(ScaledSin(outputs=lambda site: (Output(site.anchor, 0, (Step("contiguous"),)),)))

    @staticmethod
    def nodes_after(function: Callable[[torch.Tensor], Any]) -> list[str]:
        x = torch.randn(4, 3).t()
        module = capture(function, x)
        expected = function(x)
        assert fuse(module) == ""
        (got,) = module(x)
        torch.testing.assert_close(got, expected)
        assert got.stride() == expected.stride()
        return [str(node.target) for node in module.graph.nodes if node.op == "call_method"]

    def test_no_copy_where_nobody_depends_on_them(self) -> None:
        assert self.nodes_after(lambda x: ((torch.sin(x) * 3.0) + 1).sum(1)) == ["contiguous", "sum"]

    def test_restored_for_a_view(self) -> None:
        nodes = self.nodes_after(lambda x: (torch.sin(x) * 3.0).t().view(12))
        assert nodes == ["contiguous", "permute", "contiguous", "permute", "t", "view"]

    def test_restored_for_the_caller(self) -> None:
        assert self.nodes_after(lambda x: torch.sin(x) * 3.0) == ["contiguous", "permute", "contiguous", "permute"]


def test_a_repeated_site_is_planned_once_and_its_result_keeps_its_own_memory(
    toy: ScaledSin, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated: list[str] = []
    evaluate = plan._evaluated
    monkeypatch.setattr(plan, "_evaluated", lambda site, *rest: evaluated.append(site.layer) or evaluate(site, *rest))

    def layers(x: torch.Tensor) -> torch.Tensor:
        for scale in (3.0, 3.0, 2.0, 3.0):
            x = torch.sin(x) * scale + 1
        return x

    module = capture(layers, torch.randn(4))
    assert pipeline.fuse(module, FusionConfig()).counts == {"scaled_sin": 4}
    assert len(evaluated) == 2
    calls = module.graph.find_nodes(op="call_function", target=torch.ops.fusion_pass_toy.scaled_sin.default)
    assert len({call.meta["example_value"].untyped_storage()._cdata for call in calls}) == 4
    x = torch.randn(4)
    torch.testing.assert_close(module(x)[0], layers(x))
