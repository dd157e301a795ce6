"""The `triton` back end of the norm + rotation operators: from streams to launches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch
from ..options import Options
from ..replay import Work
from ..streams import Copy, Gradients, GradStream, Stream, Tables, arithmetic_dtype
from . import interpreted
from .norm_rope_kernels import backward_kernel, forward_kernel
from .norm_rope_tiles import (
    Site,
    backward_tiles,
    forward_tiles,
    next_power_of_2,
    shares,
)
from .parameter_sums import reduce_kernel

ARITHMETIC = {torch.float32: tl.float32, torch.float64: tl.float64}
_INT32_MAX = 2**31 - 1
_REDUCED_COLUMNS = 8
"""Columns a program of the reduction sums: few, so that many programs keep many rows in flight."""


def forward(
    streams: Sequence[Stream], tables: Tables | None, options: Options, copy: Copy | None = None
) -> Sequence[Work]:
    """See `streams.Backend`."""
    q, k = streams[0], streams[1] if len(streams) > 1 else None
    batch, sequence, q_heads, head_dim = q.out.shape
    k_heads = k.out.shape[2] if k is not None else 0
    geometry = Geometry(
        options, q.weight, q.bias, None if k is None else k.weight, None if k is None else k.bias, head_dim
    )
    tensors = [q.x, q.out]
    for stream in (k, copy):
        if stream is not None:
            tensors += [stream.x, stream.out]
    layout = Layout(tensors, tables, options, batch, sequence)
    acc = arithmetic_dtype(q.x.dtype, q.out.dtype)
    heavy = acc == torch.float64 or any(stream.bias is not None for stream in streams)
    tiles = forward_tiles(site_of(geometry, layout, q_heads, k_heads, heavy, q.x))
    blocks = triton.cdiv(layout.sequence, tiles.tokens)
    v_heads = copy.x.shape[2] if copy is not None else 0
    grid = (
        layout.batch
        * blocks
        * sum(
            triton.cdiv(heads, size)
            for heads, size in ((q_heads, tiles.q_heads), (k_heads, tiles.k_heads), (v_heads, tiles.v_heads))
        )
    )
    none = q.x  # stands for a pointer that is not read
    q_b, q_s, q_g, q_h = layout.strides(q.x)
    k_b, k_s, _, k_h = layout.strides(None if k is None else k.x)
    v_b, v_s, _, v_h = layout.strides(None if copy is None else copy.x)
    qo_b, qo_s, _, qo_h = layout.strides(q.out)
    ko_b, ko_s, _, ko_h = layout.strides(None if k is None else k.out)
    vo_b, vo_s, _, vo_h = layout.strides(None if copy is None else copy.out)
    pointers = [
        q.x,
        q.out,
        none if k is None else k.x,
        none if k is None else k.out,
        none if copy is None else copy.x,
        none if copy is None else copy.out,
        *geometry.parameters(none),
        *layout.table_arguments(none),
    ]
    numbers = [
        layout.sequence,
        blocks,
        *layout.table_strides,
        *(q_b, q_s, q_g, q_h, k_b, k_s, k_h, v_b, v_s, v_h),
        *(qo_b, qo_s, qo_h, ko_b, ko_s, ko_h, vo_b, vo_s, vo_h),
    ]
    constants = {
        "HQ": q_heads,
        "HK": k_heads,
        "HV": v_heads,
        "GROUP": q.x.shape[3] if q.x.dim() == 5 else 0,
        **geometry.constants,
        **layout.constants(tiles.tokens, max(tiles.q_heads, tiles.k_heads, tiles.v_heads)),
        "ACC": ARITHMETIC[acc],
        "BT": tiles.tokens,
        "BHQ": tiles.q_heads,
        "BHK": tiles.k_heads,
        "BHV": tiles.v_heads,
        "PAD": next_power_of_2(head_dim),
        "OVERLAPS": may_overlap(q.x.device),
    }
    overlaps = constants["OVERLAPS"]
    return [launched(forward_kernel, grid, pointers, numbers, constants, tiles.warps, tiles.registers, overlaps)]


def backward(
    streams: Sequence[GradStream],
    tables: Tables | None,
    options: Options,
    copy: Copy | None = None,
    needs_tables: bool = False,
) -> Gradients:
    """See `streams.Backend`."""
    q, k = streams[0], streams[1] if len(streams) > 1 else None
    batch, sequence, q_heads, head_dim = q.grad.shape
    k_heads = k.grad.shape[2] if k is not None else 0
    geometry = Geometry(
        options, q.weight, q.bias, None if k is None else k.weight, None if k is None else k.bias, head_dim
    )
    tensors = [t for s in streams for t in (s.grad, s.x, s.dx) if t is not None]
    if copy is not None:
        tensors += [copy.x, copy.out]
    layout = Layout(tensors, tables, options, batch, sequence)
    acc = arithmetic_dtype(*(t.dtype for t in tensors))
    heavy = needs_tables or acc == torch.float64 or any(stream.needs_bias for stream in streams)
    tiles = backward_tiles(site_of(geometry, layout, q_heads, k_heads, heavy, q.grad))
    blocks = triton.cdiv(layout.sequence, tiles.tokens)
    total = layout.batch * blocks
    device = q.grad.device

    outputs: list[Tensor | None] = []
    for stream in streams:
        outputs.append(torch.empty_like(stream.weight) if stream.needs_weight and stream.weight is not None else None)
        outputs.append(torch.empty_like(stream.bias) if stream.needs_bias and stream.bias is not None else None)
    sizes = [0 if out is None else out.numel() for out in outputs] + [0] * (4 - len(outputs))
    q_columns, k_columns = sizes[0] + sizes[1], sizes[2] + sizes[3]
    q_tiles, k_tiles = triton.cdiv(q_heads, tiles.q_heads), triton.cdiv(k_heads, tiles.k_heads)
    v_heads = copy.x.shape[2] if copy is not None else 0
    v_tiles = triton.cdiv(v_heads, tiles.v_heads)
    walkers = copiers = total
    if any(sizes):
        walkers, copiers = shares(tiles.programs * device_facts(device)[0], q_tiles + k_tiles, v_tiles, total)
    partial = None
    if any(sizes):
        partial = torch.empty(walkers * (q_tiles * q_columns + k_tiles * k_columns), dtype=acc, device=device)
    dcos = dsin = None
    if needs_tables:
        assert tables is not None
        dcos = torch.empty((q_tiles + k_tiles, batch, sequence, tables.cos.shape[-1]), dtype=acc, device=device)
        dsin = torch.empty_like(dcos)
    none = q.grad
    q_b, q_s, q_g, q_h = layout.strides(q.x)
    dq_b, dq_s, dq_g, dq_h = layout.strides(q.dx)
    gq_b, gq_s, _, gq_h = layout.strides(q.grad)
    gk_b, gk_s, _, gk_h = layout.strides(None if k is None else k.grad)
    k_b, k_s, _, k_h = layout.strides(None if k is None else k.x)
    dk_b, dk_s, _, dk_h = layout.strides(None if k is None else k.dx)
    gv_b, gv_s, _, gv_h = layout.strides(None if copy is None else copy.x)
    dv_b, dv_s, _, dv_h = layout.strides(None if copy is None else copy.out)
    grouped = next((t.shape[3] for t in (q.x, q.dx) if t is not None and t.dim() == 5), 0)

    def pointer(tensor: Tensor | None) -> Tensor:
        return none if tensor is None else tensor

    pointers = [
        q.grad,
        pointer(q.x),
        pointer(q.dx),
        pointer(None if k is None else k.grad),
        pointer(None if k is None else k.x),
        pointer(None if k is None else k.dx),
        pointer(None if copy is None else copy.x),
        pointer(None if copy is None else copy.out),
        *geometry.parameters(none),
        *layout.table_arguments(none),
        pointer(partial),
        pointer(dcos),
        pointer(dsin),
    ]
    numbers = [
        layout.sequence,
        blocks,
        total,
        walkers,
        copiers,
        *layout.table_strides,
        *(gq_b, gq_s, gq_h, q_b, q_s, q_g, q_h, dq_b, dq_s, dq_g, dq_h),
        *(gk_b, gk_s, gk_h, k_b, k_s, k_h, dk_b, dk_s, dk_h, gv_b, gv_s, gv_h, dv_b, dv_s, dv_h),
    ]
    constants = {
        "HQ": q_heads,
        "HK": k_heads,
        "HV": v_heads,
        "GROUP": grouped,
        **geometry.constants,
        **layout.constants(tiles.tokens, max(tiles.q_heads, tiles.k_heads, tiles.v_heads)),
        "HAS_X": q.x is not None,
        "NEEDS_DQ": q.dx is not None,
        "NEEDS_DK": k is not None and k.dx is not None,
        "NEEDS_QW": sizes[0] > 0,
        "NEEDS_QB": sizes[1] > 0,
        "NEEDS_KW": sizes[2] > 0,
        "NEEDS_KB": sizes[3] > 0,
        "NEEDS_TABLES": needs_tables,
        "Q_COLUMNS": q_columns,
        "K_COLUMNS": k_columns,
        "ACC": ARITHMETIC[acc],
        "BT": tiles.tokens,
        "BHQ": tiles.q_heads,
        "BHK": tiles.k_heads,
        "BHV": tiles.v_heads,
        "PAD": next_power_of_2(head_dim),
        "OVERLAPS": may_overlap(device),
        "REDUCED": partial is not None,
    }
    grid = walkers * (q_tiles + k_tiles) + copiers * v_tiles
    overlaps = constants["OVERLAPS"]
    works = [launched(backward_kernel, grid, pointers, numbers, constants, tiles.warps, tiles.registers, overlaps)]
    if partial is not None:
        works.append(add_partials(partial, outputs, sizes, (walkers * q_tiles, walkers * k_tiles), acc))
    if dcos is not None and dsin is not None:
        dcos, dsin = dcos.sum(0), dsin.sum(0)
    scratch = () if partial is None else (partial,)
    return Gradients(outputs[0::2], outputs[1::2], dcos, dsin, works, scratch)


def add_partials(
    partial: Tensor,
    outputs: Sequence[Tensor | None],
    sizes: Sequence[int],
    rows: tuple[int, int],
    acc: torch.dtype,
) -> Work:
    """Launch the reduction: the rows of `partial` become the gradients of the weights and biases of q and k. `sizes`:
    of these four; `rows`: of q and of k."""
    none = partial  # stands for a pointer that is not written
    pointers = [partial, *(none if out is None else out for out in outputs), *[none] * (4 - len(outputs))]
    constants = dict(zip(("QW_SIZE", "QB_SIZE", "KW_SIZE", "KB_SIZE"), sizes, strict=True))
    overlaps = may_overlap(partial.device)
    constants |= {"ACC": ARITHMETIC[acc], "ROWS": 256, "COLS": _REDUCED_COLUMNS, "OVERLAPS": overlaps}
    programs = triton.cdiv(sum(sizes), _REDUCED_COLUMNS)
    return launched(reduce_kernel, programs, pointers, rows, constants, warps=8, overlaps=overlaps)


def launched(
    kernel: Any,
    programs: int,
    pointers: Sequence[Tensor],
    numbers: Sequence[int],
    constants: dict[str, Any],
    warps: int,
    registers: int | None = None,
    overlaps: bool = False,
) -> Work:
    """Launch `kernel`. `overlaps`: it may be set up while the one before it still runs, for which it waits itself."""
    dtypes = [tensor.dtype for tensor in pointers]
    options = {"num_warps": warps} if registers is None else {"num_warps": warps, "maxnreg": registers}
    if overlaps:
        options["launch_pdl"] = True
    launch = Launch(kernel, (programs,), pointers[0].device, dtypes, numbers, constants, **options)
    launch.on(pointers)
    return Work(launch, pointers)


class Geometry:
    """What does not depend on the number of tokens: options, and which parameters there are."""

    def __init__(
        self,
        options: Options,
        q_weight: Tensor | None,
        q_bias: Tensor | None,
        k_weight: Tensor | None,
        k_bias: Tensor | None,
        head_dim: int,
    ) -> None:
        self.head_dim, self.norm = head_dim, options.norm != "none"
        self._parameters = (q_weight, q_bias, k_weight, k_bias)
        hidden = options.norm_scope == "hidden" and options.norm != "none"
        # One row a head, or a norm over all heads: the tile holds all heads of a token.
        self.per_head = hidden or any(p is not None and p.numel() != head_dim for p in self._parameters)
        rotate = options.rotary_dim > 0
        rotary = options.rotary_dim if rotate else head_dim
        lanes = next_power_of_2(rotary // 2)
        passing = next_power_of_2(head_dim - rotary) if head_dim > rotary else 0
        self.head_lanes = 2 * lanes + passing
        section = tuple(options.mrope_section) or (0, 0, 0)
        self.constants: dict[str, Any] = {
            "D": head_dim,
            "R": rotary,
            "START": options.rotary_start if rotate else 0,
            "L": lanes,
            "P": passing,
            "ROTATE": rotate,
            "READS_ADJACENT": rotate and options.reads_adjacent,
            "WRITES_ADJACENT": rotate and options.writes_adjacent,
            "CONJUGATE": options.conjugate,
            "MROPE": options.mrope_layout,
            "SECTION_T": section[0],
            "SECTION_H": section[1],
            "SECTION_W": section[2],
            "NORM": options.norm,
            "HIDDEN": hidden,
            "NORM_FIRST": options.norm_first,
            "EPS": 0.0 if options.eps is None else options.eps,
            "PER_HEAD": self.per_head,
            "HAS_QW": q_weight is not None,
            "HAS_QB": q_bias is not None,
            "HAS_KW": k_weight is not None,
            "HAS_KB": k_bias is not None,
        }

    def parameters(self, none: Tensor) -> tuple[Tensor, ...]:
        """q_weight, q_bias, k_weight, k_bias as pointers to contiguous memory."""
        return tuple(none if p is None else p.contiguous() for p in self._parameters)


class Layout:
    """Batch, sequence and the strides of all tensors, in units of VEC elements.

    VEC is the largest power of two (up to 16) that divides every stride: the kernels multiply it back, which tells
    the compiler the alignment. Where every tensor allows it batch and sequence are folded into one axis, so that
    short sequences fill the tiles.
    """

    def __init__(
        self, tensors: Sequence[Tensor], tables: Tables | None, options: Options, batch: int, sequence: int
    ) -> None:
        mrope = options.mrope_layout != "none"
        self._cos = self._sin = self._positions = None
        table: tuple[int, ...] = (0, 0, 0, 0)
        position: tuple[int, ...] = (0, 0, 0)
        entries = 0
        if tables is not None:
            cos, sin = tables.cos, tables.sin
            if cos.stride() != sin.stride():
                cos, sin = cos.contiguous(), sin.contiguous()
            self._cos, self._sin = cos, sin
            entries = cos.shape[-1]
            if tables.positions is None:
                table = tables.table_view(cos, batch, sequence, mrope).stride()
            else:
                self._positions = tables.positions
                table = (0, 0, cos.stride(0), cos.stride(1))
                position = tables.positions_view(batch, sequence, mrope).stride()
        self._max_position = self._cos.shape[0] if self._positions is not None and self._cos is not None else 0
        foldable = [(t.stride(0), t.stride(1)) for t in tensors]
        foldable += [(table[1], table[2])] if self._positions is None else [(position[1], position[2])]
        self.batch, self.sequence = batch, sequence
        if batch > 1 and all(b == sequence * s for b, s in foldable):
            self.batch, self.sequence = 1, batch * sequence
        self._table_vec = _common_power_of_2(table[:3])
        scaled = (stride // self._table_vec for stride in table[:3])
        self.table_strides = (*scaled, *position, self._max_position)
        self._vec = _common_power_of_2(
            [stride for t in tensors for size, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True) if size > 1]
        )
        # Only axes with more than one entry count: the stride of the others is arbitrary and never used.
        self._extent = max(
            (stride for t in tensors for size, stride in zip(t.shape[1:-1], t.stride()[1:-1], strict=True) if size > 1),
            default=0,
        )
        self._lane_stride = table[3]
        self._per_lane = entries == options.rotary_dim

    def strides(self, tensor: Tensor | None) -> tuple[int, int, int, int]:
        """Batch, sequence, group and head strides of a [B, S, H, D] or [B, S, KV, H/KV, D], over VEC."""
        if tensor is None:
            return 0, 0, 0, 0
        shape, stride = tensor.shape, tensor.stride()
        scaled = [step // self._vec if size > 1 else 0 for size, step in zip(shape[:-1], stride[:-1], strict=True)]
        if self.batch == 1 and self.sequence != shape[1]:
            scaled[1] = stride[1] // self._vec
        if len(scaled) == 4:
            return scaled[0], scaled[1], scaled[2], scaled[3]
        return scaled[0], scaled[1], 0, scaled[2]

    def table_arguments(self, none: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """cos, sin, positions."""
        return (
            none if self._cos is None else self._cos,
            none if self._sin is None else self._sin,
            none if self._positions is None else self._positions,
        )

    def constants(self, tokens: int, heads: int) -> dict[str, Any]:
        """The compile-time side, given the tile."""
        return {
            "VEC": self._vec,
            "WIDE": self._extent * (tokens + heads) > _INT32_MAX,
            "WHOLE_BLOCKS": self.sequence % tokens == 0,
            "TABLE_VEC": self._table_vec,
            "LANE_STRIDE": self._lane_stride,
            "PER_LANE": self._per_lane,
            "GATHER": self._positions is not None,
        }


def _common_power_of_2(strides: Iterable[int]) -> int:
    """The largest power of two, up to 16, that divides all of them."""
    bits = 16
    for stride in strides:
        bits |= stride
    return bits & -bits


def site_of(geometry: Geometry, layout: Layout, q_heads: int, k_heads: int, heavy: bool, x: Tensor) -> Site:
    """What the choice of a tile depends on."""
    multiprocessors, architecture = device_facts(x.device)
    return Site(
        q_heads=q_heads,
        k_heads=k_heads,
        head_dim=geometry.head_dim,
        head_lanes=geometry.head_lanes,
        sequence=layout.sequence,
        tokens=layout.batch * layout.sequence,
        all_heads=geometry.per_head,
        norm=geometry.norm,
        heavy=heavy,
        itemsize=x.element_size(),
        multiprocessors=multiprocessors,
        architecture=architecture,
    )


def may_overlap(device: torch.device) -> bool:
    """A kernel may be set up while the one before it still runs."""
    return device_facts(device)[1] >= 90 and not interpreted()


@lru_cache
def device_facts(device: torch.device) -> tuple[int, int]:
    """(multiprocessors, 10 major + minor); one multiprocessor of an H100 for the interpreter."""
    if device.type != "cuda":
        return 1, 90
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, 10 * properties.major + properties.minor
