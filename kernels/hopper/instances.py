"""The argument lists of the kernels: names and types in order, one place for compile checks and for the launch.

Every kernel takes tensor maps, then pointers, then numbers, then its template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .backward import backward_kernel
from .build import Instance, tensor_map_type
from .forward import forward_kernel
from .templates import AnyTemplate, BackwardTemplate, ForwardTemplate
from .wide_keys import wide_keys_kernel
from .wide_queries import wide_queries_kernel

_ROWS = ("row_low", "row_high", "labels", "ranges")
_BAND = ("band_low", "band_high", "rows_stride", "ranges_stride")


def instance(template: AnyTemplate, dtype: str) -> Instance:
    """The kernel of a template. `dtype`: "bf16" or "fp16"."""
    t = template
    row = tensor_map_type("fp32", (1, t.block_m), swizzled=False)

    rows = dict(_all("*i32", *_ROWS))
    if t.values:
        rows["row_low"] = "*fp32" if t.mask == "values32" else f"*{dtype}"

    def maps(**tiles: tuple[int, int]) -> dict[str, str]:
        return {name: tensor_map_type(dtype, (1, 1, rows, lanes)) for name, (rows, lanes) in tiles.items()}

    if isinstance(t, ForwardTemplate):
        tiles = maps(q=(64, t.qk_lanes), k=(t.block_n, t.qk_lanes), v=(t.block_n, t.v_dim), o=(64, t.o_lanes))
        arguments = {
            **tiles,
            "o_ptr": f"*{dtype}",
            **_all("*fp32", "lse", "sinks"),
            **rows,
            "counter": "*i32",
            **_all("i64", "stride_b", "stride_h", "stride_s"),
            **_all("i32", "v_head_dim", "batch", "heads", "group", "seq_q", "seq_k", "head_chunk", *_BAND),
            **_all("fp32", "scale", "cap_scale"),
        }
        return _instance(forward_kernel, arguments, t)
    scales = _all("fp32", "scale", "cap_scale", "grad_scale")
    keys, values = (t.block_n, t.qk_dim), (t.block_n, t.v_dim)
    if isinstance(t, BackwardTemplate):
        keys, values = (64, t.qk_dim), (64, t.v_dim)
        arguments = {
            **maps(q=(t.block_m, t.qk_dim), k=keys, v=values, do=(t.block_m, t.v_dim)),
            "dq": tensor_map_type("fp32", t.dq_box),
            **maps(dk=(64, t.dk_lanes), dv=values),
            "lse": row,
            "delta": row,
            **rows,
            **_all("*i32", "order", "counter"),
            "sums": "*fp32",
            **_all("i32", "kv_heads", "group", "parts", "seq_q", "seq_k", *_BAND),
            **scales,
            **_all("i32", "together", "blocks", "items", "ahead", "ready", "head_size"),
            **_all("i32", "zeroed_at", "summed_at", "turns_at"),
        }
        return _instance(backward_kernel, arguments, t, overlaps=True)
    keys = (t.block_n, t.qk_lanes)
    if t.keys_stay:
        arguments = {
            **maps(q=(t.block_m, t.qk_lanes), k=keys, v=values, do=(t.block_m, t.v_dim), dk=keys, dv=values),
            "lse": row,
            "delta": row,
            **rows,
            **_all("i32", "kv_heads", "group", "parts", "seq_q", "seq_k", *_BAND),
            **scales,
        }
        return _instance(wide_keys_kernel, arguments, t)
    arguments = {
        **maps(q=(64, t.qk_lanes), k=keys, v=values, do=(64, t.v_dim), dq=(64, t.qk_lanes)),
        **_all("*fp32", "lse", "delta"),
        **rows,
        **_all("i32", "batch", "heads", "group", "seq_q", "seq_k", "head_chunk", *_BAND),
        **scales,
    }
    return _instance(wide_queries_kernel, arguments, t)


def _all(kind: str, *names: str) -> Mapping[str, str]:
    return dict.fromkeys(names, kind)


def _instance(kernel: Any, arguments: Mapping[str, str], template: AnyTemplate, *, overlaps: bool = False) -> Instance:
    return Instance(kernel, arguments, template, template.num_warps, template.max_registers, overlaps)
