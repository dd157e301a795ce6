"""Writes that neither a name nor a schema tells: a lookup that first shortens the rows it reads, running statistics, a
function that the user puts into the graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from exactness import capture, find
from spellings import HALF, D, S, halves
from torch import Tensor, fx

from fusion_pass import FusionBackend, FusionConfig
from fusion_pass.graph.writes import written_arguments

IDS = torch.arange(S)
START = torch.zeros(1, dtype=torch.long)


def halve(table: Tensor) -> None:
    table.div_(2)


LIBRARY = torch.library.Library("fusion_pass_tests", "DEF")
LIBRARY.define("halve(Tensor(a!) table) -> ()")
LIBRARY.define("total(Tensor table) -> Tensor")
LIBRARY.define("total.into(Tensor table, *, Tensor(a!) out) -> Tensor(a!)")
LIBRARY.impl("halve", halve, "CompositeExplicitAutograd")
LIBRARY.impl("total", lambda table: table.sum(), "CompositeExplicitAutograd")


@torch.compiler.allow_in_graph
def halved(tables: dict[str, list[Tensor]]) -> Tensor:
    tables["first"][0].div_(2)
    return tables["first"][0].sum()


@torch.compiler.allow_in_graph
def halved_row(table: Tensor, *, factor: float) -> Tensor:
    table[1].mul_(factor)
    return table.sum()


@torch.compiler.allow_in_graph
def halved_data(table: Tensor) -> Tensor:
    table.data.div_(2)  # which the tensor's version does not count
    return table.sum()


@torch.compiler.allow_in_graph
def total(table: Tensor, copies_: bool = False) -> Tensor:
    return (table.clone().div_(2) if copies_ else table).sum()


@torch.compiler.allow_in_graph
def gram(x: Tensor) -> Tensor:
    return x @ x.mT


WRITES: dict[str, Callable[[Tensor], object]] = {
    "embedding": lambda table: F.embedding(IDS, table, max_norm=0.5),
    "embedding, by position": lambda table: F.embedding(IDS, table, None, 0.5),
    "embedding to nothing": lambda table: F.embedding(IDS, table, max_norm=0.0),
    "embedding_bag": lambda table: F.embedding_bag(IDS, table, START, max_norm=0.5),
    "embedding_bag, by position": lambda table: F.embedding_bag(IDS, table, START, 0.5),
    "embedding_bag, exchanged": lambda table: F.embedding_bag(table, IDS, START, max_norm=0.5),
    "operator of a library": lambda table: torch.ops.fusion_pass_tests.halve.default(table),
    "operator of a library, its overload not named": lambda table: torch.ops.fusion_pass_tests.halve(table),
    "function of the user's": lambda table: halved({"first": [table]}),
    "function of the user's, a part": lambda table: halved_row(table, factor=0.5),
    "function of the user's, a view": lambda table: halved_row(table[2:], factor=0.5),
    "function of the user's, behind autograd's back": halved_data,
    "method of NumPy's": lambda table: table.numpy().fill(0.5),
}
READS: dict[str, Callable[[Tensor], object]] = {
    "embedding": lambda table: F.embedding(IDS, table),
    "embedding, by position": lambda table: F.embedding(IDS, table, None, None, 2.0, False, False),
    "embedding_bag": lambda table: F.embedding_bag(IDS, table, START),
    "operator of a library": lambda table: torch.ops.fusion_pass_tests.total(table),
    "function of the user's": total,
    "function of the user's that writes to a copy": lambda table: total(table, copies_=True),
    "method of NumPy's": lambda table: table.numpy().sum(),
}


def rotations(lookup: Callable[[Tensor], object]) -> list[int]:
    """How many tensors each site rotates, of q and k rotated by one table, with `lookup` in between."""

    def model(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[object, ...]:
        sin = sin.clone()
        rotated = halves(q, cos, sin[:, None])
        found = lookup(sin)
        return rotated, halves(k, cos, sin[:, None]), found

    angle = torch.randn(S, HALF).repeat(1, 2)
    q, k = torch.randn(2, 2, S, 4, D)
    module, _ = capture(model, q, k, angle.cos()[:, None], angle.sin())
    sites, _ = find(module)
    return [len(site.outputs) for site in sites]


@pytest.mark.parametrize("name", WRITES)
def test_table_of_a_lookup_that_shortens_its_rows(name: str) -> None:
    """The rows of the sines change after q was rotated: no call reads them both before and after."""
    assert 2 not in rotations(WRITES[name])


@pytest.mark.parametrize("name", READS)
def test_table_of_a_lookup_that_only_reads(name: str) -> None:
    assert rotations(READS[name]) == [2]


def test_a_function_is_tried_without_fixing_the_sizes() -> None:
    """In C++ a matrix product (of torch 2.11) asks for the numbers of its operands' sizes."""

    def model(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return halves(x, cos, sin), gram(x)

    config = FusionConfig(allow_reference=True, expect={"rope": 1})
    backend = FusionBackend(config, inner=lambda module, _: module.forward)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for length in (S, S + 1, 3 * S):
        x, cos, sin = torch.randn(2, length, 4, D), torch.randn(length, 1, D), torch.randn(length, 1, D)
        for tensor, axis in ((x, 1), (cos, 0), (sin, 0)):
            torch._dynamo.maybe_mark_dynamic(tensor, axis)
        compiled(x, cos, sin)
    assert len(backend.reports) == 1


def normalised(function: Callable[..., object], order: str, *more: object) -> set[str]:
    """Which arguments of a normalisation over a batch are written. `order`: of its tensors, by their first letters."""
    graph = fx.Graph()
    tensors = {name[0]: graph.placeholder(name) for name in ("x", "mean", "variance", "weight", "bias")}
    call = graph.call_function(function, (*(tensors[letter] for letter in order), *more))
    return {node.name for node in written_arguments(call)}


STATISTICS = {"mean", "variance"}
aten = torch.ops.aten


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics(training: bool) -> None:
    expected = STATISTICS if training else set()
    assert normalised(F.batch_norm, "xmvwb", training) == expected
    for function in (torch.batch_norm, aten.batch_norm.default, aten.batch_norm):
        assert normalised(function, "xwbmv", training, 0.1, 1e-5, True) == expected
    assert normalised(aten.native_batch_norm.default, "xwbmv", training, 0.1, 1e-5) == expected
    assert normalised(aten.cudnn_batch_norm.default, "xwbmv", training, 0.1, 1e-5) == expected


def test_running_statistics_of_instances() -> None:
    assert normalised(F.instance_norm, "xmv") == STATISTICS
    assert normalised(aten.instance_norm.default, "xwbmv", True, 0.1, 1e-5, True) == STATISTICS


def test_an_argument_named_out_that_is_only_read() -> None:
    """The backward of an attention reads the result of its forward."""
    graph = fx.Graph()
    tensors = [graph.placeholder(name) for name in ("grad", "q", "k", "v", "result", "lse", "seed", "offset")]
    backward = aten._scaled_dot_product_flash_attention_backward.default
    assert "out" in [a.name for a in backward._schema.arguments]
    call = graph.call_function(backward, (*tensors[:6], None, None, 8, 8, 0.0, True, *tensors[6:]))
    assert written_arguments(call) == []


def raises(table: Tensor, number: int) -> Tensor:
    raise ValueError("only what it was made for")


def changed_if_given(table: Tensor | slice | None, other: Tensor | None = None) -> None:
    if isinstance(table, Tensor):
        table.mul_(2)


def test_function_that_cannot_be_tried() -> None:
    """Of which nothing is known: it may write all that it reads."""
    module, _ = capture(lambda table: total(table), torch.ones(2))
    (call,) = module.graph.find_nodes(op="call_function", target=total)
    (table,) = call.args
    assert written_arguments(call) == []
    assert written_arguments(module.graph.call_function(raises, (table, 1))) == [table]
    assert written_arguments(module.graph.call_function(changed_if_given, (slice(table),))) == [table]
    call.target, call.args = changed_if_given, (table, table)  # after it was tried, as a rewrite might
    assert written_arguments(call) == [table]
    table.meta.clear()
    assert written_arguments(module.graph.call_function(changed_if_given, (table,))) == [table]
    assert written_arguments(module.graph.call_function(total, ())) == []
