"""Every switch of the pass, and the three places where a switch can be set.

    keywords   <   environment `FUSION_PASS_*`   <   command line

The later place wins: a training script's author writes keywords, who operates the machine overrides them by the
environment without editing, and a flag typed for this one run says it most exactly. The order applies to
`FusionConfig.load(**keywords)` and `FusionConfig.from_args(args, **keywords)`. A `FusionConfig(...)` that was
constructed directly is final: nothing overrides it.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from fusion_pass.errors import ConfigError

ENVIRONMENT_PREFIX = "FUSION_PASS_"

LOG_LEVELS = ("debug", "info", "warning", "error")
ON_ERROR = ("warn", "raise")

Expectation = Mapping[str, int] | int


@dataclass(frozen=True)
class FusionConfig:
    """What the pass looks for, which kernels it may use, and what it does when it cannot.

    Raises `ConfigError` when a value is not one of those described below.
    """

    enabled: bool = True
    """`False`: the graph goes to Inductor untouched."""

    fusions: tuple[str, ...] | None = None
    """Names of the fusions to look for, e.g. `("qk_norm_rope",)`; `None`: every registered one."""

    skip_fusions: tuple[str, ...] = ()
    """Names of fusions that are not applied."""

    kernels: tuple[str, ...] | None = None
    """Kernels the plan may choose from, e.g. `("triton",)`; `None`: every one that runs here.
    Naming kernels is a request: a site that none of them can serve raises `FusionError`."""

    whole_block: bool = False
    """Join norm + rotation and the attention it feeds into one operator, `norm_rope_attention`: per layer the rotated
    queries and keys (from a packed projection also the values) are not kept for the backward, which computes them
    again. Off: the parts stay apart, for a step without that second run, and for selective activation checkpoints."""

    keep_rotated: bool = False
    """With `whole_block`: keep the rotated queries and keys for the backward instead of computing them again. The
    fastest way to train on Hopper, and it keeps no more than the parts apart (docs/attention.md)."""

    allow_reference: bool = False
    """Also fuse into the `reference` kernel (plain ATen). For tests and machines without a fused kernel: right, not
    fast."""

    deterministic: bool = False
    """Only kernels whose gradients are bit-reproducible. Also on when `torch.use_deterministic_algorithms` is."""

    verify: bool = False
    """Run each distinct site once at compile time beside the graph it replaces; a mismatch raises `FusionError`."""

    repro_dir: str = "fusion_pass_repro"
    """Folder for the script that reproduces a mismatch found by `verify`."""

    strict: bool = False
    """Raise `FusionError` when a place that looks like a fusion is not fused, when a pattern fails, or when a graph
    holds no place."""

    expect: Expectation | None = None
    """Number of fused sites every compiled graph must have: in all, or per fusion (`{"qk_norm_rope": 36}`).
    Another number raises `FusionError`. Capture with `fullgraph=True`, so that the model is one graph."""

    on_error: str = "warn"
    """What an exception in a pattern does, ours or another package's, which is a bug of the pattern. `"warn"`: what it
    would have found stays as it is, with a warning and an entry in the report. `"raise"`: `FusionError`, from the
    exception."""

    report: str | None = None
    """Path of a JSON file with what was fused and why the rest was not, over all graphs compiled by this process."""

    log_level: str = "info"
    """Level at which the summary of each graph is logged to the logger `fusion_pass`."""

    def __post_init__(self) -> None:
        for name in ("fusions", "skip_fusions", "kernels"):
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        for name, choices in (("log_level", LOG_LEVELS), ("on_error", ON_ERROR)):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it takes one of {', '.join(choices)}.")
        object.__setattr__(self, "expect", _checked_expectation(self.expect))

    @classmethod
    def load(cls, **keywords: Any) -> FusionConfig:
        """`keywords`, overridden by the environment (`FUSION_PASS_VERIFY=1`, `FUSION_PASS_EXPECT=qk_norm_rope=36`)."""
        return cls(**{**_known(keywords), **_from_environment(os.environ)})

    @classmethod
    def from_args(cls, args: argparse.Namespace, **keywords: Any) -> FusionConfig:
        """`keywords`, overridden by the environment, overridden by the flags that `add_arguments` defined.

        Without `--fusion-pass` on the command line (and no `enabled` from elsewhere) the configuration is disabled:
        a script opts in.
        """
        given = {
            name: value
            for name in (field.name for field in fields(cls))
            if (value := getattr(args, f"{_FLAG_DEST}{name}", None)) is not None
        }
        return cls(**{"enabled": False, **_known(keywords), **_from_environment(os.environ), **given})

    @property
    def level(self) -> int:
        """`log_level` as `logging` knows it."""
        return int(getattr(logging, self.log_level.upper()))

    def wants(self, fusion: str) -> bool:
        """Whether sites of `fusion` may be applied."""
        return fusion not in self.skip_fusions and (self.fusions is None or fusion in self.fusions)

    def cache_key(self) -> str:
        """The settings that decide what a graph becomes; the others leave a compiled artefact valid."""
        shaping = (
            "enabled", "fusions", "skip_fusions", "kernels", "whole_block", "keep_rotated", "allow_reference",
            "deterministic", "on_error",
        )  # fmt: skip
        return repr([(name, getattr(self, name)) for name in shaping])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--fusion-pass` and one `--fusion-pass-NAME` per setting to `parser`; read them with
    `FusionConfig.from_args`."""
    group = parser.add_argument_group("fusion pass", "fuse QK-norm + RoPE and attention inside torch.compile")
    group.add_argument(
        "--fusion-pass", dest=f"{_FLAG_DEST}enabled", action="store_true", default=None, help="turn it on"
    )
    for field in fields(FusionConfig):
        if field.name == "enabled":
            continue
        flag, dest = f"--fusion-pass-{field.name.replace('_', '-')}", f"{_FLAG_DEST}{field.name}"
        if isinstance(field.default, bool):
            group.add_argument(flag, dest=dest, action=argparse.BooleanOptionalAction, default=None)
        else:
            group.add_argument(flag, dest=dest, type=_PARSERS[field.name], default=None, metavar="VALUE")


_FLAG_DEST = "fusion_pass_"


def _parse_bool(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("", "0", "false", "no", "off"):
        return False
    raise ConfigError(f"{text!r} is no switch; write 1 or 0.")


def _parse_names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _parse_expectation(text: str) -> Expectation:
    """`36` or `qk_norm_rope=36,attention=36`."""
    try:
        if "=" not in text:
            return int(text)
        return {name.strip(): int(count) for name, _, count in (pair.partition("=") for pair in text.split(","))}
    except ValueError:
        raise ConfigError(f"expect is {text!r}; write a number or NAME=NUMBER[,NAME=NUMBER].") from None


_PARSERS: dict[str, Callable[[str], Any]] = {
    "fusions": _parse_names,
    "skip_fusions": _parse_names,
    "kernels": _parse_names,
    "expect": _parse_expectation,
    "repro_dir": str,
    "on_error": str.lower,
    "report": str,
    "log_level": str.lower,
    **{field.name: _parse_bool for field in fields(FusionConfig) if isinstance(field.default, bool)},
}

# The kernels' own, at run time: no graph depends on them.
_NOT_SETTINGS = frozenset({"cuda_cache", "autotune"})  # kernels/cuda/compiler.py, kernels/choice/autotune.py


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings present in `environment`. An unknown `FUSION_PASS_*` name raises: a misspelt switch must not be
    silent."""
    found: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable[len(ENVIRONMENT_PREFIX) :].lower()
        if name in _NOT_SETTINGS:
            continue
        if name not in _PARSERS:
            known = ", ".join(ENVIRONMENT_PREFIX + name.upper() for name in _PARSERS)
            raise ConfigError(f"The environment sets {variable}, which is no setting; the settings are {known}.")
        try:
            found[name] = _PARSERS[name](text)
        except ConfigError as error:
            raise ConfigError(f"The environment variable {variable} cannot be read: {error}") from None
    return found


def _known(keywords: Mapping[str, Any]) -> Mapping[str, Any]:
    names = [field.name for field in fields(FusionConfig)]
    for name in keywords:
        if name not in names:
            raise ConfigError(f"{name!r} is no setting of the fusion pass; the settings are {', '.join(names)}.")
    return keywords


def _names(setting: str, value: Any) -> tuple[str, ...] | None:
    if value is None and setting != "skip_fusions":
        return None
    if isinstance(value, str) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{setting} is {value!r}; it takes a sequence of names, such as ('qk_norm_rope',).")
    return tuple(value)


def _checked_expectation(value: Any) -> Expectation | None:
    if value is None:
        return None
    counts = value.values() if isinstance(value, Mapping) else (value,)
    if not all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts):
        raise ConfigError(f"expect is {value!r}; it takes a count (>= 0) or a mapping from fusion name to count.")
    return dict(value) if isinstance(value, Mapping) else value
