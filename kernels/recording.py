"""Watch one call of a back end and make a `Replay` of it: what it allocated, computed with PyTorch, and launched.

A back end's host code decides by shapes, strides, dtypes, options and the state of the process (`registration.Operator`
makes all of them the key of a replay), then does the same things again for every call of that key. A `Recording` sees
them: PyTorch's operations as a dispatch mode, launches because `launch.Launch` and `hopper.MappedLaunch` report to
`launched`. Views and temporary tensors of the host code leave no trace but in the addresses.

A call is not repeated (`replay` returns None) if it read a value from the device, or used a tensor that is neither an
argument nor made by the call. A launch that nobody reports cannot be seen here: a back end whose every launch is
reported says so with `REPEATABLE = True`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .driver_launch import zeros
from .replay import Replay
from .replay_function import Allocation, Launchable, LaunchStep, OperationStep, Slot, Value

_aten = torch.ops.aten
_ALLOCATING = frozenset({
    _aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
})  # fmt: skip
_ZEROS = frozenset({_aten.zeros.default, _aten.new_zeros.default})
_FEW_BYTES = 4096
_UNREPEATABLE_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_ALIGNMENT = 16
_NULL = -1
"""The place of a null pointer: see `Slot`."""

_current = threading.local()


def active() -> bool:
    """Whether this thread's call is recorded."""
    return getattr(_current, "recording", None) is not None


def launched(launch: Launchable, addresses: Sequence[int]) -> None:
    """A launch is being made. Whoever records this thread's call wants to know."""
    recording: Recording | None = getattr(_current, "recording", None)
    if recording is not None:
        recording.see_launch(launch, addresses)


@dataclass(frozen=True)
class _Operation:
    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: Sequence[int]
    """Places of the results."""

    @property
    def allocates(self) -> bool:
        """It makes a tensor and does not fill it."""
        return self.function in _ALLOCATING

    @property
    def matters(self) -> bool:
        """It does more than give results: it writes to a tensor, or moves a random generator."""
        return bool(self.function._schema.is_mutable) or torch.Tag.nondeterministic_seeded in self.function.tags


class Recording(TorchDispatchMode):
    """The calls and launches of one thread between `__enter__` and `__exit__`."""

    def __init__(self, arguments: Sequence[Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arguments = arguments
        # Tensors stay alive: an id or an address stands for one tensor only.
        self._tensors: list[Tensor | None] = []
        self._places: dict[int, int] = {}
        self._made: set[int] = set()
        """Places of tensors with memory of their own, made by the call."""
        self._steps: list[_Operation | tuple[Launchable, Sequence[int]]] = []
        self._refused = False
        for argument in arguments:
            if argument is not None and (id(argument) in self._places or argument.data_ptr() % _ALIGNMENT):
                self._refused = True
            self._keep(argument)

    def __enter__(self) -> Recording:
        _current.recording = self
        return cast(Recording, super().__enter__())  # type: ignore[no-untyped-call]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.recording = None
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if not self._refused:
            self._see_operation(function, args, kwargs, result)
        return result

    def see_launch(self, launch: Launchable, addresses: Sequence[int]) -> None:
        """See `launched`."""
        if not launch.repeatable:
            self._refused = True
        self._steps.append((launch, tuple(addresses)))

    def _see_operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        results = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        nested = [x for x in (*args, *kwargs.values()) if isinstance(x, (list, tuple, dict))]
        self._refused = (
            bool(_UNREPEATABLE_TAGS.intersection(function.tags))
            or any(isinstance(x, Tensor) for x in tree_leaves(nested))
            or any(isinstance(x, Tensor) and id(x) not in self._places for x in (*args, *kwargs.values()))
        )
        if not self._refused and function in _ZEROS and self._see_zeros(result):
            return
        before = len(self._tensors)
        outputs = [self._places.get(id(x), -1) if id(x) in self._places else self._keep(x) for x in results]
        if not function.is_view:
            self._made.update(place for place in outputs if place >= before)
        self._steps.append(_Operation(function, args, kwargs, outputs))

    def _see_zeros(self, made: Tensor) -> bool:
        """Few zeros as an allocation and a launch: the driver fills memory with less ado than PyTorch's kernel."""
        filler = zeros(made.nbytes, made.device) if 0 < made.nbytes <= _FEW_BYTES else None
        if filler is None:
            return False
        shape = list(made.shape)
        options = {"dtype": made.dtype, "device": made.device}
        place = self._keep(made)
        self._made.add(place)
        self._steps.append(_Operation(_aten.empty.memory_format, (shape,), options, [place]))
        self._steps.append((filler, (made.data_ptr(),)))
        return True

    def _keep(self, tensor: Tensor | None) -> int:
        self._tensors.append(tensor)
        if tensor is not None:
            self._places[id(tensor)] = len(self._tensors) - 1
        return len(self._tensors) - 1

    # --- afterwards ---

    def replay(self, results: Sequence[Tensor]) -> Replay | None:
        """The replay of a call that returned `results`."""
        if self._refused or not all(id(x) in self._places for x in results):
            return None
        located: dict[int, list[Slot]] = {}
        for number, step in enumerate(self._steps):
            if not isinstance(step, _Operation):
                found = [self._locate(address) for address in step[1]]
                located[number] = [slot for slot in found if slot is not None]
                if len(located[number]) < len(found):
                    return None
        addressed = {place for slots in located.values() for place, _ in slots}
        return self._compiled([self._places[id(x)] for x in results], located, addressed)

    def _locate(self, address: int) -> Slot | None:
        """Place and offset of an address. None where it is in no tensor, or in
        several."""
        if not address:
            return _NULL, 0
        for places in (range(len(self._arguments)), sorted(self._made)):
            found = []
            for place in places:
                tensor = self._tensors[place]
                if tensor is None or not tensor.numel():
                    continue
                offset = address - tensor.data_ptr()
                within = offset < tensor.untyped_storage().nbytes() if place in self._made else not offset
                if within and offset >= 0:
                    found.append((place, offset))
            if found:
                return found[0] if len(found) == 1 else None
        return None

    def _compiled(
        self, results: Sequence[int], located: Mapping[int, Sequence[Slot]], addressed: set[int]
    ) -> Replay | None:
        """Without the steps that nobody needs, the allocations first."""
        needed, kept = set(results), []
        for number, step in reversed(list(enumerate(self._steps))):
            if isinstance(step, _Operation):
                wanted = needed if step.function.is_view else needed | addressed
                if not step.matters and wanted.isdisjoint(step.outputs):
                    continue
                needed.update(self._inputs(step))
            kept.append(number)
        kept.reverse()
        shaped = self._transposed(results, kept)
        slots = {_NULL: _NULL} | {place: place for place in range(len(self._arguments))}
        allocations: list[Allocation] = []
        for step in (self._steps[number] for number in kept):
            if isinstance(step, _Operation) and step.allocates:
                view = shaped.get(step.outputs[0], step.outputs[0])
                slots[step.outputs[0]] = slots[view] = len(self._arguments) + len(allocations)
                allocations.append(Allocation.like(self._tensor(view)))
        steps: list[LaunchStep | OperationStep] = []
        filled = len(self._arguments) + len(allocations)
        for number in kept:
            step = self._steps[number]
            if not isinstance(step, _Operation):
                steps.append(LaunchStep(step[0], [(slots[place], offset) for place, offset in located[number]]))
                continue
            if step.allocates or (step.function.is_view and all(place in slots for place in step.outputs)):
                continue
            new = [place for place in step.outputs if place not in slots]
            if new and len(new) < len(step.outputs):
                return None
            steps.append(OperationStep(step.function, *self._templates(step, slots), len(new)))
            for place in new:
                slots[place] = filled
                filled += 1
        numbers = [slots[place] for place in results]
        return Replay.from_steps(self._arguments, allocations, steps, numbers, aligned=True)

    def _transposed(self, results: Sequence[int], kept: Sequence[int]) -> dict[int, int]:
        """Allocations that are used as one view of all their elements, the result, and by address: they are made in the
        view's strides."""
        operations = [step for step in (self._steps[number] for number in kept) if isinstance(step, _Operation)]
        uses = Counter(place for step in operations for place in self._inputs(step))
        allocated = {step.outputs[0] for step in operations if step.allocates}
        found = {}
        for step in operations:
            if not step.function.is_view or len(step.outputs) > 1 or step.outputs[0] not in results:
                continue
            base, view = self._inputs(step)[0], step.outputs[0]
            whole = self._tensor(base).numel() == self._tensor(view).numel()
            if whole and base in allocated and uses[base] == 1 and base not in results:
                found[base] = view
        return found

    def _inputs(self, step: _Operation) -> list[int]:
        return [self._places[id(x)] for x in (*step.args, *step.kwargs.values()) if isinstance(x, Tensor)]

    def _templates(self, step: _Operation, slots: Mapping[int, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with the numbers of tensors in their places."""

        def template(x: Any) -> Any:
            return Value(slots[self._places[id(x)]]) if isinstance(x, Tensor) else x

        return tuple(map(template, step.args)), {name: template(x) for name, x in step.kwargs.items()}

    def _tensor(self, place: int) -> Tensor:
        tensor = self._tensors[place]
        assert tensor is not None
        return tensor
