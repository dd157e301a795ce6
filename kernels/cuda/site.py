"""Where the heads, tokens and tables of a call stand in memory, as the kernels take it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..options import Options
from ..streams import Tables
from .instance import ELEMENTS, INTEGERS, Constant
from .launch import Arguments


class Site:
    """Heads and tokens. `results`: q and k as [B, S, H, D] (the forward's results, or their gradients). `activations`:
    all tensors that the kernel reads or writes by head; the q heads of a grouped packing are [B, S, KV, H/KV, D].

    Where every tensor allows it batch and sequence are folded into one axis of tokens; else the kernel divides.
    """

    def __init__(
        self,
        options: Options,
        tables: Tables | None,
        results: Sequence[Tensor],
        moved: Tensor | None,
        activations: Sequence[Tensor],
    ) -> None:
        self.batch, self.length, q_heads, self.head_dim = results[0].shape
        self.heads = (q_heads, results[1].shape[2] if len(results) > 1 else 0, 0 if moved is None else moved.shape[2])
        self.tokens = self.batch * self.length
        self.group = next((t.shape[3] for t in activations if t.dim() == 5), 0)
        self.tables = _TableSite(tables, options, self.batch, self.length)
        axes = [(t.stride(0), t.stride(1)) for t in activations] + self.tables.token_axes()
        counts = self.tables.counted is not None and self.batch > 1
        self.batched = counts or any(self._merged(*strides) is None for strides in axes)

    def constants(self) -> dict[str, Constant]:
        """Under the names of the sources."""
        q_heads, k_heads, v_heads = self.heads
        return {
            "Q_HEADS": q_heads,
            "K_HEADS": k_heads,
            "V_HEADS": v_heads,
            "GROUP": self.group,
            "BATCHED": self.batched,
            **self.tables.constants(),
        }

    def write_heads(self, arguments: Arguments, tensor: Tensor | None) -> None:
        """`Heads` of `source/streams.cuh`; null for None."""
        arguments.address(tensor)
        if tensor is None:
            arguments.integers(0, 0, 0, 0)
            return
        size = tensor.element_size()
        batch, token = self._token_strides(tensor.stride(0), tensor.stride(1))
        head = tensor.stride(-2)
        group = tensor.stride(2) if tensor.dim() == 5 else self.group * head
        arguments.integers(batch * size, token * size, group * size, head * size)

    def write_tables(self, arguments: Arguments) -> None:
        """`Tables` of `source/tables.cuh`."""
        self.tables.write(arguments, self._token_strides)

    def write_size(self, arguments: Arguments) -> None:
        """The number of tokens, and of those in one batch entry."""
        arguments.integers(self.tokens, self.length)

    def _merged(self, batch: int, token: int) -> int | None:
        if self.batch == 1:
            return token
        if self.length == 1:
            return batch
        return token if batch == self.length * token else None

    def _token_strides(self, batch: int, token: int) -> tuple[int, int]:
        if self.batched:
            return batch, token
        merged = self._merged(batch, token)
        assert merged is not None
        return 0, merged


class _TableSite:
    """cos, sin and positions."""

    def __init__(self, tables: Tables | None, options: Options, batch: int, length: int) -> None:
        self._rotary_dim, self._sequences = options.rotary_dim, batch
        self._bounds = self._offsets = None
        self._position: tuple[int, ...] = (0, 0, 0)
        self.positions = None if tables is None else tables.positions
        self.counted = None if tables is None else tables.counted
        self.view: Tensor | None = None
        if tables is None:
            return
        cos, sin = tables.cos, tables.sin
        if cos.dtype != sin.dtype:
            wide = torch.promote_types(cos.dtype, sin.dtype)
            cos, sin = cos.to(wide), sin.to(wide)
        if cos.stride() != sin.stride():
            cos, sin = cos.contiguous(), sin.contiguous()
        self._cos, self._sin = cos, sin
        mrope = options.mrope_layout != "none"
        if self.positions is None and self.counted is None:
            self.view = tables.table_view(cos, batch, length, mrope)
            self._row, self._batch, self._token, self._lane = self.view.stride()
        else:
            self.view = cos
            self._row, self._batch, self._token, self._lane = 0, 0, *cos.stride()
            if self.positions is not None:
                self._position = tables.positions_view(batch, length, mrope).stride()
        self._bounds, self._offsets = self._counts()

    @property
    def entries(self) -> int:
        """Of a position."""
        return 0 if self.view is None else self.view.shape[-1]

    def token_axes(self) -> list[tuple[int, int]]:
        """(batch, token) strides of what is read once a token."""
        if self.view is None or self.counted is not None:
            return []
        return [(self._batch, self._token)] if self.positions is None else [(self._position[1], self._position[2])]

    def _counts(self) -> tuple[Tensor | None, Tensor | None]:
        """cu_seqlens and the offsets, contiguous and of one dtype."""
        if self.counted is None:
            return None, None
        given = (self.counted.cu_seqlens, self.counted.offsets)
        wide = torch.int32 if all(t is None or t.dtype == torch.int32 for t in given) else torch.int64
        bounds, offsets = (None if t is None else t.to(wide).contiguous() for t in given)
        return bounds, offsets

    def types(self) -> dict[str, str]:
        """Under the names of the sources."""
        return {
            "Table": "float" if self.view is None else ELEMENTS[self.view.dtype],
            "Position": "int" if self.positions is None else INTEGERS[self.positions.dtype],
            "Bound": next((INTEGERS[t.dtype] for t in (self._bounds, self._offsets) if t is not None), "int"),
        }

    def constants(self) -> dict[str, Constant]:
        """Under the names of the sources."""
        return {
            "PER_LANE": self.view is not None and self.view.shape[-1] == self._rotary_dim,
            "GATHER": self.positions is not None,
            "COUNTED": self.counted is not None,
            "TABLE_LANE_STRIDE": 1 if self.view is None else self._lane,
        }

    def write(self, arguments: Arguments, token_strides: Callable[[int, int], tuple[int, int]]) -> None:
        """`Tables` of `source/tables.cuh`."""
        if self.view is None:
            arguments.integers(*[0] * 14)
            return
        size = self.view.element_size()
        batch, token = self._batch, self._token
        if self.positions is None and self.counted is None:
            batch, token = token_strides(batch, token)
        arguments.address(self._cos)
        arguments.address(self._sin)
        arguments.integers(self._row * size, batch * size, token * size)
        arguments.address(self.positions, vectors=False)
        row, batch, token = self._position
        if self.positions is not None:
            size = self.positions.element_size()
            batch, token = token_strides(batch, token)
        arguments.integers(row * size, batch * size, token * size)
        arguments.integers(self.view.shape[0])
        arguments.address(self._bounds, vectors=False)
        arguments.address(self._offsets, vectors=False)
        sequences = self._sequences if self._bounds is None else self._bounds.shape[0] - 1
        arguments.integers(sequences, 0 if self.counted is None else int(self.counted.offset))
