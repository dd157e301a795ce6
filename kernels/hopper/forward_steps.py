"""What a consumer of the forward does with a block of keys, and at the end of a tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import barriers
from .forward_softmax import first_probabilities, rescaled, scores, soften
from .forward_state import FREE, of_out, out_layout, scores_layout, unshifted, zeros
from .gluon_api import tma_store, tma_store_wait
from .scores import blocks_up_to_limit, clamp


@gluon.jit
def next_use(at, T: gl.constexpr):
    """The use of the ring of K and V behind `at`: (stage, phase of its barriers). Carried from block to block: found
    from a number, by a division by three stages, both would stand between a warpgroup's turn and its products."""
    stage, phase = at
    after = stage + 1
    wraps = after == T.stages
    return gl.where(wraps, 0, after), phase ^ wraps.to(gl.int32)


@gluon.jit
def take_turn(w: gl.constexpr, T: gl.constexpr):
    if T.pingpong:
        barriers.sync(FREE + 2 * T.stages + w, 256)


@gluon.jit
def pass_turn(w: gl.constexpr, T: gl.constexpr):
    if T.pingpong:
        barriers.arrive(FREE + 2 * T.stages + (w + 1) % T.warpgroups, 256)


@gluon.jit
def rounded(probabilities, p, T: gl.constexpr):
    """P in the input's precision, two neighbours in an int32: 16-bit values that live from one block to the next would
    be unpacked and packed again, 64 instructions for 64 scores of a thread."""
    low, high = gl.split(probabilities.reshape([64, T.block_n // 2, 2]))
    TYPE: gl.constexpr = "bf16x2" if p.v.dtype == gl.bfloat16 else "f16x2"
    ASM: gl.constexpr = "cvt.rn." + TYPE + ".f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(ASM, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def as_operand(pairs, p, T: gl.constexpr):
    """The left operand of the product with V, in registers, from `rounded`."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, out_layout(T), 2)
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    values = gl.join(low, high).reshape([64, T.block_n]).to(p.v.dtype, bitcast=True)
    return gl.convert_layout(values, LAYOUT, assert_trivial=True)


@gluon.jit
def kept_q(mem, slot, T: gl.constexpr):
    """The slice of Q that stays in registers, so that its product reads only K from shared memory."""
    if T.keep_q:
        LAYOUT: gl.constexpr = gl.DotOperandLayout(0, scores_layout(T), 2)
        return mem.q.index(slot * T.qk_slices).reshape([64, T.qk_lanes]).load(LAYOUT)
    else:
        return gl.to_tensor(slot)


@gluon.jit
def start_scores(q, slot, stage, mem, T: gl.constexpr):
    """Issue S = Q K^T, slice by slice of the lanes. `q`: what `kept_q` kept."""
    s = zeros(T.block_n, scores_layout(T))
    for i in gl.static_range(T.qk_slices):
        k = mem.k.index(stage * T.qk_slices + i).reshape([T.block_n, T.qk_lanes]).permute((1, 0))
        if T.keep_q and i == 0:
            s = warpgroup_mma(q, k, s, use_acc=False, is_async=True)
        else:
            part = mem.q.index(slot * T.qk_slices + i).reshape([64, T.qk_lanes])
            s = warpgroup_mma(part, k, s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def v_block(mem, stage, T: gl.constexpr):
    return mem.v.index(stage).reshape([T.block_n, T.v_dim])


@gluon.jit
def await_blocks(at, after, more, mem, T: gl.constexpr):
    """Wait for V of the block at `at`, and for K of the one at `after` if there are `more`."""
    if more:
        mbarrier.wait(mem.k_full.index(after[0]), after[1])
    mbarrier.wait(mem.v_full.index(at[0]), at[1])


@gluon.jit
def attend(
    before,
    at,
    block,
    first,
    q,
    slot,
    acc,
    reference,
    total,
    factor,
    pairs,
    rows,
    p,
    mem,
    w: gl.constexpr,
    T: gl.constexpr,
    MASKED: gl.constexpr,
):
    """One block of keys: its scores, and the product of the block before with V.

    `before`, `at`: the uses of the two blocks (`next_use`). `first`: the tile's last block to come. `factor`: with
    `T.rescale_late`, the factor that O still lacks before that product.
    """
    THREADS: gl.constexpr = T.warpgroups * 128 + 32
    if not T.looks_ahead:
        mbarrier.wait(mem.k_full.index(at[0]), at[1])
    take_turn(w, T)
    s = start_scores(q, slot, at[0], mem, T)
    if T.rescale_late:
        acc = rescaled(acc, factor, T)
    if not T.looks_ahead:
        mbarrier.wait(mem.v_full.index(before[0]), before[1])
    operand = as_operand(pairs, p, T)
    acc = warpgroup_mma(operand, v_block(mem, before[0], T), acc, is_async=True)
    pass_turn(w, T)
    after = next_use(at, T)
    if T.looks_ahead:
        await_blocks(at, after, block > first, mem, T)
    s = warpgroup_mma_wait(1, (s,))
    barriers.arrive(FREE + at[0], THREADS)
    s = scores(s, block, rows, p, T, MASKED)
    probabilities, reference, total, factor = soften(s, reference, total, p, T, MASKED)
    # The operand is a dependence of the wait: its registers must not be reused while the product reads them
    # (docs/hopper.md, hazards).
    acc, operand = warpgroup_mma_wait(0, (acc, operand))
    barriers.arrive(FREE + T.stages + before[0], THREADS)
    pairs = rounded(probabilities, p, T)
    if not T.rescale_late:
        acc = rescaled(acc, factor, T)
    return after, acc, reference, total, factor, pairs


@gluon.jit
def attend_in_turn(
    at, block, q, slot, acc, reference, total, rows, p, mem, w: gl.constexpr, T: gl.constexpr, MASKED: gl.constexpr
):
    """One block of keys, one product after the other."""
    THREADS: gl.constexpr = T.warpgroups * 128 + 32
    stage, phase = at
    mbarrier.wait(mem.k_full.index(stage), phase)
    s = start_scores(q, slot, stage, mem, T)
    s = warpgroup_mma_wait(0, (s,))
    barriers.arrive(FREE + stage, THREADS)
    s = scores(s, block, rows, p, T, MASKED)
    probabilities, reference, total, factor = soften(s, reference, total, p, T, MASKED)
    acc = rescaled(acc, factor, T)
    operand = as_operand(rounded(probabilities, p, T), p, T)
    mbarrier.wait(mem.v_full.index(stage), phase)
    acc = warpgroup_mma(operand, v_block(mem, stage, T), acc, is_async=True)
    acc, operand = warpgroup_mma_wait(0, (acc, operand))
    barriers.arrive(FREE + T.stages + stage, THREADS)
    return acc, reference, total


@gluon.jit
def last_values(before, acc, factor, pairs, p, mem, T: gl.constexpr):
    """The product of a tile's last block with V."""
    THREADS: gl.constexpr = T.warpgroups * 128 + 32
    stage, phase = before
    if not T.looks_ahead:
        mbarrier.wait(mem.v_full.index(stage), phase)
    if T.rescale_late:
        acc = rescaled(acc, factor, T)
    operand = as_operand(pairs, p, T)
    acc = warpgroup_mma(operand, v_block(mem, stage, T), acc, is_async=True)
    acc, operand = warpgroup_mma_wait(0, (acc, operand))
    barriers.arrive(FREE + T.stages + stage, THREADS)
    return acc


@gluon.jit
def first_block(slot, turn, at, block, rows, p, mem, w: gl.constexpr, T: gl.constexpr):
    """A tile's first block of keys, once its K and the tile's Q have come: its scores and probabilities."""
    THREADS: gl.constexpr = T.warpgroups * 128 + 32
    stage, phase = at
    mbarrier.wait(mem.q_full.index(slot), (turn // T.q_buffers) & 1)
    mbarrier.wait(mem.k_full.index(stage), phase)
    q = kept_q(mem, slot, T)
    take_turn(w, T)
    s = start_scores(q, slot, stage, mem, T)
    pass_turn(w, T)
    s = warpgroup_mma_wait(0, (s,))
    barriers.arrive(FREE + stage, THREADS)
    probabilities, reference, total = first_probabilities(s, block, rows, p, T)
    return q, reference, total, rounded(probabilities, p, T)


@gluon.jit
def store_lanes(out, coord, seq_q, p, mem, w: gl.constexpr, T: gl.constexpr):
    """Write some lanes of O through their buffer, once TMA has read what was there."""
    buffer = mem.o.index(w)
    tma_store_wait(0)
    buffer.reshape([64, T.o_lanes]).store(out)
    fence_async_shared()
    if coord[2] < seq_q:
        tma_store(p.o, coord, buffer)


@gluon.jit
def finish(acc, reference, total, row0, b, h, p, mem, w: gl.constexpr, T: gl.constexpr):
    """Normalise a tile, write O and LSE. A row that saw no key is 0 with LSE -inf."""
    LAYOUT: gl.constexpr = scores_layout(T)
    batch, heads, group, seq_q, seq_k, head_chunk = p.sizes
    total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    top = reference * p.scale
    if T.sinks:
        sink = gl.load(p.sinks + h) * 1.4426950408889634
        largest = gl.maximum(top, sink)
        weight = gl.exp2(top - largest)
        total = total * weight + gl.exp2(sink - largest)
        inverse = weight / total
        lse = (largest + gl.log2(total)) * 0.6931471805599453
    else:
        inverse = 1.0 / total
        lse = (top + gl.log2(total)) * 0.6931471805599453
        if T.masked:
            inverse = gl.where(total == 0.0, 0.0, inverse)
            lse = gl.where(total == 0.0, float("-inf"), lse)
    rows = row0 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    lse = unshifted(lse, rows, b, h, p, T)
    gl.store(p.lse + (b * heads + h).to(gl.int64) * seq_q + rows, lse, mask=rows < seq_q)
    out = (acc * of_out(inverse, T)).to(p.v.dtype)
    if T.store_by_tma:
        if T.o_lanes == T.v_dim:
            store_lanes(out, [b, h, row0, 0], seq_q, p, mem, w, T)
        else:
            gl.static_assert(2 * T.o_lanes == T.v_dim)
            low, high = gl.split(out.reshape([64, 2, T.o_lanes]).permute((0, 2, 1)))
            HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.o_lanes, 16])
            low = gl.convert_layout(low, HALF, assert_trivial=True)
            high = gl.convert_layout(high, HALF, assert_trivial=True)
            store_lanes(low, [b, h, row0, 0], seq_q, p, mem, w, T)
            store_lanes(high, [b, h, row0, T.o_lanes], seq_q, p, mem, w, T)
    else:
        OUT: gl.constexpr = out_layout(T)
        stride_b, stride_h, stride_s, v_head_dim = p.o_strides
        r = (row0 + gl.arange(0, 64, gl.SliceLayout(1, OUT)))[:, None]
        lane = gl.arange(0, T.v_dim, gl.SliceLayout(0, OUT))[None, :]
        base = p.o_ptr + b.to(gl.int64) * stride_b + h.to(gl.int64) * stride_h
        gl.store(base + r.to(gl.int64) * stride_s + lane, out, mask=(r < seq_q) & (lane < v_head_dim))


@gluon.jit
def seen_blocks(row0, first, last, clear_last, at, p, mem, w: gl.constexpr, T: gl.constexpr):
    """Of a tile's blocks of keys, those that the 64 rows at `row0` see: (last, clear_last) of `place`, and the use of
    the first. A block of later keys that only the tile's other warpgroups see is given back as soon as it is there."""
    if T.skip_hidden:
        THREADS: gl.constexpr = T.warpgroups * 128 + 32
        # No more than one block: V of a second would wait for the stage of the former tile's last V, not yet used.
        gl.static_assert((T.warpgroups - 1) * 64 <= T.block_n)
        batch, heads, group, seq_q, seq_k, head_chunk = p.sizes
        band_low, band_high = p.band
        seen, clear_last = blocks_up_to_limit(row0, 64, seq_q, seq_k, band_high, T.block_n)
        seen = clamp(seen, first + 1, last)
        clear_last = clamp(clear_last, first, seen)
        for _ in range(last - seen):
            stage, phase = at
            # Both are awaited: a warpgroup that gave back a stage before it was loaded would count twice in the
            # barrier that the former use of the stage still waits on.
            mbarrier.wait(mem.k_full.index(stage), phase)
            take_turn(w, T)
            pass_turn(w, T)
            barriers.arrive(FREE + stage, THREADS)
            mbarrier.wait(mem.v_full.index(stage), phase)
            barriers.arrive(FREE + T.stages + stage, THREADS)
            at = next_use(at, T)
        last = seen
    return last, clear_last, at
