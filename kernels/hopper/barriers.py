"""Named barriers: a hand-off between chosen warps of one thread block that costs no shared memory and no polling.

`arrive` announces and goes on, `sync` announces and waits; the barrier opens when `threads` threads of both kinds
have come (PTX `barrier`). An mbarrier arrival in Gluon is a barrier of the whole partition plus one elected thread; a
named barrier is a single instruction, worth 10 % of the backward pass when it came in.

There are 16 ids. Triton itself uses 0 (default partition), 1 (start of the partitions) and 2, 3 (partitions of more
than one warp); tests read them off the PTX. Ours start at 5 where the queries stay and at 4 where the keys do;
docs/hopper.md has a table of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_api import partition_barrier


@gluon.constexpr_function
def _barrier_asm(kind, threads):
    return "{ bar." + kind + " $1, " + str(threads) + "; mov.u32 $0, 0; }"


@gluon.jit
def sync(barrier, threads: gl.constexpr):
    """Wait at `barrier` until `threads` threads have come."""
    ASM: gl.constexpr = _barrier_asm("sync", threads)
    gl.inline_asm_elementwise(ASM, "=r,r", [gl.to_tensor(barrier)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive(barrier, threads: gl.constexpr):
    """Count towards `barrier` without waiting."""
    ASM: gl.constexpr = _barrier_asm("arrive", threads)
    gl.inline_asm_elementwise(ASM, "=r,r", [gl.to_tensor(barrier)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def bulk_writes_done():
    """Wait until the bulk copies of this thread are written, not only read from shared memory.

    Triton's `store_wait` is the `.read` form, after which other thread blocks may not yet see the result
    (https://github.com/Dao-AILab/flash-attention/issues/2244).
    """
    ASM: gl.constexpr = "{ cp.async.bulk.wait_group 0; mov.u32 $0, 0; }"
    gl.inline_asm_elementwise(ASM, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def order_proxies():
    """Order what this thread has read and written in global memory before what TMA does there next, and the other way
    round. (Without `.global` ptxas makes a fence of the whole chip of it.)"""
    gl.inline_asm_elementwise(
        "{ fence.proxy.async.global; mov.u32 $0, 0; }", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_until(counter, number):
    """Wait until `counter` in global memory has reached `number`; order what follows after it. By one warp."""
    address = counter.to(gl.int64, bitcast=True)
    ASM: gl.constexpr = "ld.acquire.gpu.global.s32 $0, [$1];"
    while gl.inline_asm_elementwise(ASM, "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1) < number:
        pass
    order_proxies()
    partition_barrier()


@gluon.jit
def begin_draw(counter):
    """Ask for the next number of `counter` in global memory, by one warp; `end_draw` waits for it. (`gl.atomic_add`
    fences all that the warp has done, and tells its lanes through shared memory.)"""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 i; mov.u32 i, %laneid; setp.eq.u32 p, i, 0; mov.u32 $0, 0;"
        " @p atom.relaxed.gpu.global.add.u32 $0, [$1], 1; }",
        "=r,l", [counter.to(gl.int64, bitcast=True)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def end_draw(begun):
    """The number, for all lanes of the warp."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [begun], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def draw(counter):
    return end_draw(begin_draw(counter))


@gluon.jit
def count_up(counter):
    """Add 1 to `counter` in global memory, for others to see after what this warp has written: its stores, and the
    bulk copies that it has waited for (which need no `order_proxies`: their completion is followed by one)."""
    partition_barrier()
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 i; mov.u32 i, %laneid; setp.eq.u32 p, i, 0;"
        " @p red.release.gpu.global.add.s32 [$1], 1; mov.u32 $0, 0; }",
        "=r,l", [counter.to(gl.int64, bitcast=True)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
