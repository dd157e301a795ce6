"""A repeated call as it is written out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from expecttest import assert_expected_inline

from fusion_pass.kernels import replay_function
from fusion_pass.kernels.replay_function import Allocation, LaunchStep, OperationStep, Steps, Value, source, written_out


class Recorder:
    """A launch that keeps its addresses."""

    repeatable = True

    def __init__(self) -> None:
        self.addresses: tuple[int, ...] = ()

    def here(self, addresses: Sequence[int]) -> None:
        self.addresses = tuple(addresses)


def call(launch: Any, **changes: Any) -> Steps:
    """Of two arguments and a None: allocate, launch, compute, launch."""
    cpu = torch.device("cpu")
    operation = OperationStep(torch.ops.aten.add.Tensor, (Value(1), Value(1)), {"alpha": 3}, makes=1)
    written = OperationStep(torch.ops.aten.zero_.default, (Value(0),), {}, makes=0)
    steps = Steps(
        present=(True, True, False),
        allocations=[Allocation((2, 3), (3, 1), torch.float32, cpu), Allocation((4,), (1,), torch.int32, cpu)],
        steps=[
            LaunchStep(launch, [(0, 0), (3, 8), (-1, 0)]),
            operation,
            written,
            LaunchStep(launch, [(5, 0), (0, 16)]),
        ],
        results=[5, 3],
        device=None,
        aligned=False,
    )
    return replace(steps, **changes)


def test_the_text(monkeypatch: Any) -> None:
    monkeypatch.setattr(replay_function, "_empty_cuda", torch.empty_strided)
    text, _ = source(call(Recorder(), device=1, aligned=True))
    assert_expected_inline(
        text,
        """\
def repeat(t0, t1, t2):
    if current_device() != 1:
        with device(1):
            return repeat(t0, t1, t2)
    p0 = t0.data_ptr()
    p1 = t1.data_ptr()
    if (p0 | p1) % 16:
        return NotImplemented
    t3 = empty_cuda((2, 3), (3, 1), dtype_4)
    t4 = empty_cuda((4,), (1,), dtype_5)
    p3 = t3.data_ptr()
    launch_6((p0, p3 + 8, 0,))
    t5, = tensors_of(operation_8(t1, t1, alpha=value_7))
    operation_10(t0)
    p5 = t5.data_ptr()
    launch_11((p5, p0 + 16,))
    return (t5, t3, )
""",
    )


def test_what_it_does() -> None:
    launch = Recorder()
    x, y = torch.ones(8), torch.arange(3.0)
    found = written_out(call(launch))(x, y, None)
    assert found is not NotImplemented
    total, made = found
    assert total.tolist() == [0.0, 4.0, 8.0]
    assert (made.shape, made.dtype) == ((2, 3), torch.float32)
    assert launch.addresses == (total.data_ptr(), x.data_ptr() + 16)
    assert not x.any()


def test_addresses_that_it_is_not_for() -> None:
    launch = Recorder()
    repeat = written_out(call(launch, aligned=True))
    x, y = torch.ones(9), torch.arange(3.0)
    assert repeat(x[:8], y, None) is not NotImplemented
    launch.addresses = ()
    assert repeat(x[1:], y, None) is NotImplemented
    assert (launch.addresses, x.tolist()) == ((), [*[0.0] * 8, 1.0])


def test_operations_of_several_results() -> None:
    aten = torch.ops.aten
    steps = [
        OperationStep(aten.split.Tensor, (Value(0), 2), {}, makes=2),
        OperationStep(aten.sort.default, (Value(1),), {}, 2),
    ]
    found = written_out(Steps((True,), [], steps, [2, 4], None, aligned=False))(torch.tensor([1, 2, 4, 3]))
    assert found is not NotImplemented
    assert [x.tolist() for x in found] == [[4, 3], [0, 1]]
