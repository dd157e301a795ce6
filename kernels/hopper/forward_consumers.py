"""The consumers of the forward: the loop over tiles and blocks of keys of a warpgroup, in the two forms that a template
chooses from."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import barriers
from .forward_softmax import first_probabilities, rescaled, row_sums
from .forward_state import FREE, announced, limits, out_layout, scores_layout, zeros, zeros_of_rows
from .forward_steps import (
    as_operand,
    attend,
    attend_in_turn,
    await_blocks,
    finish,
    first_block,
    kept_q,
    last_values,
    next_use,
    pass_turn,
    rounded,
    seen_blocks,
    start_scores,
    take_turn,
    v_block,
)
from .gluon_api import tma_store_wait


@gluon.jit
def consumer_partition(p, mem, w: gl.constexpr, T: gl.constexpr):
    if T.overlapped:
        consumer_overlapped(p, mem, w, T)
    else:
        consumer_in_turn(p, mem, w, T)


@gluon.jit
def own_rows(row0, b, h, first, last, clear_last, at, p, mem, w: gl.constexpr, T: gl.constexpr):
    """What a warpgroup does of a tile: (its first row, `limits` of its rows, last, clear_last, at), see
    `seen_blocks`."""
    row0 += w * 64
    last, clear_last, at = seen_blocks(row0, first, last, clear_last, at, p, mem, w, T)
    return row0, limits(row0, b, h, p, T), last, clear_last, at


# ---------------------------------------------------------------------------------------------------- overlapped


@gluon.jit
def attend_blocks(
    end, begin, before, at, first, q, slot, acc, reference, total, factor, pairs, rows, p, mem,
    w: gl.constexpr, T: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """`attend` to the blocks `[begin, end)`, the last one first."""
    for back in range(end - begin):
        after, acc, reference, total, factor, pairs = attend(
            before, at, end - 1 - back, first, q, slot, acc, reference, total, factor, pairs, rows, p, mem, w, T, MASKED
        )
        before = at
        at = after
    return before, at, acc, reference, total, factor, pairs


@gluon.jit
def consumer_overlapped(p, mem, w: gl.constexpr, T: gl.constexpr):
    """The scores of a block are computed beside the product of the block before with V, those of a tile's first block
    beside the last product of the tile before."""
    OUT: gl.constexpr = out_layout(T)
    THREADS: gl.constexpr = T.warpgroups * 128 + 32
    turn = gl.to_tensor(0)
    row0, b, h, first, last, clear_first, clear_last = announced(turn, mem)
    if T.pingpong:  # noqa: SIM102 (decided at compile time; the next one is not)
        if w == T.warpgroups - 1:
            pass_turn(w, T)  # opens the first turn of warpgroup 0
    at = gl.to_tensor(0), gl.to_tensor(0)
    row0, rows, last, clear_last, at = own_rows(row0, b, h, first, last, clear_last, at, p, mem, w, T)
    q, reference, total, pairs = first_block(w, turn, at, last - 1, rows, p, mem, w, T)
    factor = zeros_of_rows(T) + 1.0
    acc = zeros(T.v_dim, OUT)
    before = at
    at = next_use(at, T)
    while row0 >= 0:
        if T.looks_ahead:
            await_blocks(before, at, last - 1 > first, mem, T)
        slot = (turn % T.q_buffers) * T.warpgroups + w
        if T.masked:
            clear_last = gl.minimum(clear_last, last - 1)
            clear_first = gl.minimum(clear_first, clear_last)
            before, at, acc, reference, total, factor, pairs = attend_blocks(
                last - 1, clear_last, before, at, first, q, slot, acc, reference, total, factor, pairs,
                rows, p, mem, w, T, True,
            )  # fmt: skip
            before, at, acc, reference, total, factor, pairs = attend_blocks(
                clear_last, clear_first, before, at, first, q, slot, acc, reference, total, factor, pairs,
                rows, p, mem, w, T, False,
            )  # fmt: skip
            if T.left_limit:
                before, at, acc, reference, total, factor, pairs = attend_blocks(
                    clear_first, first, before, at, first, q, slot, acc, reference, total, factor, pairs,
                    rows, p, mem, w, T, True,
                )  # fmt: skip
        else:
            before, at, acc, reference, total, factor, pairs = attend_blocks(
                last - 1, first, before, at, first, q, slot, acc, reference, total, factor, pairs,
                rows, p, mem, w, T, False,
            )  # fmt: skip
        mbarrier.arrive(mem.q_free.index(slot), count=1)
        turn += 1
        next_row0, next_b, next_h, first, last, clear_first, clear_last = announced(turn, mem)
        if T.q_buffers == 1:
            # Q is loaded while the last product is computed and O is written.
            acc = last_values(before, acc, factor, pairs, p, mem, T)
            finish(acc, reference, total, row0, b, h, p, mem, w, T)
            if next_row0 >= 0:
                next_row0, rows, last, clear_last, at = own_rows(
                    next_row0, next_b, next_h, first, last, clear_last, at, p, mem, w, T
                )
                q, reference, total, pairs = first_block(w, turn, at, last - 1, rows, p, mem, w, T)
                factor = zeros_of_rows(T) + 1.0
                acc = zeros(T.v_dim, OUT)
                before = at
                at = next_use(at, T)
        elif next_row0 >= 0:
            next_row0, rows, last, clear_last, at = own_rows(
                next_row0, next_b, next_h, first, last, clear_last, at, p, mem, w, T
            )
            stage, phase = at
            slot = (turn % T.q_buffers) * T.warpgroups + w
            mbarrier.wait(mem.q_full.index(slot), (turn // T.q_buffers) & 1)
            mbarrier.wait(mem.k_full.index(stage), phase)
            q = kept_q(mem, slot, T)
            take_turn(w, T)
            s = start_scores(q, slot, stage, mem, T)
            if T.rescale_late:
                acc = rescaled(acc, factor, T)
                factor = zeros_of_rows(T) + 1.0
            if not T.looks_ahead:
                mbarrier.wait(mem.v_full.index(before[0]), before[1])
            operand = as_operand(pairs, p, T)
            acc = warpgroup_mma(operand, v_block(mem, before[0], T), acc, is_async=True)
            pass_turn(w, T)
            s = warpgroup_mma_wait(1, (s,))
            barriers.arrive(FREE + stage, THREADS)
            probabilities, next_reference, next_total = first_probabilities(s, last - 1, rows, p, T)
            acc, operand = warpgroup_mma_wait(0, (acc, operand))
            barriers.arrive(FREE + T.stages + before[0], THREADS)
            pairs = rounded(probabilities, p, T)
            finish(acc, reference, total, row0, b, h, p, mem, w, T)
            acc = zeros(T.v_dim, OUT)
            reference = next_reference
            total = next_total
            before = at
            at = next_use(at, T)
        else:
            acc = last_values(before, acc, factor, pairs, p, mem, T)
            finish(acc, reference, total, row0, b, h, p, mem, w, T)
        row0 = next_row0
        b = next_b
        h = next_h
    if T.store_by_tma:
        tma_store_wait(0)


# ---------------------------------------------------------------------------------------------------- in turn


@gluon.jit
def attend_blocks_in_turn(
    end, begin, at, q, slot, acc, reference, total, rows, p, mem,
    w: gl.constexpr, T: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """`attend_in_turn` to the blocks `[begin, end)`, the last one first."""
    for back in range(end - begin):
        acc, reference, total = attend_in_turn(
            at, end - 1 - back, q, slot, acc, reference, total, rows, p, mem, w, T, MASKED
        )
        at = next_use(at, T)
    return at, acc, reference, total


@gluon.jit
def consumer_in_turn(p, mem, w: gl.constexpr, T: gl.constexpr):
    """Scores, softmax and the product with V of one block after those of the other: registers for two thread blocks a
    multiprocessor, each of which works while the other waits."""
    gl.static_assert(T.q_buffers == 2)
    SUMS: gl.constexpr = row_sums(zeros(T.block_n, scores_layout(T))).type.layout
    turn = gl.to_tensor(0)
    at = gl.to_tensor(0), gl.to_tensor(0)
    row0, b, h, first, last, clear_first, clear_last = announced(turn, mem)
    while row0 >= 0:
        row0, rows, last, clear_last, at = own_rows(row0, b, h, first, last, clear_last, at, p, mem, w, T)
        slot = (turn & 1) * T.warpgroups + w
        mbarrier.wait(mem.q_full.index(slot), (turn >> 1) & 1)
        q = kept_q(mem, slot, T)
        acc = zeros(T.v_dim, out_layout(T))
        reference = zeros_of_rows(T) + float("-inf")
        total = gl.zeros((64, 4), gl.float32, SUMS)
        at, acc, reference, total = attend_blocks_in_turn(
            last, clear_last, at, q, slot, acc, reference, total, rows, p, mem, w, T, True
        )
        at, acc, reference, total = attend_blocks_in_turn(
            clear_last, clear_first, at, q, slot, acc, reference, total, rows, p, mem, w, T, False
        )
        if T.left_limit:
            at, acc, reference, total = attend_blocks_in_turn(
                clear_first, first, at, q, slot, acc, reference, total, rows, p, mem, w, T, True
            )
        mbarrier.arrive(mem.q_free.index(slot), count=1)
        finish(acc, reference, total, row0, b, h, p, mem, w, T)
        turn += 1
        row0, b, h, first, last, clear_first, clear_last = announced(turn, mem)
    if T.store_by_tma:
        tma_store_wait(0)
