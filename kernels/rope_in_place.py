"""`fusion_pass::rope_`: the rotation written over its input, for inference.

The operator says so in its schema (`Tensor(a!) x`), so functionalisation under `torch.compile` keeps its order with
other readers of x. It has no gradient, and says so when one would be recorded. A back end that cannot write in place
(`streams.Backend`) is handed a result, which is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKeySet

from .ops import LIBRARY, ROTATION_SCHEMA, counted_positions, resolve, tables_for
from .options import Options, check_heads, check_options, check_tables
from .registration import Operator, Recorded
from .replay import Replay, Work
from .streams import Stream, Tables

SCHEMA = (
    "(Tensor(a!) x, Tensor cos, Tensor sin, Tensor? positions=None, Tensor? cu_seqlens=None, "
    f'Tensor? seqlen_offsets=None, *, SymInt seqlen_offset=0, {ROTATION_SCHEMA}, str backend="auto") -> ()'
)


class InPlacePlan:
    """A checked call; see `registration.Planned`. There are no results."""

    def __init__(self, x: Tensor, tables: Tables, options: Options, backend: str) -> None:
        self.works: Sequence[Work] | None = None
        self._x, self._tables, self._options, self._backend = x, tables, options, backend

    def run(self) -> list[Tensor]:
        """Rotate x."""
        x = self._x
        if not x.numel():
            return []
        chosen = resolve("rope", self._backend, x, self._options, training=False)
        tables = tables_for(chosen, self._tables, x.shape[1])
        if getattr(chosen, "WRITES_IN_PLACE", False):
            self.works = chosen.forward((Stream(x, x),), tables, self._options)
        else:
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            chosen.forward((Stream(x, out),), tables, self._options)
            x.copy_(out)
        return []

    def replay(self, arguments: Sequence[Tensor | None], results: Sequence[Tensor]) -> Replay | None:
        """See `registration.Planned`."""
        return Replay.of(arguments, results, (), self.works)

    def fake(self) -> list[Tensor]:
        """Nothing."""
        return []


def _plan(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seqlen_offsets: Tensor | None = None,
    *,
    seqlen_offset: int = 0,
    backend: str = "auto",
    **chosen: Any,
) -> InPlacePlan:
    options = Options(norm="none", **chosen)
    check_heads("x", x)
    if any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True)):
        raise ValueError(
            f"x has strides {list(x.stride())}; in place, no two elements may share memory. Call rope, or clone x."
        )
    counted = counted_positions(x, positions, cu_seqlens, seqlen_offsets, seqlen_offset, options.mrope_layout)
    check_options(options, x.shape[3])
    check_tables(cos, sin, positions, x, options, counted=counted is not None)
    return InPlacePlan(x, Tables(cos, sin, positions, counted), options, backend)


class _InPlaceOperator(Operator):
    """Refuses to be recorded, and counts the write for autograd's checks of saved tensors."""

    def autograd(self, keyset: DispatchKeySet, *args: Tensor | None, **options: Any) -> None:
        """The kernel of the autograd keys."""
        if _would_be_recorded(args):
            raise RuntimeError(
                "rope_ writes over x and records no gradient, but x, cos or sin requires one; call rope, or rope_ "
                "under torch.no_grad()."
            )
        _count_write(args)
        super().autograd(keyset, *args, **options)

    def _shortly(self, tensors: Sequence[Tensor | None], values: tuple[Any, ...]) -> Any:
        return NotImplemented if _would_be_recorded(tensors) else super()._shortly(tensors, values)

    def _short_way(self, replay: Replay, recorded: Recorded | None) -> Callable[..., Any]:
        repeat = super()._short_way(replay, recorded)

        def call(*tensors: Tensor | None) -> Any:
            _count_write(tensors)
            return repeat(*tensors)

        return call

    def _returned(self, results: Sequence[Tensor]) -> None:
        return None


def _would_be_recorded(tensors: Sequence[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors)


def _count_write(tensors: Sequence[Tensor | None]) -> None:
    x = tensors[0]
    assert x is not None
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)


rope_in_place = _InPlaceOperator(LIBRARY, "rope_", SCHEMA, _plan, returns_list=False)
