"""How the pass gets into `torch.compile`: as a backend of its own, or as options of backend="inductor".

Both run the pass on every compilation, also when Inductor's caches hold the artefact already: the caches are looked
up with the rewritten graph, so a warm start costs the pass (tens of milliseconds) and still reports. Nothing is set
globally.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fusion_pass import identity, pipeline
from fusion_pass.config import FusionConfig
from fusion_pass.errors import ConfigError
from fusion_pass.report import Report

CACHE_KEY_OPTION = "unsafe_marked_cacheable_functions"
"""An Inductor option that maps names to cache keys and takes part in the key of every cache. One entry carries our
uuid. The hook's own `uuid()` does not suffice: torch 2.11 ignores that of a pre-grad pass, and later versions do when
the pass runs before the cache is looked up."""


class FusionBackend:
    """A Dynamo backend: the pass, then Inductor with the user's own mode and options.

    `reports` holds the report of every graph compiled through this backend, oldest first.
    """

    def __init__(self, config: FusionConfig | None, inner: Callable[..., Any] | None = None) -> None:
        self.config = config
        self.inner = inner
        self.reports: list[Report] = []
        self.__name__ = "fusion_pass"

    def __call__(
        self,
        module: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        config = self.config if self.config is not None else FusionConfig.load()
        identity.leave_precompile()
        pipeline.conclude(pipeline.fuse(module, config), config, self.reports)
        if self.inner is not None:
            return self.inner(module, example_inputs)  # type: ignore[no-any-return]
        return _inductor(module, example_inputs, mode, options, config)

    def reset(self) -> None:
        """Called by `torch._dynamo.reset()`: what backend="inductor" does there."""
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()


def backend(config: FusionConfig | None = None, **settings: Any) -> FusionBackend:
    """A backend for `torch.compile(model, backend=fusion_pass.backend(verify=True))`.

    Give a `FusionConfig` (taken as it is) or settings by keyword (overridden by the environment, see `config.py`).
    """
    return FusionBackend(_one_config(config, settings))


class _ByName:
    """`torch.compile(model, backend="fusion_pass")`: configured by the environment, read at each compilation."""

    __name__ = "fusion_pass"

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        return FusionBackend(None)(module, example_inputs, **kwargs)

    def reset(self) -> None:
        """See `FusionBackend.reset`."""
        FusionBackend(None).reset()


fusion_pass = _ByName()


def inductor_options(
    config: FusionConfig | None = None, *, options: Mapping[str, Any] | None = None, **settings: Any
) -> dict[str, Any]:
    """Options for `torch.compile(model, options=...)` on backend="inductor", with the pass in Inductor's pre-grad hook.

    `options`: the caller's own Inductor options, kept. A `pre_grad_custom_pass` among them, or else the one set in
    `torch._inductor.config` at the time of this call, runs before ours. `torch.compile` takes either a mode or
    options; for a mode use `{**torch._inductor.list_mode_options(mode)}` here.
    """
    from torch._inductor import config as inductor_config

    from fusion_pass.inductor_hook import FusionHook

    chosen = _one_config(config, settings) or FusionConfig.load()
    merged = {name.replace("-", "_"): value for name, value in (options or {}).items()}
    earlier = merged.get("pre_grad_custom_pass", inductor_config.pre_grad_custom_pass)
    merged["pre_grad_custom_pass"] = FusionHook(chosen, earlier)
    if hasattr(inductor_config, "pre_grad_pass_timing"):
        merged["pre_grad_pass_timing"] = "early"
    merged[CACHE_KEY_OPTION] = {**merged.get(CACHE_KEY_OPTION, {}), **_cache_key(chosen)}
    return merged


def _one_config(config: FusionConfig | None, settings: Mapping[str, Any]) -> FusionConfig | None:
    if config is None:
        return FusionConfig.load(**settings) if settings else None
    if settings:
        raise ConfigError(f"Give either a FusionConfig or settings ({', '.join(settings)}), not both.")
    if not isinstance(config, FusionConfig):
        raise ConfigError(f"config is {config!r}; it takes a FusionConfig.")
    return config


def _cache_key(config: FusionConfig) -> dict[str, str]:
    from torch._inductor import config as inductor_config

    return {**inductor_config.unsafe_marked_cacheable_functions, **identity.cache_key(config)}


def _inductor(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    mode: str | None,
    options: Mapping[str, Any] | None,
    config: FusionConfig,
) -> Callable[..., Any]:
    from torch._inductor import list_mode_options

    patches = {**(list_mode_options(mode) if mode else {}), **(options or {})}
    if config.enabled:
        patches[CACHE_KEY_OPTION] = {**patches.get(CACHE_KEY_OPTION, {}), **_cache_key(config)}
    # What torch.compile(backend="inductor") itself calls: it checks the names and types of a user's options.
    inductor = torch._TorchCompileInductorWrapper(None, patches, None)  # type: ignore[no-untyped-call]
    return inductor(module, example_inputs)  # type: ignore[no-any-return]
