"""Reports and graphs as `rich` renderables, for the command line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from fusion_pass.report import FUSED, Report, SiteReport

_CONTEXT = 1
"""Unchanged lines shown around a change of the graph."""


def sites(report: Report, title: str = "") -> Table:
    """One row per site: where, which fusion, and by what it was replaced or why not."""
    table = Table(title=title or None, title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("layer", overflow="fold")
    table.add_column("fusion")
    table.add_column("kernel", style="green")
    table.add_column("what it computes, or why it was left alone", overflow="fold")
    for site in report.sites:
        fused = site.status == FUSED
        table.add_row(
            site.layer or "(not known)",
            site.fusion,
            site.kernel if fused else Text("skipped", style="yellow"),
            summary(site.arguments) if fused else Text(site.reason, style="yellow"),
        )
    return table


def counts(report: Report) -> str:
    """`qk_norm_rope: 3 fused` for each fusion, and how many places were left alone."""
    parts = [f"{fusion}: {count} fused" for fusion, count in report.counts.items()]
    if report.skipped:
        parts.append(f"{len(report.skipped)} left alone")
    return ", ".join(parts) or "No place for a fusion was found."


def summary(arguments: Mapping[str, Any]) -> str:
    """The arguments that tell one variant of an operator from another, on one line."""
    shown = {name: value for name, value in arguments.items() if _tells(name, value)}
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def _tells(name: str, value: Any) -> bool:
    return name != "backend" and value not in (None, "none", False, "", []) and value != 0


def graph_change(report: Report) -> Syntax:
    """What the pass took out of the graph (-) and put in (+)."""
    before, after = list(_readable(report.before)), list(_readable(report.after))
    lines = difflib.unified_diff(before, after, lineterm="", n=_CONTEXT)
    body = [line if not line.startswith("@@") else "  ..." for line in lines if not line.startswith(("---", "+++"))]
    return Syntax("\n".join(body[1:]), "diff", theme="ansi_dark", background_color="default", word_wrap=True)


def _readable(graph: str) -> Iterator[str]:
    """The statements of a printed graph, without mangled parameter names and the clean-up at the end of a line."""
    for line in graph.splitlines():
        code = line.strip()
        if not code or code.startswith(("#", "def ", "class ")) or re.fullmatch(r"(l_\w+) = L_\w+", code):
            continue
        code = re.sub(r";  [\w =]+ = None$", "", code)
        yield re.sub(r"\bl_\w+_(?:modules|parameters|buffers)_\w+_\b", lambda match: _parameter(match.group()), code)


def _parameter(mangled: str) -> str:
    """`l_..._modules_self_attn_modules_q_norm_parameters_weight_` is `self_attn.q_norm.weight`."""
    path = re.split(r"_(?:modules|parameters|buffers)_", mangled.rstrip("_"))
    return ".".join(path[-3:])


def site_line(site: SiteReport) -> str:
    """One site on one line of plain text."""
    return f"{site.layer}: {site.fusion} {site.status}" + (f" ({site.reason})" if site.reason else f" by {site.kernel}")
