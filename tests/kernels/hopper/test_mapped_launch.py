"""A launch with kept tensor maps passes what Triton's own launch passes, encodes a map once an address, and goes
Triton's way where the launcher is another or someone watches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")


class Kernel:
    """A compiled kernel as Triton 3.6 has it, with a launcher that records."""

    def __init__(self, metadata: list[dict[str, int]]) -> None:
        self.launched: list[tuple[object, ...]] = []
        self.through_triton: list[tuple[object, ...]] = []
        self.function, self.packed_metadata = 77, (4, 1, 1000)
        self.run = SimpleNamespace(
            launch=self._closure(metadata), launch_cooperative_grid=False, launch_pdl=False, global_scratch_size=0,
            profile_scratch_size=0,
        )  # fmt: skip

    def _closure(self, tensordesc_meta: list[dict[str, int]]) -> Callable[..., None]:
        def launcher(*arguments: object) -> None:
            self.launched.append(arguments)

        def inner(*arguments: object) -> None:
            launcher(*arguments, tensordesc_meta)

        return inner

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: object) -> None:
            self.through_triton.append((grid, *arguments))

        return launch


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of which a map was encoded."""
    from fusion_pass.kernels.hopper import mapped_launch

    addresses: list[int] = []

    def encode(described: Any, metadata: dict[str, int]) -> list[object]:
        addresses.append(described.base.data_ptr())
        return [("map", described.base.data_ptr(), metadata["which"]), *described.shape, *described.strides]

    active = SimpleNamespace(get_current_stream=lambda index: 1000 + index)
    monkeypatch.setattr(mapped_launch, "driver", SimpleNamespace(active=active))
    nvidia = SimpleNamespace(_BASE_ARGS_FORMAT=mapped_launch._FORMAT, make_tensordesc_arg=encode)
    monkeypatch.setattr(mapped_launch, "nvidia", nvidia)
    monkeypatch.setattr(mapped_launch, "_current_device", lambda: 0)
    return addresses


def launch_of(kernel: Kernel) -> Any:
    from fusion_pass.kernels.hopper.descriptors import rows_map
    from fusion_pass.kernels.hopper.mapped_launch import MappedLaunch

    template = SimpleNamespace(num_warps=4)
    return MappedLaunch(kernel, (3, 2, 1), (rows_map(5, 64), rows_map(7, 32)), (8, 0.5), template, 0), template


def test_arguments_in_order_and_maps_encoded_once(encoded: list[int]) -> None:
    kernel = Kernel([{"which": 0}, {"which": 1}])
    launch, template = launch_of(kernel)
    for first in (4096, 4096, 8192):
        launch((first, 512, 1, 0))
    assert encoded == [4096, 512, 8192]
    assert not kernel.through_triton
    head = (3, 2, 1, 1000, 77, False, False, None, None, (4, 1, 1000), None, None, None)
    maps = (("map", 4096, 0), 5, 64, 64, 1, ("map", 512, 1), 7, 32, 32, 1)
    assert kernel.launched[0] == kernel.launched[1] == (*head, *maps, 1, 0, 8, 0.5, template, 4)
    assert kernel.launched[2][len(head)] == ("map", 8192, 0)


def test_threads_that_launch_at_the_same_time(encoded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launches with its own addresses, of which there are more than are kept."""
    from fusion_pass.kernels.hopper import mapped_launch

    monkeypatch.setattr(mapped_launch, "_KEPT_ADDRESSES", 2)
    kernel = Kernel([{"which": 0}, {"which": 1}])
    launch, _ = launch_of(kernel)
    launch((0, 0, 1, 0))

    def many(thread: int) -> None:
        for index in range(10_000):
            launch((64 * (index + 10_000 * thread), 512, thread, 0))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(many, range(1, 9)))
    finally:
        sys.setswitchinterval(interval)
    launched = [(arguments[13][1], arguments[-6]) for arguments in kernel.launched[1:]]
    assert sorted(launched) == [(64 * index, index // 10_000) for index in range(10_000, 90_000)]


def goes_through_triton(kernel: Kernel) -> bool:
    launch, template = launch_of(kernel)
    launch((4096, 512, 1, 0))
    if kernel.launched:
        return False
    grid, first, second, *rest = kernel.through_triton[0]
    assert grid == (3, 2, 1)
    assert rest == [1, 0, 8, 0.5, template, 4]
    assert (first.base.data_ptr(), first.base.dtype, first.shape) == (4096, torch.float32, [5, 64])  # type: ignore[attr-defined]
    assert second.base.data_ptr() == 512  # type: ignore[attr-defined]
    return True


def test_another_launcher(encoded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    from fusion_pass.kernels.hopper import mapped_launch

    metadata = [{"which": 0}, {"which": 1}]
    assert not goes_through_triton(Kernel(metadata))
    assert goes_through_triton(Kernel(metadata[:1]))  # a map that Triton does not pass as one
    needs_scratch = Kernel(metadata)
    needs_scratch.run.global_scratch_size = 16
    assert goes_through_triton(needs_scratch)
    monkeypatch.setattr(mapped_launch.nvidia, "_BASE_ARGS_FORMAT", "iiiKKppOOOOOOOO")
    assert goes_through_triton(Kernel(metadata))


def test_a_hook_sees_every_launch(encoded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda _: None)
    assert goes_through_triton(Kernel([{"which": 0}, {"which": 1}]))


def test_the_launcher_is_the_one_that_was_read() -> None:
    """Fails when Triton 3.6's driver is not what `_FORMAT` says, so that the fast way never dies unnoticed."""
    triton = pytest.importorskip("triton")
    from triton.backends.nvidia import driver

    from fusion_pass.kernels.hopper.mapped_launch import _FORMAT

    if triton.__version__.split(".")[:2] != ["3", "6"]:
        pytest.skip("another Triton has another launcher")
    assert driver._BASE_ARGS_FORMAT == _FORMAT
