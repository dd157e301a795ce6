"""Flash attention in Triton for every GPU from sm_80 on: the launchers. `AttentionBackend` is the contract."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from ..attention_problem import Problem
from ..attention_reference import sinks_gradient
from ..launch import start
from .attention_backward import attention_dkdv, attention_dq
from .attention_common import Ranges, Sight, Sizes
from .attention_forward import attention_forward
from .attention_ranges import attention_ranges
from .attention_rows import attention_delta, attention_tail
from .attention_tiles import Tile, choose_tile

REPEATABLE = True
"""See `recording.py`."""

_DELTA_ROWS = 32


def forward(problem: Problem, order: str) -> tuple[Tensor, Tensor]:
    """(out, lse): one kernel, and one small one before it when the tiles to visit depend on data."""
    problem = _aligned_problem(problem)
    q, k, v = problem.q, problem.k, problem.v
    out, lse = problem.empty_out(order), problem.empty_lse()
    tile = _tile("forward", problem)
    batch, rows, heads, _ = q.shape
    programs = triton.cdiv(rows, tile.block_m) * batch * heads
    if programs:
        with _on(q):
            start(
                attention_forward,
                (programs,),
                (
                    q,
                    k,
                    v,
                    out,
                    lse,
                    problem.sinks,
                    _strides(q),
                    _strides(k),
                    _strides(v),
                    _strides(out),
                    _sight(problem),
                    _ranges(problem, tile.block_m, tile.block_n, own_are_keys=False),
                    _sizes(problem, heads),
                    problem.scale,
                    _softcap(problem),
                ),
                _constants(problem, tile),
            )
    return out, lse


def backward(
    problem: Problem,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    needs: Sequence[bool],
    into: Sequence[Tensor | None] = (None, None, None),
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v and the sinks: kernels for delta, dq, and dk with dv, launched where needed."""
    problem = _aligned_problem(problem)
    grad_out, out = _aligned(grad_out), _aligned(out)
    dq, dk, dv = problem.gradients(needs, into)
    for name, given in zip(("dq", "dk", "dv"), (dq, dk, dv), strict=True):
        if given is not None and not _is_aligned(given):
            raise ValueError(
                f"into: {name} has strides {list(given.stride())}; its rows must start at multiples of 16 bytes."
            )
    with _on(problem.q):
        rows = (lse, _delta(problem, grad_out, grad_lse, out), tail(problem, lse))
        if dq is not None:
            _launch_dq(problem, grad_out, rows, dq)
        if dk is not None or dv is not None:
            # One kernel computes both; the one that nobody asked for is written and dropped.
            dk_out = torch.empty_like(problem.k) if dk is None else dk
            dv_out = torch.empty_like(problem.v) if dv is None else dv
            _launch_dkdv(problem, grad_out, rows, dk_out, dv_out)
    sinks = problem.sinks
    return dq, dk, dv, sinks_gradient(sinks, lse, rows[1]) if sinks is not None and needs[3] else None


_Rows = tuple[Tensor, Tensor, Tensor | None]
"""lse, delta, tail: `[B, Hq, Sq]` float32 (`attention_rows.py`)."""


def _launch_dq(problem: Problem, grad_out: Tensor, rows: _Rows, dq: Tensor) -> None:
    q, k, v = problem.q, problem.k, problem.v
    batch, queries, heads, _ = q.shape
    tile = _tile("dq", problem)
    programs = triton.cdiv(queries, tile.block_m) * batch * heads
    if programs:
        start(
            attention_dq,
            (programs,),
            (
                q,
                k,
                v,
                grad_out,
                *rows,
                dq,
                _strides(q),
                _strides(k),
                _strides(v),
                _strides(grad_out),
                _strides(dq),
                _sight(problem),
                _ranges(problem, tile.block_m, tile.block_n, own_are_keys=False),
                _sizes(problem, heads),
                problem.scale,
                _softcap(problem),
            ),
            _constants(problem, tile),
        )


def _launch_dkdv(problem: Problem, grad_out: Tensor, rows: _Rows, dk: Tensor, dv: Tensor) -> None:
    q, k, v = problem.q, problem.k, problem.v
    batch, keys, kv_heads, _ = k.shape
    tile = _tile("dkdv", problem)
    programs = triton.cdiv(keys, tile.block_n) * batch * kv_heads
    if programs:
        start(
            attention_dkdv,
            (programs,),
            (
                q,
                k,
                v,
                grad_out,
                *rows,
                dk,
                dv,
                _strides(q),
                _strides(k),
                _strides(v),
                _strides(grad_out),
                _strides(dk),
                _strides(dv),
                _sight(problem),
                _ranges(problem, tile.block_n, tile.block_m, own_are_keys=True),
                _sizes(problem, kv_heads),
                problem.scale,
                _softcap(problem),
            ),
            _constants(problem, tile),
        )


def _delta(problem: Problem, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor) -> Tensor:
    batch, rows, heads, lanes = out.shape
    delta = problem.empty_lse()
    programs = triton.cdiv(rows, _DELTA_ROWS) * batch * heads
    if programs:
        start(
            attention_delta,
            (programs,),
            (
                out,
                grad_out,
                grad_lse,
                delta,
                _strides(out),
                _strides(grad_out),
                None if grad_lse is None else grad_lse.stride(),
                _sizes(problem, heads),
            ),
            {
                "VALUE_DIM": lanes,
                "BLOCK_M": _DELTA_ROWS,
                "BLOCK_V": triton.next_power_of_2(lanes),
                "ALIGN": _alignment(out),
            },
        )
    return delta


def tail(problem: Problem, lse: Tensor) -> Tensor | None:
    """What float32 has lost of a large lse, `[B, Hq, Sq]`; None for a call without an additive mask."""
    q, k, mask = problem.q, problem.k, problem.seen.mask
    if mask is None or mask.dtype == torch.bool:
        return None
    lost = torch.empty_like(lse)
    tile = _tile("dq", problem)
    batch, rows, heads, _ = q.shape
    programs = triton.cdiv(rows, tile.block_m) * batch * heads
    constants = _constants(problem, tile)
    del constants["VALUE_DIM"], constants["BLOCK_V"]
    if programs:
        start(
            attention_tail,
            (programs,),
            (
                q,
                k,
                problem.sinks,
                lse,
                lost,
                _strides(q),
                _strides(k),
                _sight(problem),
                _ranges(problem, tile.block_m, tile.block_n, own_are_keys=False),
                _sizes(problem, heads),
                problem.scale,
                _softcap(problem),
            ),
            constants,
        )
    return lost


# --- arguments of the kernels ---


def _sight(problem: Problem, bias: bool = True) -> Sight:
    """`Visibility` as a kernel argument; `bias` False: without an additive mask."""
    seen = problem.seen
    mask = seen.mask
    boolean = mask is not None and mask.dtype == torch.bool
    if mask is not None and not boolean and not bias:
        mask = None
    strides: tuple[int, ...] = (0, 0, 0, 0)
    if mask is not None:
        strides = tuple(0 if mask.shape[axis] == 1 else mask.stride(axis) for axis in range(4))
    return Sight(
        positions=seen.positions,
        q_segments=seen.q_segments,
        k_segments=seen.k_segments,
        mask=mask.view(torch.uint8) if mask is not None and boolean else None,
        bias=None if boolean else mask,
        q_segments_stride=_batch_stride(seen.q_segments),
        k_segments_stride=_batch_stride(seen.k_segments),
        mask_batch_stride=strides[0],
        mask_head_stride=strides[1],
        mask_row_stride=strides[2],
        mask_key_stride=strides[3],
        offset=seen.offset,
        left=seen.left,
        right=seen.right,
    )


def _ranges(problem: Problem, own: int, other: int, own_are_keys: bool) -> Ranges:
    """The tiles to visit, `[B or 1, Hq or 1, blocks, 4]`, where only the data knows; None where arithmetic does.

    A mask that differs by head and is added (a position bias) is not read for it: such masks hide little.
    """
    seen, rows, keys = problem.seen, problem.q.shape[1], problem.k.shape[1]
    additive = seen.mask is not None and seen.mask.dtype != torch.bool
    mask = None if additive and seen.mask is not None and seen.mask.shape[1] != 1 else seen.mask
    read = [x for x in (seen.q_segments, seen.k_segments, mask) if x is not None]
    if not read:
        return Ranges(None, 0, 0)
    batch, heads = max(x.shape[0] for x in read), 1 if mask is None else mask.shape[1]
    blocks = torch.empty(
        (batch, heads, triton.cdiv(keys if own_are_keys else rows, own), 4), dtype=torch.int32, device=problem.q.device
    )
    floors = seen.row_floors()
    start(
        attention_ranges,
        (blocks.numel() // 4,),
        (
            blocks,
            floors,
            None
            if floors is None
            else tuple(0 if floors.shape[axis] == 1 else floors.stride(axis) for axis in range(2)),
            _sight(problem, bias=mask is not None),
            Sizes(rows, keys, heads, 1),
        ),
        {
            "OWN_ARE_KEYS": own_are_keys,
            "OWN": own,
            "OTHER": other,
        },
    )
    return Ranges(blocks, _batch_stride(blocks), 0 if heads == 1 else blocks.stride(1))


def _sizes(problem: Problem, heads: int) -> Sizes:
    return Sizes(problem.q.shape[1], problem.k.shape[1], heads, problem.q.shape[2] // problem.k.shape[2])


def _softcap(problem: Problem) -> float | None:
    return problem.softcap if problem.softcap > 0 else None


def _constants(problem: Problem, tile: Tile) -> dict[str, Any]:
    head_dim, value_dim = problem.q.shape[3], problem.v.shape[3]
    return {
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_V": max(16, triton.next_power_of_2(value_dim)),
        "PRECISION": "tf32x3" if problem.q.dtype == torch.float32 else "tf32",
        "ALIGN": _alignment(problem.q),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _aligned_problem(problem: Problem) -> Problem:
    q, k, v = (_aligned(x) for x in (problem.q, problem.k, problem.v))
    return problem if q is problem.q and k is problem.k and v is problem.v else replace(problem, q=q, k=k, v=v)


def _aligned(x: Tensor) -> Tensor:
    """`x`, or a copy of it if its rows do not start at multiples of 16 bytes or its lanes are apart (the expanded
    gradient of a sum).

    Rows that are not aligned are loaded lane by lane, each with its own address in a register. That is slow, and on
    sm_90 such a kernel read wrong addresses (head_dim 40 and 24, Triton 3.6.0, seen on an H100): `_triton_supports`
    wants head_dim a multiple of 8.
    """
    return x if _is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def _is_aligned(x: Tensor) -> bool:
    align = _alignment(x)
    rows = all(x.shape[axis] == 1 or x.stride(axis) % align == 0 for axis in range(3))
    return rows and x.stride(3) == 1 and x.data_ptr() % 16 == 0


def _alignment(x: Tensor) -> int:
    """Elements in 16 bytes."""
    return 16 // x.element_size()


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Batch, row and head stride in units of 16 bytes."""
    batch, row, head, _ = x.stride()
    align = _alignment(x)
    return batch // align, row // align, head // align


def _batch_stride(x: Tensor | None) -> int:
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)


def _tile(name: str, problem: Problem) -> Tile:
    head_dim = max(problem.q.shape[3], problem.v.shape[3])
    return choose_tile(name, _architecture(problem.q.device), head_dim, problem.q.dtype)


def _architecture(device: torch.device) -> int:
    """10 major + minor; 80 for the interpreter."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _on(x: Tensor) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(x.device) if x.device.type == "cuda" else contextlib.nullcontext()
