"""Repeat an operator call: for shapes that were seen, allocate and launch, and plan nothing again.

Checking the arguments, choosing a back end, cutting views and computing strides costs some 200 microseconds, ten times
what a kernel for one token runs. All of it depends on shapes, strides, dtypes, devices and options alone (`call_key`).
So a back end may return the launches it made (`Work`), and a `Replay` of them needs nothing but the addresses: every
pointer is one of the arguments, or of the tensors the call allocates, plus a constant number of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Key = tuple[Any, ...]

_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
# `torch.empty_strided` on a CUDA device spends as long on parsing its arguments as on allocating. Inductor's generated
# code allocates with this function, on the current device.
_empty_cuda: Callable[..., Tensor] | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


class Launchable(Protocol):
    """A kernel with all its arguments but the addresses; `launch.Launch` is one."""

    repeatable: bool
    """False where a launch needs more than addresses (an interpreter)."""

    def here(self, addresses: Sequence[int]) -> None:
        """Launch on the current stream of the current device."""


@dataclass(frozen=True, slots=True)
class Work:
    """One launch that was made, and the tensors its addresses are of."""

    launch: Launchable
    tensors: Sequence[Tensor]


def call_key(tensors: Sequence[Tensor | None], options: tuple[Any, ...]) -> Key:
    """Everything a call depends on but the tensors' contents and addresses. `options`: the values, in the order of the
    schema."""
    return (options, *[None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors])


class Replay:
    """A call that can be made again with other tensors of the same `call_key`."""

    __slots__ = ("_allocations", "_arguments", "_device", "_results", "_works")

    def __init__(
        self,
        arguments: int,
        results: int,
        allocations: Sequence[Tensor],
        works: Sequence[tuple[Launchable, Sequence[tuple[int, int]]]],
    ) -> None:
        self._arguments, self._results = arguments, results
        devices = {t.device for t in allocations}
        only = next(iter(devices)) if len(devices) == 1 else None
        self._device = only.index if only is not None and only.type == "cuda" else None
        self._allocations = [(tuple(t.shape), t.stride(), t.dtype, t.device) for t in allocations]
        # (launch, indices of the bases, byte offsets; None where all are zero)
        self._works = [
            (launch, [base for base, _ in slots], [n for _, n in slots] if any(n for _, n in slots) else None)
            for launch, slots in works
        ]

    @classmethod
    def of(
        cls,
        arguments: Sequence[Tensor | None],
        results: Sequence[Tensor],
        scratch: Sequence[Tensor],
        works: Sequence[Work] | None,
    ) -> Replay | None:
        """The replay of a call that made these launches and allocated `results` and `scratch`; None if a launch used
        anything else (a copy of an argument, say), because a repetition would use it stale."""
        if not works or not all(work.launch.repeatable for work in works):
            return None
        allocations = [*results, *scratch]
        bases = [*arguments, *allocations]
        located = []
        for work in works:
            slots = [_locate(tensor, bases) for tensor in work.tensors]
            known = [slot for slot in slots if slot is not None]
            if len(known) < len(slots):
                return None
            located.append((work.launch, known))
        return cls(len(arguments), len(results), allocations, located)

    def __call__(self, arguments: Sequence[Tensor | None]) -> list[Tensor]:
        """The results."""
        if len(arguments) != self._arguments:
            raise ValueError(f"the call had {self._arguments} tensor arguments (None counts), now {len(arguments)}.")
        if self._device is not None and _current_device() != self._device:
            with torch.cuda.device(self._device):
                return self._repeat(arguments)
        return self._repeat(arguments)

    def _repeat(self, arguments: Sequence[Tensor | None]) -> list[Tensor]:
        if self._device is not None and _empty_cuda is not None:
            made = [_empty_cuda(size, stride, dtype) for size, stride, dtype, _ in self._allocations]
        else:
            made = [
                torch.empty_strided(size, stride, dtype=dtype, device=device)
                for size, stride, dtype, device in self._allocations
            ]
        addresses = [0 if t is None else t.data_ptr() for t in (*arguments, *made)]
        for launch, bases, offsets in self._works:
            if offsets is None:
                launch.here([addresses[base] for base in bases])
            else:
                launch.here([addresses[base] + offset for base, offset in zip(bases, offsets, strict=True)])
        del made[self._results :]
        return made


def _locate(tensor: Tensor, bases: Sequence[Tensor | None]) -> tuple[int, int] | None:
    """(index of the base, offset in bytes), where no doubt is possible: two arguments that are one tensor now, or lie
    in one storage, need not do so in the next call."""
    same = [index for index, base in enumerate(bases) if tensor is base]
    if same:
        return (same[0], 0) if len(same) == 1 else None
    storage = tensor.untyped_storage().data_ptr()
    owners = [
        (index, base)
        for index, base in enumerate(bases)
        if base is not None and base.untyped_storage().data_ptr() == storage
    ]
    if len(owners) != 1 or storage == 0:
        return None
    index, base = owners[0]
    return index, tensor.data_ptr() - base.data_ptr()
