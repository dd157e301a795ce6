"""What a warpgroup that holds dK and dV does (`backward.py`): the loop over blocks of keys and tiles of queries. P and
dS stay in registers as left operands of dV and dK."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import barriers
from .backward_state import (
    DQ_FULL,
    DS_FREE,
    DS_FULL,
    PAIR,
    STAGE_FREE,
    Keys,
    arrays_of_block,
    descends,
    dq_layout,
    gradient_layout,
    hide,
    scores_layout,
    spread_rows,
    tile_at,
)
from .forward_state import announced
from .gluon_api import partition_barrier, tma_store, tma_store_wait
from .opaque import hidden
from .scores import tanh


@gluon.jit
def consumer_partition(p, mem, w: gl.constexpr, T: gl.constexpr):
    """Warpgroup `w`: 64 keys of each block."""
    kv_heads, group, seq_q, seq_k = p.sizes
    together, blocks, items = p.work
    use = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    b, kv, key0, first, last, clear_first, clear_last = announced(turn, mem)
    while b >= 0:
        row_low, row_high, labels, ranges = arrays_of_block(
            p.row_low, p.row_high, p.labels, p.ranges, b, kv, blocks, p.strides, seq_q, seq_k, T
        )
        keys = Keys(row_low, row_high, labels, p.sizes, p.band, p.scales, key0 + w * 64)
        operands = _begin(turn, mem, w, T)
        dk = gl.zeros((64, T.qk_dim), gl.float32, gradient_layout(T, T.qk_dim))
        dv = gl.zeros((64, T.v_dim), gl.float32, gradient_layout(T, T.v_dim))
        st = gl.zeros((64, T.block_m), gl.float32, scores_layout(T))
        down = descends(b, kv, p, T)
        tile = tile_at(0, first, last, down)
        uses = group * (last - first)
        if T.early_scores:  # noqa: SIM102 (decided at compile time; the next one is not)
            if uses > 0:
                st = warpgroup_mma_wait(0, (_scores(use, True, operands[0], mem, T),))
        for i in range(uses):
            masked = (tile < clear_first) | (tile >= clear_last)
            more = i + 1 < uses
            st, dk, dv = step(use + i, i, turn, tile, masked, more, operands, st, dk, dv, b, keys, p, mem, w, T)
            if T.last_reversed:
                down = descends(b, kv, p, T)
            below = gl.where(tile == first, last, tile) - 1
            tile = gl.where(down, below, gl.where(tile == last - 1, first, tile + 1))
        use += uses
        _end(use, uses, turn, mem, w, T)
        _store(dk, dv, b, kv, key0, p, mem, w, T)
        turn += 1
        b, kv, key0, first, last, clear_first, clear_last = announced(turn, mem)
    tma_store_wait(0)


@gluon.jit
def _slot(turn, w: gl.constexpr, T: gl.constexpr):
    return (turn % T.key_slots) * 2 + w


@gluon.jit
def _begin(turn, mem, w: gl.constexpr, T: gl.constexpr):
    """Wait for K and V of a block; the left operands of S^T and dP^T, in registers where there is room."""
    at = _slot(turn, w, T)
    mbarrier.wait(mem.kv_full.index(at), (turn // T.key_slots) & 1)
    if T.dq_apart:
        k, v = _left_operands(at, mem, T)
        if T.keys_in_registers:
            OPERAND: gl.constexpr = gl.DotOperandLayout(0, scores_layout(T), 2)
            k = k.load(OPERAND)
            v = v.load(OPERAND)
            mbarrier.arrive(mem.kv_free.index(at), count=1)
        return k, v
    else:
        mbarrier.wait(mem.kv_full.index(1 - w), turn & 1)  # dQ takes the keys of both
        # As if there had been a tile before the first: dS in the second buffer, and nothing left to read in the first.
        barriers.arrive(DS_FREE + 1 - w, PAIR)
        barriers.arrive(DS_FULL + 2 + w, PAIR)
        return _left_operands(at, mem, T)


@gluon.jit
def _end(use, uses, turn, mem, w: gl.constexpr, T: gl.constexpr):
    """Behind the last tile of a block: dQ of that one, where it comes one tile late; K and V are free."""
    if T.dq_apart:
        if not T.keys_in_registers:
            mbarrier.arrive(mem.kv_free.index(_slot(turn, w, T)), count=1)
        tma_store_wait(0)  # dK and dV of the block before
    else:
        odd = (uses + 1) % 2
        barriers.sync(DS_FULL + 2 * odd + (1 - w), PAIR)
        dq = warpgroup_mma_wait(0, (_dq(odd, mem, w, T),))
        barriers.arrive(DS_FREE + 2 * odd + (1 - w), PAIR)
        # Both buffers of dS are read: dK is stored there.
        barriers.sync(DS_FREE + w, PAIR)
        barriers.sync(DS_FREE + 2 + w, PAIR)
        # Now, and not before: with the keys of the next block the other warpgroup comes to these barriers again.
        mbarrier.arrive(mem.kv_free.index(0), count=1)
        mbarrier.arrive(mem.kv_free.index(1), count=1)
        _hand_over(dq, use + turn, mem, w, T)
    partition_barrier()


@gluon.jit
def _store(dk, dv, b, kv, key0, p, mem, w: gl.constexpr, T: gl.constexpr):
    """dK and dV of a block to memory."""
    scale, cap_scale, grad_scale = p.scales
    row0 = key0 + w * 64
    dk = (dk * grad_scale).to(mem.q.dtype)
    mem.dv.index(w).reshape([64, T.v_dim]).store(dv.to(mem.q.dtype))
    if T.dq_apart:
        mem.dk.index(w).reshape([64, T.dk_lanes]).store(dk)
    else:
        low, high = gl.split(dk.reshape([64, 2, T.dk_lanes]).permute((0, 2, 1)))
        mem.dk.index(w).reshape([64, T.dk_lanes]).store(low)
        mem.dk.index(2 + w).reshape([64, T.dk_lanes]).store(high)
    fence_async_shared()
    partition_barrier()
    tma_store(p.dv, [b, kv, row0, 0], mem.dv.index(w))
    tma_store(p.dk, [b, kv, row0, 0], mem.dk.index(w))
    if not T.dq_apart:
        tma_store(p.dk, [b, kv, row0, T.dk_lanes], mem.dk.index(2 + w))
        tma_store_wait(0)
        partition_barrier()


@gluon.jit
def _left_operands(at, mem, T: gl.constexpr):
    """K and V in shared memory."""
    at = hidden(at)
    return mem.k.index(at).reshape([64, T.qk_dim]), mem.v.index(at).reshape([64, T.v_dim])


@gluon.jit
def _scores(use, exists, k, mem, T: gl.constexpr):
    """Issue S^T of the `use`-th tile of this thread block; of whatever is there if there is no such tile."""
    stage = use % T.stages
    mbarrier.wait(mem.q_full.index(stage), (use // T.stages) & 1, pred=exists)
    q = mem.q.index(stage).reshape([T.block_m, T.qk_dim])
    zero = gl.zeros((64, T.block_m), gl.float32, scores_layout(T))
    return warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def step(
    use, i, turn, tile, masked, more, operands, st, dk, dv, b, keys, p, mem, w: gl.constexpr, T: gl.constexpr
):  # fmt: skip
    """One tile of queries: the `use`-th of this thread block, the `i`-th of its `turn`-th block of keys. `operands`:
    see `_begin`. With `T.early_scores`, `st` is the tile's S^T, and that of the next one (`more`: there is one) is
    returned with the accumulators."""
    BLOCK_M: gl.constexpr = T.block_m
    SCORES: gl.constexpr = scores_layout(T)
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(0, gradient_layout(T, T.v_dim), 2)
    DS_OPERAND: gl.constexpr = gl.DotOperandLayout(0, gradient_layout(T, T.qk_dim), 2)
    scale, cap_scale, grad_scale = p.scales
    # What is constant would be kept in registers, and spilled.
    use = hidden(use)
    stage = use % T.stages
    odd = (use if T.dq_apart else i) % 2
    buffer = 2 * odd + w
    k, v = operands if T.keys_in_registers else _left_operands(_slot(turn, w, T), mem, T)
    q = mem.q.index(stage).reshape([BLOCK_M, T.qk_dim])
    do = mem.do.index(stage).reshape([BLOCK_M, T.v_dim])
    if not T.early_scores:
        st = _scores(use, True, k, mem, T)
    mbarrier.wait(mem.do_full.index(stage), (use // T.stages) & 1)
    zero = gl.zeros((64, BLOCK_M), gl.float32, SCORES)
    dpt = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    lse = mem.lse.index(stage).load(SCORES)
    if not T.early_scores:
        st = warpgroup_mma_wait(1, (st,))
    if T.softcap:
        st = tanh(st * cap_scale)
        capped = st
    if T.masked:  # noqa: SIM102 (decided at compile time; the next one is not)
        if masked:
            st = hide(st, tile, b, keys, T)
    pt = gl.exp2(st * scale - lse)
    delta = mem.delta.index(stage).load(SCORES)
    p_operand = gl.convert_layout(pt.to(mem.q.dtype), P_OPERAND, assert_trivial=True)
    if T.softcap:
        pt = pt * (1.0 - capped * capped)
    dpt = warpgroup_mma_wait(0, (dpt,))
    ds = (pt * (dpt - delta)).to(mem.q.dtype)
    ds_operand = gl.convert_layout(ds, DS_OPERAND, assert_trivial=True)
    barriers.sync(DS_FREE + buffer, PAIR)
    # Stored before the product is issued: the fence need not wait for it.
    mem.ds.index(buffer).store(ds)
    dv = warpgroup_mma(p_operand, do, dv, is_async=True)
    fence_async_shared()
    barriers.arrive(DS_FULL + buffer, PAIR)
    # Operands are dependences of the waits: their registers must not be reused while a product reads them
    # (docs/hopper.md, hazards).
    if T.dq_apart:
        dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
        dk, dv, p_operand, ds_operand = warpgroup_mma_wait(0, (dk, dv, p_operand, ds_operand))
    else:
        # Of the tile before, whose dS the other warpgroup has long written: nobody waits.
        barriers.sync(DS_FULL + 2 * (1 - odd) + (1 - w), PAIR)
        dq = _dq(1 - odd, mem, w, T)
        dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
        dq, dv, p_operand = warpgroup_mma_wait(1, (dq, dv, p_operand))
        barriers.arrive(DS_FREE + 2 * (1 - odd) + (1 - w), PAIR)
        _hand_over(dq, use + turn, mem, w, T)
        if T.early_scores:
            st = _scores(use + 1, more, k, mem, T)
            dk, st, ds_operand = warpgroup_mma_wait(0, (dk, st, ds_operand))
        else:
            dk, ds_operand = warpgroup_mma_wait(0, (dk, ds_operand))
    barriers.arrive(STAGE_FREE + stage, PAIR + 32)
    return st, dk, dv


@gluon.jit
def _dq(odd, mem, w: gl.constexpr, T: gl.constexpr):
    """Issue half of the lanes of dQ = dS K, over the keys of the one and the other warpgroup."""
    dq = gl.zeros((T.block_m, T.dq_lanes), gl.float32, dq_layout(T))
    for other in gl.static_range(2):
        k = mem.k.index(hidden(other)).reshape([64, T.qk_dim]).slice(w * T.dq_lanes, T.dq_lanes, 1)
        ds = mem.ds.index(2 * odd + other).permute((1, 0))
        dq = warpgroup_mma(ds, k, dq, use_acc=other > 0, is_async=True)
    return dq


@gluon.jit
def _hand_over(dq, turn, mem, w: gl.constexpr, T: gl.constexpr):
    """Half of a tile of dQ, the `turn`-th, to the warp that adds it to memory."""
    mbarrier.wait(mem.dq_free.index(w), (turn & 1) ^ 1)
    mem.dq.index(w).store(spread_rows(dq))
    fence_async_shared()
    barriers.arrive(DQ_FULL + w, 128 + 32)
