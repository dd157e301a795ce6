"""Launch a Triton or Gluon kernel without hashing its arguments again on every call.

`kernel[grid](...)` costs 100 microseconds and more for a kernel with fifty compile-time arguments: each call binds
them, computes what every argument specialises the kernel on, and hashes all of it. A `Launch` does that once. It
keeps the grid, the numbers and the compile-time arguments; what remains of a call is the addresses:

    launch = Launch(kernel, grid, device, dtypes, numbers, constants, num_warps=4)  # once per shape, kept by the caller
    launch(addresses)                                                               # every call

The first call goes through Triton as usual and yields the compiled kernel. Later calls hand it straight to the driver
(`driver_launch.py`), or to Triton's own launcher, on the current stream, so CUDA graphs capture them like any other
launch.

Triton specialises a kernel on: the dtype of every pointer and whether it is a multiple of 16; whether an integer is 1
or a multiple of 16, and its width; the compile-time arguments; num_warps and the like; the device. Here all of these
are fixed but the alignment, so that is the key. Whatever this module does not know takes Triton's way with the same
result: the interpreter, launch hooks (profilers), pre-run hooks, back ends other than CUDA.

Read in Triton 3.6, 3.7, 3.8 and 3.9: `CompiledKernel.run(grid_x, grid_y, grid_z, stream, function, packed_metadata,
launch_metadata, enter_hook, exit_hook, *arguments)`, where a pointer may be an integer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from triton import knobs
from triton.runtime import JITFunction, driver

from . import recording
from .driver_launch import ADDRESS, driver_launch

Grid = tuple[int, ...]
_Run = Callable[[int, Sequence[int]], None]
"""Launches on a stream, with these addresses."""

_ALIGNMENT = 16
_RUNTIME = knobs.runtime
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


@dataclass(frozen=True, slots=True)
class Address:
    """A pointer as Triton takes one: an address with a dtype."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """The address."""
        return self.address


class Launch:
    """A kernel with all its arguments but the addresses.

    The kernel's parameters stand in the order: pointers (`dtypes`, one each), numbers, compile-time arguments
    (`constants`, by name). `device`: where the pointers point. Further keywords (`num_warps`, ...) are Triton's; with
    `launch_pdl=True` the kernel may start before the one before it ends, for which it must wait itself
    (`griddepcontrol.wait`, Triton's `gdc_wait`) before it reads what that one wrote, or writes what that one reads.
    """

    __slots__ = (
        "_aligned", "_constants", "_dtypes", "_grid", "_index", "_kernel", "_numbers", "_options", "_stream_of",
        "_tail", "_variants", "repeatable",
    )  # fmt: skip

    def __init__(
        self,
        kernel: Any,
        grid: Grid,
        device: torch.device,
        dtypes: Sequence[torch.dtype],
        numbers: Sequence[float],
        constants: Mapping[str, Any],
        **options: Any,
    ) -> None:
        self._kernel, self._grid, self._dtypes, self._numbers = kernel, grid, tuple(dtypes), tuple(numbers)
        self._constants, self._options = dict(constants), options
        self._index = device.index if device.type == "cuda" else -1
        self.repeatable = device.type == "cuda" and isinstance(kernel, JITFunction)
        runtime = len(self._dtypes) + len(self._numbers)
        names = list(kernel.arg_names)
        if set(names[runtime:]) != set(self._constants):
            raise TypeError(
                f"{names} takes pointers, then numbers, then compile-time arguments; the call has {len(self._dtypes)} "
                f"pointers, {len(self._numbers)} numbers and the compile-time arguments {sorted(self._constants)}."
            )
        self._tail = (*self._numbers, *(self._constants[name] for name in names[runtime:]))
        # The compiled kernel where every pointer is aligned, and for other combinations.
        self._aligned: _Run | None = None
        self._variants: dict[tuple[bool, ...], _Run] = {}
        self._stream_of: Callable[[int], int] = _no_stream

    def __call__(self, addresses: Sequence[int]) -> None:
        """Launch on the current stream of the device. `addresses`: one a pointer."""
        recording.launched(self, addresses)
        if self._index >= 0 and _current_device() != self._index:
            with torch.cuda.device(self._index):
                self.here(addresses)
        else:
            self.here(addresses)

    def here(self, addresses: Sequence[int]) -> None:
        """`__call__` where the device is the current one already."""
        aligned = reduce(or_, addresses) % _ALIGNMENT == 0
        if aligned:
            run = self._aligned
        else:
            run = self._variants.get(tuple(address % _ALIGNMENT == 0 for address in addresses))
        if run is None or _hooked(self._kernel):
            self._through_triton(addresses, aligned)
        else:
            run(self._stream_of(self._index), addresses)

    def on(self, tensors: Sequence[Tensor]) -> None:
        """`__call__` with the tensors' addresses. Triton's interpreter needs the tensors."""
        if self.repeatable:
            self([tensor.data_ptr() for tensor in tensors])
        else:
            recording.launched(self, ())
            self._kernel[self._grid](*tensors, *self._numbers, **self._constants, **self._options)

    def _through_triton(self, addresses: Sequence[int], aligned: bool) -> None:
        pointers = map(Address, addresses, self._dtypes)
        compiled = self._kernel[self._grid](*pointers, *self._numbers, **self._constants, **self._options)
        run = _direct_launch(compiled, self._grid, len(addresses), self._tail) if self.repeatable else None
        if run is None:
            return
        self._stream_of = driver.active.get_current_stream
        if aligned:
            self._aligned = run
        else:
            self._variants[tuple(address % _ALIGNMENT == 0 for address in addresses)] = run


def start(kernel: Any, grid: Grid, arguments: tuple[Any, ...], constants: Mapping[str, Any]) -> None:
    """Launch by Triton's usual way, `kernel[grid](*arguments, **constants)`, so that a recording can repeat it.

    `arguments`: tensors, numbers, None and tuples of these; `constants`: the compile-time arguments, which stand last
    in the kernel's parameters, and Triton's options.
    """
    compiled = kernel[grid](*arguments, **constants)
    if recording.active():
        started = _Started(kernel, grid, arguments, constants, compiled)
        recording.launched(started, [tensor.data_ptr() for tensor in started.tensors_of(arguments)])


class _Started:
    """A launch that Triton made, with all its arguments but the addresses, which come in the order of the tensors. Only
    for addresses of the same alignment."""

    __slots__ = ("_arguments", "_by_driver", "_constants", "_dtypes", "_grid", "_index", "_kernel", "repeatable")

    def __init__(
        self, kernel: Any, grid: Grid, arguments: tuple[Any, ...], constants: Mapping[str, Any], compiled: Any
    ) -> None:
        self._kernel, self._grid, self._constants = kernel, grid, constants
        tensors = self.tensors_of(arguments)
        self._dtypes = [tensor.dtype for tensor in tensors]
        device = tensors[0].device
        self._index = device.index
        self._arguments = _mapped(lambda x: ADDRESS if isinstance(x, Tensor) else x, arguments)
        self.repeatable = isinstance(kernel, JITFunction) and device.type == "cuda"
        self._by_driver = None
        if self.repeatable and driver.active.get_current_target().backend == "cuda":
            tail = [constants.get(name) for name in list(kernel.arg_names)[len(arguments) :]]
            self._by_driver = driver_launch(compiled, grid, (*self._arguments, *tail))

    @staticmethod
    def tensors_of(arguments: tuple[Any, ...]) -> list[Tensor]:
        """The tensors of the arguments, in order."""
        return [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]

    def here(self, addresses: Sequence[int]) -> None:
        """Launch on the current stream of the current device."""
        if self._by_driver is not None and not _hooked(self._kernel):
            self._by_driver(driver.active.get_current_stream(self._index), addresses)
            return
        pointers = iter(list(map(Address, addresses, self._dtypes)))
        arguments = _mapped(lambda x: next(pointers) if x is ADDRESS else x, self._arguments)
        self._kernel[self._grid](*arguments, **self._constants)


def _mapped(change: Callable[[Any], Any], x: tuple[Any, ...]) -> tuple[Any, ...]:
    """The (named) tuple with `change` of everything in it that is not a tuple."""
    parts = [_mapped(change, part) if isinstance(part, tuple) else change(part) for part in x]
    return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)


def _no_stream(index: int) -> int:
    raise AssertionError("a launch that was not prepared goes through Triton")


def _direct_launch(compiled: Any, grid: Grid, pointers: int, tail: Sequence[Any]) -> _Run | None:
    """A function that launches on a stream, with the addresses it is given and `tail` after them, or None where this
    Triton's launcher is another."""
    if driver.active.get_current_target().backend != "cuda":
        return None
    run = getattr(compiled, "run", None)
    function, metadata = getattr(compiled, "function", None), getattr(compiled, "packed_metadata", None)
    if run is None or function is None or metadata is None:
        return None
    x, y, z = (*grid, 1, 1)[:3]

    def launch(stream: int, addresses: Sequence[int]) -> None:
        run(x, y, z, stream, function, metadata, None, None, None, *addresses, *tail)

    return driver_launch(compiled, grid, (*(ADDRESS,) * pointers, *tail)) or launch


def _hooked(kernel: Any) -> bool:
    """Someone wants to see every launch as Triton makes it."""
    enter, leave = _RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook
    # A hook is a chain of functions, or one function.
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or getattr(kernel, "pre_run_hooks", 0))
