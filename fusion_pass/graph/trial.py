"""What a function of the user's writes to, found by calling it: `torch.compiler.allow_in_graph` puts functions into a
graph that nothing is known of.

They are called on fake tensors, as Dynamo itself has called them, and on fresh ones, so that no value of the graph
changes. A tensor that was written to has another version afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_unflatten


def written(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[bool]:
    """For each leaf of `(args, kwargs)`, whether the function writes to it: all tensors where it cannot be called."""
    leaves, form = tree_flatten((args, kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    modes = [leaf.fake_mode for leaf in given if isinstance(leaf, FakeTensor)]
    if not given or len(modes) != len(given):
        return [isinstance(leaf, torch.Tensor) for leaf in leaves]
    symbols = modes[0].shape_env
    try:
        with modes[0], torch.no_grad(), nullcontext() if symbols is None else symbols.ignore_fresh_unbacked_symbols():
            fresh = [_like(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            before = [_version(leaf) for leaf in fresh]
            again, keywords = tree_unflatten(fresh, form)
            function(*again, **keywords)
    except Exception:  # it is a user's: whatever it raises, nothing is known of it
        return [isinstance(leaf, torch.Tensor) for leaf in leaves]
    return [_version(leaf) != version for leaf, version in zip(fresh, before, strict=True)]


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _version(leaf: object) -> int:
    return leaf._version if isinstance(leaf, torch.Tensor) else 0
