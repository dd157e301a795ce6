"""Tensor maps: how TMA sees a `[B, S, H, D]` tensor of any strides, without a copy.

A map lists the axes as (batch, head, row, lane). What lies past the end of an axis reads as zero and is not written, so ragged sequences and
head dimensions below the tile's cost no branch and never touch a neighbour.

TMA needs a 16-byte aligned base and strides that are multiples of 16 bytes, and no axis of stride 0; anything else is copied first.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .build import tensor_map_layout

_TYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}


def _fits(x: Tensor) -> bool:
    unit = 16 // x.element_size()
    if x.stride(-1) != 1 or x.data_ptr() % 16:
        return False
    return all(size == 1 or (stride > 0 and stride % unit == 0) for size, stride in zip(x.shape[:-1], x.stride()[:-1]))


def readable(x: Tensor) -> Tensor:
    """`x`, or a contiguous copy where TMA cannot read it."""
    return x if _fits(x) else x.contiguous() if not x.is_contiguous() else x.clone()


def fits(x: Tensor) -> bool:
    """Whether TMA can read and write `x` in place."""
    return _fits(x)


def tensor_map(x: Tensor, rows: int, lanes: int) -> TensorDescriptor:
    """Map of `x`, `[B, S, H, D]`, by tiles of `rows` of one head and `lanes` of the feature axis."""
    unit = 16 // x.element_size()
    shape = [x.shape[0], x.shape[2], x.shape[1], x.shape[3]]
    strides = [x.stride(0), x.stride(2), x.stride(1), 1]
    strides = [stride if size > 1 else unit for size, stride in zip(shape[:-1], strides)] + [1]
    block = [1, 1, rows, lanes]
    return TensorDescriptor(x, shape, strides, block, tensor_map_layout(_TYPES[str(x.dtype)], block))


def rows_map(x: Tensor, rows: int) -> TensorDescriptor:
    """Map of per-row values, float32 `[B, H, padded rows]`, contiguous, by tiles of `rows`."""
    block = [1, rows]
    return TensorDescriptor(x, [x.numel() // rows, rows], [rows, 1], block, tensor_map_layout("fp32", block, swizzled=False))
