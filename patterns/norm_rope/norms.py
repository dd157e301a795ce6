"""RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467) and LayerNorm (Ba et al. 2016, arXiv 1607.06450), however they
are written.

Matches     a node that is, lane by lane, a constant times `x / sqrt(mean(x^2) + eps)` of some earlier node x, or a
            constant times `(x - mean(x)) / sqrt(var(x) + eps)` plus a constant.
Requires    the mean over exactly the lanes of x's last axis; an eps that stands in the graph (a literal or a run-time
            scalar) or no eps at all; a weight and a bias that are nodes of the graph (or weight - 1 is: Gemma), the
            same for every token.
Becomes     `norm`, `eps`, `norm_scope` and the weights of the fused operators.

Nothing is matched by its spelling: x is three random vectors, and the formula has to hold on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import fx

from fusion_pass.graph.evaluate import Escaped, Evaluator, Study
from fusion_pass.graph.lanes import Opaque, Value
from fusion_pass.graph.site import Operand, Step
from fusion_pass.graph.vocabulary import fake_tensor, sizes

from ..refused import Refused
from .facts import Array, Norm
from .rotary import TOLERANCE, equal
from .tables import candidates


def norm_between(root: Evaluator, start: fx.Node, end: fx.Node, frontier: Sequence[fx.Node]) -> Norm | None:
    """The norm that makes `end` out of `start`; None if `end` is not a norm of `start`. `frontier`: what the region
    between them reads.

    Raises `Refused` when it is a norm with a part that cannot be passed to the operator.
    """
    tensor = fake_tensor(start)
    assert tensor is not None
    width = sizes(tensor)[-1]
    if not isinstance(width, int) or width < 2:
        return None
    try:
        study = root.study(start, _three_vectors)
        aligned = _align(study, study.value(end))
    except (Opaque, Escaped):
        return None
    if aligned is None:
        return None
    x, y, axes = aligned
    if equal(y[:, :1] * 2, y[:, 1:2]) or not (y != y[:, :1]).any():
        return None  # homogeneous: no norm at all, or no response
    fact = _rms(root, x, y) or _layer(root, x, y)
    if fact is None:
        return None
    kind, eps, weight, bias = fact
    nodes = candidates(frontier)
    weight_operand, one_plus = _weight(root, weight, nodes, end)
    bias_operand = None
    if bias is not None and bias.any():
        bias_operand = _parameter(root, bias, nodes, end)
        if bias_operand is None:
            raise Refused("The bias of the norm is not a tensor of the graph that holds one entry for each lane.")
    if one_plus and kind == "layer":
        raise Refused("A LayerNorm with a weight stored as w - 1 has no operator.")
    return Norm(start, end, axes, "rms_one_plus" if one_plus else kind, width, eps, weight_operand, bias_operand)


def _three_vectors(x: Array) -> Array:
    # The second is twice the first: a homogeneous function shows at once. The third is unrelated.
    return np.concatenate([x, 2 * x, np.flip(x, -1) + 0.25], axis=1)


def _align(study: Study, value: object) -> tuple[Array, Array, tuple[int | None, ...]] | None:
    """x and y as [world, draw, (heads,) lanes] with equal lanes, and where y's outer axes come from."""
    if not isinstance(value, Value):
        return None
    x = study.studied
    paths = value.axes.get(study.source)
    if paths is None:
        return None
    axes: list[int | None] = []
    lane_axes = []
    for axis, path in enumerate(paths):
        if value.lanes(axis):
            lane_axes.append(axis)
            axes.append(None)
        elif path is not None and path[0] == "axis":
            axes.append(path[1])
        elif path is None and value.shape[axis] == 1:
            axes.append(-1)
        else:
            return None
    ones = [k for k, n in enumerate(x.shape[:-1]) if n == 1]
    axes = [(ones.pop(0) if ones else None) if a == -1 else a for a in axes]
    kept = [a for a in axes if a is not None]
    outer = [k for k in range(x.rank - 1) if not x.lanes(k)]
    if sorted(kept) != outer or value.outer(value.rank - 1):
        return None
    heads = [k for k in range(x.rank - 1) if x.lanes(k)]
    if heads and len(lane_axes) == len(heads) + 1:
        for axis, k in zip(lane_axes, heads, strict=False):
            axes[axis] = k
    x_data = x.data.reshape(*x.data.shape[:2], *(x.data.shape[2 + k] for k in heads), -1)
    y_data = value.data.reshape(*value.data.shape[:2], -1)
    if y_data[0, 0].size != x_data[0, 0].size:
        return None
    return x_data, y_data.reshape(y_data.shape[:2] + x_data.shape[2:]), tuple(axes)


def _scalars(root: Evaluator) -> list[tuple[Array, float | fx.Node]]:
    """What may be an eps: its numbers, and the literal or the node that they stand for."""
    return [(value.data.reshape(-1), meaning) for value, meaning in root.scalars.values()]


_Formula = tuple[str, "float | fx.Node", Array, "Array | None"]
"""Kind, eps, weight and bias."""


def _rms(root: Evaluator, x: Array, y: Array) -> _Formula | None:
    mean = (x * x).mean(-1, keepdims=True)
    for eps, meaning in [*_scalars(root), (np.zeros(len(x)), 0.0)]:
        normalised = x / np.sqrt(mean + eps.reshape(-1, *(1,) * (x.ndim - 1)))
        weight = y / normalised
        if equal(weight, np.broadcast_to(weight[:, :1], weight.shape)):
            return "rms", meaning, weight[:, 0], None
    return None


def _layer(root: Evaluator, x: Array, y: Array) -> _Formula | None:
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    for eps, meaning in _scalars(root):
        z = centred / np.sqrt(variance + eps.reshape(-1, *(1,) * (x.ndim - 1)))
        weight = (y[:, 2] - y[:, 0]) / (z[:, 2] - z[:, 0])
        bias = y[:, 0] - weight * z[:, 0]
        if equal(weight[:, None] * z + bias[:, None], y):
            bias = np.where(abs(bias) < TOLERANCE, 0, bias)
            return "layer", meaning, weight, bias
    return None


def _weight(root: Evaluator, weight: Array, nodes: Sequence[fx.Node], at: fx.Node) -> tuple[Operand | None, bool]:
    """The weight as an operand, and whether it is stored as w - 1."""
    if equal(weight, np.ones_like(weight)):
        return None, False
    stored = sorted(nodes, key=lambda n: n.op not in ("placeholder", "get_attr"))
    for one_plus in (False, True):
        inputs = [n for n in stored if n.op in ("placeholder", "get_attr")]
        operand = _parameter(root, weight - one_plus, inputs, at)
        if operand is not None:
            return operand, one_plus
    operand = _parameter(root, weight, stored, at)
    if operand is None:
        raise Refused("The weight of the norm is not a tensor of the graph that holds one entry for each lane.")
    return operand, False


def _parameter(root: Evaluator, wanted: Array, nodes: Sequence[fx.Node], at: fx.Node) -> Operand | None:
    """The node that holds `wanted` ([WORLDS, D] or [WORLDS, H, D]) for every token, without its axes of size one."""
    same_heads = wanted.ndim == 3 and equal(wanted, np.broadcast_to(wanted[:, :1], wanted.shape))
    if same_heads:
        wanted = wanted[:, 0]
    for node in nodes:
        value = root.read(node, at)
        if not isinstance(value, Value):
            continue
        kept = [d for d in range(value.rank) if value.shape[d] != 1]
        data = value.data[:, 0].reshape(len(value.data), *(value.data.shape[2 + d] for d in kept))
        if not equal(data, wanted):
            continue
        steps = []
        for axis in reversed(range(value.rank)):
            if axis not in kept:
                steps.append(Step("select", (axis, 0)))
        return Operand(node, tuple(steps))
    return None
