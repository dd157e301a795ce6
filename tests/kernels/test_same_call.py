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


def test_the_guards_see_transforms_and_inference_tensors(way: str) -> None:
    if way == "python":
        pytest.skip("`registration.plain_mode` is asked before")
    same = same_call([torch.zeros(3)])
    assert torch.func.vmap(lambda row: torch.tensor(same(row)))(torch.zeros(2, 3)).tolist() == [False, False]
    with torch.inference_mode():
        assert not same(torch.zeros(3))


def test_tensors_are_not_kept_alive() -> None:
    x = torch.zeros(3)
    same, seen = same_call([x]), weakref.ref(x)
    del x
    gc.collect()
    assert seen() is None
    assert same(torch.zeros(3))
