"""The `measured` back end of the norm + rotation operators: each call goes to CUDA C++ or to Triton.

The choice is made when a call is planned, once for each shape: a repeated call (`kernels/replay.py`) does not pass
here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from .. import registry
from ..card import card_of
from ..cuda.hidden import over_rows
from ..cuda.hidden import unsupported as rows_unsupported
from ..options import Options
from ..replay import Work
from ..streams import Backend, Copy, Gradients, GradStream, Stream, Tables
from . import autotune, table
from .form import Site, backward_site, forward_site

COUNTS_POSITIONS = True
WRITES_IN_PLACE = True


def forward(
    streams: Sequence[Stream], tables: Tables | None, options: Options, copy: Copy | None = None
) -> Sequence[Work] | None:
    """See `streams.Backend`."""

    def launches(name: str) -> Sequence[Work] | None:
        return _backend(name).forward(streams, tables, options, copy)

    if _counted(tables) or any(stream.out is stream.x for stream in streams):
        return launches("cuda")
    if _too_long([stream.out for stream in streams], streams[0].x.element_size(), options):
        return launches("triton")
    site = forward_site(streams, tables, options, copy)
    return launches(choice(site, streams[0].x.device, launches))


def backward(
    streams: Sequence[GradStream],
    tables: Tables | None,
    options: Options,
    copy: Copy | None = None,
    needs_tables: bool = False,
) -> Gradients:
    """See `streams.Backend`."""

    def gradients(name: str) -> Gradients:
        return _backend(name).backward(streams, tables, options, copy, needs_tables)

    if _counted(tables):
        return gradients("cuda")
    grads = [stream.grad for stream in streams]
    read = streams[0].x if streams[0].x is not None else grads[0]
    if _too_long(grads, read.element_size(), options):
        return gradients("triton")
    site = backward_site(streams, tables, options, copy, needs_tables)
    return gradients(choice(site, streams[0].grad.device, lambda name: gradients(name).works))


def choice(site: Site, device: torch.device, launches: Callable[[str], Sequence[Work] | None]) -> str:
    """The back end to take: by the table, or by a measurement where one is allowed and the table is not exact."""
    row = table.deciding(site.form, site.size, card_of(device)) if site.usual else None
    if (row is None or not row.exact(site.form, site.size)) and autotune.enabled():
        measured = autotune.faster(site.key(), device, launches)
        if measured is not None:
            return measured
    return "triton" if row is None else row.faster


def _counted(tables: Tables | None) -> bool:
    """Positions are counted: CUDA C++ does so in its kernel, Triton needs several kernels before."""
    return tables is not None and tables.counted is not None


def _too_long(by_head: Sequence[Tensor], itemsize: int, options: Options) -> bool:
    """A norm over rows that CUDA C++ does not take: a request does not say how many heads k has."""
    heads = [t.shape[2] for t in by_head]
    return over_rows(options) and rows_unsupported(options, by_head[0].shape[3], heads, itemsize) is not None


def _backend(name: str) -> Backend:
    return cast(Backend, registry.get("qk_norm_rope", name).load())
