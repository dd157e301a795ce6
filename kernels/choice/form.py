"""What the speed of a call depends on: its form, which a table must have measured, and its size, which may be near."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..options import Options
from ..streams import Copy, GradStream, Stream, Tables

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Form:
    """One kind of call. Two calls of one form run the same instructions for a head; only the numbers of heads and
    tokens differ.

    `itemsize`: bytes of an element of the activations. `norm`: there is one; `hidden`: over all heads of a token.
    `partial`: some lanes are not rotated. `moved`: v is copied in the same pass.
    """

    direction: str
    head_dim: int
    itemsize: int
    norm: bool
    pairing: str
    mrope_layout: str
    partial: bool
    moved: bool
    hidden: bool = False

    @property
    def padded(self) -> bool:
        """head_dim is no power of two: Triton's tiles have lanes without data."""
        return self.head_dim & (self.head_dim - 1) != 0


@dataclass(frozen=True)
class Size:
    """`heads`: of q and k together; `tokens`: of all sequences."""

    heads: int
    tokens: int


@dataclass(frozen=True)
class Site:
    """One call as the choice sees it.

    `usual`: without what no table has measured: gradients of tables, biases, one weight row a head, positions.
    `details`: what else there is, for the name of a measurement.
    """

    form: Form
    size: Size
    usual: bool
    details: tuple[object, ...]

    def key(self) -> str:
        """The name of the measurement that decides this call: tokens count by their power of two."""
        return f"{self.form} heads={self.size.heads} tokens~2^{self.size.tokens.bit_length()} {self.details}"


def forward_site(streams: Sequence[Stream], tables: Tables | None, options: Options, copy: Copy | None) -> Site:
    """Of a call of `Backend.forward`."""
    batch, sequence, _, head_dim = streams[0].out.shape
    form = _form(FORWARD, head_dim, streams[0].x.element_size(), options, copy)
    size = Size(sum(stream.out.shape[2] for stream in streams), batch * sequence)
    dtypes = (streams[0].x.dtype, streams[0].out.dtype)
    return Site(form, size, _usual(streams, tables, form), _details(streams, tables, options, dtypes))


def backward_site(
    streams: Sequence[GradStream], tables: Tables | None, options: Options, copy: Copy | None, needs_tables: bool
) -> Site:
    """Of a call of `Backend.backward`."""
    batch, sequence, _, head_dim = streams[0].grad.shape
    form = _form(BACKWARD, head_dim, streams[0].grad.element_size(), options, copy)
    size = Size(sum(stream.grad.shape[2] for stream in streams), batch * sequence)
    needed = [(s.dx is not None, s.needs_weight, s.needs_bias) for s in streams]
    details = _details(streams, tables, options, (streams[0].grad.dtype, *needed, needs_tables))
    return Site(form, size, _usual(streams, tables, form) and not needs_tables, details)


def _form(direction: str, head_dim: int, itemsize: int, options: Options, copy: Copy | None) -> Form:
    return Form(
        direction=direction,
        head_dim=head_dim,
        itemsize=itemsize,
        norm=options.norm != "none",
        pairing=options.pairing,
        mrope_layout=options.mrope_layout,
        partial=0 < options.rotary_dim < head_dim,
        moved=copy is not None,
        hidden=options.norm != "none" and options.norm_scope == "hidden",
    )


def _usual(streams: Sequence[Stream] | Sequence[GradStream], tables: Tables | None, form: Form) -> bool:
    return (tables is None or tables.positions is None) and all(
        stream.bias is None and (stream.weight is None or form.hidden or stream.weight.numel() == form.head_dim)
        for stream in streams
    )


def _details(
    streams: Sequence[Stream] | Sequence[GradStream], tables: Tables | None, options: Options, rest: tuple[object, ...]
) -> tuple[object, ...]:
    parameters = [
        (None if s.weight is None else (s.weight.dtype, s.weight.numel()), s.bias is not None) for s in streams
    ]
    read = None if tables is None else (tables.cos.dtype, tables.cos.shape[-1], tables.positions is not None)
    return options.norm, options.norm_first, options.rotary_dim, options.rotary_start, *parameters, read, *rest
