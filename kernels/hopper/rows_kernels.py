"""The small kernels behind `rows.py`, in plain Triton: intervals of keys, and which tiles meet, found on the device.

    segment_order    do the segment ids ascend, are the keys that may be seen one run        reads the ids once
    row_intervals    the interval of every query, by binary search; per tile its blocks      log2(keys) reads a query
    query_ranges     per block of keys its tiles of queries, by binary search                log2(tiles) reads a block

Where the ids do not ascend (or the keys that may be seen have a gap) the intervals are those of the band alone, no
block counts as free of a mask, and the attention kernel compares *labels* in every block: the label of a segment is
the first key that has its id, so that equal labels are equal ids whatever the integer type. Finding it reads the
square of the sequence, which costs a few percent of the attention that such a call then has to compute anyway.
"""

import triton
import triton.language as tl

LABELS_HEAD = tl.constexpr(4)
"""Entries before the labels: the first is 1 where labels must be compared."""
NO_KEY, HIDDEN_KEY = tl.constexpr(-1), tl.constexpr(-2)
"""Labels of a query whose segment has no key, and of a key that the mask hides: they equal nothing."""


@triton.jit
def segment_order(
    q_ids, k_ids, key_mask, facts,
    q_batch, q_step, k_batch, k_step, mask_batch, mask_step, num_queries, num_keys,
    HAS_IDS: tl.constexpr, HAS_MASK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, batch). `facts`: int32 [batch, chunks, 4]: 1 if some id is less than the one before it; how many
    keys may be seen, the first of them, one past the last."""
    b = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    back = tl.zeros([CHUNK], tl.int32)
    if HAS_IDS:
        back += _steps_back(q_ids + b * q_batch, token, q_step, num_queries)
        back += _steps_back(k_ids + b * k_batch, token, k_step, num_keys)
    shown = token < num_keys
    if HAS_MASK:
        shown = shown & (tl.load(key_mask + b * mask_batch + token.to(tl.int64) * mask_step, mask=shown, other=0) != 0)
    at = facts + (b * tl.num_programs(0) + tl.program_id(0)) * 4
    tl.store(at, tl.max(back, 0))
    tl.store(at + 1, tl.sum(shown.to(tl.int32), 0))
    tl.store(at + 2, tl.min(tl.where(shown, token, num_keys), 0))
    tl.store(at + 3, tl.max(tl.where(shown, token + 1, 0), 0))


@triton.jit
def _steps_back(ids, token, step, count):
    inside = token + 1 < count
    here = tl.load(ids + token.to(tl.int64) * step, mask=inside, other=0).to(tl.int64)
    following = tl.load(ids + (token + 1).to(tl.int64) * step, mask=inside, other=0).to(tl.int64)
    return (inside & (following < here)).to(tl.int32)


@triton.jit
def _first_above(ids, step, count, value, OR_EQUAL: tl.constexpr, search_steps):
    """First index whose id is above `value` (or equal to it) in ascending `ids`; `count` if there is none."""
    low = tl.zeros_like(value).to(tl.int32)
    high = low + count
    for _ in range(search_steps):
        middle = (low + high) // 2
        open_ = low < high
        found = tl.load(ids + middle.to(tl.int64) * step, mask=open_, other=0).to(tl.int64)
        below = (found < value) if OR_EQUAL else (found <= value)
        low = tl.where(open_ & below, middle + 1, low)
        high = tl.where(open_ & ~below, middle, high)
    return low


@triton.jit
def _labels(ids, step, count, value, CHUNK: tl.constexpr):
    """First index of each `value` in `ids`, in any order; NO_KEY if there is none."""
    first = tl.zeros_like(value).to(tl.int32) + count
    for start in range(0, count, CHUNK):
        token = start + tl.arange(0, CHUNK)
        found = tl.load(ids + token.to(tl.int64) * step, mask=token < count, other=0).to(tl.int64)
        equal = (found[None, :] == value[:, None]) & (token < count)[None, :]
        first = tl.minimum(first, tl.min(tl.where(equal, token[None, :], count), 1))
    return tl.where(first < count, first, NO_KEY)


@triton.jit
def row_intervals(
    q_ids, k_ids, key_mask, positions, facts, row_low, row_high, labels, ranges, order,
    q_batch, q_step, k_batch, k_step, mask_batch, mask_step,
    num_queries, num_keys, documents, search_steps, chunks, offset, left, right,
    DOCUMENTS: tl.constexpr, HAS_IDS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, FORWARD: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, batch), tiles of queries and of keys alike. With DOCUMENTS `q_ids` and `k_ids` are the
    `cu_seqlens`, else segment ids.

    `row_low`, `row_high`: [batch, rows], rows padded to PADDED; `labels`: [batch, LABELS_HEAD + rows + keys padded];
    `ranges` (FORWARD): [batch, tiles, 4], see `rows.Rows`; `order` (else): [batch, tiles].
    """
    tile, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows = tl.cdiv(num_queries, PADDED) * PADDED
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = tl.minimum(row, num_queries - 1)  # rows past the end repeat the last one
    facing = query + offset
    if HAS_POSITIONS:
        facing = tl.load(positions + query)
    compare = tile < 0
    if DOCUMENTS:
        document = _first_above(q_ids + 1, q_step, documents, query.to(tl.int64), False, search_steps)
        low = tl.load(k_ids + document * k_step).to(tl.int32)
        end = tl.load(k_ids + tl.minimum(document + 1, documents) * k_step).to(tl.int32)
    else:
        chunk = tl.arange(0, CHUNKS)
        fact = facts + (b * chunks + chunk) * 4
        first_key = tl.min(tl.load(fact + 2, mask=chunk < chunks, other=2147483647), 0)
        last_key = tl.max(tl.load(fact + 3, mask=chunk < chunks, other=0), 0)
        shown = tl.sum(tl.load(fact + 1, mask=chunk < chunks, other=0), 0)
        back = tl.max(tl.load(fact, mask=chunk < chunks, other=0), 0)
        compare = (back > 0) | ((shown > 0) & (shown != last_key - first_key))
        low = tl.zeros([BLOCK_M], tl.int32)
        end = low + num_keys
        if not compare:
            if HAS_IDS:
                own = tl.load(q_ids + b * q_batch + query.to(tl.int64) * q_step).to(tl.int64)
                low = _first_above(k_ids + b * k_batch, k_step, num_keys, own, True, search_steps)
                end = _first_above(k_ids + b * k_batch, k_step, num_keys, own, False, search_steps)
            end = tl.maximum(tl.minimum(end, last_key), tl.minimum(first_key, num_keys))
            low = tl.minimum(tl.maximum(low, first_key), end)
        width = LABELS_HEAD + rows + tl.cdiv(num_keys, PADDED) * PADDED
        mine = labels + b * width
        tl.store(mine, compare.to(tl.int32))
        if compare:
            key = tile * BLOCK_M + tl.arange(0, BLOCK_M)
            row_label = tl.zeros([BLOCK_M], tl.int32)
            key_label = tl.zeros([BLOCK_M], tl.int32)
            if HAS_IDS:
                own = tl.load(q_ids + b * q_batch + query.to(tl.int64) * q_step).to(tl.int64)
                row_label = _labels(k_ids + b * k_batch, k_step, num_keys, own, 128)
                here = tl.load(k_ids + b * k_batch + key.to(tl.int64) * k_step, mask=key < num_keys, other=0)
                key_label = _labels(k_ids + b * k_batch, k_step, num_keys, here.to(tl.int64), 128)
            if HAS_MASK:
                seen = tl.load(key_mask + b * mask_batch + key.to(tl.int64) * mask_step, mask=key < num_keys, other=0)
                key_label = tl.where(seen != 0, key_label, HIDDEN_KEY)
            tl.store(mine + LABELS_HEAD + row, row_label, mask=row < rows)
            tl.store(mine + LABELS_HEAD + rows + key, key_label, mask=key < num_keys)
    high = end
    if HAS_LEFT:
        low = tl.maximum(low, facing - left)
    if HAS_RIGHT:
        high = tl.minimum(high, facing + (right + 1))
    # A query that sees nothing keeps an empty interval at its place, so that the order holds.
    low = tl.minimum(low, end)
    high = tl.maximum(high, low)
    tl.store(row_low + b * rows + row, low, mask=row < rows)
    tl.store(row_high + b * rows + row, high, mask=row < rows)
    tiles = tl.cdiv(num_queries, BLOCK_M)
    if tile < tiles:
        lowest = tl.min(low, 0)
        if FORWARD:
            first = lowest // BLOCK_N
            at = ranges + (b * tiles + tile) * 4
            tl.store(at, first)
            tl.store(at + 1, tl.maximum(tl.cdiv(tl.max(high, 0), BLOCK_N), first + 1))  # the forward has no empty tile
            tl.store(at + 2, tl.where(compare, 0, tl.cdiv(tl.max(low, 0), BLOCK_N)))
            tl.store(at + 3, tl.where(compare, 0, tl.min(high, 0) // BLOCK_N))
        else:
            tl.store(order + b * tiles + tile, lowest // BLOCK_N)


@triton.jit
def _tiles_before(ends, BLOCK_M: tl.constexpr, LAST: tl.constexpr, tiles, value, OR_EQUAL: tl.constexpr, search_steps):
    """How many tiles have, in their first (LAST: last) row, an entry of ascending `ends` below (or equal to)
    `value`."""
    return _first_above(
        ends + (BLOCK_M - 1 if LAST else 0), BLOCK_M, tiles, value.to(tl.int64), not OR_EQUAL, search_steps
    )


@triton.jit
def query_ranges(
    row_low, row_high, labels, ranges, num_queries, num_keys, search_steps,
    LABELS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of keys / BLOCKS, batch). `ranges`: int32 [batch, blocks, 4], see `rows.Rows`."""
    b = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    blocks, tiles = tl.cdiv(num_keys, BLOCK_N), tl.cdiv(num_queries, BLOCK_M)
    rows = tl.cdiv(num_queries, PADDED) * PADDED
    low, high = row_low + b * rows, row_high + b * rows
    start = block * BLOCK_N
    end = start + BLOCK_N
    first = _tiles_before(high, BLOCK_M, True, tiles, start, True, search_steps)
    last = tl.maximum(_tiles_before(low, BLOCK_M, False, tiles, end, False, search_steps), first)
    clear_first = _tiles_before(high, BLOCK_M, False, tiles, end, False, search_steps)
    clear_last = _tiles_before(low, BLOCK_M, True, tiles, start, True, search_steps)
    if LABELS:
        compare = tl.load(labels + b * (LABELS_HEAD + rows + tl.cdiv(num_keys, PADDED) * PADDED)) != 0
        clear_first = tl.where(compare, last, clear_first)
    at = ranges + (b * blocks + block) * 4
    tl.store(at, first, mask=block < blocks)
    tl.store(at + 1, last, mask=block < blocks)
    tl.store(at + 2, clear_first, mask=block < blocks)
    tl.store(at + 3, clear_last, mask=block < blocks)
