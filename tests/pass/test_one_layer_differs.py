"""One of several layers is changed a little: it is read for itself or refused, the others stay as they are, and the
numbers of the fused model are those of the changed one."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence

import pytest
import torch
from compiling import capture
from torch import fx
from training_steps import assert_no_worse

from fusion_pass import FusionConfig, pipeline, zoo
from fusion_pass.extensions import patterns
from fusion_pass.graph.repeats import Repeats
from fusion_pass.graph.site import Refusal, Site
from fusion_pass.graph.vocabulary import layer_of, operation
from fusion_pass.zoo.oracle import float64_call

pytest.importorskip("transformers", reason="the model is one of transformers', which is not installed")

LAYERS, CHANGED = 5, 2
"""Two equal layers on either side: those are compared in full, and then the changed one is held against the steps of
that comparison."""


@pytest.fixture(scope="module")
def captured() -> tuple[fx.GraphModule, list[torch.Tensor]]:
    model, inputs = zoo.build("qwen3", layers=LAYERS)
    module = capture(model, **inputs)
    generator = torch.Generator().manual_seed(5)
    values = []
    for node in module.graph.find_nodes(op="placeholder"):
        fake = node.meta["example_value"]
        values.append(
            torch.randn(fake.shape, generator=generator).to(fake.dtype) * 0.3
            if fake.is_floating_point()
            else torch.ones(fake.shape, dtype=fake.dtype)
        )
    return module, values


def nodes(graph: fx.Graph, name: str) -> list[fx.Node]:
    """The nodes that do `name` in the attention of the changed layer, those of its norms included."""
    return [n for n in graph.nodes if operation(n) == name and f".{CHANGED}.self_attn" in layer_of(n)]


def other_eps(graph: fx.Graph) -> None:
    node = nodes(graph, "add")[0]
    node.args = (node.args[0], 0.5)


def other_sign(graph: fx.Graph) -> None:
    """The other half is negated: the rotation turns the other way."""
    node = nodes(graph, "cat")[0]
    negated, x1 = node.args[0]
    x2 = negated.args[0]
    negated.args = (x1,)
    x2.append(negated) if x1 < x2 else x1.append(negated)
    node.args = ([x2, negated],)


def no_sign(graph: fx.Graph) -> None:
    node = nodes(graph, "neg")[1]
    node.target = operator.pos


def exchanged_halves(graph: fx.Graph) -> None:
    first, second = [n for n in nodes(graph, "getitem") if n.users and isinstance(n.args[1][-1], slice)][:2]
    first.args, second.args = second.args, first.args


def q_for_k(graph: fx.Graph) -> None:
    """Both products of layer's q and k are with the other's norm weight."""
    q, k = nodes(graph, "mul")[1], nodes(graph, "mul")[3]
    (wq, x), (wk, y) = q.args, k.args
    q.args, k.args = (wk, x), (wq, y)


def exchanged_tables(graph: fx.Graph) -> None:
    cos, sin = nodes(graph, "unsqueeze")
    cos.args, sin.args = sin.args, cos.args


def no_mask(graph: fx.Graph) -> None:
    (call,) = nodes(graph, "scaled_dot_product_attention")
    call.kwargs = {**call.kwargs, "attn_mask": None}


def other_scale(graph: fx.Graph) -> None:
    (call,) = nodes(graph, "scaled_dot_product_attention")
    call.kwargs = {**call.kwargs, "scale": 0.3}


def key_for_value(graph: fx.Graph) -> None:
    (call,) = nodes(graph, "scaled_dot_product_attention")
    q, k, _ = call.args
    call.args = (q, k, k)


def rounded(graph: fx.Graph) -> None:
    """The query goes through a lower precision after its norm."""
    node = nodes(graph, "mul")[1]
    readers = list(node.users)
    with graph.inserting_after(node):
        low = graph.call_method("to", (node, torch.bfloat16))
    with graph.inserting_after(low):
        back = graph.call_method("to", (low, torch.float32))
    low.meta, back.meta = dict(node.meta), dict(node.meta)
    low.meta["example_value"] = node.meta["example_value"].to(torch.bfloat16)
    for reader in readers:
        reader.replace_input_with(node, back)


def another_reader(graph: fx.Graph) -> None:
    """The normalised query is also read by the projection of the output."""
    node, output = nodes(graph, "mul")[1], nodes(graph, "linear")[-1]
    with graph.inserting_before(output):
        total = graph.call_method("sum", (node,))
        total.meta = {**node.meta, "example_value": node.meta["example_value"].sum()}
        shifted = graph.call_function(operator.add, (output.args[0], total))
        shifted.meta = dict(output.args[0].meta)
    output.replace_input_with(output.args[0], shifted)


def written(graph: fx.Graph) -> None:
    """The normalised query is changed in place after it was read once."""
    first = nodes(graph, "mul")[4]
    query = first.args[0]
    with graph.inserting_after(first):
        write = graph.call_method("mul_", (query, 1.5))
        write.meta = dict(query.meta)


def written_table(graph: fx.Graph) -> None:
    """The cosines are changed in place, for this layer and for those behind it."""
    cos = nodes(graph, "unsqueeze")[0]
    with graph.inserting_after(cos):
        write = graph.call_method("mul_", (cos, 1.5))
        write.meta = dict(cos.meta)


CHANGES = [
    other_eps,
    other_sign,
    no_sign,
    exchanged_halves,
    q_for_k,
    exchanged_tables,
    no_mask,
    other_scale,
    key_for_value,
    rounded,
    another_reader,
    written,
    written_table,
]


@pytest.mark.parametrize("change", CHANGES)
def test_one_layer_differs(
    change: Callable[[fx.Graph], None],
    captured: tuple[fx.GraphModule, list[torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, values = copy.deepcopy(captured[0]), captured[1]
    change(module.graph)
    module.graph.lint()
    module.recompile()
    assert not all(map(torch.equal, run(module, values), run(captured[0], values)))  # it is a change

    repeated = found(module.graph)
    with monkeypatch.context() as afresh:
        afresh.setattr(Repeats, "lookup", lambda self, root: None)
        assert repeated == found(module.graph)

    fused = copy.deepcopy(module)
    report = pipeline.fuse(fused, FusionConfig(allow_reference=True, kernels=("reference",)))
    assert report.fused
    names = [str(node.target) for node in module.graph.find_nodes(op="placeholder")]
    with torch.no_grad():
        _, exact = float64_call(module, dict(zip(names, values, strict=True)))
    assert_no_worse(
        numbered(run(fused, values)), numbered(run(module, values)), numbered(exact), torch.finfo(torch.float32).eps
    )


def numbered(results: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"result {place}": result for place, result in enumerate(results)}


def found(graph: fx.Graph) -> list[Site | Refusal]:
    return [place for pattern in patterns() for place in pattern.find(graph)]


def run(module: fx.GraphModule, values: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return list(module(*[value.clone() for value in values]))


def test_the_views_of_the_tables_are_made_once_a_graph(captured: tuple[fx.GraphModule, list[torch.Tensor]]) -> None:
    module = copy.deepcopy(captured[0])
    assert (
        sum(operation(node) == "unsqueeze" and ".self_attn" in layer_of(node) for node in module.graph.nodes)
        == 2 * LAYERS
    )
    pipeline.fuse(module, FusionConfig(allow_reference=True, kernels=("reference",), whole_block=False))
    calls = [node for node in module.graph.nodes if "qk_norm_rope" in str(node.target)]
    assert len(calls) == LAYERS
    assert len({(call.kwargs["cos"], call.kwargs["sin"]) for call in calls}) == 1
