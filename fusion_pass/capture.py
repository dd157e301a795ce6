"""`explain`: what would be fused in a model and why the rest would not, without compiling a kernel."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fusion_pass import pipeline
from fusion_pass.config import FusionConfig
from fusion_pass.report import Report, append, merged

_MANY = 1 << 20


def explain(
    model: Callable[..., Any] | torch.export.ExportedProgram,
    *args: Any,
    config: FusionConfig | None = None,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> Report:
    """Capture `model(*args, **kwargs)` with Dynamo, run the pass on a copy of each graph, and report.

    The call itself runs eagerly and is not changed; gradient mode, autocast and train/eval are those of the caller.
    The report holds the graphs before and after as text (`report.before`, `report.after`) and is the merged one when
    the model has graph breaks. An `ExportedProgram` is read as it stands and needs no arguments. `strict` and
    `expect` of `config` are not enforced here: the report is the answer. Without a `config` the environment decides.

    Raises `FusionError` where `kernels`, `verify` or `on_error="raise"` of `config` ask for it.
    """
    chosen = config if config is not None else FusionConfig.load()
    if isinstance(model, torch.export.ExportedProgram):
        return pipeline.fuse(copy.deepcopy(model.graph_module), chosen, texts=True)
    reports: list[Report] = []

    def inspect(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        append(reports, pipeline.fuse(copy.deepcopy(module), chosen, texts=True))
        return module.forward

    # A model explained many times must not reach Dynamo's recompile limit and be run eagerly, with an empty report.
    with torch._dynamo.config.patch(recompile_limit=_MANY, accumulated_recompile_limit=_MANY):
        torch.compile(model, backend=inspect, dynamic=dynamic)(*args, **kwargs)
    return merged(reports)
