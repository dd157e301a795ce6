"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), however it is written.

Matches     a node whose response to some earlier node of the same size is linear, mixes lanes in pairs, and is
            `a cos - b sin, b cos + a sin` in each pair.
Requires    tables that do not depend on the rotated tensor, one table for all heads, the outer axes only permuted.
Becomes     the rotation part of `norm_rope`, `qk_norm_rope`, `qkv_norm_rope`, or `rope`.

The response is measured: the graph between the two nodes runs on the unit vectors, which gives its matrix, and on
random vectors, which proves that the matrix is all there is (homogeneous, additive).
"""

from __future__ import annotations

import numpy as np
from torch import fx

from fusion_pass.graph.evaluate import Escaped, Evaluator, Study
from fusion_pass.graph.lanes import WORLDS, Opaque, Value
from fusion_pass.graph.vocabulary import fake_tensor, sizes

from ..refused import Refused
from .facts import Array, Rotation

TOLERANCE = 1e-9
"""Relative, for float64 numbers of size one after a few dozen operations."""

MAX_HEAD_DIM = 512


def equal(a: Array, b: Array) -> bool:
    """Whether two arrays are the same numbers up to float64 rounding."""
    return a.shape == b.shape and bool((abs(a - b) <= TOLERANCE * (1 + abs(b))).all())


def rotation_between(root: Evaluator, start: fx.Node, end: fx.Node) -> Rotation | None:
    """The rotation that makes `end` out of `start`; None if `end` is not a linear pairwise function of `start` at all.

    Raises `Refused` when it mixes lanes in pairs but is not a rotation.
    """
    shape, result = (sizes(t) for t in (fake_tensor(start), fake_tensor(end)) if t is not None)
    head_dim = result[-1]
    if shape[-1] != head_dim or not isinstance(head_dim, int) or head_dim > MAX_HEAD_DIM or head_dim < 2:
        return None
    try:
        if not _linear(root, start, end):
            return None
        study = root.study(start, _unit_vectors, outer=True)
        value = study.value(end)
        matrix, axes = _response(study, value)
    except (Opaque, Escaped):
        return None
    return _read(start, end, axes, matrix, value)


def _linear(root: Evaluator, start: fx.Node, end: fx.Node) -> bool:
    study = root.study(start, _random_sums, outer=True)
    try:
        y, _ = _response(study, study.value(end))
    except (Opaque, Escaped):
        return False
    a, b, total, zero = (y[:, i] for i in range(4))
    return not zero.any() and equal(a + b, total)


def _random_sums(x: Array) -> Array:
    a, b = x, np.flip(x, -1) * 0.75
    return np.concatenate([a, b, a + b, 0 * a], axis=1)


def _unit_vectors(x: Array) -> Array:
    n = x.shape[-1]
    return np.broadcast_to(np.eye(n).reshape(1, n, *(1,) * (x.ndim - 3), n), (WORLDS, n, *x.shape[2:])) * np.ones_like(
        x
    )


def _response(study: Study, value: Value) -> tuple[Array, tuple[int, ...]]:
    """[world, draw, lane], and where each outer axis of the result comes from."""
    outer = value.rank - 1
    paths = value.axes.get(study.source, ())[:outer]
    source_shape = study.source.shape
    axes: list[int] = []
    for axis, path in enumerate(paths):
        if path is not None and path[0] == "axis":
            axes.append(path[1])
        elif value.shape[axis] == 1:
            axes.append(-1)
        else:
            raise Opaque("an outer axis is not one of the input's")
    ones = [k for k, n in enumerate(source_shape[:-1]) if n == 1]
    axes = [ones.pop(0) if a == -1 and ones else a for a in axes]
    if sorted(axes) != list(range(len(source_shape) - 1)):
        raise Opaque("outer axes are not a permutation of the input's")
    if value.outer(outer) or any(value.lanes(d) for d in range(outer)):  # no known operation gets here
        raise Opaque("lanes are not the last axis")
    return value.data.reshape((*value.data.shape[:2], -1)), tuple(axes)


def _read(start: fx.Node, end: fx.Node, axes: tuple[int, ...], response: Array, value: Value) -> Rotation | None:
    matrix = np.broadcast_to(response, (WORLDS, *response.shape[1:])).transpose(0, 2, 1)
    support = (matrix != 0).any(0)
    count = support.sum(1)
    d = len(count)
    if matrix.shape[2] != d or set(count.tolist()) - {1, 2} or not (count == 2).any():
        return None
    rotated, plain = np.flatnonzero(count == 2), np.flatnonzero(count == 1)
    if not (support[plain, plain].all() and (matrix[:, plain, plain] == 1).all()):
        return None
    first, width = int(rotated[0]), len(rotated)
    if width % 2 or rotated[-1] - first + 1 != width:
        raise Refused("The rotated lanes are not one block of even width.")
    pairing, (a, b), (u, v) = _pairing(support[first : first + width, first : first + width])
    block = matrix[:, first : first + width, first : first + width]
    cos_u, cos_v, sin_u, sin_v = block[:, u, a], block[:, v, b], -block[:, u, b], block[:, v, a]
    if equal(sin_u, -sin_v) or equal(cos_u, -cos_v):
        raise Refused("Pairs of lanes are mixed with signs that make a reflection, not a rotation.")
    if equal(cos_u, cos_v) and equal(sin_u, sin_v):
        cos, sin = cos_u, sin_u
    else:
        cos, sin = np.empty((WORLDS, width)), np.empty((WORLDS, width))
        cos[:, u], cos[:, v], sin[:, u], sin[:, v] = cos_u, cos_v, sin_u, sin_v
    return Rotation(start, end, axes, d, width, first, pairing, cos, sin, value)


def _pairing(support: Array) -> tuple[str, tuple[Array, Array], tuple[Array, Array]]:
    n = len(support)
    half = np.arange(n // 2)
    halves, adjacent = (half, half + n // 2), (2 * half, 2 * half + 1)
    for name, reads, writes in (
        ("halves", halves, halves),
        ("adjacent", adjacent, adjacent),
        ("adjacent_to_halves", adjacent, halves),
    ):
        expected = np.zeros((n, n), bool)
        for out in writes:
            for lane in reads:
                expected[out, lane] = True
        if (support == expected).all():
            return name, reads, writes
    raise Refused("Lanes are mixed in pairs that are neither halves (i, i + R/2) nor adjacent (2i, 2i + 1).")
