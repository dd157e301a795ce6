"""The patterns the pass runs: the built-in ones, those of installed packages, and those registered by hand.

A package adds a fusion without any change here by an entry point in the group `fusion_pass.patterns`:

    [project.entry-points."fusion_pass.patterns"]
    my_fusion = "my_package.my_fusion:PATTERN"    # an object as `fusion_pass.patterns.base.Pattern` describes

or, inside one program, by `fusion_pass.register(PATTERN)`. Nothing is imported before the first graph is compiled. An
entry point that cannot be loaded is a pattern that fails: see `FusionConfig.on_error`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from importlib.metadata import entry_points

from torch import fx

from fusion_pass.errors import ConfigError
from fusion_pass.graph.site import Refusal, Site
from fusion_pass.patterns.base import Pattern

ENTRY_POINT_GROUP = "fusion_pass.patterns"

BUILT_IN = (
    ("fusion_pass.patterns.norm_rope.pattern", "NormRope"),
    ("fusion_pass.patterns.attention.pattern", "AttentionPattern"),
)
"""Module and class of the patterns that come with the pass."""

_registered: dict[str, Pattern] = {}


def register(pattern: Pattern) -> Pattern:
    """Add `pattern`, an object as `fusion_pass.patterns.base.Pattern` describes, for every graph this process compiles
    from now on. Returns it.

    Raises `ConfigError` when it is no pattern or when its name is taken.
    """
    checked = _checked(pattern, "register")
    if checked.name in {known.name for known in patterns()}:
        raise ConfigError(f"A pattern named {checked.name!r} is registered already; give this one another name.")
    _registered[checked.name] = checked
    return checked


def unregister(name: str) -> None:
    """Take back a `register`. Raises `ConfigError` when there is no such pattern."""
    if _registered.pop(name, None) is None:
        raise ConfigError(f"No pattern named {name!r} was registered; registered are {sorted(_registered)}.")


def patterns() -> tuple[Pattern, ...]:
    """Every pattern, in the order built-in, installed, registered."""
    return (*_installed(), *_registered.values())


@functools.cache
def _installed() -> tuple[Pattern, ...]:
    found: dict[str, Pattern] = {}
    for module, class_name in BUILT_IN:
        pattern = _checked(getattr(importlib.import_module(module), class_name)(), module)
        found[pattern.name] = pattern
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            pattern = _checked(point.load(), f"the entry point {point.value!r}")
            if pattern.name in found:
                raise ConfigError(f"The entry point {point.value!r} brings a second pattern named {pattern.name!r}.")
        except Exception as error:
            pattern = Unloadable(f"{point.name} = {point.value}", error)
        found[pattern.name] = pattern
    return tuple(found.values())


class Unloadable:
    """In the place of a pattern that an installed package names and that cannot be had. It raises when it is asked, so
    that `FusionConfig.on_error` decides what becomes of that, as of any pattern that fails."""

    def __init__(self, name: str, error: Exception) -> None:
        self.name = name
        self.error = error

    def find(self, graph: fx.Graph) -> Iterable[Site | Refusal]:
        """Raises `ConfigError`, from the exception that kept the pattern from being loaded."""
        raise ConfigError(f"it cannot be loaded: {type(self.error).__name__}: {self.error}") from self.error


def _checked(pattern: object, source: str) -> Pattern:
    if isinstance(pattern, type) or not isinstance(pattern, Pattern):
        raise ConfigError(f"{source} got {pattern!r}; a pattern is an object with a `name` and a method `find(graph)`.")
    return pattern
