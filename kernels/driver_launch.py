"""Launch a kernel that Triton compiled by the CUDA driver, without Triton's launcher.

Triton's launcher parses every argument on every call, the compile-time ones too: 4.5 microseconds for ten pointers,
twenty numbers and thirty-five constants. All but the addresses are the same from call to call, so a `DriverLaunch`
keeps the array of parameters that `cuLaunchKernelEx` reads, writes the addresses into it, and calls: 1 microsecond and
the driver.

What a compiled kernel's parameters are is Triton's affair: the run-time arguments in order, a tensor map followed by
its shape (int32) and strides (int64), and at the end the addresses of two scratch buffers (Triton's
backends/nvidia/driver.py and driver.c, in the versions of `_READ`). `driver_launch` compares that with what the driver
says of the loaded kernel (`cuFuncGetParamInfo`, CUDA 12.4): number and size of all parameters. Where they differ, or
the kernel needs more than parameters (clusters, scratch, a cooperative grid), it gives None and the caller takes
Triton's way.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

_READ = ("3.6.", "3.7.", "3.8.", "3.9.")
"""Versions of Triton whose launcher was read and found to be as said above. Any other one takes Triton's way."""
_WARP = 32
_MAP_BYTES = 128
_MAP_OBJECT_BYTES = 256
"""Of Triton's object around a tensor map, which lies at its offset 128."""
_NO_CONTEXT = 201
_ZERO = ctypes.c_ubyte(0)
_NUMBERS: dict[str, type[Any]] = {
    "i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
    "u1": ctypes.c_uint8, "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float, "f32": ctypes.c_float, "fp64": ctypes.c_double,
}  # fmt: skip
"""Triton's names of the types that a number is passed as."""

_MORE_THAN_PARAMETERS = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid")
"""Of Triton's launcher: what a launch has besides, where it is not 0."""


class _Marker:
    pass


ADDRESS = _Marker()
"""Stands for a pointer in `driver_launch`."""
_MAP = _Marker()


class Shape(NamedTuple):
    """Stands for a tensor map in `driver_launch`: what is passed after it."""

    shape: Sequence[int]
    strides: Sequence[int]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class _Driver(NamedTuple):
    launch: Callable[..., int]
    parameter: Callable[..., int]
    fill: Callable[..., int]
    context: Callable[[], int]


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, whose value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_int * 16))


_OVERLAPS = _Attribute(6, 0, (1,))
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: the kernel may start before the one before it ends."""


@functools.cache
def _triton_was_read() -> bool:
    import triton

    return str(triton.__version__).startswith(_READ)


@functools.cache
def _driver() -> _Driver | None:
    try:
        library = ctypes.CDLL("libcuda.so.1")  # which lets other threads run during a call

        def context() -> int:
            """Make the primary context of PyTorch's device this thread's, as the runtime library does lazily."""
            found, device = ctypes.c_void_p(), ctypes.c_int(torch.cuda.current_device())
            return int(library.cuDevicePrimaryCtxRetain(ctypes.byref(found), device) or library.cuCtxSetCurrent(found))

        return _Driver(library.cuLaunchKernelEx, library.cuFuncGetParamInfo, library.cuMemsetD8Async, context)
    except (OSError, AttributeError):
        return None


def _again(what: str, driver: _Driver, error: int, call: Callable[..., int], *arguments: Any) -> None:
    """After a call that failed: once more if this thread had no context."""
    if error == _NO_CONTEXT:
        error = driver.context() or call(*arguments)
    if error:
        raise RuntimeError(f"the driver refused {what}: CUDA error {error}.")


class _Frame:
    """The parameters of one launch at a time."""

    __slots__ = ("addresses", "config", "config_at", "fixed", "parameters", "parameters_at")

    def __init__(self, config: _Config, fixed: Sequence[Any], addresses: int) -> None:
        self.config = _Config.from_buffer_copy(config)
        self.config_at = ctypes.c_void_p(ctypes.addressof(self.config))
        self.fixed = fixed  # kept alive: the parameters point to them
        self.addresses = (ctypes.c_uint64 * addresses)()
        places = iter(range(ctypes.addressof(self.addresses), ctypes.addressof(self.addresses) + 8 * addresses, 8))
        self.parameters = (ctypes.c_void_p * len(fixed))()
        for place, value in enumerate(fixed):
            if value is not _MAP:
                self.parameters[place] = next(places) if value is ADDRESS else ctypes.addressof(value)
        self.parameters_at = ctypes.c_void_p(ctypes.addressof(self.parameters))


class DriverLaunch:
    """A kernel, its grid and all its parameters but the addresses and tensor maps. Made by `driver_launch`."""

    __slots__ = ("_addresses", "_config", "_driver", "_fixed", "_frames", "_function", "_launch", "_map_places", "name")

    def __init__(self, name: str, function: int, config: _Config, fixed: Sequence[Any], driver: _Driver) -> None:
        self.name, self._function, self._config = name, ctypes.c_void_p(function), config
        self._driver, self._launch = driver, driver.launch
        self._fixed = tuple(fixed)
        self._addresses = sum(value is ADDRESS for value in fixed)
        self._map_places = [place for place, value in enumerate(fixed) if value is _MAP]
        # Threads that launch at the same time take a frame each. Lists are atomic.
        self._frames: list[_Frame] = []

    def __call__(self, stream: int, addresses: Sequence[int], maps: Sequence[Any] = ()) -> None:
        """Launch. `maps`: Triton's objects around the tensor maps, in order."""
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = _Frame(self._config, self._fixed, self._addresses)
        frame.config.stream = stream
        frame.addresses[:] = addresses  # type: ignore[call-overload]
        if maps:
            parameters = frame.parameters
            for place, described in zip(self._map_places, maps, strict=True):
                parameters[place] = id(described) + _MAP_BYTES
        error = self._launch(frame.config_at, self._function, frame.parameters_at, None)
        if error:
            arguments = frame.config_at, self._function, frame.parameters_at, None
            _again(f"to launch {self.name}", self._driver, error, self._launch, *arguments)
        self._frames.append(frame)


def driver_launch(
    compiled: Any, grid: Sequence[int], arguments: Sequence[Any], map_type: type[Any] | None = None
) -> DriverLaunch | None:
    """A way around Triton's launcher for `compiled` (a `CompiledKernel` that was loaded), or None.

    `arguments`: one for each parameter of the kernel's function: `ADDRESS`, a `Shape` for a tensor map, a number, or
    anything for a compile-time argument. `map_type`: of Triton's objects around tensor maps.
    """
    found = _driver() if _triton_was_read() else None
    run = getattr(compiled, "run", None)
    signature: Any = getattr(getattr(compiled, "src", None), "signature", None)
    packed: Sequence[int] = getattr(compiled, "packed_metadata", ())
    if found is None or not isinstance(signature, dict) or len(packed) != 3 or packed[1] != 1:
        return None
    if any(getattr(run, name, True) for name in _MORE_THAN_PARAMETERS):
        return None
    parameters = _parameters(tuple(signature.values()), arguments)
    if parameters is None or (_MAP in parameters and getattr(map_type, "__basicsize__", 0) != _MAP_OBJECT_BYTES):
        return None
    if not _is_as_loaded(found, compiled.function, [_size(value) for value in parameters]):
        return None
    warps, _, shared = packed
    overlaps = bool(getattr(run, "launch_pdl", False))
    attributes = ctypes.addressof(_OVERLAPS) if overlaps else None
    config = _Config(*(*grid, 1, 1)[:3], warps * _WARP, 1, 1, shared, None, attributes, int(overlaps))
    if not config.grid_x * config.grid_y * config.grid_z:
        return None
    return DriverLaunch(getattr(compiled, "name", "a kernel"), compiled.function, config, parameters, found)


def _parameters(kinds: Sequence[Any], arguments: Sequence[Any]) -> list[Any] | None:
    """Of a kernel as Triton compiles it; None if one is of a kind that is not known here."""
    found = _flat(kinds, arguments)
    if found is None:
        return None
    parameters: list[Any] = []
    for kind, value in found:
        if kind == "constexpr" and value is not ADDRESS:
            continue
        if not isinstance(kind, str):
            return None
        if kind.startswith("*") and value is ADDRESS:
            parameters.append(ADDRESS)
        elif kind.startswith("tensordesc<") and isinstance(value, Shape):
            numbers = [_number("i32", n) for n in value.shape] + [_number("i64", n) for n in value.strides]
            parameters += [_MAP, *numbers]
        else:
            parameters.append(_number(kind, value))
    if any(parameter is None for parameter in parameters):
        return None
    return [*parameters, ctypes.c_uint64(0), ctypes.c_uint64(0)]  # the scratch buffers, which nobody asked for


def _flat(kinds: Sequence[Any], arguments: Sequence[Any]) -> list[tuple[Any, Any]] | None:
    """Kinds with their arguments; a tuple is passed as its members."""
    if len(kinds) != len(arguments):
        return None
    flat: list[tuple[Any, Any]] = []
    for kind, value in zip(kinds, arguments, strict=True):
        if isinstance(kind, tuple):
            members = _flat(kind, value) if isinstance(value, tuple) else None
            if members is None:
                return None
            flat += members
        else:
            flat.append((kind, value))
    return flat


def _number(kind: str, value: Any) -> Any:
    """The number as it is passed; None if it is of another kind, or does not fit (ctypes would cut it)."""
    if kind not in _NUMBERS or not isinstance(value, (int, float)):
        return None
    whole = kind[0] in "iu"
    if whole and not isinstance(value, int):
        return None
    number = _NUMBERS[kind](value)
    return number if not whole or number.value == value else None


def _size(parameter: Any) -> int:
    if parameter is _MAP:
        return _MAP_BYTES
    return 8 if parameter is ADDRESS else ctypes.sizeof(parameter)


def _is_as_loaded(driver: _Driver, function: int, sizes: Sequence[int]) -> bool:
    """Whether the driver's parameters of the loaded kernel have these sizes and are no more."""
    kernel, offset, size = ctypes.c_void_p(function), ctypes.c_size_t(), ctypes.c_size_t()
    found = ctypes.byref(offset), ctypes.byref(size)
    for index, expected in enumerate(sizes):
        if driver.parameter(kernel, ctypes.c_size_t(index), *found) or size.value != expected:
            return False
    return bool(driver.parameter(kernel, ctypes.c_size_t(len(sizes)), *found))


class Zeros:
    """Sets bytes to zero: `torch.zeros` of a few, at a third of its price. A launch like any other to a `Replay`."""

    repeatable = True
    __slots__ = ("_bytes", "_driver", "_index")

    def __init__(self, count: int, index: int, driver: _Driver) -> None:
        self._bytes, self._index, self._driver = ctypes.c_size_t(count), index, driver

    def here(self, addresses: Sequence[int]) -> None:
        """On the current stream of the current device."""
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(self._index))
        error = self._driver.fill(ctypes.c_uint64(addresses[0]), _ZERO, self._bytes, stream)
        if error:
            arguments = ctypes.c_uint64(addresses[0]), _ZERO, self._bytes, stream
            _again("to fill memory", self._driver, error, self._driver.fill, *arguments)


def zeros(count: int, device: torch.device) -> Zeros | None:
    """A filler of so many bytes; None where there is no driver."""
    found = _driver() if device.type == "cuda" and device.index is not None else None
    return None if found is None else Zeros(count, device.index, found)
