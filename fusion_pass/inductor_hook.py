"""The pass as Inductor's `pre_grad_custom_pass`. Imported only when asked for: it needs `torch._inductor`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.virtualized import V

from fusion_pass import identity, pipeline
from fusion_pass.config import FusionConfig
from fusion_pass.errors import ConfigError, FusionError
from fusion_pass.report import Report, log

GraphPass = Callable[[fx.Graph], None]

_RIGHT_AHEAD_OF_TIME = torch.__version__ >= "2.13"
"""What AOTInductor of torch 2.11 compiled calls a custom operator with float64 where the graph says float32. Right in
2.13; 2.12 was not tried."""


class FusionHook(CustomGraphPass):
    """One callable for Inductor's slot (torch 2.11 and 2.12 take no list): the earlier pass or passes, then ours.

    Inductor calls it once for each body of a higher-order operator and then for the graph itself. The bodies are left
    to that last call, which reaches them too and reports on the whole.
    """

    def __init__(self, config: FusionConfig, earlier: GraphPass | Sequence[GraphPass] | None) -> None:
        self.config = config
        self.earlier = _as_passes(earlier)
        self.reports: list[Report] = []

    def __call__(self, graph: fx.Graph) -> None:
        for graph_pass in self.earlier:
            graph_pass(graph)
        module = graph.owning_module
        if module is None or not _is_captured_whole(module):
            return
        if V.aot_compilation and not _RIGHT_AHEAD_OF_TIME:
            return self._leave_alone()
        identity.leave_precompile()
        self._renew_cache_key()
        pipeline.conclude(pipeline.fuse(module, self.config), self.config, self.reports)

    def _leave_alone(self) -> None:
        reason = (
            f"Nothing is fused in what AOTInductor compiles: that of torch {torch.__version__} may call operators with "
            "another dtype than the graph says. torch 2.13 or later does not."
        )
        if self.config.strict or self.config.expect is not None:
            raise FusionError(reason)
        log.warning(reason)

    def _renew_cache_key(self) -> None:
        """A pattern that was registered since `inductor_options` takes part in the key too. Inductor is compiling with
        our options, and takes them back."""
        marked = inductor_config.unsafe_marked_cacheable_functions
        if identity.CACHE_KEY in marked:
            inductor_config.unsafe_marked_cacheable_functions = {**marked, **identity.cache_key(self.config)}

    def __deepcopy__(self, memo: dict[int, Any]) -> FusionHook:
        """Itself: AOTInductor compiles with a copy of its options, and the reports are wanted here."""
        return self

    def uuid(self) -> bytes | None:
        """Ours and those of the earlier passes; None when one of them has none, as Inductor expects."""
        digest = hashlib.sha256(identity.uuid(self.config))
        for graph_pass in self.earlier:
            own = graph_pass.uuid() if isinstance(graph_pass, CustomGraphPass) else None
            if own is None:
                return None
            digest.update(repr(own).encode())
        return digest.digest()


def _as_passes(earlier: Any) -> tuple[GraphPass, ...]:
    passes = () if earlier is None else tuple(earlier) if isinstance(earlier, list | tuple) else (earlier,)
    for graph_pass in passes:
        if not callable(graph_pass):
            raise ConfigError(
                f"pre_grad_custom_pass is {graph_pass!r}; it takes a callable on a graph, or a sequence of them."
            )
        if isinstance(graph_pass, FusionHook):
            raise ConfigError("pre_grad_custom_pass holds the fusion pass already; call inductor_options once.")
    return passes


def _is_captured_whole(module: fx.GraphModule) -> bool:
    """Whether Dynamo made `module` as a graph of its own, not as the body of a higher-order operator in one."""
    return hasattr(module, "_param_name_to_source") or not _inside_dynamo()


def _inside_dynamo() -> bool:
    return pipeline.graph_id() != "?"
