"""The argument lists of the kernels: names and types in order, one place for compile checks and for the launch."""

from __future__ import annotations

from .backward import backward_kernel
from .backward_wide import backward_wide_kernel
from .build import Instance, tensor_map_type
from .forward import forward_kernel
from .templates import BackwardTemplate, ForwardTemplate

_INT, _FLOAT = "i32", "fp32"


def forward_instance(template: ForwardTemplate, dtype: str) -> Instance:
    """`dtype`: "bf16" or "fp16"."""
    q = (1, 1, 64, template.qk_dim)
    k = (1, 1, template.block_n, template.qk_dim)
    v = (1, 1, template.block_n, template.v_dim)
    o = (1, 1, 64, template.v_dim)
    arguments = {
        **{name: tensor_map_type(dtype, block) for name, block in {"q": q, "k": k, "v": v, "o": o}.items()},
        "o_ptr": f"*{dtype}",
        **dict.fromkeys(("stride_b", "stride_h", "stride_s"), "i64"),
        "v_head_dim": _INT,
        **dict.fromkeys(("lse", "sinks"), "*fp32"),
        **dict.fromkeys(("row_low", "row_high", "labels", "ranges", "counter"), "*i32"),
        **dict.fromkeys(
            (
                "batch",
                "heads",
                "group",
                "seq_q",
                "seq_k",
                "head_chunk",
                "band_low",
                "band_high",
                "rows_stride",
                "ranges_stride",
            ),
            _INT,
        ),
        **dict.fromkeys(("scale", "cap_scale"), _FLOAT),
    }
    return Instance(forward_kernel, arguments, template, num_warps=4, max_registers=template.max_registers)


def backward_instance(template: BackwardTemplate, dtype: str) -> Instance:
    """`dtype`: "bf16" or "fp16"."""
    q = (1, 1, template.block_m, template.qk_lanes)
    do = (1, 1, template.block_m, template.v_lanes)
    k = (1, 1, template.block_n, template.qk_lanes)
    v = (1, 1, template.block_n, template.v_lanes)
    dq = (1, 1, template.block_m, template.dq_lanes)
    row = tensor_map_type("fp32", (1, template.block_m), swizzled=False)
    arguments = {
        **{name: tensor_map_type(dtype, block) for name, block in {"q": q, "k": k, "v": v, "do": do}.items()},
        "dq": tensor_map_type("fp32", dq),
        **{name: tensor_map_type(dtype, block) for name, block in {"dk": k, "dv": v}.items()},
        "lse": row,
        "delta": row,
        **dict.fromkeys(("row_low", "row_high", "labels", "ranges", "order", "turns"), "*i32"),
        **dict.fromkeys(
            ("kv_heads", "group", "seq_q", "seq_k", "band_low", "band_high", "rows_stride", "ranges_stride"), _INT
        ),
        **dict.fromkeys(("scale", "cap_scale", "grad_scale"), _FLOAT),
    }
    kernel = backward_wide_kernel if template.wide else backward_kernel
    return Instance(kernel, arguments, template, num_warps=template.num_warps, max_registers=template.max_registers)
