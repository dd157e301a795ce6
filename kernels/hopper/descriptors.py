"""Tensor maps: how TMA sees a `[B, S, H, D]` tensor of any strides, without a copy.

A map lists the axes as (batch, head, row, lane). What lies past the end of an axis reads as zero and is not written, so ragged sequences and
head dimensions below the tile's cost no branch and never touch a neighbour.

TMA needs a 16-byte aligned base and strides that are multiples of 16 bytes, and no axis of stride 0; anything else is copied first.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .build import tensor_map_layout

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
"""Triton's names."""


class TensorMap(TensorDescriptor):
    """A descriptor whose arguments are known to be valid: Triton's checks cost more than the launch."""

    def __post_init__(self) -> None:
        pass


@functools.cache
def _layout(dtype: torch.dtype, block: tuple[int, ...], swizzled: bool) -> object:
    return tensor_map_layout(DTYPES[dtype], block, swizzled=swizzled)


def fits(x: Tensor) -> bool:
    """Whether TMA can read and write `x` in place."""
    unit = 16 // x.element_size()
    if x.stride(-1) != 1 or x.data_ptr() % 16:
        return False
    return all(size == 1 or (stride > 0 and stride % unit == 0) for size, stride in zip(x.shape[:-1], x.stride()[:-1]))


def readable(x: Tensor) -> Tensor:
    """`x`, or a contiguous copy where TMA cannot read it."""
    return x if fits(x) else x.contiguous() if not x.is_contiguous() else x.clone()


def tensor_map(x: Tensor, rows: int, lanes: int) -> TensorMap:
    """Map of `x`, `[B, S, H, D]`, by tiles of `rows` of one head and `lanes` of the feature axis. `fits(x)` holds."""
    batch, length, heads, dim = x.shape
    of_batch, of_row, of_head, _ = x.stride()
    unit = 16 // x.element_size()  # stands in for the stride of an axis of one element, which may be anything
    strides = [of_batch if batch > 1 else unit, of_head if heads > 1 else unit, of_row if length > 1 else unit, 1]
    return _map(x, [batch, heads, length, dim], strides, (1, 1, rows, lanes))


def rows_map(x: Tensor, rows: int) -> TensorMap:
    """Map of per-row values, float32 `[B, H, padded rows]`, contiguous, by tiles of `rows`."""
    return _map(x, [x.numel() // rows, rows], [rows, 1], (1, rows), swizzled=False)


def _map(x: Tensor, shape: list[int], strides: list[int], block: tuple[int, ...], swizzled: bool = True) -> TensorMap:
    return TensorMap(x, shape, strides, list(block), _layout(x.dtype, block, swizzled))
