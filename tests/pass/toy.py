"""A fusion small enough to see through: `torch.sin(x) * c` becomes `fusion_pass_toy::scaled_sin(x, c)`."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from fusion_pass.graph.site import Call, Operand, Output, Refusal, Site

UNLUCKY = "A scale of 13 brings bad luck."


@torch.library.custom_op("fusion_pass_toy::scaled_sin", mutates_args=())
def scaled_sin(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.sin(x) * scale


@scaled_sin.register_fake
def _(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[torch.Tensor, float], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.scale = inputs[1]


@torch.library.custom_op("fusion_pass_toy::scaled_sin_backward", mutates_args=())
def scaled_sin_backward(grad: torch.Tensor, x: torch.Tensor, scale: float) -> torch.Tensor:
    return grad * torch.cos(x) * scale


@scaled_sin_backward.register_fake
def _(grad: torch.Tensor, x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    (x,) = ctx.saved_tensors
    return scaled_sin_backward(grad, x, ctx.scale), None


scaled_sin.register_autograd(_backward, setup_context=_save)


class ScaledSin:
    """The pattern. A scale of 13 is refused. `changes` are made to each site: how a test builds a pattern that errs."""

    name = "scaled_sin"

    def __init__(self, **changes: Any) -> None:
        self.changes = changes

    def find(self, graph: fx.Graph) -> Iterable[Site | Refusal]:
        for node in graph.find_nodes(op="call_function", target=operator.mul):
            sine, scale = node.args
            if not isinstance(sine, fx.Node) or sine.target is not torch.sin:
                continue
            if scale == 13:
                yield Refusal(self.name, "toy", node, UNLUCKY)
                continue
            x = sine.args[0]
            assert isinstance(x, fx.Node)
            site = Site(
                fusion=self.name,
                layer="toy",
                call=Call("scaled_sin", {"x": Operand(x)}, {"scale": scale}, namespace="fusion_pass_toy"),
                outputs=(Output(node, 0),),
                region=frozenset({sine, node}),
                anchor=node,
            )
            yield dataclasses.replace(
                site, **{name: change(site) if callable(change) else change for name, change in self.changes.items()}
            )
