"""Is a call the same as an earlier one, but for the contents and addresses of its tensors?

`torch.compile` asks this of every compiled function before it runs it, and has a check in C++ for it: type, dispatch
keys (so: device, modes and subclasses), dtype, device, sizes, strides and `requires_grad` of all tensors in one call.
`replay.call_key` asks for the same in Python, at the price of four calls a tensor and a hash over all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .replay import call_key

_TensorGuards: Callable[..., object] | None = getattr(torch._C._dynamo.guards, "TensorGuards", None)


def same_call(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function that says of as many other tensors whether they are like `tensors`. It may say no wrongly (one tensor
    in two places), never yes."""
    if _TensorGuards is not None:
        guards = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        check: Callable[..., bool] = guards.check  # type: ignore[attr-defined]
        return check
    expected = _key(tensors)
    return lambda *others: _key(others) == expected


def _key(tensors: Sequence[Tensor]) -> tuple[object, ...]:
    return call_key(tensors, tuple([(type(t), t.requires_grad) for t in tensors]))
