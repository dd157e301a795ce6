"""Reports and graphs as `rich` renderables, for the command line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from fusion_pass.report import FAILED, FUSED, Report

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
        fused, style = site.status == FUSED, "red" if site.status == FAILED else "yellow"
        table.add_row(
            site.layer or "(not known)",
            site.fusion,
            site.kernel if fused else Text(site.status, style=style),
            summary(site.arguments) if fused else Text(site.reason, style=style),
        )
    return table


def counts(report: Report) -> str:
    """`qk_norm_rope: 3 fused` for each fusion, how many places were left alone, and how often a pattern failed."""
    parts = [f"{fusion}: {count} fused" for fusion, count in report.counts.items()]
    if report.skipped:
        parts.append(f"{len(report.skipped)} left alone")
    if report.failed:
        parts.append(f"{len(report.failed)} failed")
    return ", ".join(parts) or "No place for a fusion was found."


def notes(report: Report) -> str:
    """What the arguments do not say, a line for each distinct note."""
    return "\n".join(f"Note on {count} of {note}." for note, count in report.notes.items())


_LEFT_OUT = frozenset(
    "backend cos sin positions weight q_weight k_weight bias q_bias k_bias out_order out_dtype rotary_start".split()
)
"""Arguments that the table leaves out: they follow from the others or say nothing about what is computed."""

_USUAL: Mapping[str, Any] = {"norm_scope": "head", "window_left": -1, "window_right": -1, "softcap": 0.0}
"""Values that mean that nothing special is done."""


def summary(arguments: Mapping[str, Any]) -> str:
    """The arguments that tell one variant of an operator from another, on one line. `--json` has them all."""
    parts = []
    for name, value in arguments.items():
        nothing = value is None or value is False or value in ("none", "", [])
        if name in _LEFT_OUT or nothing or (name in _USUAL and value == _USUAL[name]):
            continue
        parts.append(name if value is True else f"{name} {value}")
    return ", ".join(parts)


def graph_change(report: Report) -> Syntax:
    """What the pass took out of the graph (-) and put in (+)."""
    before, after = list(_readable(report.before)), list(_readable(report.after))
    lines = difflib.unified_diff(before, after, lineterm="", n=_CONTEXT)
    body = [line if not line.startswith("@@") else "  ..." for line in lines if not line.startswith(("---", "+++"))]
    return Syntax("\n".join(body[1:]), "diff", theme="ansi_dark", background_color="default", word_wrap=True)


def _readable(graph: str) -> Iterator[str]:
    """The statements of a printed graph, spelt as in the model's own code as far as that can be told."""
    for line in graph.splitlines():
        code = line.strip()
        if not code or code.startswith(("#", "def ", "class ")) or re.fullmatch(r"(l_\w+) = L_\w+", code):
            continue
        code = re.sub(r";  [\w =]+ = None$", "", code)
        code = re.sub(r"\bl_\w+_(?:modules|parameters|buffers)_\w+_\b", lambda match: _parameter(match.group()), code)
        code = re.sub(r': "(\w+\[[^\]]*\])(?:\[[^\]]*\])?\w*" =', r": \1 =", code)
        code = re.sub(r"\[\((.*)\)\]", lambda match: f"[{_index(match.group(1))}]", code)
        yield code.replace("torch._C._nn.", "").replace(".default(", "(")


def _index(items: str) -> str:
    """`Ellipsis, slice(None, 32, None)` is `..., :32`."""

    def bounds(match: re.Match[str]) -> str:
        return ":".join("" if bound == "None" else bound for bound in match.groups())

    return re.sub(r"slice\((\w+), (\w+), None\)", bounds, items).replace("Ellipsis", "...")


def _parameter(mangled: str) -> str:
    """`l_..._modules_self_attn_modules_q_norm_parameters_weight_` is `self_attn.q_norm.weight`."""
    path = re.split(r"_(?:modules|parameters|buffers)_", mangled.rstrip("_"))
    return ".".join(path[-3:])
