"""Timing shared by the benchmarks: CUDA graphs, medians, inputs rotated out of the cache, a device copy as the
yardstick, and the result file.

Each measurement captures one call for every input set in a graph and replays it, so that the host's launch cost
stays outside; `host_time` measures that cost alone, `called_time` a call with it. Use enough sets that they do not fit
in the cache (`sets_for`).
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

import torch

ROTATED = 5
"""Input sets add up to at least so many times the card's L2 cache."""

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Time:
    """Microseconds of one call: the median over replays, and the distance from the first to the third quartile."""

    median: float
    spread: float


def sets_for(bytes_a_call: int, most: int = 64) -> int:
    """How many input sets rotate a call's data out of the cache."""
    rotated = ROTATED * torch.cuda.get_device_properties().L2_cache_size
    return max(2, min(most, -(-rotated // max(bytes_a_call, 1))))


@contextmanager
def side_stream() -> Iterator[None]:
    """Run everything, forwards included, on a stream that can be captured: autograd replays a forward's stream in
    the backward."""
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


def graph_time(calls: Sequence[Callable[[], object]], replays: int = 15, least_us: float = 2000.0) -> Time:
    """Time of one of `calls`, which are run one after the other in a CUDA graph."""
    stream = torch.cuda.current_stream()
    if stream == torch.cuda.default_stream():
        raise RuntimeError("graph_time is called on the default stream; enter side_stream() first.")
    for _ in range(2):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for call in calls:
            call()
    graph.replay()
    once = _replay(graph, 1)[0]
    # Short graphs are replayed several times between two events, whose own cost would count otherwise.
    inner = max(1, int(least_us / max(once, 1.0)))
    times = [t / len(calls) for t in _replay(graph, replays, inner)]
    quartiles = statistics.quantiles(times, n=4)
    return Time(statistics.median(times), quartiles[2] - quartiles[0])


def _replay(graph: torch.cuda.CUDAGraph, replays: int, inner: int = 1) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        for _ in range(inner):
            graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e3 / inner for a, b in itertools.pairwise(events)]


def called_time(call: Callable[[], object]) -> Time:
    """Time of `call` as Python makes it, without a CUDA graph: from where the device begins it to where it ends, gaps
    included in which the device waits for the host. The L2 is overwritten before each, which gives the host a lead of
    about a tenth of a millisecond on an H100. It is `triton.testing.do_bench`."""
    from triton.testing import do_bench

    first, median, third = do_bench(call, quantiles=[0.25, 0.5, 0.75])
    return Time(median * 1e3, (third - first) * 1e3)


def host_time(call: Callable[[], object], repeats: int = 300) -> float:
    """Median microseconds the host spends in one call while the device has little to do."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
        torch.cuda.synchronize()
    return statistics.median(times)


def copy_bandwidth(size: int = 2**30, repeats: int = 30) -> float:
    """Bytes a microsecond, read plus written, of a large copy on the device. Not captured in a graph: a memcpy node
    is slower."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    target.copy_(source)
    events[0].record()
    for event in events[1:]:
        target.copy_(source)
        event.record()
    torch.cuda.synchronize()
    return 2 * size / (statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) * 1e3)


def copy_time(bytes_moved: int, as_called: bool = False) -> Time:
    """A plain copy of as many bytes (half read, half written), rotated like the rest. `as_called`: by `called_time`."""
    count = 1 if as_called else sets_for(bytes_moved)
    sources = [torch.empty(bytes_moved // 2, dtype=torch.uint8, device="cuda").random_() for _ in range(count)]
    targets = [torch.empty_like(source) for source in sources]
    calls = [lambda s=source, t=target: t.copy_(s) for source, target in zip(sources, targets, strict=True)]
    return called_time(calls[0]) if as_called else graph_time(calls)


@dataclass
class Row:
    """One line of a result file. `bandwidth`: the least possible bytes over the time, as a fraction of the device
    copy."""

    case: str
    pass_: str
    unit: str
    ours: float
    baselines: dict[str, float]
    spread: float
    bandwidth: float | None = None
    baseline_spreads: dict[str, float] = field(default_factory=dict)
    facts: dict[str, object] = field(default_factory=dict)
    """What else was seen, kept only where there is any."""

    def as_json(self) -> dict[str, object]:
        record = asdict(self)
        record["pass"] = record.pop("pass_")
        if not self.facts:
            del record["facts"]
        return record


def source_state(folder: Path = RESULTS.parent.parent) -> dict[str, str]:
    """The `commit` that `folder` is a checkout of, and whether the `tree` is that commit: "clean" or "changed".

    New files count, earlier results do not. Empty where there is no git, or `folder` is no checkout but a copy.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        root = git("rev-parse", "--show-toplevel")
        commit = git("rev-parse", "HEAD")
        changes = git("status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
    except (FileNotFoundError, subprocess.CalledProcessError):
        return {}
    if Path(root).resolve() != folder.resolve():
        return {}
    return {"commit": commit, "tree": "changed" if changes else "clean"}


def write_results(
    name: str, rows: Sequence[Row], facts: Mapping[str, object] | None = None, folder: Path = RESULTS
) -> Path:
    """`benchmarks/results/NAME-CARD.json`."""
    import triton

    card = torch.cuda.get_device_name()
    record = {
        "card": card,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": date.today().isoformat(),
        **source_state(),
        **(facts or {}),
        "rows": [row.as_json() for row in rows],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{card.replace(' ', '_')}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
