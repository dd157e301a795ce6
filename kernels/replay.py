"""Repeat an operator call: for shapes that were seen, allocate and launch, and plan nothing again.

Checking the arguments, choosing a back end, cutting views and computing strides costs some 200 microseconds, ten times
what a kernel for one token runs. All of it depends on shapes, strides, dtypes, devices and options alone (`call_key`).
So a back end may return the launches it made (`Work`), and a `Replay` of them needs nothing but the addresses: every
pointer is one of the arguments, or of the tensors the call allocates, plus a constant number of bytes. A `Recording`
(recording.py) makes one of a back end that does not return its launches. How it is repeated: replay_function.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .replay_function import Allocation, Launchable, LaunchStep, OperationStep, Repeat, Steps, written_out

Key = tuple[Any, ...]


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

    __slots__ = ("_repeat", "steps")

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self._repeat: Repeat | None = None

    @property
    def repeat(self) -> Repeat:
        """The call as a function. Written when the call is first repeated."""
        if self._repeat is None:
            self._repeat = written_out(self.steps)
        return self._repeat

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
        return cls.from_steps(arguments, [Allocation.like(tensor) for tensor in made], steps, numbers, aligned=False)

    @classmethod
    def from_steps(
        cls,
        arguments: Sequence[Tensor | None],
        allocations: Sequence[Allocation],
        steps: Sequence[LaunchStep | OperationStep],
        results: Sequence[int],
        *,
        aligned: bool,
    ) -> Replay:
        """The replay of a call that had these arguments. For the rest see `Steps`."""
        present = [t is not None for t in arguments]
        made_on = {made.device for made in allocations}
        devices = {t.device for t in arguments if t is not None and t.is_cuda} | made_on
        only = devices.pop() if len(devices) == 1 else None
        device = only.index if only is not None and only.type == "cuda" else None
        return cls(Steps(present, allocations, steps, results, device, aligned))

    def __call__(self, arguments: Sequence[Tensor | None]) -> Any:
        """See `replay_function.Repeat`."""
        if len(arguments) != len(self.steps.present):
            raise ValueError(
                f"the call had {len(self.steps.present)} tensor arguments (None counts), now {len(arguments)}."
            )
        return self.repeat(*arguments)


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
