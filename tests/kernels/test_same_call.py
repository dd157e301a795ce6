"""What makes a call another one, by PyTorch's guards and by the comparison that stands in for them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion_pass.kernels import same_call as module
from fusion_pass.kernels.same_call import same_call


@pytest.fixture(params=["guards", "python"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(module, "_TensorGuards", None)
    else:
        assert module._TensorGuards is not None
    return str(request.param)


def test_contents_and_addresses_do_not_count() -> None:
    same = same_call([torch.zeros(2, 3), torch.zeros(4, dtype=torch.int32)])
    assert same(torch.ones(2, 3), torch.ones(4, dtype=torch.int32))


@pytest.mark.parametrize(
    "other",
    [
        lambda: torch.zeros(3, 2),
        lambda: torch.zeros(3, 2).T,
        lambda: torch.zeros(2, 3, 1),
        lambda: torch.zeros(2, 1).expand(2, 3),
        lambda: torch.zeros(2, 3, dtype=torch.float64),
        lambda: torch.zeros(2, 3, device="meta"),
        lambda: torch.zeros(2, 3, requires_grad=True),
        lambda: torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False),
        lambda: FakeTensorMode().from_tensor(torch.zeros(2, 3)),
    ],
    ids=["shape", "strides", "axes", "expanded", "dtype", "device", "requires_grad", "type", "subclass"],
)
def test_what_counts(other: Callable[[], Tensor]) -> None:
    same = same_call([torch.zeros(2, 3)])
    assert not same(other())
    assert same_call([torch.zeros(2, 3, requires_grad=True)])(torch.zeros(2, 3, requires_grad=True))


def test_which_are_none() -> None:
    x, y = torch.zeros(3), torch.zeros(4)
    same = same_call([x, None, y, None])
    assert same(torch.ones(3), None, torch.ones(4), None)
    for other in ([x, y, None, None], [x, None, y, y], [x, None, None, None], [None, None, y, None], [x, y, y, None]):
        assert not same(*other)


def test_transforms_tracers_and_inference_tensors() -> None:
    same, seen = same_call([torch.zeros(3)]), []

    def look(row: Tensor) -> Tensor:
        seen.extend([same(row), same(torch.zeros(3))])
        return row * row

    torch.func.vmap(look)(torch.zeros(2, 3))
    torch.func.jvp(look, (torch.zeros(3),), (torch.ones(3),))
    torch.func.functionalize(look)(torch.zeros(3))
    torch.jit.trace(look, torch.zeros(3), check_trace=False)
    assert seen == [False] * 8
    with torch.inference_mode():
        assert not same(torch.zeros(3))


def test_tensors_are_not_kept_alive() -> None:
    x = torch.zeros(3)
    same, seen = same_call([x]), weakref.ref(x)
    del x
    gc.collect()
    assert seen() is None
    assert same(torch.zeros(3))
