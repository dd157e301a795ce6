"""Teaches Triton-Ascend 3.2.0's CPU interpreter what it lacks (test only).

The interpreter runs kernel source on numpy arrays. `extract_slice` and `insert_slice` call into a builder it does not
have; and it knows `tl.max` by the function that combines two elements, which 3.2.0 has given another name: without it
every element is a call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.language import standard
from triton.runtime.interpreter import TensorHandle
from triton.triton_patch.language.standard import _elementwise_max_default


def _integer(value: Any) -> int:
    while hasattr(value, "handle"):
        value = value.handle
    value = getattr(value, "value", value)
    return int(np.asarray(getattr(value, "data", value)).reshape(-1)[0])


def _index(offsets: Any, sizes: Any, strides: Any) -> tuple[slice, ...]:
    cuts = []
    for offset, size, stride in zip(offsets, sizes, strides, strict=True):
        first, count, step = _integer(offset), _integer(size), _integer(stride)
        cuts.append(slice(first, first + (count - 1) * step + 1, step))
    return tuple(cuts)


def extract_slice(ful: Any, offsets: Any, sizes: Any, strides: Any, *_: Any, **__: Any) -> Any:
    part = ful.handle.data[_index(offsets, sizes, strides)].copy()
    assert part.shape == tuple(map(_integer, sizes)), "extract_slice reaches beyond the tensor"
    return tl.tensor(TensorHandle(part, ful.handle.dtype.scalar), tl.block_type(ful.type.scalar, list(part.shape)))


def insert_slice(ful: Any, sub: Any, offsets: Any, sizes: Any, strides: Any, *_: Any, **__: Any) -> Any:
    data = ful.handle.data.copy()
    data[_index(offsets, sizes, strides)] = sub.handle.data
    return tl.tensor(TensorHandle(data, ful.handle.dtype.scalar), ful.type)


def install(*modules: Any) -> None:
    """Give the kernels of these modules the slice operations of this file, and the interpreter the fast `tl.max`."""
    standard._elementwise_max = _elementwise_max_default
    for module in modules:
        module.extract_slice = extract_slice
        module.insert_slice = insert_slice
