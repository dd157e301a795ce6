"""Kernel templates as data: what one compiled instance fixes, and the table that picks the tile for a problem.

A template is the only compile-time argument of a kernel. Its first fields say *what* the instance computes (head
dimensions, kind of mask, softcap, …), the others *how*: tile sizes, stages, warpgroups, scheduling. The second group
comes from the tables below, each row with the measurement that chose it. To add a tile: add a row,
`tests/kernels/hopper/test_compile.py` compiles it and counts its spills.
"""

from __future__ import annotations

from dataclasses import dataclass

MASKS = ("none", "right", "band", "rows", "segments", "bits", "values", "values32")
"""`none`: every key, and whole blocks of keys only. `right`: keys before a limit that moves with the row (causal), or
before the end of a sequence that ends inside a block. `band`: two limits (a window). `rows`: two limits read from
memory (packed documents). `segments`: the same, and labels to compare where the limits do not say all (segment ids in
any order, masks of keys). `bits`: a bit for every query and key (masks that differ from query to query). `values`:
bits, and numbers to add, in the dtype of q; `values32`: in float32."""


@dataclass(frozen=True)
class Template:
    """What an instance computes; shared by the forward and the backward."""

    qk_dim: int
    """Head dimension of q and k in shared memory: 64, 128, 192 (three slices) or 256. Lanes past the tensor's own are
    zero-filled by the tensor map."""
    v_dim: int
    mask: str
    softcap: bool

    @property
    def masked(self) -> bool:
        return self.mask != "none"

    @property
    def from_end(self) -> bool:
        """Tiles of queries are laid from the last row up (`forward_state.place`)."""
        return False

    @property
    def left_limit(self) -> bool:
        return self.mask in ("band", "rows", "segments") or self.bits

    @property
    def by_data(self) -> bool:
        """Which blocks meet is read from memory."""
        return self.mask in ("rows", "segments") or self.bits

    @property
    def by_rows(self) -> bool:
        """The limits of a row are read from memory."""
        return self.mask in ("rows", "segments")

    @property
    def bits(self) -> bool:
        return self.mask == "bits" or self.values

    @property
    def values(self) -> bool:
        return self.mask in ("values", "values32")

    @property
    def segments(self) -> bool:
        return self.mask == "segments"


@dataclass(frozen=True)
class ForwardTemplate(Template):
    """One forward instance: `warpgroups` × 64 queries against `block_n` keys at a time."""

    sinks: bool
    warpgroups: int
    block_n: int
    stages: int
    """Blocks of K, and of V, in flight."""
    q_buffers: int
    """2: the next tile's Q loads while this tile computes. 1: no room for that (above head_dim 128)."""
    store_by_tma: bool
    """O through its own shared memory buffer; otherwise straight from registers."""
    dynamic: bool
    """Tiles handed out by a counter in memory (tiles differ in length) instead of round robin."""
    pingpong: bool
    """Warpgroups take turns on the tensor cores."""
    qk_lanes: int
    """Q and K lie in shared memory by slices of so many lanes, so that a head dimension need not be a power of two."""
    o_lanes: int
    """Lanes of O in its shared memory buffer: all, or half at a time where there is no room."""
    rescale_late: bool
    """O is rescaled while the next scores are computed, not before they are issued."""
    rescale_above: float
    """From 0 on: O is rescaled in a branch, when a row's maximum has grown by more than so much, in exponents of 2.
    Below: always."""
    keep_q: bool
    """The first slice of Q stays in registers."""
    skip_hidden: bool
    """A warpgroup skips the tile's last block of keys if none of its own 64 rows sees it (`right` only)."""
    looks_ahead: bool
    """That the next K and V have come is found while a product is computed, not before the next one is issued."""
    programs: int
    """Thread blocks a multiprocessor. 1: the scores of a block are computed beside the product of the block before with
    V. 2: one after the other, in half of the registers, and what one thread block waits for the other fills."""

    @property
    def overlapped(self) -> bool:
        return self.programs == 1

    @property
    def draws_early(self) -> bool:
        """The next tile is drawn behind the first block of a tile: where tiles are of equal length it is kept from
        nobody. H200, to a late draw: hd64 full 16k 1.013, hd128 full 4k 1.003, a window of 1024 1.009 times as fast,
        but hd256 full 16k 0.994."""
        return self.dynamic and self.mask in ("none", "band") and self.v_dim < 256

    @property
    def draws_late(self) -> bool:
        """It is drawn before the last block is loaded (`forward.load_partition`)."""
        return self.dynamic and not self.draws_early

    @property
    def from_end(self) -> bool:
        """Under causality, where lengths are seldom multiples of a tile: one that is not full would cost as much as the
        longest if it had the last rows, and costs a block or two with the first ones."""
        return self.skip_hidden and self.warpgroups > 2

    @property
    def block_m(self) -> int:
        return 64 * self.warpgroups

    @property
    def qk_slices(self) -> int:
        return self.qk_dim // self.qk_lanes

    @property
    def num_warps(self) -> int:
        """Of a consumer's partition."""
        return 4

    @property
    def registers(self) -> int:
        """Per consumer thread after `setmaxnreg`; the load warp keeps 24."""
        return ((self.warpgroups + 1) * self.max_registers - 24) // self.warpgroups // 8 * 8

    @property
    def max_registers(self) -> int:
        """Per thread at launch: the register file shared by the consumer warpgroups and the load warp's warpgroup."""
        return 65536 // (self.programs * (self.warpgroups + 1) * 128) // 8 * 8


@dataclass(frozen=True)
class BackwardTemplate(Template):
    """One backward instance for head dimensions up to 128: `block_n` keys stay, `block_m` queries at a time pass by."""

    deterministic: bool
    block_m: int
    block_n: int
    stages: int
    num_warps: int
    """Of a warpgroup's partition."""
    keys_in_registers: bool
    """K and V are left operands in registers."""
    dq_apart: bool
    """dQ is computed by a warpgroup of its own; otherwise by the two that hold dK and dV, half of its lanes each and
    one tile late."""
    early_scores: bool
    """S of the next tile is issued behind the last product of a tile (not with `dq_apart`)."""

    @property
    def later_first(self) -> bool:
        """Blocks of later keys are drawn, and with `deterministic` add to dQ, before those of earlier ones."""
        return self.deterministic and self.mask in ("right", "band")

    @property
    def last_reversed(self) -> bool:
        """In the last chunk of heads earlier keys come first after all: their blocks are the longest, and what is drawn
        last should be short."""
        return self.later_first and self.mask == "right"

    @property
    def descending(self) -> bool:
        """Queries are visited from the last tile down (`backward_state.tile_at`)."""
        return self.deterministic and not self.later_first

    @property
    def adders(self) -> int:
        """Warps that add dQ to memory: one more where each waits for its turn and until its addition is written, and
        nobody needs zeros."""
        return 3 if self.deterministic else 2

    @property
    def dq_slots(self) -> int:
        """Buffers of dQ on its way to memory: tiles, as many as there is room for, or at head_dim 128 halves of one."""
        return 3 if self.dq_apart and self.deterministic else 2

    @property
    def key_slots(self) -> int:
        """Blocks of K and V in shared memory."""
        return 2 if self.dq_apart else 1

    @property
    def dq_lanes(self) -> int:
        """Lanes of dQ in one reduce-add."""
        return self.qk_dim if self.dq_apart else self.qk_dim // 2

    @property
    def dq_box(self) -> tuple[int, ...]:
        """What one reduce-add takes, in the axes of the accumulator's tensor map (`plans.py`)."""
        return 1, self.block_m // 8, 4, 2, self.dq_lanes

    @property
    def dk_lanes(self) -> int:
        """Lanes of dK in one store: a whole row, or what the buffers of dS hold."""
        return self.qk_dim if self.dq_apart else self.block_m

    @property
    def registers(self) -> int:
        """Per thread of the two warpgroups that hold dK and dV, after `setmaxnreg`."""
        return 208 if self.dq_apart else 240

    @property
    def dq_registers(self) -> int:
        """Per thread of the warpgroup that computes dQ, where there is one; single warps have 24."""
        return 72

    @property
    def max_registers(self) -> int:
        """Per thread at launch, of three or four warpgroups."""
        return 128 if self.dq_apart else 168


@dataclass(frozen=True)
class WideTemplate(Template):
    """One instance of a backward kernel for head dimensions above 128: `wide_queries.py` (dQ; the queries stay), or
    `wide_keys.py` (dK and dV; the keys stay). Both are two warpgroups and a load warp."""

    keys_stay: bool
    block_m: int
    block_n: int
    stages: int
    qk_lanes: int
    """As in `ForwardTemplate`; dQ and dK are as many accumulators."""
    num_warps: int
    """Of a warpgroup's partition."""

    @property
    def qk_slices(self) -> int:
        return self.qk_dim // self.qk_lanes

    @property
    def max_registers(self) -> int:
        """Per thread at launch: two warpgroups (240 each after `setmaxnreg`) and a warpgroup for the load warp."""
        return 168


AnyTemplate = ForwardTemplate | BackwardTemplate | WideTemplate


@dataclass(frozen=True)
class Tile:
    """One row of a table: how, for a head dimension and a kind of mask."""

    block_m: int
    block_n: int
    stages: int
    q_buffers: int = 2
    store_by_tma: bool = True
    dynamic: bool = True
    pingpong: bool = True
    qk_lanes: int = 0
    """0: all in one slice."""
    o_lanes: int = 0
    """0: all at once."""
    rescale_late: bool = False
    """Where O is rescaled always, beside the numbers of a mask."""
    rescale_above: float = -1.0
    keep_q: bool = False
    skip_hidden: bool = False
    looks_ahead: bool = False
    programs: int = 1


_WIDE_FORWARD = Tile(
    128,
    64,
    stages=2,
    q_buffers=1,
    pingpong=False,
    qk_lanes=128,
    o_lanes=128,
    rescale_late=True,
    rescale_above=8.0,
    keep_q=True,
)

# TFLOP/s on an H100 80GB, bf16, 16k tokens, hidden size 2048, all of a row in one run with cuDNN 9.19
# (docs/hopper_history.md).
_FORWARD_TILES: dict[tuple[int, int, bool], Tile] = {
    # (qk_dim, v_dim, keys differ from tile to tile)
    # Causal 2k / 4k: 445 / 456, cuDNN 398 / 405; with three warpgroups 449 at 4k. Looking ahead 1.006 times. Q in
    # registers, H200, 2k / 4k: 1.014 / 1.015 times; 1k in 256 tiles 1.034.
    (64, 64, True): Tile(128, 128, stages=3, pingpong=False, keep_q=True, looks_ahead=True),
    # Full 4k / 16k: 508 / 532, cuDNN 438 / 450; with two warpgroups 483 / 500. Looking ahead, and rescaling in a
    # branch, 1.025 times at 16k. A kernel of the family that ptxas 12.8 miscompiles (docs/hopper.md, hazards).
    (64, 64, False): Tile(192, 128, stages=3, rescale_above=0.0, looks_ahead=True),
    # Causal 1k / 4k / 16k: 433 / 633 / 741, cuDNN 419 / 525 / 638; with 64 keys a block 424 / 528 for 421 / 603.
    # Rescaling above 8 1.000 / 1.031 / 1.050 times, above 0 at 4k 0.988.
    (128, 128, True): Tile(128, 128, stages=2, pingpong=False, rescale_above=8.0),
    # Full 1k / 4k: 572 / 684, cuDNN 533 / 581; with pingpong 576 / 656, and without the counter 576 / 653. Rescaling
    # above 8 at 4k 1.042 times, above 0 1.005. Q in registers, H200, 1k / 2k / 4k / 16k: 1.017 / 1.014 / 1.010 / 1.007
    # times; causal 0.996 to 0.963.
    (128, 128, False): Tile(128, 128, stages=2, pingpong=False, rescale_above=8.0, keep_q=True),
    # Causal 1k / 4k: 489 / 674, cuDNN 403 / 514. Full 4k: 756, cuDNN 583; without pingpong 736. Rescaling above 8,
    # causal 4k, 1.018 times.
    (192, 128, True): Tile(128, 128, stages=2, q_buffers=1, qk_lanes=64, o_lanes=64, rescale_above=8.0),
    (192, 128, False): Tile(128, 128, stages=2, q_buffers=1, qk_lanes=64, o_lanes=64, rescale_above=8.0),
    (256, 128, True): Tile(128, 64, stages=2, q_buffers=1, store_by_tma=False),
    (256, 128, False): Tile(128, 64, stages=2, q_buffers=1, store_by_tma=False, dynamic=False),
    # Causal 1k / 4k / 16k: 449 / 629 / 686, cuDNN 426 / 506 / 542. Full: 629 / 723 / 774, cuDNN 575 / 619 / 639; with
    # all of Q in shared memory 628 / 707 / 749, and O rescaled before the scores are issued 619 / 688 / 738. Rescaling
    # above 8, causal 1k / 4k / 16k and full 4k: 1.013 / 1.017 / 1.006 / 1.008 times.
    (256, 256, True): _WIDE_FORWARD,
    (256, 256, False): _WIDE_FORWARD,
}

_SHORT_FORWARD_TILES: dict[tuple[int, int], tuple[int, Tile]] = {
    # (qk_dim, v_dim): up to so many queries, where the keys do not differ from tile to tile.
    # Full 1k: 448, cuDNN 397; with three warpgroups 426, for 192 rows divide 1024 badly. Rescaling above 8 1.068
    # times.
    (64, 64): (1536, Tile(128, 128, stages=3, dynamic=False, pingpong=False, rescale_above=8.0)),
}

_SHORT_CAUSAL_TILES: dict[tuple[int, int], tuple[int, int, Tile]] = {
    # (qk_dim, v_dim): up to so many queries, and from so many queries of all heads and batches on, under mask `right`
    # where the keys differ from tile to tile.
    # Causal 1k, 4096 tiles: 365, of the tile of the other table 332, cuDNN 320; 1024 tiles 314, 300 and 297; 512 tiles
    # 251, 274 and 248. 2k, 4096 tiles: 440, 445 and 398.
    (64, 64): (1024, 1024 * 128, Tile(128, 64, stages=3, pingpong=False, skip_hidden=True, programs=2)),
}

_LONG_CAUSAL_TILES: dict[tuple[int, int], tuple[int, Tile]] = {
    # (qk_dim, v_dim): from so many queries on, under mask `right` where the keys differ from tile to tile.
    # Causal 8k / 16k: 537 / 529, of the tile of two warpgroups 509 at 8k, cuDNN 440 / 423; without `skip_hidden`
    # 508 for 517 at 16k. Looking ahead, and rescaling in a branch, 1.03 times at 16k.
    (64, 64): (8192, Tile(192, 128, stages=3, rescale_above=0.0, skip_hidden=True, looks_ahead=True)),
}


@dataclass(frozen=True)
class BackwardTile:
    """One row of the table of the backward, see `BackwardTemplate`."""

    block_m: int
    block_n: int
    stages: int
    keys_in_registers: bool
    dq_apart: bool
    early_scores: bool


# Ratios on an H100 80GB, bf16, 16k tokens: of variants that took turns in one run, medians of ten
# (docs/hopper_history.md).
_BACKWARD_TILES: dict[tuple[int, int], BackwardTile] = {
    # (qk_dim, v_dim)
    # Causal 4k / full 4k: 1.16 / 1.11 times as fast as two warpgroups with a barrier in every tile and a thread block
    # for every block of keys, where 1.10 / 1.04 are dQ's own warpgroup; with early scores 1.14 / 1.05 (all with two
    # stages). In another run causal 4k / 1k 1.16 / 1.13, with two stages 1.13 / 1.12.
    (64, 64): BackwardTile(64, 128, stages=3, keys_in_registers=True, dq_apart=True, early_scores=False),
    # Causal 4k / full 4k / causal 1k: 1.03 / 1.08 / 1.01 times as fast; without early scores 1.00 / 1.03 / 1.01. In
    # another run causal 4k / 1k 1.02 / 1.00.
    (128, 128): BackwardTile(64, 128, stages=2, keys_in_registers=False, dq_apart=False, early_scores=True),
}

_WIDE_QUERIES = Tile(128, 64, stages=2)
_WIDE_KEYS = Tile(64, 64, stages=2)
"""Head dimensions above 128: what shared memory holds."""
_WIDE_LANES = {192: 64}
"""Lanes of a slice, by head dimension, where one slice would be padded."""


def padded_dim(dim: int) -> int | None:
    """The head dimension in shared memory that holds `dim`; None when there is none."""
    return next((size for size in (64, 128, 256) if dim <= size), None)


def _tile_dims(head_dim: int, v_head_dim: int) -> tuple[int, int] | None:
    qk_dim, v_dim = padded_dim(head_dim), padded_dim(v_head_dim)
    if qk_dim is None or v_dim is None:
        return None
    return (qk_dim, max(v_dim, 128)) if qk_dim == 256 else (max(qk_dim, v_dim), max(qk_dim, v_dim))


def _sliced_dims(head_dim: int, v_head_dim: int) -> tuple[int, int] | None:
    """As `_tile_dims`; head dimensions of q and k up to 192 beside one of v up to 128 have tiles of their own."""
    if 128 < head_dim <= 192 and v_head_dim <= 128:
        return 192, 128
    return _tile_dims(head_dim, v_head_dim)


def forward_block(head_dim: int, v_head_dim: int) -> int:
    """Keys of a block of the forward."""
    dims = _sliced_dims(head_dim, v_head_dim)
    tile = None if dims is None else _FORWARD_TILES.get((*dims, True))
    return 64 if tile is None else tile.block_n


def forward_template(
    head_dim: int, v_head_dim: int, *, mask: str, softcap: bool, sinks: bool, uneven: bool, queries: int, heads: int
) -> ForwardTemplate | None:
    """The forward instance for a problem; None when no row serves. `uneven`: tiles see different numbers of keys.
    `queries`: of a sequence. `heads`: query heads of all batches."""
    dims = _sliced_dims(head_dim, v_head_dim)
    tile = None if dims is None else _FORWARD_TILES.get((*dims, uneven))
    if dims is None or tile is None:
        return None
    up_to, short = _SHORT_FORWARD_TILES.get(dims, (0, tile))
    if queries <= up_to and not uneven:
        tile = short
    up_to, at_least, short = _SHORT_CAUSAL_TILES.get(dims, (0, 0, tile))
    if queries <= up_to and queries * heads >= at_least and uneven and mask == "right":
        tile = short
    from_, long = _LONG_CAUSAL_TILES.get(dims, (0, tile))
    if queries >= from_ and uneven and mask == "right" and not sinks:  # with sinks it spills 130 bytes
        tile = long
    return ForwardTemplate(
        *dims,
        mask,
        softcap,
        sinks,
        tile.block_m // 64,
        tile.block_n,
        tile.stages,
        tile.q_buffers,
        tile.store_by_tma,
        # Beside the numbers of a mask the counter's registers are spilled.
        tile.dynamic and not (dims[1] == 256 and mask.startswith("values")),
        tile.pingpong,
        tile.qk_lanes or dims[0],
        tile.o_lanes or dims[1],
        # Beside the numbers of a mask the branch's registers are spilled.
        tile.rescale_late and mask.startswith("values"),
        -1.0 if mask.startswith("values") else tile.rescale_above,
        # What labels and bits need to be compared takes the registers of Q.
        tile.keep_q and mask not in ("segments", "bits", "values", "values32"),
        tile.skip_hidden,
        tile.looks_ahead,
        tile.programs,
    )


def backward_template(
    head_dim: int, v_head_dim: int, *, mask: str, softcap: bool, deterministic: bool
) -> BackwardTemplate | None:
    """The backward instance for a problem; None when no row serves."""
    dims = _tile_dims(head_dim, v_head_dim)
    tile = None if dims is None else _BACKWARD_TILES.get(dims)
    if dims is None or tile is None:
        return None
    # Beside tanh keys in registers would be spilled.
    keys_in_registers = tile.keys_in_registers and not softcap
    return BackwardTemplate(
        *dims, mask, softcap, deterministic, tile.block_m, tile.block_n, tile.stages, 4,
        keys_in_registers, tile.dq_apart, tile.early_scores and not softcap,
    )  # fmt: skip


def wide_templates(
    head_dim: int, v_head_dim: int, *, mask: str, softcap: bool
) -> tuple[WideTemplate, WideTemplate] | None:
    """The instances for dQ, and for dK and dV, where a head dimension is above 128; else None."""
    dims = _sliced_dims(head_dim, v_head_dim)
    if dims is None or dims[0] <= 128:
        return None
    lanes = _WIDE_LANES.get(dims[0], dims[0])
    queries, keys = (
        WideTemplate(*dims, mask, softcap, keys_stay, tile.block_m, tile.block_n, tile.stages, lanes, num_warps=4)
        for keys_stay, tile in ((False, _WIDE_QUERIES), (True, _WIDE_KEYS))
    )
    return queries, keys
