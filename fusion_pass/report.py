"""What was fused by what, and why the rest was not: one record for the log, the JSON file, `explain` and `tlparse`."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch._logging._internal import trace_structured

from fusion_pass.config import FusionConfig
from fusion_pass.errors import FusionError
from fusion_pass.graph.site import Refusal, Site
from fusion_pass.plan import Planned

log = logging.getLogger("fusion_pass")

FUSED, SKIPPED, FAILED = "fused", "skipped", "failed"

_PLAIN = (bool, int, float, str)


@dataclass(frozen=True)
class SiteReport:
    """One place of one graph, or a pattern that failed on it."""

    fusion: str
    """Name of the fusion; of a failed pattern the pattern's name."""
    layer: str
    """Path of the module, such as `model.layers.0.self_attn`; empty where it is not known."""
    status: str
    """`fused`, `skipped`, or `failed`: an exception where nothing should raise."""
    reason: str
    """Why it was not fused; empty when it was."""
    kernel: str
    """The kernel that runs it; empty when not fused."""
    arguments: Mapping[str, Any]
    """The operator's options as found in the graph, and `"<tensor>": "<dtype>[shape]"` for its tensors."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """What the arguments do not say, by topic: work of the model that stays in front of the call."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, keys in the order of the fields; notes stand among the arguments."""
        return {
            "fusion": self.fusion,
            "layer": self.layer,
            "status": self.status,
            "reason": self.reason,
            "kernel": self.kernel,
            "arguments": {**self.arguments, **self.notes},
        }


@dataclass(frozen=True)
class Report:
    """All places of one captured graph, or of several (`explain` on a model with graph breaks)."""

    sites: tuple[SiteReport, ...] = ()
    before: str = field(default="", repr=False)
    """The graph as captured, as text; empty unless asked for."""
    after: str = field(default="", repr=False)
    """The graph as rewritten, as text; empty unless asked for."""
    graph: str = ""
    """Dynamo's name of the compilation (`frame/recompile`), or `?` outside of one. DDP cuts what is captured into
    several graphs of one name."""
    attempt: int = field(default=0, repr=False)
    """How often Dynamo had started that compilation over, as it does under `dynamic=True`."""
    graphs: int = 1
    """Number of captured graphs this report covers."""

    @property
    def fused(self) -> tuple[SiteReport, ...]:
        """The sites that became an operator call."""
        return tuple(site for site in self.sites if site.status == FUSED)

    @property
    def skipped(self) -> tuple[SiteReport, ...]:
        """The places that were recognised, or nearly, and left alone; each has a reason."""
        return tuple(site for site in self.sites if site.status == SKIPPED)

    @property
    def failed(self) -> tuple[SiteReport, ...]:
        """Patterns that raised an exception, of whose fusions this graph has none, and places whose planning did: bugs.
        See `FusionConfig.on_error`."""
        return tuple(site for site in self.sites if site.status == FAILED)

    @property
    def counts(self) -> dict[str, int]:
        """Number of fused sites per fusion."""
        return dict(Counter(site.fusion for site in self.fused))

    @property
    def reasons(self) -> dict[str, int]:
        """How often each reason not to fuse occurs, as `"fusion: reason"`."""
        return dict(Counter(f"{site.fusion}: {site.reason}" for site in self.skipped))

    @property
    def notes(self) -> dict[str, int]:
        """How many sites have each note, as `"fusion, topic: note"`."""
        notes = (f"{site.fusion}, {topic}: {note}" for site in self.sites for topic, note in site.notes.items())
        return dict(Counter(notes))

    def to_dict(self) -> dict[str, Any]:
        """`{"sites": [...], "counts": {...}}`, JSON-ready."""
        return {"sites": [site.to_dict() for site in self.sites], "counts": self.counts}

    def __str__(self) -> str:
        kernels = Counter((site.fusion, site.kernel) for site in self.fused)
        lines = [f"{fusion}: {count} fused ({kernel})" for (fusion, kernel), count in sorted(kernels.items())]
        lines += [f"{count} left alone, {reason}" for reason, count in self.reasons.items()]
        lines += _failures(self)
        lines += [f"{count} of {note}" for note, count in self.notes.items()]
        if not self.graphs:
            return "Dynamo captured no graph. Is it switched off (TORCHDYNAMO_DISABLE, torch.compiler.set_stance)?"
        return "\n".join(lines) or "no place for a fusion found"


def append(history: list[Report], new: Report) -> None:
    """Add `new`, in the place of what earlier attempts of the same compilation had added."""
    while history and history[-1].graph == new.graph and history[-1].attempt < new.attempt:
        history.pop()
    history.append(new)


def merged(reports: Iterable[Report]) -> Report:
    """The reports of several graphs as one, texts one behind the other."""
    parts = list(reports)
    return Report(
        sites=tuple(site for part in parts for site in part.sites),
        before="\n".join(part.before for part in parts if part.before),
        after="\n".join(part.after for part in parts if part.after),
        graph=" ".join(part.graph for part in parts),
        graphs=sum(part.graphs for part in parts),
    )


def fused(plan: Planned) -> SiteReport:
    """The record of a site that is rewritten."""
    tensors = {name: _tensor_text(moved.value) for name, moved in plan.tensors.items()}
    return SiteReport(
        plan.site.fusion,
        plan.site.layer,
        FUSED,
        "",
        plan.kernel,
        {**tensors, **_json_ready(plan.options)},
        plan.site.notes,
    )


def skipped(place: Site | Refusal, reason: str) -> SiteReport:
    """The record of a place that is left alone."""
    options = _json_ready(place.call.options) if isinstance(place, Site) else {}
    notes = place.notes if isinstance(place, Site) else {}
    return SiteReport(place.fusion, place.layer, SKIPPED, reason, "", options, notes)


def failed(fusion: str, layer: str, reason: str) -> SiteReport:
    """The record of an exception where nothing should raise."""
    return SiteReport(fusion, layer, FAILED, reason, "", {})


def _failures(report: Report) -> list[str]:
    """Each distinct failure once."""
    return list(dict.fromkeys(f"failed, {site.fusion}: {site.reason}" for site in report.failed))


def _json_ready(options: Mapping[str, Any]) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if value is None or isinstance(value, _PLAIN):
            return value
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return str(value).removeprefix("torch.")

    return {name: plain(value) for name, value in options.items()}


def _tensor_text(value: torch.Tensor) -> str:
    return f"{_name(value.dtype)}{list(value.shape)}"


@lru_cache(maxsize=64)
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_expectations(report: Report, config: FusionConfig) -> None:
    """Raise `FusionError` when `strict` or `expect` asks for what this graph does not give."""
    if config.expect is not None:
        wanted = config.expect if isinstance(config.expect, int) else dict(config.expect)
        found: Any = (
            len(report.fused) if isinstance(wanted, int) else {name: report.counts.get(name, 0) for name in wanted}
        )
        if found != wanted:
            raise FusionError(
                f"expect is {wanted}, but {found} were fused in this graph. {_inventory(report)} "
                "(A model captured in several graphs has its sites spread over them: compile with fullgraph=True.)"
            )
    if config.strict and (report.skipped or report.failed or not report.fused):
        raise FusionError(f"strict is on, but not everything was fused. {_inventory(report)}")


def _inventory(report: Report) -> str:
    if not report.sites:
        return "No place for a fusion was found in the graph."
    left_alone = (f"{count} left alone, {reason}" for reason, count in report.reasons.items())
    return " ".join((f"Fused: {report.counts or 'nothing'}.", *left_alone, *_failures(report)))


_warned: set[str] = set()


def publish(report: Report, config: FusionConfig) -> None:
    """Log the report, warn once about each inventory of refusals and failures, hand it to `tlparse`, and write the JSON
    file if one is configured."""
    for line in str(report).splitlines():
        log.log(config.level, "graph %s: %s", report.graph, line)
    if (report.skipped or report.failed) and (inventory := _inventory(report)) not in _warned:
        _warned.add(inventory)
        log.warning("Not everything was fused. %s", inventory)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "fusion_pass", "encoding": "json"},
        payload_fn=lambda: json.dumps(report.to_dict()),
    )
    if config.report is not None:
        _ReportFile.of(config.report).put(report)


class _ReportFile:
    """The JSON file: the sites of every graph this process compiled."""

    _open: dict[str, _ReportFile] = {}  # noqa: RUF012  (one per path and process, on purpose)

    def __init__(self, path: str) -> None:
        self.path = _own_path(path)
        self.graphs: list[Report] = []

    @classmethod
    def of(cls, path: str) -> _ReportFile:
        return cls._open.setdefault(path, cls(path))

    def put(self, report: Report) -> None:
        append(self.graphs, replace(report, before="", after=""))
        sites = [{**site.to_dict(), "graph": part.graph} for part in self.graphs for site in part.sites]
        content = json.dumps({"sites": sites, "counts": merged(self.graphs).counts}, indent=1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
        with os.fdopen(handle, "w") as file:
            file.write(content)
        os.replace(temporary, self.path)


def _own_path(path: str) -> Path:
    """Each rank of a distributed job writes its own file."""
    rank = os.environ.get("RANK", "0")
    return Path(path) if rank == "0" else Path(f"{path}.rank{rank}")
