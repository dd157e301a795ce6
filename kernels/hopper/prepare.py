"""The two memory-bound kernels around the backward, in plain Triton.

`before`: delta = rowsum(dO * O) - dLSE and LSE in base 2, both padded to whole tiles; up to head_dim 128 the counter of
blocks and what stands behind it are zeroed (`plans.Counts`), and of the float32 accumulator of dQ the heads that come
first: the others are zeroed by the main kernel, shortly before it adds to them. (In a fixed order none is: who comes
first stores.) A dO that TMA cannot read is copied on the way.
Traffic of a head: 2 rows v_dim elements of O and dO and 4 rows bytes of LSE read, 8 padded_rows bytes of LSE and delta
written; of a head that it zeroes 4 accumulator_rows head_dim bytes more, of a dO that it copies rows v_dim elements.
`after`: dQ = scale * accumulator, rounded once.  Traffic of a head: 4 rows head_dim bytes read, rows head_dim elements
written.

The three kernels overlap by programmatic dependent launch. `before` starts like any other, after everything that was
launched before it, and lets the next one start at once; that one waits for it (all its programs, and what they have
written) before it touches global memory, and only then lets `after` start, whose programs find room where a thread
block of the main kernel has ended. Each waits for its own head, by a count of who has added to it: what is left to do
at the end of the main kernel does not fill the chip. The last program waits for the main kernel as a whole, and `after`
lets nobody start early. So whatever follows on the stream finds all three complete.
"""

import triton
import triton.language as tl


@triton.jit
def before(
    out, grad_out, grad_out_copy, lse, grad_lse, lse_rows, delta_rows, accumulator, counter,
    out_b, out_h, out_s, grad_b, grad_h, grad_s, grad_lane,
    heads, rows, accumulator_rows, padded_rows, head_dim, v_head_dim, zeroed_heads,
    zeroed_at, summed_at, turns_at,
    TILE: tl.constexpr, ROWS: tl.constexpr, QK_DIM: tl.constexpr, V_DIM: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr, COPY: tl.constexpr, ACCUMULATE: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Grid: (padded_rows / ROWS) * batch * heads. `lse_rows`, `delta_rows`: float32 [batch, heads, padded_rows].

    A row that saw no key (LSE -inf) and a row past the end get LSE +inf: exp2(s - LSE) is then 0 for every score,
    also for -inf.
    """
    tl.extra.cuda.gdc_launch_dependents()
    chunks = padded_rows // ROWS
    # The heads that come first last: their dO is in the L2 cache then.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    head = program // chunks
    row0 = (program - head * chunks) * ROWS
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    r = row0 + tl.arange(0, ROWS)
    inside = r < rows
    lane = tl.arange(0, V_DIM)
    here = inside[:, None] & (lane < v_head_dim)[None, :]
    o = tl.load(out + b * out_b + h * out_h + r.to(tl.int64)[:, None] * out_s + lane[None, :], mask=here, other=0.0)
    at = b * grad_b + h * grad_h + r.to(tl.int64)[:, None] * grad_s + lane.to(tl.int64)[None, :] * grad_lane
    g = tl.load(grad_out + at, mask=here, other=0.0)
    line = head.to(tl.int64) * rows + r
    if COPY:
        tl.store(grad_out_copy + line[:, None] * v_head_dim + lane[None, :], g, mask=here)
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    if HAS_GRAD_LSE:
        delta -= tl.load(grad_lse + line, mask=inside, other=0.0)
    log_sum = tl.load(lse + line, mask=inside, other=float("-inf"))
    empty = log_sum == float("-inf")
    padded = head.to(tl.int64) * padded_rows + r
    tl.store(lse_rows + padded, tl.where(empty, float("inf"), log_sum * 1.4426950408889634))
    tl.store(delta_rows + padded, tl.where(empty, 0.0, delta))
    if ACCUMULATE:
        if head < zeroed_heads:
            q_lane = tl.arange(0, QK_DIM)
            zero = tl.zeros((ROWS, QK_DIM), tl.float32)
            here = inside[:, None] & (q_lane < head_dim)[None, :]
            line = head.to(tl.int64) * accumulator_rows + r
            tl.store(accumulator + line[:, None] * head_dim + q_lane[None, :], zero, mask=here)
        if row0 == 0:
            tl.store(counter + zeroed_at + head, 0)
            tl.store(counter + summed_at + head, 0)
            if head == 0:
                tl.store(counter, 0)
    if TURNS:  # noqa: SIM102 (decided at compile time; the next one is not)
        if row0 % TILE == 0:
            tl.store(counter + turns_at + head.to(tl.int64) * (padded_rows // TILE) + row0 // TILE, 0)


@triton.jit
def after(
    accumulator, counter, dq, dq_b, dq_h, dq_s, heads, rows, accumulator_rows, head_dim, summed_at, group, additions,
    turns_at, tiles, scale,
    ROWS: tl.constexpr, QK_DIM: tl.constexpr, TILE: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Grid: ceil(rows / ROWS) * batch * heads. `accumulator`: float32 [batch, heads, accumulator_rows, head_dim].
    `additions`: the count of a `group` of heads when all of it is summed. With `TURNS` nothing was zeroed: of the
    `tiles` of a head those to which nobody has added are zero."""
    chunks = tl.cdiv(rows, ROWS)
    head = tl.program_id(0) // chunks
    # Triton makes a load of it: nothing is added.
    while tl.atomic_add(counter + summed_at + head // group, 0, sem="acquire", scope="gpu") < additions:
        pass
    row0 = (tl.program_id(0) - head * chunks) * ROWS
    r = row0 + tl.arange(0, ROWS)
    lane = tl.arange(0, QK_DIM)
    here = (r < rows)[:, None] & (lane < head_dim)[None, :]
    line = head.to(tl.int64) * accumulator_rows + r
    there = here
    if TURNS:
        there = here & (tl.load(counter + turns_at + head.to(tl.int64) * tiles + row0 // TILE) > 0)
    x = tl.load(accumulator + line[:, None] * head_dim + lane[None, :], mask=there, other=0.0)
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    at = dq + b * dq_b + h * dq_h + r.to(tl.int64)[:, None] * dq_s + lane[None, :]
    tl.store(at, (x * scale).to(dq.dtype.element_ty), mask=here)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.extra.cuda.gdc_wait()
