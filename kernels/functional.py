"""The operators as Python functions, for use without the pass (`rotation.py` has the rotation alone).

Shapes, options and errors are those of `docs/operators.md`; B = batch, S = sequence, H = heads, D = head_dim, R =
rotary_dim.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .ops import OPERATORS, split_packed
from .options import check_packed
from .registration import plain

# Called with the tensors and the values of all options in the order of the schema: see `registration.Operator`.
_qkv_norm_rope, _qk_norm_rope = OPERATORS["qkv_norm_rope"], OPERATORS["qk_norm_rope"]
_norm_rope = OPERATORS["norm_rope"]


def qkv_norm_rope(
    qkv: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    norm: str,
    rotary_dim: int,
    eps: float | None = None,
    packing: str = "blocked",
    norm_scope: str = "head",
    norm_first: bool = True,
    rotary_start: int = 0,
    pairing: str = "halves",
    conjugate: bool = False,
    mrope_layout: str = "none",
    mrope_section: Sequence[int] = (),
    out_order: str = "bshd",
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a packed projection and normalise and rotate each head of Q and K.

    `qkv` is [B, S, (num_heads + 2 num_kv_heads) D]. Returns q [B, S, num_heads, D], k and v [B, S, num_kv_heads, D].
    Where no gradient is recorded v is a view of `qkv` and nothing of it is moved; in training it is a copy, because
    the backward writes one packed gradient in one pass.
    """
    options = (
        norm, eps, norm_scope, norm_first, rotary_dim, rotary_start, pairing, conjugate, mrope_layout,
        tuple(mrope_section), out_order, out_dtype, backend,
    )  # fmt: skip
    if packing == "blocked" and not (torch.is_grad_enabled() and qkv.requires_grad):
        q, k, v = _parts(qkv, num_heads, num_kv_heads, head_dim)
        q, k = _qk_norm_rope((q, k, cos, sin, positions, q_weight, k_weight, q_bias, k_bias), options)
        return q, k, v
    tensors = (qkv, cos, sin, positions, q_weight, k_weight, q_bias, k_bias)
    q, k, v = _qkv_norm_rope(tensors, (num_heads, num_kv_heads, head_dim, packing, *options))
    return q, k, v


def _parts(qkv: Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as views of a blocked buffer."""
    sizes = num_heads, num_kv_heads, head_dim
    if torch.compiler.is_compiling() or not plain((qkv,)):
        check_packed(qkv, *sizes, "blocked")
        return split_packed(qkv, num_heads, num_kv_heads, "blocked")
    first = qkv.storage_offset()
    q, k, v = (
        qkv.as_strided(shape, strides, first + offset)
        for shape, strides, offset in _geometry(qkv.shape, qkv.stride(), qkv.dtype, *sizes)
    )
    return q, k, v


@functools.lru_cache(maxsize=1024)
def _geometry(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[tuple[Sequence[int], Sequence[int], int], ...]:
    """Shape, strides and offset of q, k and v in a buffer: to cut it by these takes a third of the time."""
    qkv = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    check_packed(qkv, num_heads, num_kv_heads, head_dim, "blocked")
    parts = split_packed(qkv, num_heads, num_kv_heads, "blocked")
    return tuple((part.shape, part.stride(), int(part.storage_offset())) for part in parts)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    *,
    norm: str,
    rotary_dim: int,
    eps: float | None = None,
    norm_scope: str = "head",
    norm_first: bool = True,
    rotary_start: int = 0,
    pairing: str = "halves",
    conjugate: bool = False,
    mrope_layout: str = "none",
    mrope_section: Sequence[int] = (),
    out_order: str = "bshd",
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Normalise and rotate each head of q [B, S, H, D] and k [B, S, KV, D]; any strides, the last is 1."""
    options = (
        norm, eps, norm_scope, norm_first, rotary_dim, rotary_start, pairing, conjugate, mrope_layout,
        tuple(mrope_section), out_order, out_dtype, backend,
    )  # fmt: skip
    q, k = _qk_norm_rope((q, k, cos, sin, positions, q_weight, k_weight, q_bias, k_bias), options)
    return q, k


def norm_rope(
    x: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    norm: str,
    rotary_dim: int,
    eps: float | None = None,
    norm_scope: str = "head",
    norm_first: bool = True,
    rotary_start: int = 0,
    pairing: str = "halves",
    conjugate: bool = False,
    mrope_layout: str = "none",
    mrope_section: Sequence[int] = (),
    out_order: str = "bshd",
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """`qk_norm_rope` for one tensor [B, S, H, D]."""
    options = (
        norm, eps, norm_scope, norm_first, rotary_dim, rotary_start, pairing, conjugate, mrope_layout,
        tuple(mrope_section), out_order, out_dtype, backend,
    )  # fmt: skip
    result: Tensor = _norm_rope((x, cos, sin, positions, weight, bias), options)
    return result
