"""A fusion small enough to see through: `torch.sin(x) * c` becomes `fusion_pass_toy::scaled_sin(x, c)`."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from fusion_pass.graph.site import Call, Operand, Output, Refusal, Site


@torch.library.custom_op("fusion_pass_toy::scaled_sin", mutates_args=())
def scaled_sin(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.sin(x) * scale


@scaled_sin.register_fake
def _(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.empty_like(x)


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[torch.Tensor, float], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.scale = inputs[1]


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    (x,) = ctx.saved_tensors
    return grad * torch.cos(x) * ctx.scale, None


scaled_sin.register_autograd(_backward, setup_context=_save)


class ScaledSin:
    """The pattern. A scale of 13 is refused."""

    name = "scaled_sin"

    def __init__(self, **changes: object) -> None:
        self.changes = changes

    def find(self, graph: fx.Graph) -> Iterable[Site | Refusal]:
        for node in graph.find_nodes(op="call_function", target=operator.mul):
            sine, scale = node.args
            if not isinstance(sine, fx.Node) or sine.target not in (torch.sin, torch.ops.aten.sin.default):
                continue
            if scale == 13:
                yield Refusal(self.name, "toy", node, "A scale of 13 brings bad luck.")
                continue
            (x,) = sine.args
            site = Site(
                fusion=self.name,
                layer="toy",
                call=Call("scaled_sin", {"x": Operand(x)}, {"scale": scale}, namespace="fusion_pass_toy"),
                outputs=(Output(node, 0),),
                region=frozenset({sine, node}),
                anchor=node,
            )
            yield dataclasses_replace(site, self.changes)


def dataclasses_replace(site: Site, changes: dict[str, object]) -> Site:
    import dataclasses

    return dataclasses.replace(site, **changes)
