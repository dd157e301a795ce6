"""Which tiles to visit where only the data knows: packed documents, explicit masks.

One program a block of own tokens walks over the blocks of the other side and writes four block numbers, (begin,
full_begin, full_end, end): every seen pair lies in [begin, end), and every pair of [full_begin, full_end) is seen.
Tiles whose segments cannot meet are passed over by their smallest and largest segment; segments need not be sorted.
It reads the tokens' segments Sq Sk / BLOCK times (from the L2), and a mask once: a small part of the attention that
follows.

`row_floors` is given with an additive mask: a number at or below its row's floor leaves no trace in the softmax of that
row, because another number of the row is so much larger, and counts as not seen here (`attention_problem.row_floors`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_common import facing_key, hide, key_segment, query_segment


@triton.jit
def attention_ranges(
    ranges,
    row_floors,
    floor_strides,
    sight,
    sizes,
    OWN_ARE_KEYS: tl.constexpr,
    OWN: tl.constexpr,
    OTHER: tl.constexpr,
):
    """ranges `[B or 1, Hq or 1, blocks of own tokens, 4]` int32; `sizes.heads` is the second of these sizes."""
    num_own = sizes.keys if OWN_ARE_KEYS else sizes.rows
    num_other = sizes.rows if OWN_ARE_KEYS else sizes.keys
    num_blocks = tl.cdiv(num_own, OWN)
    head_of_batch = (tl.program_id(0) // num_blocks).to(tl.int64)
    batch = head_of_batch // sizes.heads
    own = (tl.program_id(0) % num_blocks) * OWN + tl.arange(0, OWN)
    own_inside = own < num_own
    own_within = tl.minimum(own, num_own - 1)
    if OWN_ARE_KEYS:
        own_segment = key_segment(sight, batch, own_within, num_own)
    else:
        own_segment = query_segment(sight, batch, own_within, num_own)
    own_lowest, own_highest = tl.min(own_segment, 0), tl.max(own_segment, 0)

    begin, end = num_other, 0  # as "none yet": begin is past every block
    full_begin, full_end = num_other, 0
    for block in range(tl.cdiv(num_other, OTHER)):
        other = block * OTHER + tl.arange(0, OTHER)
        other_within = tl.minimum(other, num_other - 1)
        if OWN_ARE_KEYS:
            other_segment = query_segment(sight, batch, other_within, num_other)
        else:
            other_segment = key_segment(sight, batch, other_within, num_other)
        possible = True
        if sight.q_segments is not None:
            possible = (tl.min(other_segment, 0) <= own_highest) & (tl.max(other_segment, 0) >= own_lowest)
        if possible:
            row = other[None, :] if OWN_ARE_KEYS else own[:, None]
            key = own[:, None] if OWN_ARE_KEYS else other[None, :]
            shown = hide(
                tl.zeros([OWN, OTHER], tl.float32),
                sight,
                sizes,
                batch,
                head_of_batch % sizes.heads,
                row,
                key,
                facing_key(sight, row, sizes.rows),
                other_segment[None, :] if OWN_ARE_KEYS else own_segment[:, None],
                own_segment[:, None] if OWN_ARE_KEYS else other_segment[None, :],
            )
            floor = float("-inf")
            if row_floors is not None:
                floor = tl.load(
                    row_floors + batch * floor_strides[0] + row * floor_strides[1],
                    mask=row < sizes.rows,
                    other=float("-inf"),
                )
            seen = (shown > floor) & (row < sizes.rows)
            # Own tokens past the end do not count; other tokens past the end keep the tile from being full.
            some = tl.max(tl.max(seen.to(tl.int32), 1), 0)
            every = tl.min(tl.min((seen | ~own_inside[:, None]).to(tl.int32), 1), 0)
            if some == 1:
                begin = tl.minimum(begin, block)
                end = block + 1
            if every == 1:
                if full_end == 0:
                    full_begin = block
                    full_end = block + 1
                elif full_end == block:
                    full_end = block + 1
    begin = tl.minimum(begin, end)
    full_begin = tl.minimum(full_begin, end)
    full_end = tl.maximum(full_end, full_begin)
    slot = ranges + tl.program_id(0).to(tl.int64) * 4
    tl.store(slot, begin)
    tl.store(slot + 1, full_begin)
    tl.store(slot + 2, full_end)
    tl.store(slot + 3, end)
