"""Launch a compiled instance: one structure of arguments, filled once but for the addresses.

A kernel takes one structure by value (`source/forward.cuh` and others): addresses, strides in bytes, sizes, all of them
64-bit words. `Arguments` collects them in order. A `Launch` keeps them; a call copies the words, writes the addresses
and hands them to `cuLaunchKernel`, on the current stream, so CUDA graphs capture it like any other launch.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .compiler import load
from .instance import WIDEST, Instance

_INVALID_CONTEXT = 201
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


class Arguments:
    """The words of a kernel's argument structure, and the tensors whose addresses stand among them."""

    def __init__(self) -> None:
        self.words: list[int] = []
        self.tensors: list[Tensor] = []
        self.slots: list[tuple[int, int]] = []
        """(index of the word, which bits of the address matter for how wide memory may be accessed)."""

    def address(self, tensor: Tensor | None, vectors: bool = True) -> None:
        """The address of `tensor`; null for None. `vectors`: it is read or written in vectors."""
        if tensor is not None:
            self.slots.append((len(self.words), WIDEST - 1 if vectors else 0))
            self.tensors.append(tensor)
        self.words.append(0)

    def integers(self, *values: int) -> None:
        """Sizes, and strides in bytes."""
        self.words += values

    def real(self, value: float) -> None:
        """A double."""
        self.words.append(struct.unpack("<Q", struct.pack("<d", value))[0])


class Launch:
    """A kernel with all its arguments but the addresses; see `kernels/replay.py`."""

    __slots__ = ("_functions", "_grid", "_index", "_slots", "_threads", "_words", "instance", "repeatable")

    def __init__(self, instance: Instance, grid: int, threads: int, arguments: Arguments, device: torch.device) -> None:
        if grid >= 2**31:
            raise ValueError(f"{instance.name} needs {grid} blocks, and a launch takes 2^31 - 1; split the sequence.")
        self.instance = instance
        self.repeatable = True
        self._grid, self._threads, self._index = grid, threads, device.index
        self._words, self._slots = tuple(arguments.words), tuple(arguments.slots)
        # By the alignment of the addresses, which may narrow the accesses: the kernel and what keeps it loaded.
        self._functions: dict[int, tuple[int, Any]] = {}

    def __call__(self, addresses: Sequence[int]) -> None:
        """Launch on the current stream of the device. `addresses`: of `Arguments.tensors`."""
        if _current_device() == self._index:
            self._launch(addresses)
        else:
            with torch.cuda.device(self._index):
                self._launch(addresses)

    def _launch(self, addresses: Sequence[int]) -> None:
        words = list(self._words)
        bits = WIDEST
        for (slot, mask), address in zip(self._slots, addresses, strict=True):
            words[slot] = address
            bits |= address & mask
        function, _ = self._functions.get(bits & -bits) or self._load(bits & -bits)
        values = array("Q", words)
        pointers = (ctypes.c_void_p * 1)(values.buffer_info()[0])
        # The driver copies the arguments before it returns.
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        call = (function, self._grid, 1, 1, self._threads, 1, 1, 0, stream, pointers, None)
        error = _driver().cuLaunchKernel(*call)
        if error == _INVALID_CONTEXT:
            # A thread that has not used the device yet.
            torch.cuda.set_device(self._index)
            error = _driver().cuLaunchKernel(*call)
        if error:
            raise RuntimeError(f"cuLaunchKernel of {self.instance.name} failed with CUDA error {error}.")

    def _load(self, alignment: int) -> tuple[int, Any]:
        major, minor = torch.cuda.get_device_capability(self._index)
        kernel = load(self.instance.source(alignment), f"sm_{major}{minor}", self.instance.name)
        self._functions[alignment] = int(kernel.handle), kernel
        return self._functions[alignment]


@lru_cache
def _driver() -> ctypes.CDLL:
    """The driver's library, which PyTorch has loaded already."""
    library = ctypes.CDLL("nvcuda.dll" if hasattr(ctypes, "WinDLL") else "libcuda.so.1")
    pointer, unsigned = ctypes.c_void_p, ctypes.c_uint
    library.cuLaunchKernel.argtypes = [pointer, *[unsigned] * 7, pointer, pointer, pointer]
    return library
