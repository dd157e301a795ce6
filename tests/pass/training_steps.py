"""Training steps of whole models, and the bound on their error: how ours, eager's and float64's are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from compiling import eager
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from fusion_pass import FusionBackend, FusionConfig
from fusion_pass.zoo.oracle import float64_call

pytest.importorskip("transformers")  # so that whoever imports this is skipped without it

FACTOR, SLACK = 1.5, 8.0
"""Accepted: `|ours - oracle| <= FACTOR |eager - oracle| + SLACK eps |oracle|` in the 2-norm of each parameter's
gradient (of a bias: `size_of_terms`).

Ours and eager's are two roundings of one value, and what each layer rounds is spread over the parameters before it:
neither is smaller parameter by parameter. A wrong argument is off by the size of the gradient, a thousand times what
is allowed in float32.
"""

NORM_AND_ROTATION = ("qkv_norm_rope", "qk_norm_rope", "norm_rope", "rope")
"""The fusions of these tests. `test_attention.py` has attention beside them."""


def terms_of(output: Any) -> torch.Tensor:
    """The terms of a loss, in float64: the first output tensor, in its own precision, times fixed random weights."""
    first = next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))
    weights = torch.randn(first.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return (first.double().cpu() * weights).flatten() / weights.numel()


def loss_of(output: Any) -> torch.Tensor:
    return terms_of(output).sum()


def step(model: Any, module: nn.Module, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Loss, term by term, and the gradients of all parameters, in float64. (The error of the sum of the terms is one
    number, which in eager's step may happen to be next to nothing.)"""
    module.zero_grad(set_to_none=True)
    terms = terms_of(model(**inputs))
    terms.sum().backward()
    found = {name: p.grad.double() for name, p in module.named_parameters() if p.grad is not None}
    return {"terms of the loss": terms.detach(), **{name: grad.clone() for name, grad in found.items()}}


def eager_steps(module: nn.Module, inputs: Mapping[str, Any]) -> list[dict[str, torch.Tensor]]:
    """By either of the algorithms that PyTorch has for attention on a CPU. They round in different ways, and a gradient
    that is the remainder of larger ones is off by up to three times as much with the one as with the other."""
    with sdpa_kernel(SDPBackend.MATH):
        spelled_out = step(module, module, inputs)
    return [step(module, module, inputs), spelled_out]


def exact_step(module: nn.Module, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    copy, output = float64_call(module, inputs)
    terms = terms_of(output)
    terms.sum().backward()
    grads = {name: p.grad for name, p in copy.named_parameters() if p.grad is not None}
    return {"terms of the loss": terms.detach(), **grads}


def assert_no_worse(
    ours: Mapping[str, torch.Tensor],
    plain: Mapping[str, torch.Tensor] | Sequence[Mapping[str, torch.Tensor]],
    exact: Mapping[str, torch.Tensor],
    eps: float,
) -> None:
    """`plain`: eager's, or several of eager's, of which the one with the largest error counts."""
    plains = [plain] if isinstance(plain, Mapping) else plain
    assert all(found.keys() == exact.keys() for found in (ours, *plains))
    for name, truth in exact.items():
        of_eager = max((found[name] - truth).norm() for found in plains)
        allowed = FACTOR * of_eager + SLACK * eps * size_of_terms(name, exact)
        error = (ours[name] - truth).norm()
        assert error <= allowed, f"{name}: error {error:.3g}, eager's {of_eager:.3g}, allowed {allowed:.3g}"


def size_of_terms(name: str, exact: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The norm of a gradient; of a bias that of its layer's weight, if it is larger. Both are sums of the same terms.

    In a bias they may cancel. In k's they do, for a softmax does not see it, and what is left are roundings."""
    layer, _, kind = name.rpartition(".")
    weight = exact.get(f"{layer}.weight")
    own = exact[name].norm()
    return own if kind != "bias" or weight is None else torch.maximum(own, weight.norm())


def backend(inner: Callable[..., Any] = eager, **settings: Any) -> FusionBackend:
    settings = {"fusions": NORM_AND_ROTATION, **settings}
    return FusionBackend(FusionConfig(allow_reference=True, **settings), inner=inner)
