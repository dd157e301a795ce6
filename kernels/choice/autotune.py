"""A measurement on the user's machine, for calls that no table speaks for: `FUSION_PASS_AUTOTUNE=1`.

When a shape is first seen both back ends run on the call's own tensors, in turns, the L2 cache overwritten before each
run; the median decides. That takes some milliseconds beside the compilation of the back end that is not taken, waits
for the device, and happens once on a machine: the outcome is kept in a file beside the cubins
(`cuda/compiler.py`: `$FUSION_PASS_CUDA_CACHE` or the user's cache folder), named after the card and a digest of the
kernels' sources and versions.

Not measured, but left to the table: while a CUDA graph is captured (nothing may wait), and under
`torch.use_deterministic_algorithms` (the bits of a weight's gradient depend on the back end, so a choice by the clock
is none).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from ..cuda.compiler import cache_folder
from ..replay import Work

VARIABLE = "FUSION_PASS_AUTOTUNE"
NAMES = ("triton", "cuda")
ROUNDS = 15
_FLUSHED = 4
"""Times the size of the L2 that is written between two runs. It also keeps the device busy until the launches of the
next run are queued, so that the host's time does not count."""


def enabled() -> bool:
    """A call may be measured now."""
    return (
        os.environ.get(VARIABLE, "0").lower() in ("1", "true", "yes", "on")
        and not torch.are_deterministic_algorithms_enabled()
        and not torch.cuda.is_current_stream_capturing()
    )


def faster(call: str, device: torch.device, launches: Callable[[str], Sequence[Work] | None]) -> str | None:
    """The back end that is faster for `call` on this card, measured now if it was not before. None where that cannot
    be said: a back end whose launches cannot be repeated.

    `launches` runs a back end and returns its launches; to repeat them must do no harm.
    """
    path = _file(device)
    known = _read(path)
    if call not in known:
        times = measure(device, launches)
        if times is None:
            return None
        known = {**_read(path), call: {name: round(time, 2) for name, time in times.items()}}
        _write(path, known)
    return min(NAMES, key=lambda name: known[call][name])


def measure(device: torch.device, launches: Callable[[str], Sequence[Work] | None]) -> dict[str, float] | None:
    """The median microseconds of each back end; None if one's launches cannot be repeated."""
    works = {name: launches(name) for name in NAMES}
    if not all(found and all(work.launch.repeatable for work in found) for found in works.values()):
        return None
    bound = {
        name: [(work.launch, [tensor.data_ptr() for tensor in work.tensors]) for work in found or ()]
        for name, found in works.items()
    }
    with torch.cuda.device(device):
        properties = torch.cuda.get_device_properties(device)
        flushed = torch.empty(_FLUSHED * properties.L2_cache_size, dtype=torch.uint8, device=device)
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in NAMES}
        for _ in range(ROUNDS):
            for name in NAMES:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                flushed.zero_()
                start.record()
                for launch, addresses in bound[name]:
                    launch.here(addresses)
                end.record()
                events[name].append((start, end))
        torch.cuda.synchronize(device)
    return {name: statistics.median(1e3 * a.elapsed_time(b) for a, b in pairs) for name, pairs in events.items()}


@cache
def _file(device: torch.device) -> Path:
    card = re.sub(r"\W+", "_", torch.cuda.get_device_name(device))
    return cache_folder() / f"choice-{card}-{_digest()}.json"


@cache
def _digest() -> str:
    """Of everything else that the times depend on: the kernels' sources and what compiles them."""
    digest = hashlib.sha256()
    for name in ("triton", "cuda-core", "cuda-bindings", "torch"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            digest.update(f"{name} {metadata.version(name)}\0".encode())
    folder = Path(__file__).parents[1]
    for path in sorted((*folder.glob("triton/*.py"), *folder.glob("cuda/*.py"), *folder.glob("cuda/source/*.cuh"))):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _read(path: Path) -> dict[str, dict[str, float]]:
    """What is in the file; nothing if there is none, or if it is damaged."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return {
        call: times
        for call, times in (found.items() if isinstance(found, dict) else ())
        if isinstance(times, dict) and all(isinstance(times.get(name), int | float) for name in NAMES)
    }


def _write(path: Path, content: dict[str, dict[str, float]]) -> None:
    """Where it cannot be written, every process measures for itself."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file, indent=1)
        os.replace(name, path)
