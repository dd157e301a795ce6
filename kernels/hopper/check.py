"""`python -m fusion_pass.kernels.hopper.check [PATTERN]`: compile instances without a GPU and print, one JSON object
a line, what they use.

The names are those of `INSTANCES`; PATTERN is a shell pattern over them (default: all). Compilation is cached, so
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
from .instances import backward_instance, forward_instance
from .templates import MASKS, backward_template, forward_template


def _instances() -> Iterator[tuple[str, Callable[[], Instance]]]:
    for dims in ((64, 64), (128, 128), (192, 128), (256, 256)):
        for mask in MASKS:
            for extra in ("", "softcap", "sinks"):
                template = forward_template(
                    *dims, mask=mask, softcap=extra == "softcap", sinks=extra == "sinks", uneven=mask != "none"
                )
                assert template is not None
                name = "-".join(filter(None, ("forward", f"{dims[0]}x{dims[1]}", mask, extra)))
                yield name, partial(forward_instance, template, "bf16")
    for dims in ((64, 64), (128, 128), (192, 128), (256, 256)):
        for mask in MASKS:
            for extra in ("", "softcap", "deterministic"):
                backward = backward_template(
                    *dims, mask=mask, softcap=extra == "softcap", deterministic=extra == "deterministic"
                )
                assert backward is not None
                name = "-".join(filter(None, ("backward", f"{dims[0]}x{dims[1]}", mask, extra)))
                yield name, partial(backward_instance, backward, "bf16")


INSTANCES = dict(_instances())


def report(name: str) -> dict[str, object]:
    """Resources of one instance of `INSTANCES`."""
    return {"name": name, **dataclasses.asdict(resources(compile_instance(INSTANCES[name]())))}


def main(arguments: list[str]) -> None:
    names = fnmatch.filter(INSTANCES, arguments[0] if arguments else "*")
    with ProcessPoolExecutor(max_workers=min(len(os.sched_getaffinity(0)), max(len(names), 1))) as pool:
        for line in pool.map(report, names):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
