"""Ranges of what a graph computes: the one expected, and one that holds what comes out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from exactness import capture
from torch import Tensor

from fusion_pass.graph.effects import Effects
from fusion_pass.patterns.masks.ranges import Range, Ranges

BYTE = (-128.0, 127.0)
INTEGER = (-(2.0**63), 2.0**63)
"""Of `int64`, as far as a float tells."""


def written(memory: Tensor, x: Tensor) -> Tensor:
    memory.add_(x)
    return memory


FUNCTIONS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], Range | None]] = {
    "data": (lambda x, i, b: x * 1.0, None),
    "integers": (lambda x, i, b: i.clone(), BYTE),
    "truth": (lambda x, i, b: b.clone(), (0.0, 1.0)),
    "integers as fractions": (lambda x, i, b: i.float(), BYTE),
    "integers as fractions, above zero": (lambda x, i, b: torch.ones(3, dtype=torch.int32).float(), (1.0, 1.0)),
    "integers that overflow": (lambda x, i, b: i * 2, BYTE),
    "integers that do not": (lambda x, i, b: i.to(torch.int32) * 2, (-256.0, 254.0)),
    "least magnitude": (lambda x, i, b: i.abs(), BYTE),
    "magnitude": (lambda x, i, b: i.float().abs(), (0.0, 128.0)),
    "cut": (lambda x, i, b: torch.full((3,), 1.5).to(torch.int32), (0.0, 1.5)),
    "cut from below": (lambda x, i, b: torch.full((3,), -1.5).to(torch.int32), (-1.5, 0.0)),
    "bits": (lambda x, i, b: torch.full((3,), 1.5).view(torch.int32), (-(2.0**31), 2.0**31 - 1)),
    "complex": (lambda x, i, b: i.to(torch.complex64), None),
    "too large for its dtype": (lambda x, i, b: torch.full((3,), 1e6).half(), None),
    "not finite": (lambda x, i, b: torch.full((3,), float("inf")), None),
    "full": (lambda x, i, b: torch.full((3,), 2.0), (2.0, 2.0)),
    "full by name": (lambda x, i, b: torch.full((3,), fill_value=2.0), (2.0, 2.0)),
    "full_like": (lambda x, i, b: torch.full_like(x, 2.0), (2.0, 2.0)),
    "new_full": (lambda x, i, b: x.new_full((3,), 2.0), (2.0, 2.0)),
    "tensor": (lambda x, i, b: torch.tensor(2.0), (2.0, 2.0)),
    "scalar_tensor": (lambda x, i, b: torch.scalar_tensor(2.0), (2.0, 2.0)),
    "several numbers": (lambda x, i, b: torch.tensor([2.0, 3.0]), None),
    "zeros": (lambda x, i, b: torch.zeros(3), (0.0, 0.0)),
    "ones": (lambda x, i, b: torch.ones_like(x), (1.0, 1.0)),
    "written": (lambda x, i, b: written(torch.zeros(3), x), None),
    "arange": (lambda x, i, b: torch.arange(3), (0.0, 3.0)),
    "arange from": (lambda x, i, b: torch.arange(-2, 3), (-2.0, 3.0)),
    "arange from a fraction": (lambda x, i, b: torch.arange(0.5, 3), (0.0, 3.0)),
    "arange of fractions": (lambda x, i, b: torch.arange(0.5, 3.5), None),
    "arange with a step": (lambda x, i, b: torch.arange(0, 9, 3).float(), INTEGER),
    "arange with a step by name": (lambda x, i, b: torch.arange(0, 9, step=3).float(), INTEGER),
    "arange by name": (lambda x, i, b: torch.arange(end=9).float(), INTEGER),
    "cat": (lambda x, i, b: torch.cat((torch.zeros(3), torch.full((3,), 2.0))), (0.0, 2.0)),
    "cat with data": (lambda x, i, b: torch.cat((torch.zeros(3), x)), None),
    "where": (lambda x, i, b: torch.where(b, torch.full((3,), -3.0), 2.0), (-3.0, 2.0)),
    "where, a method": (lambda x, i, b: torch.full((3,), -3.0).where(b, torch.zeros(3)), (-3.0, 0.0)),
    "where, data": (lambda x, i, b: x.where(b, torch.zeros(3)), None),
    "masked_fill": (lambda x, i, b: torch.zeros(3).masked_fill(b, -2.0), (-2.0, 0.0)),
    "cumsum": (lambda x, i, b: torch.full((3,), 2.0).cumsum(0), (2.0, 6.0)),
    "cumsum of data": (lambda x, i, b: x.cumsum(0), None),
    "difference": (lambda x, i, b: i.float() - torch.arange(3), (-131.0, 127.0)),
    "difference from a number": (lambda x, i, b: 1 - i.float(), (-126.0, 129.0)),
    "difference, scaled": (lambda x, i, b: torch.sub(i.float(), i.float(), alpha=5), None),
    "product of signs": (lambda x, i, b: i.float() * i.float(), (-128.0 * 127, 128.0 * 128)),
    "negative": (lambda x, i, b: -i.float(), (-127.0, 128.0)),
    "quotient": (lambda x, i, b: i.float() / -2, (-63.5, 64.0)),
    "quotient by data": (lambda x, i, b: torch.ones(3) / x, None),
    "quotient by what may be zero": (lambda x, i, b: torch.ones(3) / i.float(), None),
    "quotient that is rounded": (lambda x, i, b: torch.div(i.float(), 2, rounding_mode="floor"), None),
    "reciprocal": (lambda x, i, b: torch.full((3,), 2.0).reciprocal(), (0.5, 0.5)),
    "power": (lambda x, i, b: 2.0 ** (torch.arange(3) * -1.0), (0.125, 1.0)),
    "power of what may be negative": (lambda x, i, b: i.float() ** 2, None),
    "power of data": (lambda x, i, b: x**2, None),
    "power beyond all numbers": (lambda x, i, b: 10.0 ** (i.double() * 100), None),
    "moved": (lambda x, i, b: i.float()[None].expand(2, 3).transpose(0, 1), BYTE),
    "moved data": (lambda x, i, b: x[None].expand(2, 3), None),
    "repeated": (lambda x, i, b: torch.full((3,), 2.0).repeat(2), (2.0, 2.0)),
    "of no rule": (lambda x, i, b: torch.zeros(3).exp(), None),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_range(name: str) -> None:
    function, expected = FUNCTIONS[name]
    i = torch.tensor([-128, 5, 127], dtype=torch.int8)
    module, inputs = capture(
        lambda *given: (function(*given),), 1e3 * torch.randn(3), i, torch.tensor([True, False, True])
    )
    (output,) = module.graph.find_nodes(op="output")
    ((node,),) = output.args
    found = Ranges(Effects.of(module.graph)).of(node)
    assert found == expected
    if found is not None:
        (result,) = module(*inputs)
        assert found[0] <= result.double().min()
        assert result.double().max() <= found[1]
