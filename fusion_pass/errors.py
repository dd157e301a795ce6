"""The errors of the pass. Each message is a sentence that names what was asked, what was found and what to do."""

from __future__ import annotations


class FusionError(RuntimeError):
    """Something that was explicitly asked for cannot be done (`strict`, `expect`, `kernels`, `verify`), or a bug must
    not be passed over: in a pattern with `on_error="raise"`, in a rewrite always."""


class ConfigError(ValueError):
    """A setting has a value that it does not take."""
