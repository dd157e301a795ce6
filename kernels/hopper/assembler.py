"""Which ptxas assembles these kernels, decided per compilation and without changing anything for anybody else.

Triton 3.6 assembles for sm_90 with its bundled ptxas 12.8, which miscompiles a warp-specialised kernel of this
family: wrong rows, then illegal accesses. The same PTX is right under 12.9 and 13.x (docs/hopper.md, hazards). Triton
wheels carry a second assembler for newer chips, `ptxas-blackwell`: 12.9 in Triton 3.6, 13.x later. It serves sm_90a
just as well. The rule: Triton's own choice if it is new enough, else that one, else refuse.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas

OLDEST = (12, 9)
"""First ptxas release whose output passed every numeric check; 12.8.93 failed."""

_lock = threading.Lock()


@dataclass(frozen=True)
class Assembler:
    path: str
    version: str
    replaces: bool
    """It is not the one that Triton would take for sm_90."""


@functools.lru_cache(maxsize=1)
def choose() -> Assembler | str:
    """The assembler for sm_90a, or the reason why there is none."""
    own = get_ptxas(90)
    seen = []
    for tool in (own, knobs.nvidia.ptxas_blackwell):
        if tuple(int(part) for part in tool.version.split(".")) >= OLDEST:
            return Assembler(tool.path, tool.version, replaces=tool.path != own.path)
        seen.append(f"{tool.path} ({tool.version})")
    wanted = ".".join(map(str, OLDEST))
    return f"ptxas {wanted} or newer is needed, older ones miscompile it; there is {seen}; set TRITON_PTXAS_PATH."


@contextmanager
def assembling_with(assembler: Assembler) -> Iterator[None]:
    """Compile with `assembler` inside the block.

    Triton reads the path from a process-wide knob at the moment it assembles. The knob is set for the length of one
    compilation and put back, under a lock of ours; a foreign thread that compiles at that moment gets a newer ptxas
    for that one kernel, which is as good.
    """
    with _lock, knobs.nvidia.scope():
        if assembler.replaces:
            # Assigned to the instance, not through the knob's setter, which would also write the environment variable.
            knobs.nvidia.__dict__["ptxas"] = assembler.path
        yield
