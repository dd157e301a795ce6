"""`python -m fusion_pass.kernels.hopper.check [PATTERN ...]`: compile instances without a GPU and print, one JSON
object a line, what they use.

The names are those of `INSTANCES`; a PATTERN is a shell pattern over them (default: all). Compilation is cached, so
this also warms Triton's cache.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from .build import Instance, compile_instance, resources
from .instances import instance
from .templates import MASKS, AnyTemplate, backward_template, forward_template, wide_templates


def _templates() -> Iterator[tuple[str, AnyTemplate | None]]:
    for dims in ((64, 64), (128, 128), (192, 128), (256, 256)):
        size = f"{dims[0]}x{dims[1]}"
        for mask in MASKS:
            for extra in ("", "softcap", "sinks"):
                if extra == "sinks" and mask.startswith("values"):
                    continue  # refused
                softcap, sinks = extra == "softcap", extra == "sinks"
                name = "-".join(filter(None, (size, mask, extra)))
                template = forward_template(
                    *dims, mask=mask, softcap=softcap, sinks=sinks, uneven=mask != "none", queries=4096, heads=64
                )
                yield f"forward-{name}", template
                if dims == (64, 64) and mask == "right":
                    short = forward_template(
                        *dims, mask=mask, softcap=softcap, sinks=sinks, uneven=True, queries=1024, heads=512
                    )
                    yield f"forward-{name}-short", short
                if dims == (64, 64) and mask == "right" and not sinks:
                    long = forward_template(
                        *dims, mask=mask, softcap=softcap, sinks=False, uneven=True, queries=8192, heads=64
                    )
                    yield f"forward-{name}-long", long
            for extra in ("", "softcap", "deterministic"):
                softcap, deterministic = extra == "softcap", extra == "deterministic"
                name = "-".join(filter(None, (size, mask, extra)))
                wide = wide_templates(*dims, mask=mask, softcap=softcap)
                if wide is None:
                    narrow = backward_template(*dims, mask=mask, softcap=softcap, deterministic=deterministic)
                    yield f"backward-{name}", narrow
                elif not deterministic:
                    yield f"queries-{name}", wide[0]
                    yield f"keys-{name}", wide[1]


def _instances() -> Iterator[tuple[str, Callable[[], Instance]]]:
    for name, template in _templates():
        assert template is not None
        yield name, partial(instance, template, "bf16")


INSTANCES = dict(_instances())


def report(name: str) -> dict[str, object]:
    """Resources of one instance of `INSTANCES`."""
    return {"name": name, **dataclasses.asdict(resources(compile_instance(INSTANCES[name]())))}


def main(arguments: list[str]) -> None:
    names = [name for name in INSTANCES if any(fnmatch.fnmatch(name, pattern) for pattern in arguments or ["*"])]
    with ProcessPoolExecutor(max_workers=min(len(os.sched_getaffinity(0)), max(len(names), 1))) as pool:
        for line in pool.map(report, names):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
