"""What a function of the user's writes to, found by calling it: `torch.compiler.allow_in_graph` puts functions into a
graph that nothing is known of.

They are called on fake tensors, as Dynamo itself has called them, and on fresh ones, so that no value of the graph
changes. Every operation on the way says by its schema what it writes, through `x.data` and views as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from .fake_mode import evaluating


def written(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[bool]:
    """For each leaf of `(args, kwargs)`, whether the function writes to it: all tensors where it cannot be called."""
    leaves, form = tree_flatten((args, kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    modes = [leaf.fake_mode for leaf in given if isinstance(leaf, FakeTensor)]
    if not given or len(modes) != len(given):
        return [isinstance(leaf, torch.Tensor) for leaf in leaves]
    symbols = modes[0].shape_env
    writes = _Writes()
    try:
        with (
            evaluating(modes[0]),
            torch.no_grad(),
            nullcontext() if symbols is None else symbols.ignore_fresh_unbacked_symbols(),
        ):
            fresh = [_like(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            again, keywords = tree_unflatten(fresh, form)
            with writes:
                function(*again, **keywords)
    except Exception:  # it is a user's: whatever it raises, nothing is known of it
        return [isinstance(leaf, torch.Tensor) for leaf in leaves]
    return [isinstance(leaf, torch.Tensor) and _memory(leaf) in writes.memory for leaf in fresh]


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the memory that operations write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                self.memory.update(_memory(t) for t in tree_leaves(value) if isinstance(t, torch.Tensor))
        return func(*args, **kwargs)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
