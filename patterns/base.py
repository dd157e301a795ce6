"""The contract of a pattern, also for third parties (entry-point group `fusion_pass.patterns`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from torch import fx

from fusion_pass.graph.site import Refusal, Site


@runtime_checkable
class Pattern(Protocol):
    """Finds the sites of one fusion in one graph. Never changes the graph.

    What it does not understand it leaves out, or refuses with a reason. An exception is a bug: all that the pattern
    found in that graph is dropped, with a warning (`FusionConfig.on_error`).
    """

    name: str
    """Name of the fusion, as in reports and `FusionConfig.fusions`."""

    def find(self, graph: fx.Graph) -> Iterable[Site | Refusal]:
        """Every site of this fusion in `graph`, and a refusal for every near miss."""
        ...
