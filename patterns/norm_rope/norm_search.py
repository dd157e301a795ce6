"""The norm beside a rotation: looked for before it, and where there is none after it.

These are candidates only: `norms.py` proves. A search stops where tokens or streams are joined or cut, as a norm is not
looked for behind those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from fusion_pass.graph.effects import Effects
from fusion_pass.graph.evaluate import Evaluator
from fusion_pass.graph.lanes import Opaque, product
from fusion_pass.graph.region import between, downstream, frontier, modelled, upstream
from fusion_pass.graph.vocabulary import CASTS, MOVEMENTS, Size, fake_tensor, operation, sizes

from ..refused import Refused
from .facts import Norm, Rotation
from .norms import norm_between

_REDUCTIONS = frozenset("mean rms_norm layer_norm norm vector_norm var var_mean normalize l2_norm rsqrt".split())

_HOMOGENEOUS = MOVEMENTS | CASTS | frozenset({"mul", "div", "add", "sub", "neg", "cat", "sum", "mean"})
"""No norm is made of these alone: it needs a root."""


def norm_before(root: Evaluator, rotation: Rotation) -> Norm | None:
    """The norm whose result is rotated; None if what is rotated is no reduction's. Raises `Refused` for a reduction
    that is not proved to be a norm, or a norm that the operators do not take.
    """
    end = rotation.start

    def one_tensor(node: fx.Node) -> bool:
        # Joint attention concatenates streams that were normalised each on its own, or rotates some of the normalised
        # tokens: a norm is not looked for behind either.
        return modelled(node) and not root.opaque(node)

    if root.opaque(end) or not any(
        operation(node) in _REDUCTIONS for node in [end, *upstream(root.effects, end, one_tensor)]
    ):
        return None
    norm = _first_norm(root, end, one_tensor)
    if norm is None:
        raise Refused(
            "The rotated tensor is normalised before, but not provably by RMSNorm or LayerNorm "
            "over the lanes of one head or of all heads."
        )
    return norm


def _first_norm(root: Evaluator, end: fx.Node, through: Callable[[fx.Node], bool]) -> Norm | None:
    tensor = fake_tensor(end)
    assert tensor is not None
    total = product(sizes(tensor))
    for start in upstream(root.effects, end, through):
        candidate = fake_tensor(start)
        if (
            candidate is None
            or not candidate.is_floating_point()
            or candidate.dim() < 2
            or product(sizes(candidate)) != total
        ):
            continue
        norm = _norm(root, start, end)
        if norm is not None:
            return norm
    return None


def _norm(root: Evaluator, start: fx.Node, end: fx.Node) -> Norm | None:
    try:
        region = between(root.study(start, lambda x: x), end)
        read = frontier(root.effects, region, start)
        if all(operation(node) in _HOMOGENEOUS for node in region) or _goes_around(root.effects, start, read):
            return None
        return norm_between(root, start, end, read)
    except Opaque:
        return None


def _goes_around(effects: Effects, start: fx.Node, read: Sequence[fx.Node]) -> bool:
    """Whether what `start` is computed from also enters the region behind it, as x does where x^2 is the start: what
    comes out is then no function of `start` and weights."""
    total = _elements(start)
    origins = set(upstream(effects, start, limit=12))
    return any(node in origins and _elements(node) == total for node in read)


def _elements(node: fx.Node) -> Size | None:
    tensor = fake_tensor(node)
    return None if tensor is None else product(sizes(tensor))


def norm_after(root: Evaluator, rotation: Rotation) -> Norm | None:
    """The norm of what was rotated; None if there is none, or none that the operators take: the rotation is fused
    without it.
    """
    reach = downstream(rotation.end, 24, lambda n: modelled(n) and operation(n) != "cat")
    if not any(operation(n) in _REDUCTIONS for n in reach):
        return None
    tensor = fake_tensor(rotation.end)
    assert tensor is not None
    total = product(sizes(tensor))
    for end in sorted(reach, key=root.effects.order.__getitem__, reverse=True):
        candidate = fake_tensor(end)
        if candidate is None or not candidate.is_floating_point() or product(sizes(candidate)) != total:
            continue
        if candidate.dim() != tensor.dim() or sizes(candidate)[-1] != rotation.head_dim:
            continue
        try:
            norm = _norm(root, rotation.end, end)
        except Refused:
            continue  # the last factor may be no weight: the norm itself may end earlier
        if norm is not None:
            return norm
    return None
