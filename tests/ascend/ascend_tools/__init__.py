"""What the Ascend tests share: cases, the tool chain, the interpreter's missing operations, the vendor's schemas."""

from __future__ import annotations

import os

import pytest


def needs(missing: str | None) -> None:
    """Skip the module if a tool is missing. `make test-ascend` sets ASCEND_TESTS_STRICT: there it fails
    instead."""
    if missing is None:
        return
    message = f"{missing}; `make test-ascend` installs it"
    if os.environ.get("ASCEND_TESTS_STRICT") == "1":
        raise RuntimeError(message)
    pytest.skip(message, allow_module_level=True)
