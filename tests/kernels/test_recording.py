"""A back end's call is watched and made again: on other tensors it gives what the back end would have given."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from fusion_pass.kernels import recording
from fusion_pass.kernels.recording import Recording
from fusion_pass.kernels.replay import Replay
from fusion_pass.kernels.replay_function import LaunchStep, OperationStep


class Recorder:
    """A launch that keeps its addresses."""

    repeatable = True

    def __init__(self) -> None:
        self.addresses: list[int] = []

    def __call__(self, addresses: Sequence[int]) -> None:
        recording.launched(self, addresses)

    def here(self, addresses: Sequence[int]) -> None:
        self.addresses = list(addresses)


def record(call: Callable[..., list[Tensor]], *arguments: Tensor | None) -> Replay | None:
    with Recording(arguments) as watched:
        results = call(*arguments)
    return watched.replay(results)


def test_addresses_of_arguments_allocations_and_parts_of_them() -> None:
    launch = Recorder()

    def call(q: Tensor, k: Tensor, nothing: None) -> list[Tensor]:
        out = q.new_empty((2, 3, 5)).transpose(1, 2)
        low, high = q.new_empty((2, 7)).unbind()
        launch([q.data_ptr(), k.data_ptr(), out.data_ptr(), low.data_ptr(), high.data_ptr(), 0])
        return [out]

    packed = torch.zeros(4, 8)
    replay = record(call, packed[:, :4], packed[:, 4:], None)
    assert replay is not None
    q, k = torch.zeros(4, 8)[:, :4], torch.zeros(4, 8)[:, 4:]
    (out,) = replay([q, k, None])
    assert (out.shape, out.stride()) == ((2, 5, 3), (15, 1, 5))
    first, second, third, low, high, null = launch.addresses
    assert (first, second, third, null) == (q.data_ptr(), k.data_ptr(), out.data_ptr(), 0)
    assert high - low == 28
    assert low not in (0, first, second, third)


def test_operations_are_made_again() -> None:
    def call(x: Tensor, y: Tensor) -> list[Tensor]:
        total = torch.empty_like(x)
        torch.sum(x.unflatten(1, (-1, 2)), 2).repeat(1, 2).mul_(y)
        total.copy_(x.t().contiguous().t() + y).add_(1)
        parts = torch.split(total, 2, 1)
        return [total, parts[1].clone(), torch.zeros(3), torch.sort(y)[1]]

    replay = record(call, torch.randn(4, 4), torch.randn(4, 4))
    assert replay is not None
    for _ in range(3):
        x, y = torch.randn(4, 4), torch.randn(4, 4)
        torch.testing.assert_close(replay([x, y]), call(x, y), rtol=0, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(replay([x, x]), call(x, x), strict=True))


def test_launches_see_what_operations_made() -> None:
    """In order, with their addresses of this time."""
    launch = Recorder()

    def call(x: Tensor) -> list[Tensor]:
        copy, counter = x.clone(), torch.zeros(1, dtype=torch.int32)
        launch([copy.data_ptr(), counter.data_ptr()])
        return [copy.neg_(), counter]

    replay = record(call, torch.ones(3))
    assert replay is not None
    copy, counter = replay([torch.full((3,), 5.0)])
    assert launch.addresses == [copy.data_ptr(), counter.data_ptr()]
    assert (copy.tolist(), counter.tolist()) == ([-5.0] * 3, [0])


def test_what_nobody_needs_is_not_done_again() -> None:
    def call(x: Tensor) -> list[Tensor]:
        torch.cumsum(x, 0).square()
        used = torch.arange(3)
        launch([used.data_ptr()])
        x.mul(2).add_(1)
        return [x.new_empty(4)]

    launch = Recorder()
    replay = record(call, torch.ones(3))
    assert replay is not None
    done = [step.function for step in replay.steps.steps if isinstance(step, OperationStep)]
    aten = torch.ops.aten
    assert done == [aten.arange.default, aten.mul.Tensor, aten.add_.Tensor]
    replay([torch.ones(3)])
    assert launch.addresses[0]


def test_few_zeros_are_filled_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Filler(Recorder):
        def here(self, addresses: Sequence[int]) -> None:
            super().here(addresses)
            ctypes.memset(addresses[0], 0, 12)

    filler = Filler()
    monkeypatch.setattr(recording, "zeros", lambda count, device: filler if count == 12 else None)
    replay = record(lambda x: [torch.zeros(3), x.new_zeros((2,))], torch.ones(4))
    assert replay is not None
    assert [type(step) for step in replay.steps.steps] == [LaunchStep, OperationStep]
    for _ in range(3):
        first, second = replay([torch.ones(4)])
        assert (first.tolist(), second.tolist()) == ([0.0] * 3, [0.0] * 2)
        assert filler.addresses == [first.data_ptr()]
        first.fill_(5)


CONSTANT = torch.ones(4)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y, launch: [x * (1 if x.sum().item() > 0 else 2)],
        lambda x, y, launch: [x + CONSTANT],
        lambda x, y, launch: [torch.cat([x, y])],
        lambda x, y, launch: [CONSTANT],
        lambda x, y, launch: launch([CONSTANT.data_ptr()]) or [x.clone()],
        lambda x, y, launch: launch([x.data_ptr() + 4]) or [x.clone()],
        lambda x, y, launch: [x[x > 0]],
    ],
    ids=["value read", "constant used", "list of tensors", "constant returned", "launched", "inside", "size from data"],
)
def test_what_is_not_repeated(call: Callable[..., list[Tensor]]) -> None:
    launch = Recorder()
    assert record(lambda x, y: call(x, y, launch), torch.ones(4), torch.ones(4)) is None


def test_one_tensor_twice_and_misaligned_ones_teach_nothing() -> None:
    def call(x: Tensor, y: Tensor) -> list[Tensor]:
        return [x + y]

    x, y = torch.ones(4), torch.ones(5)[1:]
    assert record(call, x, x) is None
    assert record(call, x, y) is None
    replay = record(call, x, torch.ones(4))
    assert replay is not None
    assert replay([x, x]) is not NotImplemented
    assert replay([x, y]) is NotImplemented


def test_a_launch_that_needs_more_than_addresses() -> None:
    launch = Recorder()
    launch.repeatable = False
    assert record(lambda x: launch([x.data_ptr()]) or [x.clone()], torch.ones(4)) is None  # type: ignore[func-returns-value]


def test_nothing_is_watched_afterwards() -> None:
    with pytest.raises(RuntimeError, match="stop"), Recording([]):
        raise RuntimeError("stop")
    assert getattr(recording._current, "recording", None) is None
    assert not torch._C._len_torch_dispatch_stack()
