"""The operator schemas of torch_npu, read from its wheel without importing it (it needs CANN to import)."""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from pathlib import Path

import torch

PATH = Path(os.environ.get("FUSION_PASS_NPU_SCHEMAS", Path(sys.prefix) / "torch_npu_schemas.yaml"))


def missing() -> str | None:
    """Why there are no schemas here, or None."""
    return None if PATH.exists() else f"the operator schemas of the torch_npu wheel are not in {PATH}"


@cache
def _text() -> str:
    return PATH.read_text()


def read(name: str) -> str:
    """The schema of `npu::name` as `torch.library` takes it."""
    found = set(re.findall(rf"func: ({re.escape(name)}\(.*)$", _text(), flags=re.MULTILINE))
    assert len(found) == 1, f"{name} has {len(found)} schemas in {PATH}"
    return found.pop().strip()


def argument_names(name: str) -> list[str]:
    """The arguments of `npu::name` in order."""
    return [argument.name for argument in torch._C.parse_schema(read(name)).arguments]
