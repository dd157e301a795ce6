"""Repeat an operator call: for shapes that were seen, allocate and launch, and plan nothing again.

Checking the arguments, choosing a back end, cutting views and computing strides costs some 200 microseconds, ten times
what a kernel for one token runs. All of it depends on shapes, strides, dtypes, devices and options alone (`call_key`).
So a back end may return the launches it made (`Work`), and a `Replay` of them needs nothing but the addresses: every
pointer is one of the arguments, or of the tensors the call allocates, plus a constant number of bytes. A `Recording`
(recording.py) makes one of a back end that does not return its launches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import add, itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor

Key = tuple[Any, ...]

_ALIGNMENT = 16
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


Slot = tuple[int, int]
"""Where an address comes from: number of the tensor (see `Replay`), and bytes from its start."""


@dataclass(frozen=True, slots=True)
class Value:
    """Stands for a tensor among the arguments of an operation: its number."""

    number: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """A tensor that a call makes, unfilled."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, tensor: Tensor) -> Allocation:
        """The allocation that gave `tensor`."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


class LaunchStep:
    """A launch with its addresses."""

    __slots__ = ("_offsets", "_pick", "here")

    def __init__(self, launch: Launchable, slots: Sequence[Slot]) -> None:
        self.here = launch.here
        numbers = [number for number, _ in slots]
        # Of the addresses of all tensors those of this launch, as a tuple.
        self._pick: Callable[[Sequence[int]], tuple[int, ...]] = (
            itemgetter(*numbers) if len(numbers) > 1 else lambda addresses: tuple([addresses[n] for n in numbers])
        )
        offsets = [offset for _, offset in slots]
        self._offsets = offsets if any(offsets) else None

    def __call__(self, addresses: Sequence[int]) -> None:
        """Launch, on the current stream of the current device. `addresses`: of all tensors."""
        picked = self._pick(addresses)
        self.here(picked if self._offsets is None else list(map(add, picked, self._offsets)))


@dataclass(frozen=True, slots=True)
class OperationStep:
    """A call of PyTorch."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    makes: bool
    """It makes new tensors, which get the next numbers; else it writes to those that it was given."""

    def __call__(self, tensors: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """The new tensors."""
        args = [tensors[x.number] if type(x) is Value else x for x in self.args]
        kwargs = {name: tensors[x.number] if type(x) is Value else x for name, x in self.kwargs.items()}
        made = self.function(*args, **kwargs)
        if not self.makes:
            return ()
        return (made,) if isinstance(made, Tensor) else [x for x in made if isinstance(x, Tensor)]


class Replay:
    """A call that can be made again with other tensors of the same `call_key`.

    Its tensors are numbered: the arguments, what it allocates, and then what its operations make. Number -1 is a null
    pointer. `results`: numbers of what it returns. `aligned`: only for arguments at multiples of 16 bytes.
    """

    __slots__ = (
        "_allocations", "_arguments", "_device", "_results", "_results_first", "_steps", "_straight", "aligned",
    )  # fmt: skip

    def __init__(
        self,
        arguments: int,
        allocations: Sequence[Allocation],
        steps: Sequence[LaunchStep | OperationStep],
        results: Sequence[int],
        *,
        aligned: bool = False,
    ) -> None:
        self._arguments, self._results, self.aligned = arguments, results, aligned
        devices = {made.device for made in allocations}
        only = next(iter(devices)) if len(devices) == 1 else None
        self._device = only.index if only is not None and only.type == "cuda" else None
        self._allocations = [(made.shape, made.strides, made.dtype, made.device) for made in allocations]
        self._steps = steps
        # Nearly all calls: allocate and launch.
        self._straight = all(isinstance(step, LaunchStep) for step in steps)
        self._results_first = list(results) == list(range(arguments, arguments + len(results)))

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
        made = [*results, *scratch]
        steps = []
        for work in works:
            slots = [_locate(tensor, [*arguments, *made]) for tensor in work.tensors]
            known = [slot for slot in slots if slot is not None]
            if len(known) < len(slots):
                return None
            steps.append(LaunchStep(work.launch, known))
        numbers = range(len(arguments), len(arguments) + len(results))
        return cls(len(arguments), [Allocation.like(tensor) for tensor in made], steps, numbers)

    def __call__(self, arguments: Sequence[Tensor | None]) -> list[Tensor]:
        """The results."""
        if len(arguments) != self._arguments:
            raise ValueError(f"the call had {self._arguments} tensor arguments (None counts), now {len(arguments)}.")
        if self._device is None or _current_device() == self._device:
            return self._repeat(arguments)
        with torch.cuda.device(self._device):
            return self._repeat(arguments)

    def takes(self, arguments: Sequence[Tensor | None]) -> bool:
        """Whether arguments of the same `call_key` may be used."""
        return not self.aligned or not any(t is not None and t.data_ptr() % _ALIGNMENT for t in arguments)

    def _repeat(self, arguments: Sequence[Tensor | None]) -> list[Tensor]:
        if self._device is not None and _empty_cuda is not None:
            made = [_empty_cuda(size, stride, dtype) for size, stride, dtype, _ in self._allocations]
        else:
            made = [
                torch.empty_strided(size, stride, dtype=dtype, device=device)
                for size, stride, dtype, device in self._allocations
            ]
        if not self._straight:
            return self._with_operations([*arguments, *made])
        addresses = [0 if t is None else t.data_ptr() for t in (*arguments, *made)]
        addresses.append(0)
        for launch in self._steps:
            launch(addresses)  # type: ignore[arg-type]
        if self._results_first:
            del made[len(self._results) :]
            return made
        return [made[number - self._arguments] for number in self._results]

    def _with_operations(self, tensors: list[Tensor | None]) -> list[Tensor]:
        for step in self._steps:
            if isinstance(step, LaunchStep):
                step([0 if t is None else t.data_ptr() for t in tensors] + [0])
            else:
                tensors += step(tensors)
        results = [tensors[number] for number in self._results]
        assert all(result is not None for result in results)
        return results  # type: ignore[return-value]


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
