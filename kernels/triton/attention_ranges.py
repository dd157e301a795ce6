"""Which tiles to visit where only the data knows: packed documents, explicit masks.

One program a block of own tokens walks over the blocks of the other side and writes four block numbers, (begin,
full_begin, full_end, end): every seen pair lies in [begin, end), and every pair of [full_begin, full_end) is seen.
Tiles whose segments cannot meet are passed over by their smallest and largest segment; segments need not be sorted.
It reads the tokens' segments Sq Sk / BLOCK times (from the L2), and a mask once: a small part of the attention that
follows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_common import facing_key, hide, segment


@triton.jit
def attention_ranges(
    ranges,
    positions,
    q_segments,
    k_segments,
    mask,
    q_segments_stride,
    k_segments_stride,
    mask_batch_stride,
    mask_head_stride,
    mask_row_stride,
    mask_key_stride,
    mask_floor,
    num_rows,
    num_keys,
    num_heads,
    offset,
    left,
    right,
    OWN_ARE_KEYS: tl.constexpr,
    OWN: tl.constexpr,
    OTHER: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    MASK: tl.constexpr,
):
    """ranges `[B or 1, Hq or 1, blocks of own tokens, 4]` int32."""
    num_own = num_keys if OWN_ARE_KEYS else num_rows
    num_other = num_rows if OWN_ARE_KEYS else num_keys
    num_blocks = tl.cdiv(num_own, OWN)
    head_of_batch = (tl.program_id(0) // num_blocks).to(tl.int64)
    batch = head_of_batch // num_heads
    mask_base = mask + batch * mask_batch_stride + (head_of_batch % num_heads) * mask_head_stride
    q_segments_base = q_segments + batch * q_segments_stride
    k_segments_base = k_segments + batch * k_segments_stride
    own = (tl.program_id(0) % num_blocks) * OWN + tl.arange(0, OWN)
    own_inside = own < num_own
    own_segment = segment(
        k_segments_base if OWN_ARE_KEYS else q_segments_base, tl.minimum(own, num_own - 1), num_own, HAS_SEGMENTS
    )
    own_lowest, own_highest = tl.min(own_segment, 0), tl.max(own_segment, 0)

    begin, end = num_other, 0  # as "none yet": begin is past every block
    full_begin, full_end = num_other, 0
    for block in range(tl.cdiv(num_other, OTHER)):
        other = block * OTHER + tl.arange(0, OTHER)
        other_segment = segment(
            q_segments_base if OWN_ARE_KEYS else k_segments_base,
            tl.minimum(other, num_other - 1),
            num_other,
            HAS_SEGMENTS,
        )
        possible = True
        if HAS_SEGMENTS:
            possible = (tl.min(other_segment, 0) <= own_highest) & (tl.max(other_segment, 0) >= own_lowest)
        if possible:
            row = other[None, :] if OWN_ARE_KEYS else own[:, None]
            key = own[:, None] if OWN_ARE_KEYS else other[None, :]
            shown = hide(
                tl.zeros([OWN, OTHER], tl.float32),
                row,
                key,
                facing_key(positions, row, num_rows, offset, HAS_POSITIONS),
                other_segment[None, :] if OWN_ARE_KEYS else own_segment[:, None],
                own_segment[:, None] if OWN_ARE_KEYS else other_segment[None, :],
                mask_base,
                mask_row_stride,
                mask_key_stride,
                mask_floor,
                num_rows,
                num_keys,
                left,
                right,
                HAS_LEFT,
                HAS_RIGHT,
                HAS_SEGMENTS,
                MASK,
            )
            seen = (shown > float("-inf")) & (row < num_rows)
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
