"""What is fixed when a kernel is compiled: the constants that the sources in `source/` are written with.

An instance depends on dtypes, options, head counts, which arguments there are, and how wide memory may be accessed;
never on strides beyond their alignment or on eps, and on the number of tokens only by the tile (few or many).
source/constants.cuh says what each constant means.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..options import Options

ELEMENTS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float", torch.float64: "double"}
INTEGERS = {
    torch.int8: "signed char",
    torch.int16: "short",
    torch.int32: "int",
    torch.int64: "long long",
    torch.uint8: "unsigned char",
    torch.uint16: "unsigned short",
    torch.uint32: "unsigned",
    torch.uint64: "unsigned long long",
}
NORMS = {"none": "NO_NORM", "rms": "RMS", "rms_one_plus": "RMS_ONE_PLUS", "layer": "LAYER"}
MROPE_LAYOUTS = {"none": "NO_MROPE", "sectioned": "SECTIONED", "interleaved": "INTERLEAVED"}
WIDEST = 16
"""Bytes of the widest access."""

Constant = int | bool | str


@dataclass(frozen=True)
class Access:
    """How wide a kind of memory is accessed: at most `bytes`, never less than one element."""

    bytes: int
    itemsize: int

    def narrowed(self, alignment: int) -> int:
        """For addresses that are multiples of `alignment`."""
        return max(self.itemsize, min(self.bytes, alignment))


@dataclass(frozen=True)
class Instance:
    """One kernel: which source file, the types, the constants, and the widths of access, which the addresses of a
    call may narrow."""

    kernel: str
    types: Mapping[str, str]
    constants: Mapping[str, Constant]
    accesses: Mapping[str, Access] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the kernel."""
        return f"norm_rope_{self.kernel}"

    def source(self, alignment: int = WIDEST) -> str:
        """The translation unit."""
        lines = ['#include "constants.cuh"']
        lines += [f"using {name} = {value};" for name, value in self.types.items()]
        lines += [f"#define IN_PLACE {int(self.constants.get('IN_PLACE', False))}"]
        constants = {name: value for name, value in self.constants.items() if name != "IN_PLACE"}
        for name, value in constants.items():
            kind = "bool" if isinstance(value, bool) else "auto" if isinstance(value, str) else "int"
            lines.append(f"constexpr {kind} {name} = {str(value).lower() if isinstance(value, bool) else value};")
        lines += [f"constexpr int {name} = {access.narrowed(alignment)};" for name, access in self.accesses.items()]
        return "\n".join([*lines, f'#include "{self.kernel}.cuh"', ""])


def slot_constants(itemsize: int, head_dim: int, options: Options) -> dict[str, Constant]:
    """How a head is cut into slots (`source/lanes.cuh`), for activations of `itemsize` bytes."""
    rotary = options.rotary_dim
    start = options.rotary_start if rotary else 0
    pairs = WIDEST // itemsize
    while pairs > 1 and (head_dim % (2 * pairs) or rotary % (2 * pairs) or start % pairs):
        pairs //= 2
    slots = head_dim // (2 * pairs)
    return {
        "HEAD_DIM": head_dim,
        "ROTARY_DIM": rotary,
        "ROTARY_START": start,
        "PAIRS": pairs,
        "CHUNKS": -(-slots // 32),
        "SPLIT_PAIRS": options.pairing == "adjacent" and pairs > 1,
    }


def heads_per_warp(slots: Mapping[str, Constant]) -> int:
    """As in `source/lanes.cuh`."""
    count = int(slots["HEAD_DIM"]) // (2 * int(slots["PAIRS"]))
    return 32 // -(-count // int(slots["CHUNKS"]))


def option_constants(options: Options) -> dict[str, Constant]:
    """The options, under the names of the sources."""
    section = tuple(options.mrope_section) or (0, 0, 0)
    rotates = options.rotary_dim > 0
    return {
        "ROTATES": rotates,
        "READS_ADJACENT": rotates and options.reads_adjacent,
        "WRITES_ADJACENT": rotates and options.writes_adjacent,
        "CONJUGATE": options.conjugate,
        "NORM": NORMS[options.norm],
        "NORM_FIRST": options.norm_first,
        "MROPE": MROPE_LAYOUTS[options.mrope_layout],
        "SECTION_T": section[0],
        "SECTION_H": section[1],
        "SECTION_W": section[2],
    }


def lane_access(tensors: Iterable[Tensor | None], pairs: int) -> Access:
    """For vectors of `pairs` lanes of tensors whose lanes are next to each other, all of one dtype."""
    itemsize, width = 0, WIDEST
    for tensor in tensors:
        if tensor is not None:
            itemsize = tensor.element_size()
            width = min(width, pairs * itemsize, _alignment(tensor, tensor.dim() - 1))
    return Access(max(width, itemsize), itemsize)


def table_access(table: Tensor, slots: Mapping[str, Constant], options: Options) -> Access:
    """For the entries of cos and sin that one thread reads: next to each other in memory, and all from one row."""
    itemsize = table.element_size()
    if table.stride(-1) != 1 and table.shape[-1] > 1:
        return Access(itemsize, itemsize)
    per_lane = table.shape[-1] == options.rotary_dim
    pairs, split = int(slots["PAIRS"]), bool(slots["SPLIT_PAIRS"])
    entries = min(pairs if per_lane or not split else pairs // 2, WIDEST // itemsize)
    for size, stride in zip(table.shape[:-1], table.stride()[:-1], strict=True):
        while size > 1 and stride % entries:
            entries //= 2
    if options.mrope_layout != "none":
        rows = entry_rows(options, per_lane)
        while any(len(set(rows[i : i + entries])) > 1 for i in range(0, len(rows), entries)):
            entries //= 2
    return Access(entries * itemsize, itemsize)


def entry_rows(options: Options, per_lane: bool) -> list[int]:
    """The row of a MRoPE table that each of its entries is read from."""
    rows = options.mrope_rows()
    if not per_lane:
        return rows
    return [row for row in rows for _ in range(2)] if options.writes_adjacent else rows + rows


def _alignment(tensor: Tensor, axes: int) -> int:
    """The largest power of two, up to 16, that divides the strides in bytes of the first `axes` axes. The stride of an
    axis with one entry is arbitrary and never used."""
    bits = WIDEST
    for size, stride in zip(tensor.shape[:axes], tensor.stride()[:axes], strict=True):
        if size > 1:
            bits |= stride * tensor.element_size()
    return bits & -bits
