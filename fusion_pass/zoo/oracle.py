"""The float64 answer of a model that casts to float32 inside."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


class _Float32IsFloat64(TorchFunctionMode):
    """A request for float32 gives float64: `x.to(torch.float32)`, `x.float()`, `softmax(..., dtype=torch.float32)`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args, kwargs = pytree.tree_map(wide, (args, dict(kwargs or {})))
        return func(*args, **kwargs)


def float64_call(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[nn.Module, Any]:
    """Run a float64 copy of `model` on `inputs`, with the casts to float32 inside it made casts to float64.

    `model.double()` alone is no oracle: RMSNorm, rotary tables and softmax of most models work in float32 on their own.

    Returns:
        The copy (its parameters take the gradients of a later `backward()`) and its output.
    """
    exact: nn.Module = copy.deepcopy(model).double()
    set_experts = getattr(exact, "set_experts_implementation", None)
    if set_experts is not None:
        set_experts("eager")  # the default, a grouped matrix product, does not take float64
    wide = pytree.tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, dict(inputs))
    with _Float32IsFloat64():
        output = exact(**wide)
    return exact, output
