"""The `ascend_flash` back end: `attention` forward by our own kernel, for what the vendor's operators do not take."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf
from typing import Any

import torch
from torch import Tensor

from ..attention_problem import Problem
from .environment import platform_of
from .flash_kernels import flash_forward_kernel
from .launch import Launch, start
from .tiling import Mask, longest_first
from .tiling import Problem as Sizes
from .tiling_key import DType

TILES = ((64, (64, 128)), (128, (64, 128)), (256, (32, 64)))
"""Up to this head_dim: query rows and key columns of a tile. Each fits the smallest chip with double buffers."""
TILES_WITH_INPUT = ((64, (64, 64)), (128, (32, 64)), (256, (32, 32)))
"""The same where a mask or segment ids lie beside the scores in the Unified Buffer."""
DTYPES = {torch.bfloat16: DType.BFLOAT16, torch.float16: DType.FLOAT16, torch.float32: DType.FLOAT32}


def forward(problem: Problem, order: str) -> tuple[Tensor, Tensor]:
    """(out, lse); see `AttentionBackend`."""
    out, lse = problem.empty_out(order), problem.empty_lse()
    if not out.numel():
        lse.fill_(-torch.inf)
    elif not problem.k.shape[1]:
        out.zero_()
        lse.fill_(-torch.inf)
        if problem.sinks is not None:
            lse.copy_(problem.sinks[None, :, None])
    else:
        start(forward_launch(problem, out, lse))
    return out, lse


def backward(*_: Any, **__: Any) -> Sequence[Tensor | None]:
    """There is none; the registry does not name this back end for `attention_backward`."""
    raise NotImplementedError('ascend_flash has no backward; use backend="auto", which takes another one for it.')


def forward_launch(problem: Problem, out: Tensor, lse: Tensor) -> Launch:
    """The launch that `forward` starts. There must be queries and keys."""
    q, k, v, seen = problem.q, problem.k, problem.v, problem.seen
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    tiles = TILES if seen.mask is None and seen.q_segments is None else TILES_WITH_INPUT
    rows, cols = next(tile for most, tile in tiles if head_dim <= most)
    platform = platform_of(q.device)
    order = _row_order(problem, rows, cols)
    mask = None if seen.mask is None else seen.mask.expand(batch, heads, queries, keys)
    additive = mask is not None and mask.dtype != torch.bool
    segments = _segments(problem)
    blocks = batch * heads * order.numel()
    arguments: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "out": out,
        "lse": lse,
        "row_order": order,
        "sinks": q if problem.sinks is None else problem.sinks,
        "mask": q if mask is None else mask if additive else mask.view(torch.uint8),
        "q_segments": order if segments is None else segments[0],
        "k_segments": order if segments is None else segments[1],
        "q_segment_b": 0 if segments is None else segments[0].stride(0),
        "k_segment_b": 0 if segments is None else segments[1].stride(0),
        "batch_heads": batch * heads,
        "row_blocks": order.numel(),
        "queries": queries,
        "keys": keys,
        "offset": seen.offset,
        "left": seen.left or 0,
        "right": seen.right or 0,
        "scale": float(problem.scale),
        "softcap": float(problem.softcap or 1.0),
    }
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        arguments |= {f"{name}_{axis}": tensor.stride(i) for i, axis in enumerate("bsh")}
    arguments |= {f"mask_{axis}": 0 if mask is None else mask.stride(i) for i, axis in enumerate("bhqk")}
    constants = {
        "HEADS": heads,
        "GROUP": heads // kv_heads,
        "D": head_dim,
        "ROWS": rows,
        "COLS": cols,
        "LEFT": seen.left is not None,
        "RIGHT": seen.right is not None,
        "MASK": "none" if mask is None else "add" if additive else "bool",
        "SEGMENTS": segments is not None,
        "SINKS": problem.sinks is not None,
        "SOFTCAP": problem.softcap != 0.0,
    }
    return Launch(flash_forward_kernel, min(platform.cube_cores, blocks), arguments, constants)


def _row_order(problem: Problem, rows: int, cols: int) -> Tensor:
    """Query blocks from the longest to the shortest."""
    seen, q = problem.seen, problem.q
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads = problem.k.shape[1:3]
    visible = Mask(
        pre_tokens=inf if seen.left is None else seen.left,
        next_tokens=inf if seen.right is None else seen.right,
        right_down=seen.offset != 0,
    )
    sizes = Sizes(batch, kv_heads, heads // kv_heads, queries, keys, head_dim, DTYPES[q.dtype], visible)
    return _order_tensor(sizes, rows, cols, q.device)


@lru_cache(maxsize=256)
def _order_tensor(sizes: Sizes, rows: int, cols: int, device: torch.device) -> Tensor:
    return torch.tensor(longest_first(sizes, rows, cols), dtype=torch.int32, device=device)


def _segments(problem: Problem) -> tuple[Tensor, Tensor] | None:
    """Segment ids `[B, S]`, or None."""
    seen = problem.seen
    if seen.q_segments is None or seen.k_segments is None:
        return None
    batch, queries = problem.q.shape[:2]
    kinds = seen.q_segments.to(torch.int32), seen.k_segments.to(torch.int32)
    return kinds[0].contiguous().expand(batch, queries), kinds[1].contiguous().expand(batch, problem.k.shape[1])
