"""The `ascend` back end of the norm + rotation operators: from streams to one kernel launch (see `streams.Backend`).

What the kernels do not take is computed by the `reference` back end's ATen operations on the same device; `uncovered`
says which cases those are and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..options import Options
from ..streams import Copy, Gradients, GradStream, Stream, Tables
from .environment import platform_of
from .launch import Launch, start
from .norm_rope_kernels import backward_kernel, forward_kernel
from .row_tiling import RowTile, tile_rows

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def forward(streams: Sequence[Stream], tables: Tables | None, options: Options, copy: Copy | None = None) -> None:
    """Fill `out` of every stream, and of `copy`, in one launch."""
    if uncovered(options, [stream.x for stream in streams]):
        return reference.forward(streams, tables, options, copy)
    if streams[0].out.shape[:2].numel():
        start(forward_launch(streams, tables, options, copy))
    return None


def backward(
    streams: Sequence[GradStream],
    tables: Tables | None,
    options: Options,
    copy: Copy | None = None,
    needs_tables: bool = False,
) -> Gradients:
    """Fill `dx` of every stream, and `copy.out`, in one launch; sum the rows of the weight gradients."""
    no_tokens = not streams[0].grad.shape[:2].numel()
    if needs_tables or no_tokens or uncovered(options, [s.grad for s in streams]) or any(map(_sums_per_head, streams)):
        return reference.backward(streams, tables, options, copy, needs_tables)
    launch, sums = backward_launch(streams, tables, options, copy)
    start(launch)
    return Gradients(
        [_finish(rows, stream.weight) for (rows, _), stream in zip(sums, streams, strict=True)],
        [_finish(rows, stream.bias) for (_, rows), stream in zip(sums, streams, strict=True)],
    )


def uncovered(options: Options, tensors: Sequence[Tensor]) -> str | None:
    """Why the kernels do not take this call, or None."""
    if options.norm != "none" and options.norm_scope == "hidden":
        return "norm_scope='hidden' reduces over all heads, which are several tiles"
    for tensor in tensors:
        if tensor.dtype not in FLOATS:
            return f"the vector cores have no {tensor.dtype} arithmetic"
    return None


def _sums_per_head(stream: GradStream) -> bool:
    """Whether a weight or bias gradient has one row a head; the kernel keeps a single row on chip."""
    wanted = ((stream.weight, stream.needs_weight), (stream.bias, stream.needs_bias))
    return any(needed and value is not None and _kind(value, stream.grad) == "heads" for value, needed in wanted)


def forward_launch(
    streams: Sequence[Stream], tables: Tables | None, options: Options, copy: Copy | None = None
) -> Launch:
    """The launch that `forward` starts. There must be at least one token."""
    batch, sequence, _, head_dim = streams[0].out.shape
    moved = [] if copy is None else [copy.x, copy.out]
    tokens = _Tokens(batch, sequence, [*(t for s in streams for t in (s.x, s.out)), *moved], tables, options)
    tile = _tile(tokens, [_heads(s.x) for s in streams], copy, head_dim, backward=False)
    arguments, constants = _common(tokens, tile, options, head_dim)
    for i in range(2):
        # An absent second stream is the first one with no heads: every pointer is valid and none is used.
        stream = streams[i] if i < len(streams) else streams[0]
        groups, heads = _heads(stream.x)
        arguments |= {f"x{i}": stream.x, f"y{i}": stream.out}
        arguments |= {f"weight{i}": _parameter(stream.weight, stream.x), f"bias{i}": _parameter(stream.bias, stream.x)}
        arguments |= _strides(f"x{i}", stream.x, tokens, grouped=True) | _strides(f"y{i}", stream.out, tokens)
        constants |= {
            f"GROUPS{i}": groups,
            f"HEADS{i}": heads if i < len(streams) else 0,
            f"TILE{i}": tile.heads[i] if i < len(streams) else 1,
            f"WEIGHT{i}": _kind(stream.weight, stream.out),
            f"BIAS{i}": _kind(stream.bias, stream.out),
        }
    _add_copy(arguments, constants, copy, tile, tokens, streams[0].x)
    return Launch(forward_kernel, tokens.programs, arguments, constants)


def backward_launch(
    streams: Sequence[GradStream], tables: Tables | None, options: Options, copy: Copy | None = None
) -> tuple[Launch, list[tuple[Tensor | None, Tensor | None]]]:
    """The launch that `backward` starts, and each stream's rows [programs, D] of weight and bias gradients."""
    batch, sequence, _, head_dim = streams[0].grad.shape
    moved = [] if copy is None else [copy.x, copy.out]
    touched = [t for s in streams for t in (s.grad, s.x, s.dx) if t is not None]
    tokens = _Tokens(batch, sequence, touched + moved, tables, options)
    shapes = [_heads(_input_shaped(stream)) for stream in streams]
    tile = _tile(tokens, shapes, copy, head_dim, backward=True)
    arguments, constants = _common(tokens, tile, options, head_dim)
    sums: list[tuple[Tensor | None, Tensor | None]] = []
    for i in range(2):
        absent = i >= len(streams)
        stream = streams[0] if absent else streams[i]
        normed = options.norm != "none"
        needs_weight, needs_bias = normed and stream.needs_weight, normed and stream.needs_bias
        rows = [
            stream.grad.new_empty((tokens.programs, head_dim), dtype=torch.float32) if needed and not absent else None
            for needed in (needs_weight, needs_bias)
        ]
        if not absent:
            sums.append((rows[0], rows[1]))
        x = stream.x if stream.x is not None else stream.grad
        dx = stream.dx if stream.dx is not None else stream.grad
        groups, heads = shapes[0 if absent else i]
        arguments |= {f"grad{i}": stream.grad, f"x{i}": x, f"dx{i}": dx}
        arguments |= {f"weight{i}": _parameter(stream.weight, stream.grad)}
        arguments |= {
            f"d{name}{i}": stream.grad if row is None else row
            for name, row in zip(("weight", "bias"), rows, strict=True)
        }
        arguments |= _strides(f"g{i}", stream.grad, tokens)
        arguments |= _strides(f"x{i}", x, tokens, grouped=True) | _strides(f"d{i}", dx, tokens, grouped=True)
        constants |= {
            f"GROUPS{i}": groups,
            f"HEADS{i}": 0 if absent else heads,
            f"TILE{i}": 1 if absent else tile.heads[i],
            f"WEIGHT{i}": _kind(stream.weight, stream.grad),
            f"NEEDS_X{i}": stream.dx is not None,
            f"NEEDS_WEIGHT{i}": needs_weight,
            f"NEEDS_BIAS{i}": needs_bias,
        }
    _add_copy(arguments, constants, copy, tile, tokens, streams[0].grad)
    return Launch(backward_kernel, tokens.programs, arguments, constants), sums


class _Tokens:
    """How the kernel walks the tokens: as one run if every tensor has one stride for it, else as [batch, sequence]."""

    def __init__(
        self, batch: int, sequence: int, tensors: Sequence[Tensor], tables: Tables | None, options: Options
    ) -> None:
        self.count = batch * sequence
        self.platform = platform_of(tensors[0].device)
        self.programs = min(self.platform.vector_cores, self.count)
        mrope = options.mrope_layout != "none"
        self.cos = self.sin = self.positions = None
        rows = list(tensors)
        if tables is not None:
            cos, sin = _table(tables.cos), _table(tables.sin)
            if tables.positions is None:
                self.cos, self.sin = (tables.table_view(t, batch, sequence, mrope) for t in (cos, sin))
                rows += [self.cos[0], self.sin[0]]
            else:
                self.cos, self.sin = cos, sin
                self.positions = _integers(tables).positions_view(batch, sequence, mrope)
        self.one_run = self.positions is None and all(_run_stride(t) is not None for t in rows)
        self.sequence = self.count if self.one_run else sequence

    def strides(self, tensor: Tensor) -> tuple[int, int]:
        """Batch and token stride of a [B, S, ...] tensor."""
        if self.one_run:
            stride = _run_stride(tensor)
            assert stride is not None
            return 0, stride
        return tensor.stride(0), tensor.stride(1)


def _run_stride(tensor: Tensor) -> int | None:
    """The one stride from token to token of a [B, S, ...] tensor, or None."""
    batch, sequence = tensor.shape[:2]
    if sequence == 1:
        return tensor.stride(0)
    if batch == 1 or tensor.stride(0) == sequence * tensor.stride(1):
        return tensor.stride(1)
    return None


def _tile(
    tokens: _Tokens, heads: Sequence[tuple[int, int]], copy: Copy | None, head_dim: int, *, backward: bool
) -> RowTile:
    counts = [count for _, count in heads] + ([] if copy is None else [copy.x.shape[2]])
    return tile_rows(counts, head_dim, tokens.platform, backward=backward, one_run=tokens.one_run, tokens=tokens.count)


def _common(tokens: _Tokens, tile: RowTile, options: Options, head_dim: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments and constants that do not belong to one stream."""
    mrope = options.mrope_layout != "none"
    section = tuple(options.mrope_section) if mrope else (0, 0, 0)
    arguments: dict[str, Any] = {"tokens": tokens.count, "sequence": tokens.sequence, "eps": float(options.eps or 0.0)}
    for name, table in (("cos", tokens.cos), ("sin", tokens.sin)):
        if table is None or tokens.positions is not None:
            arguments |= {f"{name}_m": 0, f"{name}_b": 0, f"{name}_s": 0 if table is None else table.stride(0)}
        else:
            batch_stride, token_stride = tokens.strides(table[0])
            arguments |= {f"{name}_m": table.stride(0), f"{name}_b": batch_stride, f"{name}_s": token_stride}
        arguments[name] = table
    positions = tokens.positions
    for name, axis in (("m", 0), ("b", 1), ("s", 2)):
        arguments[f"position_{name}"] = 0 if positions is None else positions.stride(axis)
    arguments["positions"] = positions
    constants = {
        "TOKENS": tile.tokens,
        "D": head_dim,
        "NORM": options.norm,
        "NORM_FIRST": options.norm_first,
        "PLUS": 1.0 if options.norm == "rms_one_plus" else 0.0,
        "ENTRIES": 0 if tokens.cos is None else tokens.cos.shape[-1],
        "START": options.rotary_start,
        "PAIRS": 0 if tokens.cos is None else options.rotary_dim // 2,
        "READ": options.reads_adjacent,
        "WRITE": options.writes_adjacent,
        "CONJUGATE": options.conjugate,
        "GATHER": positions is not None,
        "MROPE": options.mrope_layout,
        "SECTION_T": section[0],
        "SECTION_H": section[1],
        "SECTION_W": section[2],
    }
    return arguments, constants


def _add_copy(
    arguments: dict[str, Any],
    constants: dict[str, Any],
    copy: Copy | None,
    tile: RowTile,
    tokens: _Tokens,
    unused: Tensor,
) -> None:
    """V, and a valid pointer for everything that this launch does not use."""
    source, target = (unused, unused) if copy is None else (copy.x, copy.out)
    arguments |= {"v": source, "copy": target}
    for name, tensor in (("v", source), ("copy", target)):
        batch_stride, token_stride = (0, 0) if copy is None else tokens.strides(tensor)
        arguments |= {f"{name}_b": batch_stride, f"{name}_s": token_stride, f"{name}_h": tensor.stride(2)}
    constants |= {
        "COPY_HEADS": 0 if copy is None else copy.x.shape[2],
        "COPY_TILE": 1 if copy is None else tile.heads[-1],
    }
    for name in ("cos", "sin", "positions"):
        if arguments[name] is None:
            arguments[name] = unused


def _heads(x: Tensor) -> tuple[int, int]:
    """Groups and heads a group; only the grouped packing, [B, S, KV, H/KV, D], has more than one group."""
    return (x.shape[2], x.shape[3]) if x.dim() == 5 else (1, x.shape[2])


def _input_shaped(stream: GradStream) -> Tensor:
    """A tensor with the input's axes; without one there is nothing to read or write in them."""
    if stream.x is not None:
        return stream.x
    return stream.grad if stream.dx is None else stream.dx


def _strides(name: str, x: Tensor, tokens: _Tokens, grouped: bool = False) -> dict[str, int]:
    batch_stride, token_stride = tokens.strides(x)
    strides = {f"{name}_b": batch_stride, f"{name}_s": token_stride, f"{name}_h": x.stride(-2)}
    if grouped:
        strides[f"{name}_g"] = x.stride(2) if x.dim() == 5 else 0
    return strides


def _kind(parameter: Tensor | None, heads: Tensor) -> str:
    if parameter is None:
        return "none"
    return "row" if parameter.shape == heads.shape[-1:] else "heads"


def _parameter(parameter: Tensor | None, unused: Tensor) -> Tensor:
    return unused if parameter is None else _narrow(parameter.contiguous())


def _table(table: Tensor) -> Tensor:
    """Lanes side by side: the halves of a complex table have stride 2, and a table is small beside the heads."""
    return _narrow(table if table.stride(-1) == 1 else table.contiguous())


def _integers(tables: Tables) -> Tables:
    positions = tables.positions
    assert positions is not None
    if positions.dtype not in (torch.int32, torch.int64):
        positions = positions.to(torch.int64)
    return Tables(tables.cos, tables.sin, positions)


def _narrow(value: Tensor) -> Tensor:
    return value.to(torch.float32) if value.dtype == torch.float64 else value


def _finish(rows: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    if rows is None or parameter is None:
        return None
    return rows.sum(0).view(parameter.shape).to(parameter.dtype)
