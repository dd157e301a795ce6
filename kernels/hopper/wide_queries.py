"""dQ for head dimensions above 128: the queries stay, the keys pass by.

dK and dV of 64 keys at head_dim 256 fill half of the register file, which leaves no room for dQ: adding it up in
memory, one tile of 64 keys at a time, moves twice the bytes per product that head_dim 128 does. So dQ has a kernel of
its own (this one) and dK, dV have theirs (`wide_keys.py`). The scores are computed twice, 7 products instead of 5, but
nothing is added in memory, no tile of dQ is handed between warps, and every gradient is reproducible.

    load warp          Q, dO of 128 queries once;   K blocks -> sK[stages]   V blocks -> sV
    consumer w (64 queries), per block of 64 keys
        S  = Q K^T      dP = dO V^T       P = exp2(S scale - LSE)      dS = P (dP - delta)
        dQ += dS K                        (dS in registers as the left operand)

The two consumers do not wait for each other, so that the products of one run during the softmax of the other.

Global memory traffic per head and tile of 128 queries that sees n keys: 128 (2 qk_dim + v_dim) elements of Q, dO and
dQ, 1024 bytes of LSE and delta, and n (qk_dim + v_dim) elements of K and V, which come from L2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import barriers
from .backward_state import new_barriers
from .forward_state import hide_keys, limits, place, scores_layout
from .gluon_api import aggregate, partition_barrier, tma_load, tma_store, tma_store_wait
from .opaque import hidden
from .scores import tanh

K_FREE = gl.constexpr(5)
"""Named barriers: 5, 6 "stage of K free", 7 "V free"."""
V_FREE = gl.constexpr(7)
_THREADS = gl.constexpr(288)
"""Two consumers and the load warp."""


@aggregate
class Problem:
    """The arguments of the kernel, see `wide_queries_kernel`. Names as in `forward_state.Problem`, whose functions
    read them."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    do: tma.tensor_descriptor
    dq: tma.tensor_descriptor
    lse: gl.tensor
    delta: gl.tensor
    row_low: gl.tensor
    row_high: gl.tensor
    labels: gl.tensor
    ranges: gl.tensor
    sizes: gl.tuple
    band: gl.tuple
    rows_strides: gl.tuple
    scale: gl.tensor
    cap_scale: gl.tensor
    grad_scale: gl.tensor


@aggregate
class Shared:
    """Shared memory and its barriers."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor


@gluon.constexpr_function
def gradient_layout(T):
    """Registers of a slice [64, qk_lanes] of dQ or dK of one warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.template.qk_lanes, 16])


@gluon.jit
def no_sums(T: gl.constexpr):
    """dQ or dK of 64 rows before the first product: a tuple of slices of their lanes."""
    zeros = gl.zeros((64, T.qk_lanes), gl.float32, gradient_layout(T))
    if T.qk_slices == 1:
        return (zeros,)
    else:
        gl.static_assert(T.qk_slices == 3)
        return zeros, zeros, zeros


@gluon.jit
def slice_of(buffer, at, i: gl.constexpr, T: gl.constexpr):
    """The i-th slice of the tile `at` of `buffer`, K or Q of 64 rows."""
    return buffer.index(at * T.qk_slices + i).reshape([64, T.qk_lanes])


@gluon.jit
def accumulate(sums, operand, buffer, at, T: gl.constexpr):
    """Add the product of `operand`, 64 x 64, and the tile `at` of `buffer`, K or Q of 64 rows, to `no_sums`."""
    low = warpgroup_mma(operand, slice_of(buffer, at, 0, T), sums[0], is_async=True)
    # The operand is a dependence of the wait: its registers must not be reused while the product reads them
    # (docs/hopper.md, hazards).
    if T.qk_slices == 1:
        low, operand = warpgroup_mma_wait(0, (low, operand))
        return (low,)
    else:
        gl.static_assert(T.qk_slices == 3)
        middle = warpgroup_mma(operand, slice_of(buffer, at, 1, T), sums[1], is_async=True)
        high = warpgroup_mma(operand, slice_of(buffer, at, 2, T), sums[2], is_async=True)
        low, middle, high, operand = warpgroup_mma_wait(0, (low, middle, high, operand))
        return low, middle, high


@gluon.jit
def load_slices(desc, coord, full, buffer, at, T: gl.constexpr):
    """Fetch rows of q or k, slice by slice of their lanes, into the tile `at` of `buffer`."""
    b, head, row = coord
    mbarrier.expect(full, desc.block_type.nbytes * T.qk_slices)
    for i in gl.static_range(T.qk_slices):
        tma_load(desc, [b, head, row, i * T.qk_lanes], full, buffer.index(at * T.qk_slices + i))


@gluon.jit
def load_partition(p, mem, T: gl.constexpr):
    batch, heads, group, seq_q, seq_k, head_chunk = p.sizes
    row0, b, h, first, last, clear_first, clear_last = place(gl.program_id(0), p, T)
    kv = h // group
    for w in gl.static_range(2):
        load_slices(p.q, (b, h, row0 + w * 64), mem.q_full.index(w), mem.q, w, T)
    for i in range(last - first):
        key0 = (last - 1 - i) * T.block_n
        stage = i % T.stages
        if i >= T.stages:
            barriers.sync(K_FREE + stage, _THREADS)
        load_slices(p.k, (b, kv, key0), mem.k_full.index(stage), mem.k, stage, T)
        if i == 0:
            for w in gl.static_range(2):
                mbarrier.expect(mem.do_full.index(w), p.do.block_type.nbytes)
                tma_load(p.do, [b, h, row0 + w * 64, 0], mem.do_full.index(w), mem.do.index(w))
        else:
            barriers.sync(V_FREE, _THREADS)
        mbarrier.expect(mem.v_full.index(0), p.v.block_type.nbytes)
        tma_load(p.v, [b, kv, key0, 0], mem.v_full.index(0), mem.v)


@gluon.jit
def step(i, block, masked, rows, lse, delta, dq, p, mem, w: gl.constexpr, T: gl.constexpr):
    """The i-th block of keys."""
    LAYOUT: gl.constexpr = scores_layout(T)
    stage = i % T.stages
    own = hidden(w)
    do = mem.do.index(own).reshape([64, T.v_dim])
    v = mem.v.reshape([T.block_n, T.v_dim])
    zero = gl.zeros((64, T.block_n), gl.float32, LAYOUT)
    mbarrier.wait(mem.k_full.index(stage), (i // T.stages) & 1)
    s = zero
    for lanes in gl.static_range(T.qk_slices):
        q = mem.q.index(own * T.qk_slices + lanes).reshape([64, T.qk_lanes])
        k = mem.k.index(stage * T.qk_slices + lanes).reshape([T.block_n, T.qk_lanes])
        s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=lanes > 0, is_async=True)
    mbarrier.wait(mem.v_full.index(0), i & 1)
    dp = warpgroup_mma(do, v.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, (s,))
    if T.softcap:
        s = tanh(s * p.cap_scale)
        capped = s
    if T.masked:  # noqa: SIM102 (decided at compile time; the next one is not)
        if masked:
            s = hide_keys(s, block, rows, p, T)
    probabilities = gl.exp2(s * p.scale - lse[:, None])
    if T.softcap:
        probabilities = probabilities * (1.0 - capped * capped)
    dp = warpgroup_mma_wait(0, (dp,))
    barriers.arrive(V_FREE, _THREADS)
    ds = (probabilities * (dp - delta[:, None])).to(p.k.dtype)
    operand = gl.convert_layout(ds, gl.DotOperandLayout(0, gradient_layout(T), 2), assert_trivial=True)
    dq = accumulate(dq, operand, mem.k, stage, T)
    barriers.arrive(K_FREE + stage, _THREADS)
    return dq


@gluon.jit
def consumer_partition(p, mem, w: gl.constexpr, T: gl.constexpr):
    LAYOUT: gl.constexpr = scores_layout(T)
    batch, heads, group, seq_q, seq_k, head_chunk = p.sizes
    row0, b, h, first, last, clear_first, clear_last = place(gl.program_id(0), p, T)
    row0 += w * 64
    rows = limits(row0, b, h, p, T)
    line = (
        (b * heads + h).to(gl.int64) * (gl.cdiv(seq_q, T.block_m) * T.block_m)
        + row0
        + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    )
    lse = gl.load(p.lse + line)
    delta = gl.load(p.delta + line)
    dq = no_sums(T)
    mbarrier.wait(mem.q_full.index(w), 0)
    mbarrier.wait(mem.do_full.index(w), 0)
    for i in range(last - first):
        block = last - 1 - i
        masked = (block < clear_first) | (block >= clear_last)
        dq = step(i, block, masked, rows, lse, delta, dq, p, mem, w, T)
    partition_barrier()
    for lanes in gl.static_range(T.qk_slices):
        buffer = mem.q.index(w * T.qk_slices + lanes)
        buffer.reshape([64, T.qk_lanes]).store((dq[lanes] * p.grad_scale).to(p.k.dtype))
    fence_async_shared()
    partition_barrier()
    if row0 < seq_q:
        for lanes in gl.static_range(T.qk_slices):
            tma_store(p.dq, [b, h, row0, lanes * T.qk_lanes], mem.q.index(w * T.qk_slices + lanes))
    tma_store_wait(0)


@gluon.jit
def wide_queries_kernel(
    q, k, v, do, dq,
    lse, delta, row_low, row_high, labels, ranges,
    batch, heads, group, seq_q, seq_k, head_chunk,
    band_low, band_high, rows_stride, ranges_stride,
    scale, cap_scale, grad_scale,
    T: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Grid: tiles of 128 queries times batch and heads, in the order of `forward_state.place`.

    `q` … `dq`: tensor maps over [batch, heads, seq, dim]. `lse`, `delta`: float32 [batch, heads, rows padded to whole
    tiles], base 2, +inf in `lse` for rows that take no part (prepare.py). The rest as in `forward_kernel`.
    """
    mem = Shared(
        gl.allocate_shared_memory(q.dtype, [2 * T.qk_slices, 1, 1, 64, T.qk_lanes], q.layout),
        gl.allocate_shared_memory(q.dtype, [2, 1, 1, 64, T.v_dim], do.layout),
        gl.allocate_shared_memory(q.dtype, [T.stages * T.qk_slices, 1, 1, T.block_n, T.qk_lanes], k.layout),
        gl.allocate_shared_memory(q.dtype, [1, 1, T.block_n, T.v_dim], v.layout),
        new_barriers(2), new_barriers(2), new_barriers(T.stages), new_barriers(1),
    )  # fmt: skip
    p = Problem(
        q, k, v, do, dq, lse, delta, row_low, row_high, labels, ranges,
        (batch, heads, group, seq_q, seq_k, head_chunk), (band_low, band_high), (rows_stride, ranges_stride),
        scale, cap_scale, grad_scale,
    )  # fmt: skip
    gl.warp_specialize([
        (consumer_partition, (p, mem, 0, T)),
        (consumer_partition, (p, mem, 1, T)),
        (load_partition, (p, mem, T)),
    ], [4, 1], [240, 24])  # fmt: skip
