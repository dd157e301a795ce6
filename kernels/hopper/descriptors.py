"""Tensor maps: how TMA sees a `[B, S, H, D]` tensor of any strides, without a copy.

A map lists the axes as (batch, head, row, lane). What lies past the end of an axis reads as zero and is not written,
so ragged sequences and head dimensions below the tile's cost no branch and never touch a neighbour.

TMA needs a 16-byte aligned base and strides that are multiples of 16 bytes, and no axis of stride 0; anything else is
copied first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .build import tensor_map_layout

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
"""Triton's names."""


class _Valid(TensorDescriptor):  # type: ignore[misc]
    """A descriptor whose arguments are known to be valid: Triton's checks cost more than a launch."""

    def __post_init__(self) -> None:
        pass


@dataclass(frozen=True)
class Map:
    """A tensor map without its address."""

    shape: list[int]
    strides: list[int]
    block: list[int]
    layout: Any
    dtype: torch.dtype

    def at(self, x: Any) -> TensorDescriptor:
        """The map of `x`, a tensor or an address with a dtype, which has this shape and these strides."""
        return _Valid(x, self.shape, self.strides, self.block, self.layout)


@functools.lru_cache(maxsize=4096)
def _strides_fit(shape: Sequence[int], strides: Sequence[int], size: int) -> bool:
    unit = 16 // size
    outer = zip(shape[:-1], strides[:-1], strict=True)
    return strides[-1] == 1 and all(axis == 1 or (stride > 0 and stride % unit == 0) for axis, stride in outer)


def fits(x: Tensor) -> bool:
    """Whether TMA can read and write `x` in place."""
    return x.data_ptr() % 16 == 0 and _strides_fit(x.shape, x.stride(), x.element_size())


def readable(x: Tensor) -> Tensor:
    """`x`, or a contiguous copy where TMA cannot read it."""
    return x if fits(x) else x.clone(memory_format=torch.contiguous_format)


def tensor_map(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, rows: int, lanes: int) -> Map:
    """Map of a `[B, S, H, D]` tensor that `fits`, by tiles of `rows` of one head and `lanes` of the feature axis."""
    batch, length, heads, dim = shape
    of_batch, of_row, of_head, _ = strides
    unit = 16 // dtype.itemsize  # stands in for the stride of an axis of one element, which may be anything
    outer = [of_batch if batch > 1 else unit, of_head if heads > 1 else unit, of_row if length > 1 else unit]
    block = [1, 1, rows, lanes]
    return Map([batch, heads, length, dim], [*outer, 1], block, tensor_map_layout(DTYPES[dtype], block), dtype)


def spread_rows_map(heads: int, length: int, dim: int, block: Sequence[int]) -> Map:
    """Map of a contiguous float32 `[heads, length, dim]`, `length` a multiple of 8, by tiles whose row 8 a + 2 j + h in
    shared memory is row 8 a + 4 h + j of the tensor (`backward_state.to_store`). Axes: head, a, j, h, lane."""
    layout = tensor_map_layout("fp32", block)
    strides = [length * dim, 8 * dim, dim, 4 * dim, 1]
    return Map([heads, length // 8, 4, 2, dim], strides, list(block), layout, torch.float32)


def rows_map(tiles: int, rows: int) -> Map:
    """Map of float32 per-row values, contiguous, `tiles` tiles of `rows`."""
    block = [1, rows]
    return Map([tiles, rows], [rows, 1], block, tensor_map_layout("fp32", block, swizzled=False), torch.float32)
