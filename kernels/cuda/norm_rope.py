"""The `cuda` back end of the norm + rotation operators: from streams to launches.

`forward_work` and `BackwardWork` only prepare; they need no GPU, and the tests compile what they prepare.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..card import H100, Card, card_of
from ..options import Options
from ..replay import Work
from ..streams import Copy, Gradients, GradStream, Stream, Tables, arithmetic_dtype
from . import hidden
from .hidden import over_rows
from .instance import (
    ELEMENTS,
    Access,
    Constant,
    Instance,
    heads_per_warp,
    lane_access,
    option_constants,
    slot_constants,
    table_access,
)
from .launch import Arguments, Launch
from .parameters import KINDS, ParameterGradient, Parameters
from .site import Site
from .tiles import (
    FEW_BYTES,
    SUM_THREADS,
    SUM_THREADS_BESIDE_V,
    TABLE_GRADIENT_WARPS,
    Tile,
    backward_tile,
    deferred_tokens,
    forward_tile,
    prefetched_tokens,
    tile_constants,
)

COUNTS_POSITIONS = True
WRITES_IN_PLACE = True

# As in source/partial.cuh and source/streams.cuh.
_PITCH = 16
_VECTORS_A_THREAD = 4
# Heads of all tokens that source/forward.cuh counts through in 32 bits.
_MOST_FLAT = 2**31


def unsupported(options: Options, head_dim: int, heads: Sequence[int], itemsize: int) -> str | None:
    """None, or why this cannot be computed here. `heads`: of q and of k; `itemsize`: bytes of an element of them."""
    if head_dim % 2 or head_dim > 512:
        return f"head_dim is {head_dim}, it takes even ones up to 512."
    return hidden.unsupported(options, head_dim, heads, itemsize) if over_rows(options) else None


def forward(
    streams: Sequence[Stream], tables: Tables | None, options: Options, copy: Copy | None = None
) -> Sequence[Work] | None:
    """See `streams.Backend`."""
    multiprocessors, _, card = _device_facts(streams[0].x.device)
    work = forward_work(streams, tables, options, copy, card, multiprocessors=multiprocessors)
    _launch(work)
    return [work]


def backward(
    streams: Sequence[GradStream],
    tables: Tables | None,
    options: Options,
    copy: Copy | None = None,
    needs_tables: bool = False,
) -> Gradients:
    """See `streams.Backend`."""
    prepared = BackwardWork(streams, tables, options, copy, needs_tables, *_device_facts(streams[0].grad.device))
    for work in prepared.works:
        _launch(work)
    return prepared.gradients()


def forward_work(
    streams: Sequence[Stream],
    tables: Tables | None,
    options: Options,
    copy: Copy | None = None,
    card: Card = H100,
    transposed: bool = False,
    multiprocessors: int = 132,
) -> Work:
    """The launch that fills `out` of every stream, and of `copy`.

    `transposed`: by the transpose of the rotation, without a norm. `x` is then the gradient of a result ([B, S, H, D]),
    and `out` has the shape of an input.
    """
    q = streams[0]
    inputs, results = [s.x for s in streams], [s.out for s in streams]
    moved = [] if copy is None else [copy.x, copy.out]
    by_head = inputs if transposed else results
    _check(options, by_head, q.x.element_size())
    site = Site(options, tables, by_head, None if copy is None else copy.x, [*inputs, *results, *moved])
    rows = over_rows(options)
    parameters = Parameters(streams, site.heads, site.head_dim, options.norm == "rms_one_plus", rows)
    acc = arithmetic_dtype(q.x.dtype, q.out.dtype)
    slots = slot_constants(q.x.element_size(), site.head_dim, options)
    pairs = int(slots["PAIRS"])
    constants: dict[str, Constant] = {
        **slots,
        **option_constants(options),
        **site.constants(),
        **parameters.constants(),
        "IN_PLACE": any(s.x is s.out for s in streams),
        "TRANSPOSED": transposed,
    }
    accesses = {
        "IN_BYTES": lane_access([*inputs, *moved[:1]], pairs),
        "OUT_BYTES": lane_access(results, pairs),
        "MOVE_BYTES": lane_access(moved[1:] or inputs[:1], pairs),
        "TABLE_BYTES": _table_access(site, slots, options),
        "PARAM_BYTES": parameters.access(pairs),
    }
    types = {"In": ELEMENTS[q.x.dtype], "Out": ELEMENTS[q.out.dtype], "Acc": ELEMENTS[acc]}
    heads = sum(site.heads[:2])
    ahead = prefetched_tokens(site.tokens, heads * site.head_dim * q.x.element_size(), card)
    if rows:
        few = site.tokens * heads * site.head_dim * q.x.element_size() < hidden.FEW_BYTES
        tile = hidden.forward_tile(constants, accesses, _adjoin(inputs), card, few)
    else:
        tile = forward_tile(constants, accesses, acc.itemsize, card, prefetches=ahead > 0)
    if site.tokens * heads >= _MOST_FLAT:
        tile = tile._replace(flat=False)
    instance = Instance(
        "hidden_forward" if rows else "forward",
        {**types, **site.tables.types(), **parameters.types()},
        {**constants, **tile_constants(tile), "KEEPS_TABLES": tile.keeps},
        accesses,
    )
    arguments = Arguments()
    for tensor in (*_padded(inputs, 2), *_padded(moved[:1], 1), *_padded(results, 2), *_padded(moved[1:], 1)):
        site.write_heads(arguments, tensor)
    parameters.write(arguments)
    site.write_tables(arguments)
    shared = 0
    if rows:
        blocks = hidden.blocks(tile, site.tokens, multiprocessors) if tile.stages else site.tokens
        shared = hidden.shared_bytes(instance.constants, accesses)
        arguments.integers(blocks)
    else:
        at_once = heads_per_warp(slots) * tile.unroll
        warps = -(-site.tokens * heads // at_once) if tile.flat else site.tokens * -(-heads // at_once)
        blocks = -(-warps // tile.warps)
        arguments.integers(blocks, ahead)
    site.write_size(arguments)
    arguments.real(options.eps or 0.0)
    grid = blocks + _moving_blocks(site, slots, tile.warps)
    launch = Launch(instance, grid, 32 * tile.warps, arguments, q.x.device, overlaps=True, shared=shared)
    return Work(launch, arguments.tensors)


class BackwardWork:
    """The launches that fill `dx` of every stream and `copy.out`, and the gradients that they leave.

    `overlaps`: a second launch begins while the first still ends. `card`: what tiles are for.
    """

    def __init__(
        self,
        streams: Sequence[GradStream],
        tables: Tables | None,
        options: Options,
        copy: Copy | None,
        needs_tables: bool,
        multiprocessors: int,
        overlaps: bool,
        card: Card = H100,
    ) -> None:
        self._streams, self._tables, self._options, self._copy = streams, tables, options, copy
        self._grads = [s.grad for s in streams]
        self._read = [s.x for s in streams if s.x is not None]
        self._filled = [s.dx for s in streams if s.dx is not None]
        moved = [] if copy is None else [copy.x, copy.out]
        activations = [*self._grads, *self._read, *self._filled, *moved]
        self._site = Site(options, tables, self._grads, None if copy is None else copy.x, activations)
        self._rows = over_rows(options)
        one_plus = options.norm == "rms_one_plus"
        self._parameters = Parameters(streams, self._site.heads, self._site.head_dim, one_plus, self._rows)
        self._acc = arithmetic_dtype(*(t.dtype for t in activations))
        in_dtype = next((t.dtype for t in (*self._read, *self._filled)), self._grads[0].dtype)
        _check(options, self._grads, in_dtype.itemsize)
        self._slots = slot_constants(in_dtype.itemsize, self._site.head_dim, options)
        self._types = {
            "In": ELEMENTS[in_dtype],
            "Grad": ELEMENTS[self._grads[0].dtype],
            "Acc": ELEMENTS[self._acc],
            **self._site.tables.types(),
            **self._parameters.types(),
        }
        self.works: list[Work] = []
        self._scratch: list[Tensor] = []
        self._parameter_gradients: dict[tuple[str, int], ParameterGradient] = {}
        self._dcos: Tensor | None = None
        self._dsin: Tensor | None = None
        self._kinds = [kind for kind in KINDS if any(getattr(s, f"needs_{kind}") for s in streams)]
        if self._filled or self._kinds or copy is not None:
            self._add_main(multiprocessors, overlaps, card)
        if needs_tables:
            self._add_table_gradient()

    def gradients(self) -> Gradients:
        """After the launches."""
        found = self._parameter_gradients
        weights, biases = (
            [found[kind, i].finish() if (kind, i) in found else None for i in range(len(self._streams))]
            for kind in KINDS
        )
        # A gradient that is finished outside of the launches is not repeated by them.
        works = self.works if all(g.direct for g in found.values()) else None
        return Gradients(weights, biases, self._dcos, self._dsin, works, self._scratch)

    def _constants(self) -> dict[str, Constant]:
        return {
            **self._slots,
            **option_constants(self._options),
            **self._site.constants(),
            **self._parameters.constants(),
            "KEEPS_TABLES": True,
        }

    def _accesses(self) -> dict[str, Access]:
        pairs = int(self._slots["PAIRS"])
        copy = self._copy
        inputs = [*self._read, *([] if copy is None else [copy.x])]
        outputs = [*self._filled, *([] if copy is None else [copy.out])]
        return {
            "IN_BYTES": lane_access(inputs or self._grads, pairs),
            "GRAD_BYTES": lane_access(self._grads, pairs),
            "DX_BYTES": lane_access(outputs or self._grads, pairs),
            "TABLE_BYTES": _table_access(self._site, self._slots, self._options),
            "PARAM_BYTES": self._parameters.access(pairs),
        }

    def _add_main(self, multiprocessors: int, overlaps: bool, card: Card) -> None:
        site, streams, copy = self._site, self._streams, self._copy
        if self._only_rotates():
            rotated = [Stream(s.grad, s.dx) for s in streams if s.dx is not None]
            self.works.append(forward_work(rotated, self._tables, self._options, copy, card, transposed=True))
            return
        constants = {
            **self._constants(),
            "HAS_X": self._options.norm != "none",
            "NEEDS_WEIGHT": "weight" in self._kinds,
            "NEEDS_BIAS": "bias" in self._kinds,
        }
        if self._kinds:
            # v is moved beside the sums, which would leave the card idle otherwise.
            constants["V_HEADS"], copy = 0, None
        accesses = self._accesses()
        if self._rows:
            tile = hidden.backward_tile(constants, accesses, _adjoin([*self._grads, *self._read]), card)
        else:
            few = site.tokens * sum(site.heads[:2]) * site.head_dim * accesses["IN_BYTES"].itemsize < FEW_BYTES
            packed = self._copy is not None
            tile = backward_tile(constants, accesses, self._acc.itemsize, card, packed, few)
            if not _adjoin([*self._grads, *self._read]):
                tile = tile._replace(heads_a_copy=1)
        constants["DEFERS"] = overlaps and self._may_defer(tile)
        deferred = deferred_tokens(site.tokens, self._dx_bytes()) if constants["DEFERS"] else 0
        kernel = "hidden_backward" if self._rows else "backward"
        instance = Instance(kernel, self._types, {**constants, **tile_constants(tile)}, accesses)
        self._groups = groups = -(-(site.heads[0] + site.heads[1]) // heads_per_warp(self._slots))
        if self._rows:
            blocks = hidden.blocks(tile, site.tokens, multiprocessors)
        else:
            # Every slice of the tokens is walked by all groups of heads: whole rounds of groups fill whole blocks.
            round_ = groups // math.gcd(groups, tile.warps)
            needed = -(-site.tokens * groups // tile.warps)
            blocks = -(-needed // round_)
            if self._kinds:
                blocks = min(blocks, max(1, multiprocessors * tile.blocks // round_))
            blocks *= round_
        partial = None
        if self._kinds:
            columns = len(self._kinds) * sum(self._parameters.columns(i) for i in range(len(streams)))
            by_slice = self._parameters.per_head and not self._rows
            rows = blocks * tile.warps // groups if by_slice else blocks
            pitch = -(-columns // _PITCH) * _PITCH
            partial = torch.empty((rows, pitch), dtype=self._acc, device=self._grads[0].device)
            self._scratch.append(partial)
        arguments = Arguments()
        moved, filled = (None, None) if copy is None else (copy.x, copy.out)
        x = [s.x for s in streams] if constants["HAS_X"] else []
        for tensor in (
            *(*_padded(self._grads, 2), moved),
            *_padded(x, 2),
            *(*_padded([s.dx for s in streams], 2), filled),
        ):
            site.write_heads(arguments, tensor)
        stored = () if self._rows else (site.tokens - deferred,)
        self._write_rest(arguments, [partial], blocks, *stored)
        grid = blocks + (0 if copy is None else _moving_blocks(site, self._slots, tile.warps))
        shared = hidden.shared_bytes(instance.constants, accesses) if self._rows else 0
        self._add(instance, grid, 32 * tile.warps, arguments, overlaps=True, shared=shared)
        if partial is not None:
            self._add_sums(partial, instance, deferred)

    def _only_rotates(self) -> bool:
        """No norm: the backward is a forward, by the transpose. Llama, H200, 16384 tokens: a forward takes 82.5 us, the
        kernel of the backward 90.6. (That one serves where an input's gradient is not needed, or has another dtype.)"""
        filled = len(self._filled) == len(self._streams)
        moved = [] if self._copy is None else [self._copy.x, self._copy.out]
        dtypes = {t.dtype for t in (*self._grads, *self._filled, *moved)}
        return self._options.norm == "none" and filled and len(dtypes) == 1

    def _may_defer(self, tile: Tile) -> bool:
        """dx of some tokens may be left to the launch that adds up the sums: that has blocks like these, and no v."""
        filled = len(self._filled) == len(self._streams)
        whole = self._copy is None and filled and not self._rows
        return bool(self._kinds) and whole and 32 * tile.warps == SUM_THREADS

    def _dx_bytes(self) -> int:
        """Of one token."""
        return sum(self._site.heads[:2]) * self._site.head_dim * self._filled[0].element_size()

    def _add_sums(self, partial: Tensor, main: Instance, deferred: int) -> None:
        """The rows of `partial`, added up; and `copy`, if there is one, or the dx of the last `deferred` tokens."""
        arguments = Arguments()
        arguments.address(partial)
        ends: list[int] = []
        outputs: list[Tensor | None] = []
        for i, stream in enumerate(self._streams):
            for kind in self._kinds:
                ends.append((ends[-1] if ends else 0) + self._parameters.columns(i))
                outputs.append(None)
                if getattr(stream, f"needs_{kind}"):
                    gradient = self._parameters.gradient(kind, i)
                    self._parameter_gradients[kind, i] = gradient
                    outputs[-1] = gradient.target
        for output in (outputs + [None] * 4)[:4]:
            arguments.address(output)
        arguments.integers(*(ends + [ends[-1]] * 4)[:4])
        arguments.integers(*partial.shape)
        self._scratch += [g.target for g in self._parameter_gradients.values() if not g.direct]
        # Not by the read-only path: the kernel before this one may still write what this one will read.
        threads = SUM_THREADS if self._copy is None else SUM_THREADS_BESIDE_V
        written: dict[str, Constant] = {"IN_PLACE": True, "SUM_THREADS": threads}
        instance = Instance("reduce", {"Acc": ELEMENTS[self._acc], **self._parameters.types()}, written)
        site, warps = self._site, threads // 32
        blocks = partial.shape[1] // warps  # a column a warp
        if self._copy is not None:
            site.write_heads(arguments, self._copy.x)
            site.write_heads(arguments, self._copy.out)
            site.write_size(arguments)
            constants = {**self._constants(), "WARPS": warps, **written}
            instance = Instance("reduce_and_move", self._types, constants, main.accesses)
            blocks += _moving_blocks(site, self._slots, warps)
        elif deferred:
            for tensors in (self._grads, [s.x for s in self._streams], [s.dx for s in self._streams]):
                for tensor in _padded(tensors, 2):
                    site.write_heads(arguments, tensor)
            self._write_rest(arguments, (), site.tokens - deferred)
            instance = Instance("reduce_and_finish", self._types, {**main.constants, **written}, main.accesses)
            blocks += -(-deferred * self._groups // warps)
        self._add(instance, blocks, threads, arguments, overlaps=True)

    def _add_table_gradient(self) -> None:
        site, warps = self._site, TABLE_GRADIENT_WARPS
        entries = site.tables.entries
        shape = (site.batch, site.length, entries)
        self._dcos = torch.empty(shape, dtype=self._acc, device=self._grads[0].device)
        self._dsin = torch.empty_like(self._dcos)
        constants = {**self._constants(), "HIDDEN": self._rows, "WARPS": warps, "V_HEADS": 0}
        arguments = Arguments()
        for tensor in (*_padded(self._grads, 2), *_padded([s.x for s in self._streams], 2)):
            site.write_heads(arguments, tensor)
        self._write_rest(arguments, [self._dcos, self._dsin])
        instance = Instance("table_gradient", self._types, constants, self._accesses())
        self._add(instance, -(-site.tokens // warps), 32 * warps, arguments)

    def _write_rest(self, arguments: Arguments, outputs: Sequence[Tensor | None], *counts: int) -> None:
        self._parameters.write(arguments)
        self._site.write_tables(arguments)
        for output in outputs:
            arguments.address(output)
        arguments.integers(*counts)
        self._site.write_size(arguments)
        arguments.real(self._options.eps or 0.0)

    def _add(
        self,
        instance: Instance,
        blocks: int,
        threads: int,
        arguments: Arguments,
        overlaps: bool = False,
        shared: int = 0,
    ) -> None:
        launch = Launch(instance, blocks, threads, arguments, self._grads[0].device, overlaps, shared)
        self.works.append(Work(launch, arguments.tensors))


def _adjoin(tensors: Sequence[Tensor]) -> bool:
    """The heads of a token follow each other in memory."""
    return all(t.dim() == 4 and (t.shape[2] == 1 or t.stride(2) == t.shape[3]) for t in tensors)


def _moving_blocks(site: Site, slots: dict[str, Constant], warps: int) -> int:
    """Blocks that only move v."""
    vectors = site.tokens * site.heads[2] * site.head_dim // int(slots["PAIRS"])
    return -(-vectors // (32 * warps * _VECTORS_A_THREAD))


def _padded(tensors: Sequence[Tensor | None], count: int) -> list[Tensor | None]:
    return [*tensors, *[None] * (count - len(tensors))]


def _check(options: Options, by_head: Sequence[Tensor], itemsize: int) -> None:
    reason = unsupported(options, by_head[0].shape[3], [t.shape[2] for t in by_head], itemsize)
    if reason is not None:
        raise NotImplementedError(f"backend='cuda' cannot compute this: {reason} Pass backend='auto'.")


def _table_access(site: Site, slots: dict[str, Constant], options: Options) -> Access:
    view = site.tables.view
    return Access(4, 4) if view is None else table_access(view, slots, options)


def _launch(work: Work) -> None:
    work.launch.here([tensor.data_ptr() for tensor in work.tensors])


@lru_cache
def _device_facts(device: torch.device) -> tuple[int, bool, Card]:
    """Multiprocessors, whether a launch may begin while the one before it ends (programmatic dependent launch), and
    what tiles are for."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.major >= 9, card_of(device)
