"""The launch cache: which launches share a compiled kernel, what still goes through Triton, and that nothing else
changes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")


class Compiled:
    """Stands for a compiled kernel; keeps its launches."""

    function, packed_metadata = 7, (4, 1, 0)

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.launches.append(arguments)


class Kernel:
    """Stands for a JIT function of two pointers, a number and two constants: compiles one kernel for each
    combination of alignments, as Triton does."""

    arg_names = ("x", "y", "n", "A", "B")

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.pre_run_hooks: list[Any] = []
        self.compiled: dict[tuple[bool, ...], Compiled] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(x: Any, y: Any, n: int, **constants: Any) -> Compiled:
            self.calls.append((grid, x, y, n, constants))
            aligned = (x.data_ptr() % 16 == 0, y.data_ptr() % 16 == 0)
            return self.compiled.setdefault(aligned, Compiled())

        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    from fusion_pass.kernels import launch

    driver = mock.Mock()
    driver.active.get_current_target.return_value.backend = "cuda"
    driver.active.get_current_stream = lambda index: 100 + index
    monkeypatch.setattr(launch, "driver", driver)
    monkeypatch.setattr(launch, "JITFunction", Kernel)
    monkeypatch.setattr(launch, "_current_device", lambda: 0)
    return Kernel()


def make(kernel: Kernel, **constants: Any) -> Any:
    from fusion_pass.kernels.launch import Launch

    dtypes = [torch.bfloat16, torch.float32]
    return Launch(kernel, (5,), torch.device("cuda", 0), dtypes, [3], {"A": 1, "B": 2, **constants}, num_warps=8)


def test_the_first_launch_goes_through_triton_and_later_ones_do_not(kernel: Kernel) -> None:
    launch = make(kernel)
    launch([32, 64])
    launch([96, 160])
    ((grid, x, y, n, constants),) = kernel.calls
    assert (grid, n, constants) == ((5,), 3, {"A": 1, "B": 2, "num_warps": 8})
    assert [(p.data_ptr(), p.dtype) for p in (x, y)] == [(32, torch.bfloat16), (64, torch.float32)]
    ((*fixed, first, second, number, a, b),) = kernel.compiled[True, True].launches
    assert fixed == [5, 1, 1, 100, 7, (4, 1, 0), None, None, None]
    assert (first, second, number, a, b) == (96, 160, 3, 1, 2)


def test_alignments_have_kernels_of_their_own(kernel: Kernel) -> None:
    launch = make(kernel)
    for addresses in ([32, 64], [34, 64], [32, 72], [34, 72]):
        launch(addresses)
        launch(addresses)
    assert len(kernel.calls) == 4
    assert {aligned: len(compiled.launches) for aligned, compiled in kernel.compiled.items()} == {
        (True, True): 1,
        (False, True): 1,
        (True, False): 1,
        (False, False): 1,
    }


def test_hooks_see_every_launch(kernel: Kernel) -> None:
    from triton import knobs

    launch = make(kernel)
    launch([32, 64])
    with mock.patch.object(knobs.runtime, "launch_enter_hook", print):
        launch([32, 64])
    kernel.pre_run_hooks.append(print)
    launch([32, 64])
    assert len(kernel.calls) == 3


def test_another_back_end_keeps_tritons_way(kernel: Kernel) -> None:
    from fusion_pass.kernels import launch as module

    module.driver.active.get_current_target.return_value.backend = "hip"
    launch = make(kernel)
    launch([32, 64])
    launch([32, 64])
    assert len(kernel.calls) == 2


def test_arguments_in_another_order_are_refused(kernel: Kernel) -> None:
    with pytest.raises(TypeError, match="takes pointers, then numbers, then compile-time arguments"):
        make(kernel, C=1)


def test_a_started_launch_is_made_again(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuples keep their kind and order; the addresses go to the driver, or through Triton with their dtypes."""
    from collections import namedtuple

    from fusion_pass.kernels import launch as module
    from fusion_pass.kernels.driver_launch import ADDRESS

    Pair = namedtuple("Pair", "first second")
    calls: list[Any] = []
    given: list[Any] = []

    class Jit:
        arg_names, pre_run_hooks = ("x", "pair", "n", "BLOCK"), ()

        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **constants: calls.append((grid, arguments, constants))

    def driver(stream: int, addresses: Any) -> None:
        given.append((stream, addresses))

    monkeypatch.setattr(module, "JITFunction", Jit)
    x, y = torch.zeros(4, dtype=torch.bfloat16), torch.zeros(2)
    arguments = (x, Pair(y, (3, None)), 7)
    started = module._Started(Jit(), (5,), arguments, {"BLOCK": 64, "num_warps": 4}, "compiled")
    assert not started.repeatable  # these tensors are on the CPU
    started._by_driver, started._index = driver, 0
    started.here([32, 64])
    assert (given, calls) == ([(100, [32, 64])], [])
    started._by_driver = None
    started.here([32, 64])
    ((grid, (first, pair, number), constants),) = calls
    assert (grid, number, constants) == ((5,), 7, {"BLOCK": 64, "num_warps": 4})
    assert (first.data_ptr(), first.dtype, pair.first.data_ptr(), pair.first.dtype) == (32, x.dtype, 64, y.dtype)
    assert isinstance(pair, Pair)
    assert pair.second == (3, None)
    assert started._arguments == (ADDRESS, Pair(ADDRESS, (3, None)), 7)
