"""Write a replay out as one Python function, a line for every allocation, operation and launch.

To go through a list of steps takes longer than the steps of a small kernel: calls of our own, tuples taken apart,
tests whose answer never changes. So the first repetition writes them out, as Inductor does with its wrapper code:

    def repeat(t0, t1, t2):
        if current_device() != 0:
            with device(0):
                return repeat(t0, t1, t2)
        p0 = t0.data_ptr()
        t3 = empty_cuda((1, 1, 32, 128), (4096, 4096, 128, 1), dtype_0)
        p3 = t3.data_ptr()
        launch_1((p0, p0 + 8192, p3, 0))
        return (t3,)

The text has numbers and names made here; objects are passed by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

_ALIGNMENT = 16
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
# `torch.empty_strided` on a CUDA device spends as long on parsing its arguments as on allocating. Inductor's generated
# code allocates with this function, on the current device.
_empty_cuda: Callable[..., Tensor] | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)

Slot = tuple[int, int]
"""Where an address comes from: number of the tensor (see `Steps`; -1: a null pointer), and bytes from its start."""


class Launchable(Protocol):
    """A kernel with all its arguments but the addresses; `launch.Launch` is one."""

    repeatable: bool
    """False where a launch needs more than addresses (an interpreter)."""

    def here(self, addresses: Sequence[int]) -> None:
        """Launch on the current stream of the current device."""


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


@dataclass(frozen=True, slots=True)
class LaunchStep:
    """A launch, and where its addresses come from."""

    launch: Launchable
    slots: Sequence[Slot]


@dataclass(frozen=True, slots=True)
class OperationStep:
    """A call of PyTorch."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    makes: int
    """So many new tensors, which get the next numbers; 0: it writes to those that it was given."""


@dataclass(frozen=True, slots=True)
class Steps:
    """What a call does. Its tensors are numbered: the arguments, what it allocates, and then what its operations make.

    `present`: which arguments are not None. `results`: numbers of what it returns. `device`: index of the CUDA device
    of all its tensors, if it is one. `aligned`: only for arguments at multiples of 16 bytes.
    """

    present: Sequence[bool]
    allocations: Sequence[Allocation]
    steps: Sequence[LaunchStep | OperationStep]
    results: Sequence[int]
    device: int | None
    aligned: bool


Repeat = Callable[..., Any]
"""A function of all arguments: a tuple of the results. NotImplemented: not for arguments that lie like these
(`Steps.aligned`)."""


def written_out(call: Steps) -> Repeat:
    """The function of a call."""
    text, names = source(call)
    exec(compile(text, "<replay>", "exec"), names)
    repeat: Repeat = names["repeat"]
    return repeat


def source(call: Steps) -> tuple[str, dict[str, Any]]:
    """The text of the function, and the objects it names."""
    return _Writer().function(call)


class _Writer:
    def __init__(self) -> None:
        self._lines: list[str] = []
        self._names: dict[str, Any] = {"empty_cuda": _empty_cuda, "empty_strided": torch.empty_strided}
        self._pointers: set[int] = set()
        self._tensors = 0

    def function(self, call: Steps) -> tuple[str, dict[str, Any]]:
        arguments = ", ".join(f"t{number}" for number in range(len(call.present)))
        self._tensors = len(call.present)
        if call.device is not None:
            self._names |= {"current_device": _current_device, "device": torch.cuda.device}
            self._lines += [
                f"if current_device() != {call.device}:",
                f"    with device({call.device}):",
                f"        return repeat({arguments})",
            ]
        if call.aligned and any(call.present):
            bits = " | ".join(self._pointer(number) for number, present in enumerate(call.present) if present)
            self._lines += [f"if ({bits}) % {_ALIGNMENT}:", "    return NotImplemented"]
        for made in call.allocations:
            self._allocate(made, on_current=call.device is not None and _empty_cuda is not None)
        for step in call.steps:
            if isinstance(step, LaunchStep):
                self._launch(step)
            else:
                self._operation(step)
        results = "".join(f"t{number}, " for number in call.results)
        body = "".join(f"    {line}\n" for line in (*self._lines, f"return ({results})"))
        return f"def repeat({arguments}):\n{body}", self._names

    def _allocate(self, made: Allocation, *, on_current: bool) -> None:
        shaped = f"{made.shape!r}, {made.strides!r}"
        dtype = self._name("dtype", made.dtype)
        if on_current:
            self._lines.append(f"{self._new()} = empty_cuda({shaped}, {dtype})")
        else:
            device = self._name("device", made.device)
            self._lines.append(f"{self._new()} = empty_strided({shaped}, dtype={dtype}, device={device})")

    def _launch(self, step: LaunchStep) -> None:
        addresses = [self._pointer(number) + (f" + {offset}" if offset else "") for number, offset in step.slots]
        self._lines.append(f"{self._name('launch', step.launch.here)}(({', '.join(addresses)},))")

    def _operation(self, step: OperationStep) -> None:
        given = [self._value(x) for x in step.args] + [f"{key}={self._value(x)}" for key, x in step.kwargs.items()]
        call = f"{self._name('operation', step.function)}({', '.join(given)})"
        made = "".join(f"{self._new()}, " for _ in range(step.makes))
        self._names["tensors_of"] = _tensors_of
        self._lines.append(f"{made}= tensors_of({call})" if made else call)

    def _pointer(self, number: int) -> str:
        """The address of a tensor's start, looked up where it is first used."""
        if number < 0:
            return "0"
        if number not in self._pointers:
            self._pointers.add(number)
            self._lines.append(f"p{number} = t{number}.data_ptr()")
        return f"p{number}"

    def _value(self, x: Any) -> str:
        return f"t{x.number}" if isinstance(x, Value) else self._name("value", x)

    def _new(self) -> str:
        self._tensors += 1
        return f"t{self._tensors - 1}"

    def _name(self, kind: str, x: Any) -> str:
        name = f"{kind}_{len(self._names)}"
        self._names[name] = x
        return name


def _tensors_of(made: Tensor | Sequence[Any]) -> Sequence[Tensor]:
    """What an operation of PyTorch made."""
    return (made,) if isinstance(made, Tensor) else [x for x in made if isinstance(x, Tensor)]
