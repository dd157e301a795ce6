"""Layers that repeat: what is carried over is what would be found afresh, the work does not grow with the number of
layers, and what differs in anything at all is not taken for a repeat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiling import capture
from torch import fx

from fusion_pass import FusionConfig, pipeline, plan, zoo
from fusion_pass.extensions import patterns
from fusion_pass.graph.effects import Effects
from fusion_pass.graph.repeats import Repeats
from fusion_pass.graph.site import Refusal, Site
from fusion_pass.patterns.attention import pattern as attention
from fusion_pass.patterns.norm_rope import pattern as norm_rope


def captured(name: str, layers: int) -> fx.GraphModule:
    pytest.importorskip("transformers")
    model, inputs = zoo.build(name, layers=layers)
    return capture(model, **inputs)


def found(graph: fx.Graph) -> list[Site | Refusal]:
    return [place for pattern in patterns() for place in pattern.find(graph)]


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "olmo2", "qwen3_vl", "deepseek_v3"])
def test_carried_over_is_found_afresh(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma3 alternates windows, Qwen3-VL writes to memory."""
    graph = captured(name, layers=4).graph
    hits: list[object] = []
    lookup = Repeats.lookup
    monkeypatch.setattr(Repeats, "lookup", lambda self, root: _kept(hits, lookup(self, root)))
    repeated = found(graph)
    assert any(hit is not None for hit in hits)
    monkeypatch.setattr(Repeats, "lookup", lambda self, root: None)
    assert repeated == found(graph)


def _kept(hits: list[object], hit: Any) -> Any:
    hits.append(hit)
    return hit


def test_the_work_does_not_grow_with_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def count(module: Any, name: str) -> None:
        function = getattr(module, name)

        def counted(*args: Any) -> Any:
            calls[name] += 1
            return function(*args)

        monkeypatch.setattr(module, name, counted)

    count(norm_rope, "read")  # a place evaluated on lanes
    count(attention, "_site")  # an attention with its mask proved
    count(plan, "_evaluated")  # an operator call evaluated on fake tensors
    count(Repeats, "_counterparts")  # a layer compared; the next ones repeat the steps
    work = []
    for layers in (2, 6):
        calls.clear()
        report = pipeline.fuse(captured("qwen3", layers), FusionConfig(allow_reference=True, whole_block=False))
        assert report.counts == {"qk_norm_rope": layers, "attention": layers}
        work.append(dict(calls))
    assert work[0] == work[1] == {"read": 3, "_site": 1, "_evaluated": 2, "_counterparts": 3}


# --- what tells two places apart --------------------------------------------------------------------------------------


def is_repeat(first: Callable[..., Any], second: Callable[..., Any], *inputs: torch.Tensor) -> bool:
    """Whether the place that ends in the last `rsqrt` is a repeat of the one that ends in the first: compared on its
    own, and behind another repeat, whose comparison is then repeated. `inputs`: x of the first, y and w of the last; w
    of the first if it is another."""
    x, y, last, w = (*inputs, inputs[2])[:4]

    def model(x: Any, z: Any, y: Any, w: Any, last: Any) -> Any:
        # The weights are read first, so that the inputs of the graph come in the same order for all.
        return w.sum(), last.sum(), first(x, w), first(z, w), second(y, last)

    module = capture(model, x, x.clone(), y, w, last)
    old, repeat, new = module.graph.find_nodes(op="call_function", target=torch.rsqrt)
    answers = []
    for before in ([], [repeat]):
        repeats: Repeats[str] = Repeats(Effects(module.graph))
        repeats.add(old, "known")
        assert all(repeats.lookup(root) is not None for root in before)
        answers.append(repeats.lookup(new))
    assert answers[0] == answers[1]
    return answers[0] is not None


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    return torch.rsqrt(y + torch.neg(y) * 2.0).transpose(0, 1) + 1


def other_literal(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    return torch.rsqrt(y + torch.neg(y) * 2.5).transpose(0, 1) + 1


def literal_of_another_type(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    return torch.rsqrt(y + torch.neg(y) * 2).transpose(0, 1) + 1


def other_operation(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    return torch.rsqrt(y - torch.neg(y) * 2.0).transpose(0, 1) + 1


def other_order_of_arguments(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    return torch.rsqrt(torch.neg(y) * 2.0 + y).transpose(0, 1) + 1


def other_input(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    return torch.rsqrt(x + torch.neg(y) * 2.0).transpose(0, 1) + 1


def one_input_twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * x
    return torch.rsqrt(y + torch.neg(y) * 2.0).transpose(0, 1) + 1


def other_readers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    z = torch.rsqrt(y + torch.neg(y) * 2.0)
    return z.transpose(0, 1) + z


def other_reader(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    return torch.rsqrt(y + torch.neg(y) * 2.0).transpose(-2, -1) + 1


def other_order_of_nodes(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    return torch.rsqrt(torch.add(other=torch.neg(y) * 2.0, input=y)).transpose(0, 1) + 1


def a_write(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    z = torch.neg(y)
    y.add_(1)
    return torch.rsqrt(y + z * 2.0).transpose(0, 1) + 1


def test_an_equal_layer_is_a_repeat() -> None:
    x, y, w = torch.randn(3, 3), torch.randn(3, 3), torch.randn(3)
    assert is_repeat(layer, layer, x, y, w)
    assert is_repeat(a_write, a_write, x, y, w)


@pytest.mark.parametrize(
    "other",
    [
        other_literal,
        literal_of_another_type,
        other_operation,
        other_order_of_arguments,
        other_input,
        one_input_twice,
        other_readers,
        other_reader,
        other_order_of_nodes,
        a_write,
    ],
)
def test_another_layer_is_not(other: Callable[..., torch.Tensor]) -> None:
    x, y, w = torch.randn(3, 3), torch.randn(3, 3), torch.randn(3)
    assert not is_repeat(layer, other, x, y, w)
    assert not is_repeat(other, layer, x, y, w)


def two_inputs(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.rsqrt(torch.relu(x * w) + torch.relu(x + w)).transpose(0, 1) + 1


def two_inputs_the_other_first(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    second = torch.relu(x + w)
    return torch.rsqrt(torch.relu(x * w) + second).transpose(0, 1) + 1


def one_input(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x * w)
    return torch.rsqrt(y + y).transpose(0, 1) + 1


def test_nor_is_one_that_reads_one_tensor_in_the_place_of_two() -> None:
    x, y, w = torch.randn(3, 3), torch.randn(3, 3), torch.randn(3)
    assert is_repeat(two_inputs, two_inputs, x, y, w)
    assert not is_repeat(two_inputs, one_input, x, y, w)
    assert not is_repeat(one_input, two_inputs, x, y, w)


def read_once_behind(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(torch.rsqrt(x * w))  # which is not modelled, so what reads it is not followed


def read_twice_behind(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.linalg.inv(torch.rsqrt(x * w))
    return y, torch.neg(y)


def test_nor_is_one_whose_last_reader_is_read_more_often() -> None:
    x, y, w = torch.randn(3, 3), torch.randn(3, 3), torch.randn(3)
    assert is_repeat(read_once_behind, read_once_behind, x, y, w)
    assert not is_repeat(read_once_behind, read_twice_behind, x, y, w)
    assert not is_repeat(read_twice_behind, read_once_behind, x, y, w)


def test_nor_is_one_that_computes_in_another_order() -> None:
    x, y, w = torch.randn(3, 3), torch.randn(3, 3), torch.randn(3)
    assert not is_repeat(two_inputs, two_inputs_the_other_first, x, y, w)


def test_nor_is_one_with_another_kind_of_weight() -> None:
    x, y, w = torch.randn(3, 3), torch.randn(3, 3), torch.randn(3)
    assert is_repeat(layer, layer, x, y, w, w.clone())
    for other in (w.double(), torch.randn(3, 2)[:, 0], torch.randn(1)):
        assert not is_repeat(layer, layer, x, y, other, w)


@pytest.mark.parametrize(
    "y", [torch.randn(2, 3), torch.randn(3, 3).t(), torch.randn(3, 3).double(), torch.randn(3, 3, 1)[..., 0].mT]
)
def test_nor_is_one_of_another_shape_stride_or_dtype(y: torch.Tensor) -> None:
    assert not is_repeat(layer, layer, torch.randn(3, 3), y, torch.randn(3))


def test_nor_under_autocast() -> None:
    def lowered(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return matrix(x, w)

    def matrix(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.rsqrt(torch.matmul(x, w)).transpose(0, 1) + 1

    x, y, w = torch.randn(3, 3), torch.randn(3, 3), torch.randn(3, 3)
    assert is_repeat(matrix, matrix, x, y, w)
    assert is_repeat(lowered, lowered, x, y, w)
    assert not is_repeat(matrix, lowered, x, y, w)
