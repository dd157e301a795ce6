"""The norm's weights and biases, as the kernels take them, and their gradients.

A kernel knows one type and one shape for all of them: [D], or one row a head. Parameters that differ from each other
are brought to a common form first, and their gradients back from it afterwards; the usual case copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..streams import GradStream, Stream
from .instance import ELEMENTS, Access, Constant
from .launch import Arguments

KINDS = ("weight", "bias")


@dataclass
class ParameterGradient:
    """`target` is written by the kernel; `finish` makes the parameter's gradient of it (itself, in the usual case)."""

    target: Tensor
    parameter: Tensor

    @property
    def direct(self) -> bool:
        """The target is the gradient."""
        return self.target.shape == self.parameter.shape and self.target.dtype == self.parameter.dtype

    def finish(self) -> Tensor:
        if self.direct:
            return self.target
        per_head = self.target.view(-1, self.parameter.shape[-1])
        total = per_head if self.parameter.numel() == self.target.numel() else per_head.sum(0)
        return total.view(self.parameter.shape).to(self.parameter.dtype)


class Parameters:
    """Of one or two streams. `heads`: how many each of them has; `hidden`: a parameter is one row of all heads, which
    the kernels take as one row a head."""

    def __init__(
        self,
        streams: Sequence[Stream] | Sequence[GradStream],
        heads: Sequence[int],
        head_dim: int,
        one_plus: bool,
        hidden: bool = False,
    ) -> None:
        given = {"weight": [s.weight for s in streams], "bias": [s.bias for s in streams]}
        present = [p for kind in KINDS for p in given[kind] if p is not None]
        self.head_dim = head_dim
        self.per_head = hidden or any(p.dim() > 1 for p in present)
        self.dtype = torch.float32
        if present:
            self.dtype = present[0].dtype
            for p in present:
                self.dtype = torch.promote_types(self.dtype, p.dtype)
        heads = heads[: len(streams)]
        self.heads = heads
        self.given = given
        self.used: dict[str, list[Tensor] | None] = {}
        for kind in KINDS:
            neutral = 0.0 if kind == "bias" or one_plus else 1.0
            absent = all(p is None for p in given[kind])
            self.used[kind] = (
                None if absent else [self._form(p, h, neutral) for p, h in zip(given[kind], heads, strict=True)]
            )

    def _form(self, parameter: Tensor | None, heads: int, neutral: float) -> Tensor:
        like = next(p for kind in KINDS for p in self.given[kind] if p is not None)
        if parameter is None:
            parameter = torch.full((self.head_dim,), neutral, dtype=self.dtype, device=like.device)
        if self.per_head and parameter.shape == (self.head_dim,):
            parameter = parameter.expand(heads, -1)
        return parameter.to(self.dtype).contiguous()

    def types(self) -> dict[str, str]:
        """Under the names of the sources."""
        return {"Param": ELEMENTS[self.dtype]}

    def constants(self) -> dict[str, Constant]:
        """Under the names of the sources."""
        return {
            "HAS_WEIGHT": self.used["weight"] is not None,
            "HAS_BIAS": self.used["bias"] is not None,
            "PER_HEAD": self.per_head,
        }

    def access(self, pairs: int) -> Access:
        """Rows of head_dim elements, one after the other."""
        return Access(min(16, pairs * self.dtype.itemsize), self.dtype.itemsize)

    def write(self, arguments: Arguments) -> None:
        """`Parameters` of `source/streams.cuh`: q_weight, q_bias, k_weight, k_bias."""
        for stream in range(2):
            for kind in KINDS:
                used = self.used[kind]
                arguments.address(used[stream] if used is not None and stream < len(used) else None)

    def gradient(self, kind: str, stream: int) -> ParameterGradient:
        """An unfilled gradient."""
        parameter = self.given[kind][stream]
        assert parameter is not None
        shape: tuple[int, ...] = (self.heads[stream], self.head_dim) if self.per_head else (self.head_dim,)
        if parameter.numel() == self.columns(stream):
            shape = parameter.shape
        return ParameterGradient(torch.empty(shape, dtype=self.dtype, device=parameter.device), parameter)

    def columns(self, stream: int) -> int:
        """Elements of one parameter of a stream."""
        return self.head_dim * (self.heads[stream] if self.per_head else 1)
