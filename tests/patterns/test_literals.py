"""Numbers in a graph: as they stand, in a tensor of one number, and as a factor or divisor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from exactness import capture
from torch import Tensor, fx

from fusion_pass.graph.effects import Effects
from fusion_pass.graph.vocabulary import operation
from fusion_pass.patterns.literals import constant, number, number_times


def returned(function: Callable[[Tensor], Tensor]) -> fx.Node:
    """The node that a graph of `function` returns."""
    module, _ = capture(lambda x: (function(x),), torch.randn(4))
    (output,) = module.graph.find_nodes(op="output")
    ((node,),) = output.args
    return node


def halved(x: Tensor) -> Tensor:
    x.div_(2)
    return x


CONSTANTS: dict[str, tuple[Callable[[Tensor], Tensor], float | None]] = {
    "tensor": (lambda x: torch.tensor(0.1), float(torch.tensor(0.1))),
    "in a low precision": (lambda x: torch.tensor(0.1, dtype=torch.bfloat16), 0.10009765625),
    "cast to a low precision and back": (lambda x: torch.tensor(0.1).to(torch.bfloat16).float(), 0.10009765625),
    "full": (lambda x: torch.full((), 0.5), 0.5),
    "scalar_tensor": (lambda x: torch.scalar_tensor(0.5), 0.5),
    "an integer": (lambda x: torch.tensor(3), None),
    "cut to an integer and back": (lambda x: torch.tensor(3.5).to(torch.int32).float(), None),
    "by name": (lambda x: torch.tensor(data=0.5), None),
    "full, by name": (lambda x: torch.full((), fill_value=0.5), None),
    "several": (lambda x: torch.tensor([0.5, 0.5]), None),
    "written": (lambda x: halved(torch.tensor(0.5)), None),
    "computed": (lambda x: torch.tensor(0.5) + 0.5, None),
    "of data": (lambda x: x * 1.0, None),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_tensor_of_one_number(name: str) -> None:
    function, expected = CONSTANTS[name]
    node = returned(function)
    assert constant(Effects.of(node.graph), node) == expected


def test_what_is_a_number() -> None:
    assert (number(2), number(0.5), number(True), number("2"), number(None)) == (2.0, 0.5, None, None, None)


PRODUCTS: dict[str, tuple[Callable[[Tensor], Tensor], float | None]] = {
    "behind": (lambda x: x * 4, 4.0),
    "in front": (lambda x: 4 * x, 4.0),
    "divided": (lambda x: x / 4, 0.25),
    "a number divided": (lambda x: 4 / x, None),
    "two tensors": (lambda x: x * x, None),
    "two tensors divided": (lambda x: x / x, None),
    "rounded down": (lambda x: torch.div(x, 4, rounding_mode="floor"), None),
    "into another": (lambda x: torch.mul(x, 4, out=torch.empty(4)), None),
    "by name": (lambda x: torch.mul(x, other=4), None),
    "a sum": (lambda x: x + 4, None),
    "by zero": (lambda x: x / 0.0, None),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_factor(name: str) -> None:
    function, expected = PRODUCTS[name]
    node = returned(function)
    found = number_times(node, operation(node))
    assert (found and found[1]) == expected
    assert found is None or found[0].op == "placeholder"
