"""The small kernels behind `explicit.py`, in plain Triton: bits of what is seen, and which tiles meet.

mask_bits      32 pairs a word, with every other condition         reads Sq Sk bytes of the mask, writes an eighth
mask_ranges    per tile of own tokens its blocks of the others     reads the bits twice
mask_order     per block of keys and tile of queries, how many blocks of keys before it meet the tile

Every batch, or head of a batch, whose mask differs is a *plane* of bits.
"""

import triton
import triton.language as tl

WORD = tl.constexpr(32)
FLAG = tl.constexpr(64)
"""Own tokens, and tokens of the other side, of a flag (`mask_ranges`)."""
BLOCK = tl.constexpr(128)
"""Own tokens, and tokens of the other side, of a program of `mask_bits`."""


@triton.jit
def mask_bits(
    mask, q_ids, k_ids, positions, bits,
    mask_batch, mask_head, mask_row, mask_key, q_batch, q_step, k_batch, k_step,
    heads, own_blocks, num_queries, num_keys, offset, left, right,
    OWN_ARE_KEYS: tl.constexpr, HAS_IDS: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Grid (planes * blocks of own tokens, blocks of the others and one more). `heads`: planes of a batch. `bits`:
    int32 [planes, own tokens padded, words]."""
    plane, b, own, row, key, inside, at = pairs_of_program(
        mask, mask_batch, mask_head, mask_row, mask_key, heads, own_blocks, num_queries, num_keys, OWN_ARE_KEYS
    )
    seen = seen_beside(
        inside & (tl.load(at, mask=inside, other=0) != 0), row, key, b, q_ids, k_ids, positions,
        q_batch, q_step, k_batch, k_step, num_queries, num_keys, offset, left, right,
        HAS_IDS, HAS_POSITIONS, HAS_LEFT, HAS_RIGHT,
    )  # fmt: skip
    store_bits(bits, plane, own_blocks, own, seen)


@triton.jit
def pairs_of_program(
    mask, mask_batch, mask_head, mask_row, mask_key, heads, own_blocks, num_queries, num_keys,
    OWN_ARE_KEYS: tl.constexpr,
):  # fmt: skip
    """The BLOCK x BLOCK pairs of this program (grid: see `mask_bits`): their plane and batch (int64); own tokens; query
    and key of each pair, which are both inside, and where the mask says something of it."""
    plane = tl.program_id(0) // own_blocks
    block = tl.program_id(0) - plane * own_blocks
    b = (plane // heads).to(tl.int64)
    h = (plane % heads).to(tl.int64)
    own = block * BLOCK + tl.arange(0, BLOCK)
    other = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if OWN_ARE_KEYS:
        row, key = other[None, :], own[:, None]
    else:
        row, key = own[:, None], other[None, :]
    inside = (row < num_queries) & (key < num_keys)
    at = mask + b * mask_batch + h * mask_head + row.to(tl.int64) * mask_row + key.to(tl.int64) * mask_key
    return plane, b, own, row, key, inside, at


@triton.jit
def seen_beside(
    seen, row, key, b, q_ids, k_ids, positions, q_batch, q_step, k_batch, k_step,
    num_queries, num_keys, offset, left, right,
    HAS_IDS: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Of the pairs `seen` those that every condition beside the mask allows. `row`, `key`: query and key of the pairs;
    `b`: int64, the batch."""
    if HAS_IDS:
        of_row = tl.load(q_ids + b * q_batch + row.to(tl.int64) * q_step, mask=row < num_queries, other=0)
        of_key = tl.load(k_ids + b * k_batch + key.to(tl.int64) * k_step, mask=key < num_keys, other=0)
        seen = seen & (of_row.to(tl.int64) == of_key.to(tl.int64))
    facing = row + offset
    if HAS_POSITIONS:
        facing = tl.load(positions + row, mask=row < num_queries, other=0)
    if HAS_LEFT:
        seen = seen & (key >= facing - left)
    if HAS_RIGHT:
        seen = seen & (key <= facing + right)
    return seen


@triton.jit
def store_bits(bits, plane, own_blocks, own, seen):
    """The bits of BLOCK x BLOCK pairs, those of the program: see `mask_bits`."""
    bit = tl.arange(0, WORD)[None, None, :]
    spread = tl.reshape(seen.to(tl.int32), [BLOCK, BLOCK // WORD, WORD])
    words = tl.sum(spread << bit, 2)  # every bit once: the sum is the union
    width = tl.num_programs(1) * (BLOCK // WORD)
    line = plane.to(tl.int64) * own_blocks * BLOCK + own
    column = tl.program_id(1) * (BLOCK // WORD) + tl.arange(0, BLOCK // WORD)
    tl.store(bits + line[:, None] * width + column[None, :], words)


@triton.jit
def mask_ranges(
    bits, flags, ranges,
    own_length, other_length, padded, width, flags_plane,
    FORWARD: tl.constexpr, HAS_FLAGS: tl.constexpr, OWN: tl.constexpr, OWN_PADDED: tl.constexpr, OTHER: tl.constexpr,
    WORDS_PADDED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid (planes * tiles of own tokens,). `ranges`: int32 [planes, tiles, 4], see `rows.Rows`: of the blocks that
    are seen whole the first run. BLOCKS at a time. `flags` (HAS_FLAGS): 1 where a block is not seen whole whatever the
    bits say (`additive_kernels.mask_values`); `flags_plane`: elements from one plane to the next."""
    tiles = tl.cdiv(own_length, OWN)
    plane = tl.program_id(0) // tiles
    tile, b = tl.program_id(0) - plane * tiles, plane.to(tl.int64)
    blocks = tl.cdiv(other_length, OTHER)
    first, last, clear_first = blocks, 0, blocks
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        some, every = _state(
            bits, flags, b, tile, start, own_length, other_length, padded, width, flags_plane,
            HAS_FLAGS, OWN, OWN_PADDED, OTHER, WORDS_PADDED, BLOCKS,
        )  # fmt: skip
        first = tl.minimum(first, tl.min(tl.where(some, block, blocks), 0))
        last = tl.maximum(last, tl.max(tl.where(some, block + 1, 0), 0))
        clear_first = tl.minimum(clear_first, tl.min(tl.where(every, block, blocks), 0))
    clear_last = blocks
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        some, every = _state(
            bits, flags, b, tile, start, own_length, other_length, padded, width, flags_plane,
            HAS_FLAGS, OWN, OWN_PADDED, OTHER, WORDS_PADDED, BLOCKS,
        )  # fmt: skip
        clear_last = tl.minimum(clear_last, tl.min(tl.where(every | (block < clear_first), blocks, block), 0))
    first = tl.minimum(first, last)
    if FORWARD:
        last = tl.maximum(last, first + 1)  # the forward has no empty tile
    at = ranges + tl.program_id(0).to(tl.int64) * 4
    tl.store(at, first)
    tl.store(at + 1, last)
    tl.store(at + 2, tl.minimum(clear_first, last))
    tl.store(at + 3, tl.minimum(clear_last, last))


@triton.jit
def _state(
    bits, flags, b, tile, start, own_length, other_length, padded, width, flags_plane,
    HAS_FLAGS: tl.constexpr, OWN: tl.constexpr, OWN_PADDED: tl.constexpr, OTHER: tl.constexpr,
    WORDS_PADDED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Whether some pair of the tile and each of BLOCKS blocks from `start` on is seen, and whether every pair is. Own
    tokens past the end do not count, others keep a block from being seen whole."""
    WORDS: tl.constexpr = OTHER // WORD
    within = tl.arange(0, OWN_PADDED)
    own = tl.where(within < OWN, tile * OWN + within, own_length)
    place = tl.arange(0, BLOCKS * WORDS_PADDED)
    part = place % WORDS_PADDED
    word = (start + place // WORDS_PADDED) * WORDS + part
    line = b * padded + own
    # What is past the last word is past the last block, and seen by nobody.
    read = (own < own_length)[:, None] & ((word < width) & (part < WORDS))[None, :]
    found = tl.load(bits + line[:, None] * width + word[None, :], mask=read, other=0)
    union = tl.max((found != 0).to(tl.int32), 0)
    whole = (found == -1) | (own >= own_length)[:, None] | (part >= WORDS)[None, :]
    some = tl.max(tl.reshape(union, [BLOCKS, WORDS_PADDED]), 1) != 0
    every = tl.min(tl.reshape(tl.min(whole.to(tl.int32), 0), [BLOCKS, WORDS_PADDED]), 1) != 0
    if HAS_FLAGS:
        ROWS: tl.constexpr = OWN // FLAG
        PARTS: tl.constexpr = OTHER // FLAG
        flag_row = tile * ROWS + tl.arange(0, ROWS)
        flags_width = tl.cdiv(other_length, BLOCK) * (BLOCK // FLAG)
        flag_line = flags + b * flags_plane + flag_row[:, None] * flags_width
        for i in tl.static_range(PARTS):
            column = (start + tl.arange(0, BLOCKS)) * PARTS + i
            inside = (flag_row < padded // FLAG)[:, None] & (column < flags_width)[None, :]
            every = every & (tl.max(tl.load(flag_line + column[None, :], mask=inside, other=0), 0) == 0)
    return some, every


@triton.jit
def mask_order(ranges, order, blocks, tiles, BLOCKS: tl.constexpr):
    """Grid (planes * tiles of queries,). `ranges`: of the backward, [planes, blocks of keys, 4]; `order`: int32
    [planes, tiles, blocks], how many blocks of keys with a lower number visit the tile."""
    plane = tl.program_id(0) // tiles
    tile, b = tl.program_id(0) - plane * tiles, plane.to(tl.int64)
    block = tl.arange(0, BLOCKS)
    inside = block < blocks
    at = ranges + (b * blocks + block) * 4
    visits = tl.load(at, mask=inside, other=1) <= tile
    visits = (visits & (tile < tl.load(at + 1, mask=inside, other=0))).to(tl.int32)
    tl.store(order + (b * tiles + tile) * blocks + block, tl.cumsum(visits, 0) - visits, mask=inside)
