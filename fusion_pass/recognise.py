"""Recognise: ask every pattern, and survive one that raises.

A pattern only reads the graph, and so does planning; until the first rewrite nothing has happened. A bug there costs
the fusion and not the compilation: its record in the report has the status `failed`, and the warning says how to see
the traceback. With `on_error="raise"`, as in the tests of this repository, it stops the compilation.
"""

from __future__ import annotations

import traceback
from pathlib import Path

from torch import fx

from fusion_pass import report
from fusion_pass.config import FusionConfig
from fusion_pass.errors import FusionError
from fusion_pass.extensions import patterns
from fusion_pass.graph.effects import graphs_at_rest
from fusion_pass.graph.site import Refusal, Site
from fusion_pass.patterns.block import FUSION as BLOCK
from fusion_pass.patterns.block import Block, blocks
from fusion_pass.report import SiteReport


def places(graph: fx.Graph, config: FusionConfig, failures: list[SiteReport]) -> list[Site | Refusal]:
    """What the patterns find, in the graph's order. One that raises finds nothing, and `failures` tells of it."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    found: list[Site | Refusal] = []
    with graphs_at_rest():
        for pattern in patterns():
            try:
                own = [place for place in pattern.find(graph) if config.wants(place.fusion)]
                own.sort(key=lambda place: order[place.anchor])
            except Exception as error:
                failures.append(failure(f"The pattern {pattern.name!r}", pattern.name, "", error, config))
            else:
                found += own
    return sorted(found, key=lambda place: order[place.anchor])


def whole_blocks(
    graph: fx.Graph, found: list[Site | Refusal], config: FusionConfig, failures: list[SiteReport]
) -> list[Block]:
    """The pairs of sites that one operator can replace: none unless `config.whole_block`, or if looking for them
    raises."""
    if not config.whole_block:
        return []
    try:
        return list(blocks(graph, found, keep=config.keep_rotated))
    except Exception as error:
        failures.append(failure(f"The pattern {BLOCK!r}", BLOCK, "", error, config))
        return []


def failure(what: str, fusion: str, layer: str, error: Exception, config: FusionConfig) -> SiteReport:
    """The record of `error`, raised by `what`. Raises `FusionError` instead with `on_error="raise"`."""
    if config.on_error == "raise":
        raise FusionError(f"{what} raised {in_words(error)}.") from error
    return report.failed(
        fusion,
        layer,
        f"{what} raised {in_words(error)}. That is a bug; what it concerns stays unfused. "
        "on_error='raise' (FUSION_PASS_ON_ERROR=raise) shows the traceback.",
    )


def in_words(error: Exception) -> str:
    """`IndexError: list index out of range (norm_rope/norms.py:34)`"""
    title = str(error).strip().split("\n")[0]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = "/".join(Path(frame.filename).parts[-2:])
    return f"{type(error).__name__}{': ' if title else ''}{title} ({place}:{frame.lineno})"
