"""Triton-Ascend's slice operations, wherever the installed release keeps them.

3.2.0 (PyPI) has them on `triton.language`; the main branch and 3.6 have them in `triton.language.extra.cann.extension`.
"""

from __future__ import annotations

import importlib
from typing import Any

import triton.language as tl

EXTENSION = "triton.language.extra.cann.extension"


def _resolve(name: str) -> Any:
    try:
        home: Any = importlib.import_module(EXTENSION)
    except ModuleNotFoundError:
        home = tl
    found = getattr(home, name, None)
    if found is None:
        raise ImportError(
            f"this Triton has no `{name}` (neither in {EXTENSION} nor in triton.language); the Ascend kernels need "
            "triton-ascend 3.2.0 or later, which installs itself as `triton` in place of the upstream package."
        )
    return found


extract_slice = _resolve("extract_slice")
insert_slice = _resolve("insert_slice")
