"""What a call needs that does not change from call to call: the kernels, their grids, tensor maps but for the address,
and numbers.

Computed once for every combination of shapes, strides and options and kept, so that a call costs little more than its
launches.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..attention_problem import Problem
from ..launch import Launch
from . import prepare
from .additive import additive
from .build import compile_instance
from .descriptors import DTYPES, rows_map, spread_rows_map, tensor_map
from .explicit import explicit, heads_apart
from .instances import instance
from .mapped_launch import MappedLaunch
from .rows import PADDED, batches, by_data
from .templates import (
    AnyTemplate,
    BackwardTemplate,
    ForwardTemplate,
    WideTemplate,
    backward_template,
    forward_block,
    forward_template,
    wide_templates,
)

_LOG2_E = math.log2(math.e)
_L2_BYTES_FOR_KEYS = 32 << 20
"""Of 50 MB: K and V of the heads that run together where the queries stay."""
_WIDE_BYTES_FOR_KEYS = 64 << 20
"""The same in a forward at head_dim 256, from so many keys on. Causal 4k, H200: 16 heads (67 MB) and 32 the same, eight
and four 0.99; 2k: 32 heads 1.004 times as fast as 16."""
_WIDE_KEYS_FROM = 2048
_FORWARD_HEADS = 4
"""At least so many key heads run together in a forward under a mask, whatever their size: what tiles in step read is a
part of K and V, and the last heads together end in short tiles. head_dim 256, causal, 16k, H200, to four: one 0.96, two
and eight the same."""
_L2_BYTES_FOR_QUERIES = 40 << 20
"""Q, dO and the accumulator of dQ of the heads that run together where the keys stay."""
_DRIFTING_BYTES = 100 << 20
"""The same of all heads that those blocks visit: 67 MB did no harm, 134 MB did."""
_BLOCKS_AHEAD = 32
"""At least so many blocks of keys are drawn before, and zero, what a block of keys adds to."""
_MANY = 8
"""With more blocks of keys a multiprocessor the L2 cache matters more than their order."""
_FEW = 2
"""With `deterministic` an order is looked for up to so many blocks a multiprocessor: with more, turns decide, which the
model does not know. H200, causal, to the form before: 1 x 4k tokens, 32/8 heads, 1.12 times as fast, but 2 x 4k 1.01
(the model says 1.13)."""
_FEW_SHORT = 4
"""The same where a block visits one query head: 1 x 4k, 16 heads, 1.12."""
_TILES_OF_A_BLOCK = 3
"""What a block of keys costs beside its tiles of queries: 5 microseconds at head_dim 128, where a tile is 1.75."""
_QUERIES_OF_A_TILE = 64
_ROWS_PER_PROGRAM = 32
"""Of the kernels in prepare.py."""

Axes = tuple[int, ...]
Shaped = tuple[Axes, Axes]
"""Shape and strides."""


@dataclass(frozen=True)
class Call:
    """The part of a `Problem` that decides a plan; hashable."""

    q: Shaped
    k: Shaped
    v: Shaped
    dtype: torch.dtype
    device: int
    offset: int
    left: int | None
    right: int | None
    data: str | None
    """Kind of mask that only the data knows: "rows", "segments", "bits", "values" or "values32" (templates.MASKS)."""
    row_batches: int
    """Batches that such a mask tells apart."""
    row_heads: int
    """Query heads that it tells apart."""
    sinks: bool
    scale: float
    softcap: float
    deterministic: bool

    @classmethod
    def of(cls, problem: Problem) -> Call:
        """The call of a problem."""
        q, k, v, seen = problem.q, problem.k, problem.v, problem.seen
        data = None
        if seen.mask is not None and additive(seen):
            data = "values" if seen.mask.dtype == q.dtype else "values32"
        elif by_data(seen):
            data = "bits" if explicit(seen) else "segments" if seen.documents is None else "rows"
        return cls(
            (q.shape, q.stride()), (k.shape, k.stride()), (v.shape, v.stride()), q.dtype, q.device.index,
            seen.offset, seen.left, seen.right, data, 0 if data is None else batches(seen),
            heads_apart(seen), problem.sinks is not None, problem.scale, problem.softcap, problem.deterministic,
        )  # fmt: skip

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """(batch, queries, query heads, head_dim of q and k, keys, key heads)."""
        (batch, seq_q, heads, head_dim), (_, seq_k, kv_heads, _) = self.q[0], self.k[0]
        return batch, seq_q, heads, head_dim, seq_k, kv_heads

    def mask(self, block_n: int) -> str:
        """Kind of mask (templates.MASKS)."""
        if self.data is not None:
            return self.data
        if self.left is not None:
            return "band"
        return "right" if self.right is not None or self.k[0][1] % block_n else "none"

    def band(self, ranges: int) -> tuple[int, int, int, int]:
        """Keys of a query, relative to its row; a side without a limit is past every key. Then the elements from one
        batch to the next of rows.py's arrays: of the rows, and of the `ranges` (their number); of bits the planes from
        one batch, and one head, to the next."""
        seq_q, seq_k = self.q[0][1], self.k[0][1]
        low = -(seq_q + seq_k) if self.left is None else max(self.offset - self.left, -(seq_q + seq_k))
        high = seq_k if self.right is None else min(self.offset + self.right, seq_k)
        strides = (-(-seq_q // PADDED) * PADDED, ranges * 4) if self.row_batches > 1 else (0, 0)
        if self.data in ("bits", "values", "values32"):
            strides = self.row_heads if self.row_batches > 1 else 0, int(self.row_heads > 1)
        return low, high, *strides

    def scales(self) -> tuple[float, float]:
        """(factor to exponents of 2, factor before tanh)."""
        if self.softcap > 0:
            return self.softcap * _LOG2_E, self.scale / self.softcap
        return self.scale * _LOG2_E, 0.0


# ---------------------------------------------------------------------------------------------------- forward


@dataclass(frozen=True)
class ForwardPlan:
    """`launch`: maps of q, k, v, out; pointers to out, lse, sinks, the arrays of rows.py and the counter."""

    template: ForwardTemplate
    launch: MappedLaunch


def forward_template_of(call: Call) -> ForwardTemplate | None:
    """The forward instance for a call; None when there is none."""
    head_dim, v_head_dim = call.q[0][3], call.v[0][3]
    mask = call.mask(forward_block(head_dim, v_head_dim))
    uneven = mask not in ("none", "right") or call.right is not None
    batch, queries, heads, _ = call.q[0]
    return forward_template(
        head_dim, v_head_dim, mask=mask, softcap=call.softcap > 0, sinks=call.sinks, uneven=uneven, queries=queries,
        heads=batch * heads,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def forward_plan(call: Call, out: Shaped) -> ForwardPlan:
    """The plan of a forward; `out`: of the output."""
    template = forward_template_of(call)
    assert template is not None, "the registry does not choose this back end for such a call"
    batch, seq_q, heads, _, seq_k, kv_heads = call.sizes
    tiles = -(-seq_q // template.block_m)
    q = tensor_map(*call.q, call.dtype, 64, template.qk_lanes)
    maps = (
        q,
        tensor_map(*call.k, call.dtype, template.block_n, template.qk_lanes),
        tensor_map(*call.v, call.dtype, template.block_n, template.v_dim),
        # Without a buffer for O there is no map either; the kernel does not look at the argument.
        tensor_map(*out, call.dtype, 64, template.o_lanes) if template.store_by_tma else q,
    )
    together = heads_of_forward(call, template) if template.masked else 1
    numbers = (
        *(out[1][0], out[1][2], out[1][1]), out[0][3], batch, heads, heads // kv_heads, seq_q, seq_k, together,
        *call.band(tiles), *call.scales(),
    )  # fmt: skip
    processors = _multiprocessors(call.device)
    programs = min(tiles * batch * heads, template.programs * processors)
    kernel = _loaded(template, call.dtype, call.device)
    return ForwardPlan(template, MappedLaunch(kernel, (programs, 1, 1), maps, numbers, template, call.device))


# ---------------------------------------------------------------------------------------------------- backward


@dataclass(frozen=True)
class Counts:
    """What the kernels of a backward up to head_dim 128 count, in one array of int32 that is zero when the main one
    starts. Element 0 counts the blocks of keys that were drawn; the other counts begin at these elements, multiples of
    16 bytes."""

    zeroed: int
    """For every head: the blocks of keys that have zeroed their part of its sums of dQ."""
    summed: int
    """For every head: the warps that have added their part of a block of keys, every adding warp once a block."""
    turns: int
    """For every tile: the blocks of keys that have added to it (`deterministic`)."""
    size: int
    """Elements of the array."""

    @classmethod
    def of(cls, heads: int, tiles: int) -> Counts:
        """`heads`: of all batches; `tiles`: of all heads, as far as they have turns."""
        padded = -(-heads // 4) * 4
        return cls(4, 4 + padded, 4 + 2 * padded, 4 + 2 * padded + tiles)

    @property
    def places(self) -> tuple[int, int, int]:
        """As the kernels take them."""
        return self.zeroed, self.summed, self.turns


@dataclass(frozen=True)
class BackwardPlan:
    """What both kinds of backward share, see `prepare.py`: `before`, and the rows of LSE and delta, padded."""

    before: Launch
    padded_rows: int


@dataclass(frozen=True)
class NarrowPlan(BackwardPlan):
    """Head dimensions up to 128. `main`: maps of q, k, v, dO, dQ (the accumulator), dK, dV, LSE and delta; pointers to
    the arrays of rows.py, the counter with what stands behind it, and the accumulator. `after`: rounds dQ."""

    template: BackwardTemplate
    main: MappedLaunch
    after: Launch
    counts: Counts


@dataclass(frozen=True)
class WidePlan(BackwardPlan):
    """Head dimensions above 128. `queries`: maps of q, k, v, dO and dQ; pointers to LSE, delta and the arrays of
    rows.py. `keys`: maps of q, k, v, dO, dK, dV, LSE and delta; pointers to the arrays of rows.py."""

    templates: tuple[WideTemplate, WideTemplate]
    queries: MappedLaunch
    keys: MappedLaunch


def backward_templates_of(call: Call) -> BackwardTemplate | tuple[WideTemplate, WideTemplate] | None:
    """The backward instances for a call; None when there are none."""
    dims = call.q[0][3], call.v[0][3]
    softcap = call.softcap > 0
    if max(dims) > 128:
        return wide_templates(*dims, mask=call.mask(64), softcap=softcap)
    return backward_template(*dims, mask=call.mask(128), softcap=softcap, deterministic=call.deterministic)


def parts_of(call: Call) -> int:
    """Over how many thread blocks the query heads of a group are spread. Each part has a dK and dV of its own, which
    are summed afterwards. Where the mask differs by head every query head has blocks of its own to visit, so each is a
    part."""
    return order_of(call)[0]


@functools.lru_cache(maxsize=1024)
def order_of(call: Call) -> tuple[int, int]:
    """(parts, see `parts_of`; how many key heads times parts run together) where the keys stay.

    Blocks of keys that are few and long leave multiprocessors idle in the end. What an order costs is found by drawing
    them as thread blocks do (`_time_of`): of 2 x 4k tokens with 32/8 heads, two heads together take 1.22 times as long
    as four, and were measured to take 1.18. Many blocks fill the end in any order: then the fewest parts that are
    enough are taken, and as many heads as the L2 cache likes. So they are where the model does not know the lengths,
    or the time: with `deterministic` blocks wait for each other.
    """
    batch, _, heads, _, seq_k, kv_heads = call.sizes
    group, keys = heads // kv_heads, _keys_of_a_block(call)
    together = _key_heads_together(call, masked=call.mask(keys) != "none")
    if call.row_heads > 1:
        return group, _chunk(batch * kv_heads * group, together)
    blocks, processors = -(-seq_k // keys) * batch * kv_heads, _multiprocessors(call.device)
    uneven = call.left is not None or call.right is not None or call.data is not None
    enough, wanted = (2.5, 3.5) if uneven else (1.0, 1.5)
    divisors = [n for n in range(1, group + 1) if group % n == 0 and group // n <= _heads_of_a_block(call)]
    parts = divisors[0]
    if blocks * parts < enough * processors:
        parts = next((n for n in divisors if blocks * n >= wanted * processors), group)
    usual = parts, _chunk(batch * kv_heads * parts, together)
    if call.data is not None or blocks * parts > _MANY * processors:
        return usual
    if keys < 128:
        divisors = [parts]
    elif not call.deterministic:
        divisors = [n for n in divisors if blocks * n <= _MANY * processors]
    elif call.right is not None and call.left is None:
        divisors = [n for n in range(1, group + 1) if group % n == 0]
        divisors = [n for n in divisors if blocks * n <= (_FEW if n < group else _FEW_SHORT) * processors]
    else:
        divisors = []
    if not divisors:
        return usual
    times = {order: _time_of(call, order) for order in _orders(call, divisors, together)}
    best = next(order for order in times if times[order] <= 1.02 * min(times.values()))
    # What promised 1.05 brought 0.98 to 1.01; but a sum of parts that is saved is not in the model.
    promised = _time_of(call, usual) / times[best]
    return best if promised > 1.06 or (promised >= 1 and best[0] < parts) else usual


def _orders(call: Call, divisors: list[int], together: int) -> Iterator[tuple[int, int]]:
    """What `order_of` chooses from, the fewest parts, and then heads together, first. Blocks of equal length have no
    use for another number of heads than `together`."""
    batch, _, _, _, _, kv_heads = call.sizes
    for parts in divisors:
        heads = batch * kv_heads * parts
        if call.right is None:
            yield parts, _chunk(heads, together)
            continue
        for n in range(1, heads + 1):
            if heads % n == 0 and (n == 1 or n * _queries_bytes(call) <= _L2_BYTES_FOR_QUERIES):
                yield parts, n


def _time_of(call: Call, order: tuple[int, int]) -> float:
    """When the last multiprocessor is done with blocks of keys that are drawn in this order, in tiles of queries."""
    batch, seq_q, heads, _, seq_k, kv_heads = call.sizes
    parts, together = order
    group = heads // kv_heads // parts
    chunk = [group * tiles + _TILES_OF_A_BLOCK for tiles in _tiles_of_blocks(call) for _ in range(together)]
    free_at = [0.0] * _multiprocessors(call.device)
    for _ in range(batch * kv_heads * parts // together):
        for length in chunk:
            heapq.heapreplace(free_at, free_at[0] + length)
    return max(free_at)


def _tiles_of_blocks(call: Call) -> Iterator[int]:
    """How many tiles of queries see each block of keys, where causality and windows are all that hides any
    (`scores.query_tiles`)."""
    seq_q, seq_k, keys = call.q[0][1], call.k[0][1], _keys_of_a_block(call)
    low, high, *_ = call.band(0)
    tiles = -(-seq_q // _QUERIES_OF_A_TILE)
    for key0 in range(0, seq_k, keys):
        first = min(max(key0 - high, 0) // _QUERIES_OF_A_TILE, tiles)
        last = -(-max(key0 + keys - low, 0) // _QUERIES_OF_A_TILE)
        yield max(min(last, tiles) - first, 0)


def _keys_of_a_block(call: Call) -> int:
    return 128 if max(call.q[0][3], call.v[0][3]) <= 128 else 64


def _heads_of_a_block(call: Call) -> int:
    """How many query heads a block of keys may visit. Causal blocks differ in length and are soon at different heads;
    if those do not fit L2 together, each reads its queries from memory. At 2 x 8k tokens of 64/8 heads, blocks of eight
    heads had 478 TFLOP/s, of four 539, of two 551, of one 539; of 32/8 heads, of four 561, of two 531. Where
    one query head is half of the cache, one (H200, 32k tokens, 32/8 heads: 1.03 times as fast as four, in three runs).
    Deterministic ones wait for each other as well: of 32/8 heads, blocks of four had 346, of one 567."""
    batch, _, heads, _, _, kv_heads = call.sizes
    group = heads // kv_heads
    causal = call.right is not None and call.left is None and call.data is None
    if not causal or max(call.q[0][3], call.v[0][3]) > 128:
        return group
    wanted = _key_heads_together(call, masked=True)
    if call.deterministic or wanted == 1:
        return 1
    together = _chunk(batch * kv_heads, wanted)
    return group if group * together * _queries_bytes(call) <= _DRIFTING_BYTES else min(group, 4)


@functools.lru_cache(maxsize=1024)
def backward_plan(
    call: Call, out: Shaped, grad_out: Shaped, do: Shaped, dq: Shaped, dk: Shaped, dv: Shaped, *,
    dq_dtype: torch.dtype, grad_lse: bool,
) -> NarrowPlan | WidePlan:  # fmt: skip
    """The plan of a backward. `do`: of the gradient as TMA reads it, `grad_out` itself or a copy of it. `dk`, `dv`:
    with a head for every part (`parts_of`). `dq_dtype`: above head_dim 128 that of q."""
    templates = backward_templates_of(call)
    assert templates is not None, "the registry does not choose this back end for such a call"
    wide = isinstance(templates, tuple)
    template = templates[1] if isinstance(templates, tuple) else templates
    batch, seq_q, heads, head_dim, seq_k, kv_heads = call.sizes
    blocks = -(-seq_k // template.block_n)
    padded_rows = -(-seq_q // PADDED) * PADDED if wide else -(-seq_q // template.block_m) * template.block_m
    accumulator_rows = rows_of_accumulator(seq_q)
    parts, together = order_of(call)
    grid = together, blocks, batch * kv_heads * parts // together
    programs, group = min(math.prod(grid), _multiprocessors(call.device)), heads // kv_heads // parts
    ahead, ready = heads_ahead(programs, together, blocks)
    turns = call.deterministic and not wide
    counts = Counts.of(batch * heads, batch * heads * padded_rows // template.block_m if turns else 0)
    before = Launch(
        prepare.before, (padded_rows // _ROWS_PER_PROGRAM * batch * heads,), torch.device("cuda", call.device),
        (*[call.dtype] * 3, *[torch.float32] * 5, torch.int32),
        (
            *_strides(out), *_strides(grad_out), grad_out[1][3],
            heads, seq_q, accumulator_rows, padded_rows, head_dim, out[0][3], 0 if turns else ready * group,
            *counts.places,
        ),
        {
            "TILE": template.block_m, "ROWS": _ROWS_PER_PROGRAM, "QK_DIM": template.qk_dim, "V_DIM": template.v_dim,
            "HAS_GRAD_LSE": grad_lse, "COPY": do != grad_out, "ACCUMULATE": not wide,
            "TURNS": turns,
        },
        num_warps=4,
    )  # fmt: skip
    lanes = template.qk_dim if isinstance(template, BackwardTemplate) else template.qk_lanes
    queries, keys = (template.block_m, lanes), (64, lanes)
    values, rows = (
        (64, template.v_dim),
        rows_map(padded_rows // template.block_m * batch * heads, template.block_m),
    )
    inputs = (
        tensor_map(*call.q, call.dtype, *queries),
        tensor_map(*call.k, call.dtype, *keys),
        tensor_map(*call.v, call.dtype, *values),
        tensor_map(*do, call.dtype, template.block_m, template.v_dim),
    )
    dk_lanes = template.dk_lanes if isinstance(template, BackwardTemplate) else template.qk_lanes
    gradients = tensor_map(*dk, call.dtype, 64, dk_lanes), tensor_map(*dv, call.dtype, *values)
    numbers = (
        *(kv_heads * parts, group, parts, seq_q, seq_k),
        *call.band(blocks), *call.scales(), call.scale,
    )  # fmt: skip
    kernel = _loaded(template, call.dtype, call.device)
    if isinstance(templates, tuple):
        of_keys = MappedLaunch(kernel, grid, (*inputs, *gradients, rows, rows), numbers, template, call.device)
        return WidePlan(before, padded_rows, templates, _wide_queries(call, templates[0], do, dq), of_keys)
    dq_map = spread_rows_map(batch * heads, accumulator_rows, head_dim, templates.dq_box)
    after = Launch(
        prepare.after, (-(-seq_q // _ROWS_PER_PROGRAM) * batch * heads,), torch.device("cuda", call.device),
        (torch.float32, torch.int32, dq_dtype),
        (
            *_strides(dq), heads, seq_q, accumulator_rows, head_dim, counts.summed, group, templates.adders * blocks,
            counts.turns, padded_rows // template.block_m, call.scale,
        ),
        {"ROWS": _ROWS_PER_PROGRAM, "QK_DIM": template.qk_dim, "TILE": template.block_m, "TURNS": turns},
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
    maps = *inputs, dq_map, *gradients, rows, rows
    work = *grid[:2], math.prod(grid), ahead, ready, group * accumulator_rows * head_dim, *counts.places
    main = MappedLaunch(kernel, (programs, 1, 1), maps, (*numbers, *work), template, call.device)
    return NarrowPlan(before, padded_rows, templates, main, after, counts)


def heads_ahead(programs: int, together: int, blocks: int) -> tuple[int, int]:
    """(how many heads after its own is the one whose sums of dQ a block of keys zeroes a part of, how many heads are
    zero at launch), in key heads times parts: whole chunks of `together` heads, so that who zeroes a head is drawn
    before who adds to it.

    Of heads that many blocks of keys come before, the zeros have left the L2 cache when they are added to: head_dim
    128, causal 1k, had 314 TFLOP/s 18 heads ahead, 337 four. But the blocks that run first, as many as `programs`,
    shall find zeros.
    """
    chunk = together * blocks
    ahead = -(-_BLOCKS_AHEAD // chunk) * together
    return ahead, max(-(-programs // chunk) * together, ahead)


def rows_of_accumulator(seq_q: int) -> int:
    """Rows of a head of the accumulator of dQ: whole groups of 8, whose rows a tile in shared memory holds in another
    order."""
    return -(-seq_q // 8) * 8


def _wide_queries(call: Call, template: WideTemplate, do: Shaped, dq: Shaped) -> MappedLaunch:
    batch, seq_q, heads, _, seq_k, kv_heads = call.sizes
    tiles = -(-seq_q // template.block_m)
    maps = (
        tensor_map(*call.q, call.dtype, 64, template.qk_lanes),
        tensor_map(*call.k, call.dtype, template.block_n, template.qk_lanes),
        tensor_map(*call.v, call.dtype, template.block_n, template.v_dim),
        tensor_map(*do, call.dtype, 64, template.v_dim),
        tensor_map(*dq, call.dtype, 64, template.qk_lanes),
    )
    sizes = batch, heads, heads // kv_heads, seq_q, seq_k, _heads_together(call, _L2_BYTES_FOR_KEYS)
    numbers = *sizes, *call.band(tiles), *call.scales(), call.scale
    kernel = _loaded(template, call.dtype, call.device)
    return MappedLaunch(kernel, (tiles * batch * heads, 1, 1), maps, numbers, template, call.device)


# ---------------------------------------------------------------------------------------------------- shared


@functools.cache
def _loaded(template: AnyTemplate, dtype: torch.dtype, device: int) -> Any:
    """The compiled kernel, one handle per device."""
    return compile_instance(instance(template, DTYPES[dtype]))


def _multiprocessors(device: int) -> int:
    """As many thread blocks as multiprocessors stay and draw their work."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _strides(x: Shaped) -> tuple[int, int, int]:
    """Of batch, head and row of a `[B, S, H, D]` tensor."""
    of_batch, of_row, of_head, _ = x[1]
    return of_batch, of_head, of_row


def heads_of_forward(call: Call, template: ForwardTemplate) -> int:
    """How many query heads run at the same time in a forward under a mask."""
    wide = template.v_dim == 256 and call.k[0][1] >= _WIDE_KEYS_FROM
    return _heads_together(call, _WIDE_BYTES_FOR_KEYS if wide else _L2_BYTES_FOR_KEYS, at_least=_FORWARD_HEADS)


def _heads_together(call: Call, limit: int, *, at_least: int = 1) -> int:
    """How many query heads run at the same time where the queries stay, so that their K and V, up to `limit` bytes,
    stay in L2; those of `at_least` key heads, where there are as many."""
    batch, _, heads, head_dim, seq_k, kv_heads = call.sizes
    bytes_per_head = seq_k * (head_dim + call.v[0][3]) * call.dtype.itemsize
    together = 1
    while together * 2 <= batch * kv_heads and (together * 2 * bytes_per_head <= limit or together * 2 <= at_least):
        together *= 2
    return together * (heads // kv_heads)


def _key_heads_together(call: Call, *, masked: bool) -> int:
    """How many key/value heads run at the same time where the keys stay. Blocks of keys pass the queries side by side,
    unless a mask lets each begin where its keys are first seen: then they are all over the sequence, of which one query
    head each must stay in L2. Causal GQA 32/8 at 8k had 529 TFLOP/s with 2, 492 with 4."""
    if not masked:
        return 4
    return 2 if 2 * _queries_bytes(call) <= _L2_BYTES_FOR_QUERIES else 1


def _queries_bytes(call: Call) -> int:
    """Q, dO and the accumulator of dQ of one query head."""
    _, seq_q, _, head_dim, _, _ = call.sizes
    return seq_q * ((head_dim + call.v[0][3]) * call.dtype.itemsize + 4 * head_dim)


def _chunk(heads: int, wanted: int) -> int:
    """The largest divisor of `heads` up to `wanted` that leaves at most 65535 chunks, the third axis of the grid; else
    the smallest one."""
    divisors = [n for n in range(1, heads + 1) if heads % n == 0 and heads // n <= 65535]
    return max((n for n in divisors if n <= wanted), default=divisors[0])
