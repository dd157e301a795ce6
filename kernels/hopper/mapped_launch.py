"""Launch a Gluon kernel that takes tensor maps, without encoding the maps again on every call.

Triton's own launch encodes every tensor map anew and costs some 40 microseconds for nine of them. Here a map is encoded
once for every address that it is used at (allocators hand the same ones out again), and the call goes straight to the
driver (`driver_launch.py`), or to the function that Triton compiled for the kernel's signature:

    launch = MappedLaunch(kernel, grid, maps, numbers, template, device)    # once per shape, kept by the plan
    launch(addresses)                                                       # every call

Where this Triton's launcher is built in another way, or someone watches launches through Triton's hooks, the call
takes Triton's way, with the same result.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from .. import recording
from ..driver_launch import ADDRESS, DriverLaunch, Shape, driver_launch
from ..launch import Address
from .descriptors import Map

_KEPT_ADDRESSES = 256
"""Of every map, some 700 bytes each; a model's layers use each shape at a few addresses."""
_FORMAT = "iiiKKppOOOOOO"
"""What Triton 3.6's `launch` takes before the kernel's arguments: the grid, stream, function, two flags, two scratch
buffers, metadata, hooks. Triton 3.9 has another launcher, and calls go through it."""
_changes = threading.Lock()
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


class MappedLaunch:
    """A compiled kernel with all its arguments but the addresses: tensor maps, then pointers, then `numbers`, then its
    template and its number of warps."""

    repeatable = True
    """As `launch.Launch`: a repetition needs nothing but addresses."""

    __slots__ = (
        "_before", "_by_driver", "_encoded", "_function", "_grid", "_index", "_kernel", "_maps", "_metadata",
        "_stream_of", "_tail", "_together",
    )  # fmt: skip

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], maps: Sequence[Map], numbers: Sequence[float], template: Any,
        device: int,
    ) -> None:  # fmt: skip
        self._kernel, self._grid, self._maps, self._index = kernel, grid, tuple(maps), device
        self._tail = (*numbers, template, template.num_warps)
        # By address: Triton's object around the map, then what is passed after it. The oldest first.
        self._encoded: tuple[dict[int, Sequence[Any]], ...] = tuple({} for _ in maps)
        # By the addresses of all maps: the first part of each, which is all that the driver needs.
        self._together: dict[tuple[int, ...], Sequence[Any]] = {}
        self._stream_of: Callable[[int], int] | None = None
        self._function: Callable[..., None] | None = None
        self._metadata: Sequence[Any] = ()
        self._before: tuple[Any, ...] = ()
        self._by_driver: DriverLaunch | None = None

    def __call__(self, addresses: Sequence[int]) -> None:
        """Launch on the current stream of the device. `addresses`: of every map's tensor, then the pointers (0: none,
        where the kernel does not look)."""
        recording.launched(self, addresses)
        if _current_device() != self._index:
            with torch.cuda.device(self._index):
                return self.here(addresses)
        return self.here(addresses)

    def here(self, addresses: Sequence[int]) -> None:
        """`__call__` where the device is the current one already."""
        count = len(self._maps)
        mapped, pointers = tuple(addresses[:count]), addresses[count:]
        if self._stream_of is None:
            self._prepare(len(pointers))
            self._stream_of = driver.active.get_current_stream
        runtime = knobs.runtime
        if self._function is None or _watched(runtime.launch_enter_hook) or _watched(runtime.launch_exit_hook):
            described = (m.at(Address(address, m.dtype)) for m, address in zip(self._maps, mapped, strict=True))
            self._kernel[self._grid](*described, *pointers, *self._tail)
            return
        stream = self._stream_of(self._index)
        if self._by_driver is not None:
            self._by_driver(stream, pointers, self._together.get(mapped) or self._gather(mapped))
        else:
            arguments = [argument for encoded in self._encode(mapped) for argument in encoded]
            self._function(*self._grid, stream, *self._before, *arguments, *pointers, *self._tail)

    def _prepare(self, pointers: int) -> None:
        """Find the function behind Triton's launcher, as Triton 3.6 builds it: a closure that encodes the maps and
        calls a `launch` that was compiled for the kernel's signature."""
        run = self._kernel.run
        if getattr(nvidia, "_BASE_ARGS_FORMAT", None) != _FORMAT or not inspect.isfunction(run.launch):
            return
        found = inspect.getclosurevars(run.launch).nonlocals
        metadata = found.get("tensordesc_meta")
        if run.global_scratch_size or run.profile_scratch_size:
            return
        if callable(found.get("launcher")) and metadata and len(metadata) == len(self._maps) and all(metadata):
            self._metadata = metadata
            self._before = (
                self._kernel.function, run.launch_cooperative_grid, run.launch_pdl, None, None,
                self._kernel.packed_metadata, None, None, None,
            )  # fmt: skip
            self._function = found["launcher"]
            shapes = [Shape(m.shape, m.strides) for m in self._maps]
            arguments = *shapes, *(ADDRESS,) * pointers, *self._tail
            self._by_driver = driver_launch(self._kernel, self._grid, arguments, getattr(nvidia, "PyCUtensorMap", None))

    def _gather(self, mapped: tuple[int, ...]) -> Sequence[Any]:
        maps = [encoded[0] for encoded in self._encode(mapped)]
        _keep(self._together, mapped, maps)
        return maps

    def _encode(self, mapped: Sequence[int]) -> list[Sequence[Any]]:
        """The maps at these addresses."""
        found = []
        for kept, address, tensor_map, metadata in zip(self._encoded, mapped, self._maps, self._metadata, strict=True):
            encoded = kept.get(address)
            if encoded is None:
                described = tensor_map.at(Address(address, tensor_map.dtype))
                encoded = tuple(nvidia.make_tensordesc_arg(described, metadata))
                _keep(kept, address, encoded)
            found.append(encoded)
        return found


def _keep(kept: dict[Any, Any], key: Any, value: Any) -> None:
    """The oldest makes room where there is none. Threads that launch at the same time do so one after the other."""
    with _changes:
        if len(kept) >= _KEPT_ADDRESSES:
            del kept[next(iter(kept))]
        kept[key] = value


def _watched(hook: Any) -> bool:
    """Someone listens: a chain of hooks that is not empty, or one function."""
    return bool(getattr(hook, "calls", hook))
