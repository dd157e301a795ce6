"""What looked like a site and is left alone, with the reason."""

from __future__ import annotations

from collections.abc import Container

from torch import fx

from fusion_pass.graph.effects import Effects


class Refused(Exception):
    """Looked like the pattern and is not, or cannot be proved to be. The message is the sentence a user will read."""


def check_written_for_itself(effects: Effects, region: Container[fx.Node], results: Container[fx.Node]) -> None:
    """Raise `Refused` if memory that `region` writes is read outside of it, other than through its `results`: the call
    writes nothing."""
    found = effects.reader_behind(region, results)
    if found is not None:
        write, reader = found
        raise Refused(f"{write.name!r} writes, inside the site, what is read outside it, by {reader.name!r}.")
