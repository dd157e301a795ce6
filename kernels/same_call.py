"""Is a call the same as an earlier one, but for the contents and addresses of its tensors?

`torch.compile` asks this of every compiled function before it runs it, and has a check in C++ for it: type, dispatch
keys (so: device, subclasses, and the thread's dispatch modes, functorch transforms and tracer), dtype, device, sizes,
strides and `requires_grad` of all tensors in one call.
`replay.call_key` asks for the same in Python, at the price of four calls a tensor and a hash over all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .replay import call_key

_TensorGuards: Callable[..., object] | None = getattr(torch._C._dynamo.guards, "TensorGuards", None)


def same_call(tensors: Sequence[Tensor | None]) -> Callable[..., bool]:
    """A function that says of as many other tensors whether they are like `tensors` (None for None), and are used where
    `tensors` are: under the same functorch transforms and tracer. It may say no wrongly (one tensor in two places),
    never yes."""
    names = [f"t{place}" for place in range(len(tensors))]
    absent = [f"{name} is None" for name, tensor in zip(names, tensors, strict=True) if tensor is None]
    present = [name for name, tensor in zip(names, tensors, strict=True) if tensor is not None]
    # Written out, because lists of which are None take longer to make than the check in C++.
    conditions = [*absent, f"check({', '.join(present)})"]
    text = f"lambda {', '.join(names)}: {' and '.join(conditions)}"
    check: Callable[..., bool] = eval(text, {"check": _check([tensor for tensor in tensors if tensor is not None])})
    return check


def _check(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    if _TensorGuards is not None:
        guards = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        check: Callable[..., bool] = guards.check  # type: ignore[attr-defined]
        return check
    expected = _key(tensors)
    return lambda *others: all(other is not None for other in others) and _key(others) == expected


def _key(tensors: Sequence[Tensor]) -> tuple[object, ...]:
    here = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return call_key(tensors, (*here, *[(type(t), t.requires_grad) for t in tensors]))
