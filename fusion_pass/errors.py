"""The errors of the pass. Each message is a sentence that names what was asked, what was found and what to do."""

from __future__ import annotations


class FusionError(RuntimeError):
    """Something that was explicitly asked for cannot be done (`strict`, `expect`, `kernels`, `verify`)."""


class ConfigError(ValueError):
    """A setting has a value that it does not take."""
