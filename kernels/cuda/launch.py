"""Launch a compiled instance: one structure of arguments, filled once but for the addresses.

A kernel takes one structure by value (`source/forward.cuh` and others): addresses, strides in bytes, sizes, all of them
64-bit words. `Arguments` collects them in order. A `Launch` keeps them; a call copies the words, writes the addresses
and hands them to `cuLaunchKernelEx`, on the current stream, so CUDA graphs capture it like any other launch.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .compiler import load
from .instance import WIDEST, Instance

_INVALID_CONTEXT = 201
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_MAX_DYNAMIC_SHARED_BYTES = 8
_KEPT_STREAMS = 64
_Pointer = ctypes.c_void_p * 1
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


class Arguments:
    """The words of a kernel's argument structure, and the tensors whose addresses stand among them."""

    def __init__(self) -> None:
        self.words: list[int] = []
        self.tensors: list[Tensor] = []
        self.slots: list[int] = []
        """Where the addresses stand among the words, in the order of `tensors`."""
        self.scalars: set[int] = set()
        """Those of `slots` whose memory is read one element at a time, whatever its alignment."""

    def address(self, tensor: Tensor | None, vectors: bool = True) -> None:
        """The address of `tensor`; null for None. `vectors`: it is read or written in vectors."""
        if tensor is not None:
            self.slots.append(len(self.words))
            if not vectors:
                self.scalars.add(len(self.words))
            self.tensors.append(tensor)
        self.words.append(0)

    def integers(self, *values: int) -> None:
        """Sizes, and strides in bytes."""
        self.words += values

    def real(self, value: float) -> None:
        """A double."""
        self.words.append(struct.unpack("<Q", struct.pack("<d", value))[0])


class Launch:
    """A kernel with all its arguments but the addresses; see `kernels/replay.py`.

    `overlaps`: it waits by itself for the kernel before it (`griddepcontrol.wait`), so that it may be set up while that
    one still runs: programmatic dependent launch, on sm_90 and later. `shared`: bytes of dynamic shared memory.
    """

    __slots__ = (
        "_configs", "_functions", "_grid", "_index", "_overlaps", "_scalars", "_shared", "_slots", "_threads", "_words",
        "instance", "repeatable",
    )  # fmt: skip

    def __init__(
        self,
        instance: Instance,
        grid: int,
        threads: int,
        arguments: Arguments,
        device: torch.device,
        overlaps: bool = False,
        shared: int = 0,
    ) -> None:
        if grid >= 2**31:
            raise ValueError(f"{instance.name} needs {grid} blocks, and a launch takes 2^31 - 1; split the sequence.")
        # The sources assert that their structure has as many words.
        self.instance = replace(instance, constants={**instance.constants, "ARGUMENT_WORDS": len(arguments.words)})
        self.repeatable = True
        self._grid, self._threads, self._index, self._overlaps = grid, threads, device.index, overlaps
        self._shared = shared
        self._words = array("Q", arguments.words)
        self._slots, self._scalars = tuple(arguments.slots), frozenset(arguments.scalars)
        # By the alignment of the addresses, which may narrow the accesses: the kernel and what keeps it loaded.
        self._functions: dict[int, tuple[int, Any]] = {}
        self._configs: dict[int, Any] = {}

    def here(self, addresses: Sequence[int]) -> None:
        """Launch on the current stream of the tensors' device, also where another one is the current device.
        `addresses`: of `Arguments.tensors`."""
        if _current_device() == self._index:
            self._launch(addresses)
        else:
            with torch.cuda.device(self._index):
                self._launch(addresses)

    def _launch(self, addresses: Sequence[int]) -> None:
        words = self._words[:]
        bits = 0
        for slot, address in zip(self._slots, addresses, strict=True):
            words[slot] = address
            bits |= address
        alignment = WIDEST if bits % WIDEST == 0 else self._alignment(addresses)
        function, _ = self._functions.get(alignment) or self._load(alignment)
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        _, config = self._configs.get(stream) or self._configuration(stream)
        # The driver copies the arguments before it returns.
        pointers = _Pointer(words.buffer_info()[0])
        error = _driver().cuLaunchKernelEx(config, function, pointers, None)
        if error == _INVALID_CONTEXT:
            # A thread that has not used the device yet.
            torch.cuda.set_device(self._index)
            error = _driver().cuLaunchKernelEx(config, function, pointers, None)
        if error:
            raise RuntimeError(f"cuLaunchKernelEx of {self.instance.name} failed with CUDA error {error}.")

    def _alignment(self, addresses: Sequence[int]) -> int:
        bits = WIDEST
        for slot, address in zip(self._slots, addresses, strict=True):
            if slot not in self._scalars:
                bits |= address
        return bits & -bits

    def _configuration(self, stream: int) -> Any:
        """The launch's shape, kept for each stream: two threads may launch on two streams at once."""
        attributes = None
        if self._overlaps and torch.cuda.get_device_capability(self._index)[0] >= 9:
            attributes = _LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 1)
        config = _LaunchConfig(
            *(self._grid, 1, 1, self._threads, 1, 1, self._shared, stream),
            ctypes.pointer(attributes) if attributes else None,
            1 if attributes else 0,
        )
        if len(self._configs) >= _KEPT_STREAMS:
            self._configs.clear()
        self._configs[stream] = config, ctypes.byref(config)
        return self._configs[stream]

    def _load(self, alignment: int) -> tuple[int, Any]:
        major, minor = torch.cuda.get_device_capability(self._index)
        kernel = load(self.instance.source(alignment), f"sm_{major}{minor}", self.instance.name)
        if self._shared:
            # More than 48 KB has to be asked for.
            of_kernel = int(kernel.handle), self._index
            error = _driver().cuKernelSetAttribute(_MAX_DYNAMIC_SHARED_BYTES, self._shared, *of_kernel)
            if error:
                raise RuntimeError(f"cuKernelSetAttribute of {self.instance.name} failed with CUDA error {error}.")
        self._functions[alignment] = int(kernel.handle), kernel
        return self._functions[alignment]


class _LaunchAttribute(ctypes.Structure):
    """`CUlaunchAttribute` of cuda.h: an id and a union of 64 bytes, of which the first is an int here."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("value", ctypes.c_int64),
        ("rest_of_value", ctypes.c_byte * 56),
    )


class _LaunchConfig(ctypes.Structure):
    """`CUlaunchConfig` of cuda.h."""

    _fields_ = (
        *((f"grid_{axis}", ctypes.c_uint) for axis in "xyz"),
        *((f"block_{axis}", ctypes.c_uint) for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


@lru_cache
def _driver() -> ctypes.CDLL:
    """The driver's library, which PyTorch has loaded already."""
    library = ctypes.CDLL("nvcuda.dll" if hasattr(ctypes, "WinDLL") else "libcuda.so.1")
    pointer = ctypes.c_void_p
    library.cuLaunchKernelEx.argtypes = [ctypes.POINTER(_LaunchConfig), pointer, ctypes.POINTER(pointer), pointer]
    library.cuKernelSetAttribute.argtypes = [ctypes.c_int, ctypes.c_int, pointer, ctypes.c_int]
    return library
