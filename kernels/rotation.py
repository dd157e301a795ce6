"""The rotation alone, as a serving engine calls it: gathered tables, packed sequences, offsets, in place.

Shapes, options and errors are those of `docs/operators.md`; B = batch, S = sequence, H = heads, D = head_dim, R =
rotary_dim, T = entries of a table a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .ops import OPERATORS
from .rope_in_place import rope_in_place
from .streams import Counted

_rope = OPERATORS["rope"]
_Call = tuple[tuple[Tensor | None, ...], tuple[Any, ...]]


def rope(
    x: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    cos_sin_cache: Tensor | None = None,
    rotary_dim: int | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    seqlen_offset: int | Tensor = 0,
    rotary_start: int = 0,
    pairing: str = "halves",
    conjugate: bool = False,
    mrope_layout: str = "none",
    mrope_section: Sequence[int] = (),
    out_order: str = "bshd",
    out_dtype: torch.dtype | None = None,
    check_positions: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Rotate x, [B, S, H, D] or [S, H, D], any strides but the last.

    cos and sin are aligned with the tokens ([B or 1, S or 1, T] or [S, T]; MRoPE with a leading 3) unless the rows of a
    table [max_position, T] are named: by `positions` ([S], [B, S]; MRoPE with a leading 3; any integer dtype), or
    counted within each sequence from `seqlen_offset`, an int or one per sequence. `cu_seqlens` ([sequences + 1], int32
    or int64) says that x [total, H, D] holds sequences of those bounds one after the other; `max_seqlen`, the longest
    of them, is only compared with the length of the table. `cos_sin_cache` [max_position, cos | sin] stands for both
    tables. `rotary_dim` defaults to twice T.

    A position outside the table makes its token NaN on a device, without a synchronisation; `check_positions` waits for
    the device and raises IndexError (eager calls only).
    """
    tensors, options = _call(
        x,
        cos,
        sin,
        positions,
        cos_sin_cache,
        rotary_dim,
        cu_seqlens,
        max_seqlen,
        seqlen_offset,
        (rotary_start, pairing, conjugate, mrope_layout, tuple(mrope_section)),
        check_positions,
    )
    result: Tensor = _rope(tensors, (*options, out_order, out_dtype, backend))
    return result.squeeze(0) if x.dim() == 3 else result


def rope_(
    x: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    cos_sin_cache: Tensor | None = None,
    rotary_dim: int | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    seqlen_offset: int | Tensor = 0,
    rotary_start: int = 0,
    pairing: str = "halves",
    conjugate: bool = False,
    mrope_layout: str = "none",
    mrope_section: Sequence[int] = (),
    check_positions: bool = False,
    backend: str = "auto",
) -> Tensor:
    """`rope` in place, for inference: rotates x itself and returns it. Raises where a gradient would be recorded."""
    tensors, options = _call(
        x,
        cos,
        sin,
        positions,
        cos_sin_cache,
        rotary_dim,
        cu_seqlens,
        max_seqlen,
        seqlen_offset,
        (rotary_start, pairing, conjugate, mrope_layout, tuple(mrope_section)),
        check_positions,
    )
    rope_in_place(tensors, (*options, backend))
    return x


def _call(
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    cache: Tensor | None,
    rotary_dim: int | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    seqlen_offset: int | Tensor,
    rotation: tuple[Any, ...],
    check_positions: bool,
) -> _Call:
    """The operator's tensors, and its options up to the rotation's."""
    if not isinstance(x, Tensor) or x.dim() not in (3, 4):
        got = f"has shape {list(x.shape)}" if isinstance(x, Tensor) else f"is {x!r}"
        raise (ValueError if isinstance(x, Tensor) else TypeError)(
            f"x {got}; it takes a tensor [sequence, heads, head_dim] or [batch, sequence, heads, head_dim]."
        )
    if x.dim() == 3:
        x = x.unsqueeze(0)
    offsets = seqlen_offset if isinstance(seqlen_offset, Tensor) else None
    offset = 0 if isinstance(seqlen_offset, Tensor) else seqlen_offset
    aligned = positions is None and cu_seqlens is None and offsets is None and offset == 0
    cos, sin = _tables(cos, sin, cache, x.shape[1] if aligned else None)
    if aligned and cos.dim() == (2 if rotation[3] == "none" else 3):
        # [S, T], or [3, S, T]: one table for every batch entry.
        cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    if max_seqlen is not None and not aligned and max_seqlen + offset > cos.shape[0]:
        raise ValueError(
            f"max_seqlen is {max_seqlen} and seqlen_offset {offset}, but the table has {cos.shape[0]} rows; "
            "build a longer table."
        )
    if check_positions and not aligned and not torch.compiler.is_compiling():
        if positions is None:
            positions_read = Counted(cu_seqlens, offsets, offset).positions(x.shape[1], x.device)
        else:
            positions_read = positions
        _check_range(positions_read, cos.shape[0])
    if rotary_dim is None:
        rotary_dim = 2 * cos.shape[-1]
    return (x, cos, sin, positions, cu_seqlens, offsets), (offset, rotary_dim, *rotation)


def _tables(cos: Tensor | None, sin: Tensor | None, cache: Tensor | None, tokens: int | None) -> tuple[Tensor, Tensor]:
    """cos and sin; of a cache its halves, and the first `tokens` rows where the positions are those of the tokens."""
    if cache is None:
        if cos is None or sin is None:
            raise TypeError("cos or sin is missing; pass both tables, or cos_sin_cache.")
        return cos, sin
    if cos is not None or sin is not None:
        raise ValueError("cos or sin is given together with cos_sin_cache; pass one or the other.")
    if cache.dim() != 2 or cache.shape[1] % 2:
        raise ValueError(f"cos_sin_cache has shape {list(cache.shape)}; it takes [max_position, cos | sin].")
    if tokens is not None:
        if tokens > cache.shape[0]:
            raise ValueError(
                f"x has {tokens} tokens a sequence, but cos_sin_cache only {cache.shape[0]} rows; build a longer one."
            )
        cache = cache[:tokens]
    cos, sin = cache.chunk(2, 1)
    return cos, sin


def _check_range(positions: Tensor, rows: int) -> None:
    if not positions.numel():
        return
    # 64 unsigned bits beyond the signed range wrap around to negative positions, which are outside as well.
    low, high = (int(bound) for bound in positions.long().aminmax())
    if low < 0 or high >= rows:
        raise IndexError(
            f"positions go from {low} to {high}, but the table has {rows} rows; build a longer table or correct the "
            "positions."
        )
