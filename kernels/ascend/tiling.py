"""How attention is cut up on an Ascend chip: a pure function from sizes to a tiling.

An Ascend core is a pair: one cube core (matrix products, operands in L1) and two vector cores (softmax, data in the
Unified Buffer) that hand each other score tiles through memory. The steps, in this order:

1. *Within a core*: pick the template by size, that is, which axes a core cuts. A step is `step_rows x step_cols`
   scores.
2. *Between cores*: what is left (batch, heads, row blocks) is dealt out to the cores.
3. *Cube and vector*: a step is computed by the cube in `cube_rows x cube_cols` products and read back by each vector
   core in `vector_rows x step_cols` tiles, `ratio` tiles a step.
4. *Overlap*: double buffers in the vector core, and how many steps the cube runs ahead.

The templates and their limits follow the vendor's published design (ops-transformer, "FA/FAG operator design",
sections 1 and 2): a step of 512 KiB keeps the hand-over rare, a vector tile's largest buffer is 32 KiB (8 x 1024
scores in float32), a cube tile is 128 x 128. The dealing-out and the memory account are ours. Nothing here was
measured on a chip.

What runs: `longest_first`, the order in which `flash.py` deals its blocks out. `tile_attention` and `Tiling` are a
design: for a kernel that programs cube and vector cores apart, as the vendor's do. We have none, because
Triton-Ascend's compiler makes those choices itself; so nothing but the tests calls them, which hold every property
claimed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Final

from .platform import KIB, Platform
from .tiling_key import Axis, Buffering, DType, Format, Layout, Mode, Sparse, TemplateKey

FRACTAL: Final = 16
"""Side of the cube unit's smallest product; rows and columns come in multiples of it."""
STEP_BYTES: Final = 512 * KIB
STEP_COLS: Final = 1024
STEP_ROWS: Final = 128
CUBE_TILE: Final = 128
VECTOR_BUFFER: Final = 32 * KIB
SMALL_COLS: Final = 128
"""Up to this many keys whole batches are put together into one step."""
STATISTIC_BYTES: Final = 32
"""A row's maximum or sum is kept as 8 equal floats, one block of the vector unit."""
L1_BUFFERS: Final = 2
FLOAT: Final = 4

CUBE_MACS_PER_CYCLE: Final[Mapping[DType, int]] = {DType.FLOAT16: 4096, DType.BFLOAT16: 4096, DType.FLOAT32: 1024}
"""16 x 16 x 16 in 16-bit types; a quarter of it in float32 (assumed)."""
VECTOR_LANES: Final = 64
"""Floats of one 256-byte vector instruction."""
VECTOR_OPS_PER_SCORE: Final = 10
"""Scale, mask, row maximum, subtract, exponential (counted as three), row sum, cast, rescale (assumed)."""


class Template(Enum):
    """Which axes are cut within a core (`ub0`, `ub1`) and which is the innermost one cut between cores (`block`)."""

    EMPTY = (Axis.NONE, Axis.NONE, Axis.NONE)
    """No query or no key: nothing to multiply, the output (if it has elements) is zero."""
    S1_S2 = (Axis.S1, Axis.S2, Axis.S1)
    """Long keys: the softmax is corrected from step to step."""
    S1 = (Axis.S1, Axis.NONE, Axis.S1)
    """All keys in one step: no correction."""
    BATCH = (Axis.B, Axis.NONE, Axis.B)
    """Small heads: one step takes every head of several batches."""


@dataclass(frozen=True)
class Mask:
    """The scores that exist: query `i` sees key `j` when `i + shift - pre_tokens <= j <= i + shift + next_tokens`.

    `shift` is 0, or `S2 - S1` with `right_down` (the diagonal ends in the last row and column).
    `dense` adds a mask tensor that is read for every score; it may hide any score and proves nothing about any.
    """

    pre_tokens: float = inf
    next_tokens: float = inf
    right_down: bool = False
    dense: bool = False

    @property
    def sparse(self) -> Sparse:
        if self.pre_tokens != inf:
            return Sparse.BAND
        if self.next_tokens == inf:
            return Sparse.NONE
        if self.next_tokens == 0:
            return Sparse.RIGHT_DOWN_CAUSAL if self.right_down else Sparse.CAUSAL
        return Sparse.BAND

    def columns(self, first_row: int, last_row: int, s1: int, s2: int) -> tuple[int, int]:
        """Half-open range of keys that some row of `[first_row, last_row]` sees; empty ranges are `(0, 0)`."""
        shift = s2 - s1 if self.right_down else 0
        start = max(0, first_row + shift - self.pre_tokens)
        stop = min(s2, last_row + shift + self.next_tokens + 1)
        return (int(start), int(stop)) if start < stop else (0, 0)


FULL: Final = Mask()
CAUSAL: Final = Mask(next_tokens=0)
CAUSAL_RIGHT_DOWN: Final = Mask(next_tokens=0, right_down=True)


@dataclass(frozen=True)
class Problem:
    """One attention call: `B` batches, `N2` key/value heads, `G` query heads for each, `S1` queries, `S2` keys,
    head_dim `D`."""

    B: int
    N2: int
    G: int
    S1: int
    S2: int
    D: int
    dtype: DType
    mask: Mask = FULL
    layout: Layout = Layout.BSND
    dropout: bool = False
    pse: bool = False

    def __post_init__(self) -> None:
        for name in ("B", "N2", "G", "S1", "S2", "D"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} is negative; pass a size of zero or more.")


@dataclass(frozen=True)
class Block:
    """What one core does without a break.

    Query rows `[row, row + rows)` of heads `[head, head + heads)` (of `N2 * G`) of batches `[batch, batch + batches)`.
    """

    batch: int
    batches: int
    head: int
    heads: int
    row: int
    rows: int
    steps: int
    """Cost: the number of steps, at least 1 (a block without visible keys still writes its zeros)."""


@dataclass(frozen=True)
class Tiling:
    """The answer. Rows and columns are elements of the score matrix, memory is bytes."""

    problem: Problem
    platform: Platform
    template: Template
    step_rows: int
    step_cols: int
    step_batches: int
    row_order: tuple[int, ...]
    """Row blocks from the longest to the shortest."""
    cube_rows: int
    cube_cols: int
    cube_depth: int
    """The part of head_dim that one product takes."""
    vector_rows: int
    ratio: int
    """Vector tiles a vector core works through for one step of the cube."""
    buffers: int
    """1 or 2: depth of the vector core's buffers."""
    cube_steps_ahead: int
    l1_reuse: bool

    @property
    def key(self) -> TemplateKey:
        ub0, ub1, block = self.template.value
        mask = self.problem.mask
        return TemplateKey(
            ub0=ub0,
            ub1=ub1,
            block=block,
            mode=Mode.INVALID_ROWS if _may_have_empty_rows(self.problem) else Mode.HIGH_PRECISION,
            dtype=self.problem.dtype,
            layout=self.problem.layout,
            score_format=Format.ND,
            sparse=mask.sparse,
            buffering=Buffering(self.buffers),
            dropout=self.problem.dropout,
            mask=mask.dense,
            pse=self.problem.pse,
            l1_reuse=self.l1_reuse,
        )

    @property
    def block_count(self) -> int:
        """Blocks dealt out to the cores."""
        if self.template is Template.EMPTY:
            return 0
        if self.template is Template.BATCH:
            return _ceil_div(self.problem.B, self.step_batches)
        return self.problem.B * self.problem.N2 * self.problem.G * len(self.row_order)

    @property
    def cores(self) -> int:
        """Cube cores that get work: all of them unless there are fewer blocks."""
        return min(self.platform.cube_cores, self.block_count)

    def block(self, index: int) -> Block:
        """Block `index` in dealing order: longest first, and for equal length the heads that share keys side by
        side."""
        p = self.problem
        if self.template is Template.BATCH:
            first = index * self.step_batches
            return Block(first, min(self.step_batches, p.B - first), 0, p.N2 * p.G, 0, p.S1, steps=1)
        rank, head = divmod(index, p.B * p.N2 * p.G)
        row = self.row_order[rank] * self.step_rows
        rows = min(self.step_rows, p.S1 - row)
        batch, head = divmod(head, p.N2 * p.G)
        return Block(batch, 1, head, 1, row, rows, _steps(p, row, rows, self.step_cols))

    def blocks_of(self, core: int) -> Iterator[Block]:
        """The blocks of one core: every `cores`-th one.

        Dealing a list sorted from long to short leaves any two cores within one block of each other: the differences of
        successive rounds telescope to at most the longest block.
        """
        return (self.block(index) for index in range(core, self.block_count, self.cores))

    def ub_bytes(self) -> Mapping[str, int]:
        """Buffers of one vector core."""
        return _ub_bytes(self.problem, self.platform, self.step_rows, self.step_cols, self.vector_rows, self.buffers)

    def l1_bytes(self) -> Mapping[str, int]:
        """Buffers of one cube core's L1."""
        p = self.problem
        depth = _align(p.D, FRACTAL)
        kept = self.step_cols if self.l1_reuse else L1_BUFFERS * self.cube_cols
        queries = depth if self.l1_reuse else L1_BUFFERS * self.cube_depth
        return {
            "queries": self.cube_rows * queries * p.dtype.itemsize,
            "keys": kept * (depth if self.l1_reuse else self.cube_depth) * p.dtype.itemsize,
            "probabilities": L1_BUFFERS * self.cube_rows * self.cube_cols * p.dtype.itemsize,
            "values": L1_BUFFERS * self.cube_cols * self.cube_depth * p.dtype.itemsize,
        }

    def l0_bytes(self) -> Mapping[str, int]:
        """Operand and accumulator buffers of the cube unit, double-buffered."""
        size = self.problem.dtype.itemsize
        return {
            "l0a": 2 * self.cube_rows * self.cube_depth * size,
            "l0b": 2 * self.cube_depth * self.cube_cols * size,
            "l0c": 2 * self.cube_rows * self.cube_cols * FLOAT,
        }


def tile_attention(problem: Problem, platform: Platform) -> Tiling:
    """The tiling of `problem` on `platform`.

    Raises:
        ValueError: head_dim is zero, or no tile of this head_dim fits the on-chip memory.
    """
    if problem.D == 0:
        raise ValueError("D=0: attention needs a head_dim of at least 1.")
    template = _choose_template(problem, platform)
    if template is Template.EMPTY:
        return Tiling(problem, platform, template, 0, 0, 0, (), 0, 0, 0, 0, 0, 1, 0, False)

    step_batches = 1
    step_cols = min(STEP_COLS, _align(problem.S2, FRACTAL))
    if template is Template.BATCH:
        step_rows = _align(problem.S1, FRACTAL)
        step_batches = _batches_per_step(problem, platform, step_rows, step_cols)
        row_order: tuple[int, ...] = (0,)
    else:
        step_rows = _rows_per_step(problem, platform, template, step_cols)
        row_order = longest_first(problem, step_rows, step_cols)

    vector_rows, buffers = _vector_tile(problem, platform, step_rows, step_cols)
    size = problem.dtype.itemsize
    cube_depth = min(_align(problem.D, FRACTAL), platform.l0a // (2 * CUBE_TILE * size))
    cube_rows = min(CUBE_TILE, step_rows)
    cube_cols = min(CUBE_TILE, step_cols)
    steps = step_batches * problem.N2 * problem.G if template is Template.BATCH else _ceil_div(problem.S2, step_cols)
    return Tiling(
        problem=problem,
        platform=platform,
        template=template,
        step_rows=step_rows,
        step_cols=step_cols,
        step_batches=step_batches,
        row_order=row_order,
        cube_rows=cube_rows,
        cube_cols=cube_cols,
        cube_depth=cube_depth,
        vector_rows=vector_rows,
        ratio=_ceil_div(_ceil_div(step_rows, platform.vectors_per_cube), vector_rows),
        buffers=buffers,
        cube_steps_ahead=_cube_steps_ahead(problem, platform, steps),
        l1_reuse=_keys_stay_in_l1(problem, platform, step_rows, step_cols, cube_rows, cube_cols, cube_depth),
    )


def _choose_template(p: Problem, platform: Platform) -> Template:
    if 0 in (p.B, p.N2, p.G, p.S1, p.S2):
        return Template.EMPTY
    if p.S2 > STEP_COLS:
        return Template.S1_S2
    rows, cols, depth = _align(p.S1, FRACTAL), _align(p.S2, FRACTAL), _align(p.D, FRACTAL)
    heads = p.N2 * p.G * p.dtype.itemsize
    # One batch whose operands fill L1 gains nothing from being put together with another one.
    fills_l1 = max(heads * (rows + cols) * depth, heads * (rows + depth) * cols) >= platform.l1
    fills_chip = platform.cube_cores <= p.B
    return Template.BATCH if p.S2 <= SMALL_COLS and fills_chip and not fills_l1 else Template.S1


def _rows_per_step(p: Problem, platform: Platform, template: Template, step_cols: int) -> int:
    """As many rows as a step may hold, halved while cores would stay idle: a full chip is worth more than a large
    step."""
    most = STEP_ROWS if template is Template.S1_S2 else max(STEP_ROWS, STEP_BYTES // (step_cols * FLOAT))
    rows = min(_power_of_two_below(most), _power_of_two_above(max(p.S1, FRACTAL)))
    while rows > FRACTAL and p.B * p.N2 * p.G * _ceil_div(p.S1, rows) < platform.cube_cores:
        rows //= 2
    return rows


def _batches_per_step(p: Problem, platform: Platform, rows: int, cols: int) -> int:
    by_memory = STEP_BYTES // (p.N2 * p.G * rows * cols * FLOAT)
    by_cores = p.B // platform.cube_cores
    return max(1, min(by_memory, by_cores, p.B))


def longest_first(p: Problem, step_rows: int, step_cols: int) -> tuple[int, ...]:
    """The blocks of `step_rows` query rows from the most steps of `step_cols` keys to the fewest."""
    blocks = range(_ceil_div(p.S1, step_rows))
    cost = [_steps(p, block * step_rows, min(step_rows, p.S1 - block * step_rows), step_cols) for block in blocks]
    return tuple(sorted(blocks, key=lambda block: (-cost[block], block)))


def _steps(p: Problem, row: int, rows: int, step_cols: int) -> int:
    """Steps of a row block: from the tile of the first visible key to the tile of the last."""
    start, stop = p.mask.columns(row, row + rows - 1, p.S1, p.S2)
    return max(1, _ceil_div(stop, step_cols) - start // step_cols)


def _vector_tile(p: Problem, platform: Platform, step_rows: int, step_cols: int) -> tuple[int, int]:
    """Rows of a vector tile and the depth of its buffers: two buffers as long as that leaves at least two rows."""
    share = _ceil_div(step_rows, platform.vectors_per_cube)
    rows = min(_power_of_two_below(VECTOR_BUFFER // (step_cols * FLOAT)), _power_of_two_above(share))
    for buffers, fewest in ((2, 2), (1, 1)):
        candidate = rows
        while candidate >= fewest:
            used = sum(_ub_bytes(p, platform, step_rows, step_cols, candidate, buffers).values())
            if used <= platform.ub:
                # A single tile a step has nothing to overlap with.
                return candidate, buffers if share > candidate else 1
            candidate //= 2
    raise ValueError(
        f"D={p.D}: not even one row of scores fits the {platform.ub} bytes of a vector core of {platform.name}; "
        "use a smaller head_dim."
    )


def _ub_bytes(
    p: Problem, platform: Platform, step_rows: int, step_cols: int, rows: int, buffers: int
) -> dict[str, int]:
    scores = rows * step_cols
    size = p.dtype.itemsize
    # The maximum and sum of a row outlive a tile only where a later step corrects them.
    rows_kept = rows if step_cols >= p.S2 else _ceil_div(step_rows, platform.vectors_per_cube)
    needed = {
        "scores": buffers * scores * FLOAT,
        "probabilities": buffers * scores * size,
        "exponential": scores * FLOAT,
        "product and output": 2 * rows * _align(p.D, FRACTAL) * FLOAT,
        "row statistics": 3 * rows_kept * STATISTIC_BYTES,
    }
    if p.mask.dense or p.mask.sparse is not Sparse.NONE:
        needed["mask"] = buffers * scores
    if p.dropout:
        needed["dropout bits"] = buffers * _ceil_div(scores, 8)
    if p.pse:
        needed["bias"] = buffers * scores * size
    return needed


def _keys_stay_in_l1(
    p: Problem, platform: Platform, step_rows: int, step_cols: int, cube_rows: int, cube_cols: int, cube_depth: int
) -> bool:
    """Whether the keys of a whole step fit L1 beside the other operands, and more than one row tile would read them."""
    size = p.dtype.itemsize
    depth = _align(p.D, FRACTAL)
    needed = (cube_rows + step_cols) * depth + L1_BUFFERS * cube_cols * (cube_rows + cube_depth)
    return step_rows > cube_rows and needed * size <= platform.l1


def _cube_steps_ahead(p: Problem, platform: Platform, steps: int) -> int:
    """How many steps the cube is launched ahead of the vector cores.

    With the vector cores the slower side, one finished step waiting for them is enough. With the cube the slower
    side, a second one queued keeps its products back to back. There is nothing to run ahead of with a single step.
    """
    cube = 2 * p.D / CUBE_MACS_PER_CYCLE[p.dtype]
    vector = VECTOR_OPS_PER_SCORE / (VECTOR_LANES * platform.vectors_per_cube)
    return min(2 if cube > vector else 1, steps - 1)


def _may_have_empty_rows(p: Problem) -> bool:
    """Whether some query may see no key: then its output must be zero rather than a mean over masked keys."""
    if p.mask.dense:
        return True
    shift = p.S2 - p.S1 if p.mask.right_down else 0
    return p.S1 > 0 and (shift + p.mask.next_tokens < 0 or p.S1 - 1 + shift - p.mask.pre_tokens > p.S2 - 1)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _align(a: int, unit: int) -> int:
    return _ceil_div(a, unit) * unit


def _power_of_two_below(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def _power_of_two_above(n: int) -> int:
    return 1 << (n - 1).bit_length()
