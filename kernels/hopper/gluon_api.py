"""The names of Gluon that moved between Triton 3.6 and 3.9, under one spelling.

| here                | Triton 3.6                                       | Triton 3.9             |
|---------------------|--------------------------------------------------|------------------------|
| `aggregate`         | `triton.language.core._aggregate`                | `gluon.aggregate`      |
| `tma_load`          | `tma.async_copy_global_to_shared`                | `tma.async_load`       |
| `tma_store`         | `tma.async_copy_shared_to_global`                | `tma.async_store`      |
| `tma_reduce_add`    | no Gluon name, but the builder has the operation | `tma.async_atomic_add` |
| `partition_barrier` | `gl.thread_barrier`                              | `gl.barrier`           |
| `reinterpret`       | `buffer._reinterpret`                            | `buffer.reinterpret`   |

Names are looked up, not versions: whatever the installed Triton offers decides.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from typing_extensions import dataclass_transform

_aggregate = gluon.aggregate if hasattr(gluon, "aggregate") else core._aggregate
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_load") else tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait
launch_dependents, wait_for_prerequisites = gdc_launch_dependents, gdc_wait
partition_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

if hasattr(tma, "async_atomic_add"):
    tma_reduce_add = tma.async_atomic_add
else:
    from triton._C.libtriton import ir

    @builtin
    def tma_reduce_add(tensor_desc, coord, src, _semantic=None):
        """Add a tile of shared memory to global memory: `cp.reduce.async.bulk.tensor … .add`."""
        coordinates = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(
            ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coordinates, src.handle
        )


@dataclass_transform()
def aggregate(cls):
    """A class of values that kernels pass on together: a field for each annotation, which its constructor takes in
    their order."""
    # A Triton constant, so that what a kernel is cached by tells other fields, or another order, apart.
    names = gl.constexpr(tuple(cls.__annotations__))

    @gluon.constexpr_function
    def __init__(self, *fields):
        for name, field in zip(names.value, fields, strict=True):
            setattr(self, name, field)

    cls.__init__ = __init__
    return _aggregate(cls)


@builtin
def reinterpret(buffer, dtype, shape, layout, _semantic=None):
    """The same shared memory, seen as another tile."""
    method = buffer.reinterpret if hasattr(buffer, "reinterpret") else buffer._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


__all__ = [
    "aggregate",
    "launch_dependents",
    "partition_barrier",
    "reinterpret",
    "tma_load",
    "tma_reduce_add",
    "tma_store",
    "tma_store_wait",
    "wait_for_prerequisites",
]
