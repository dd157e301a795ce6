"""The second half of the gradients of weights and biases: the rows that the backward's programs wrote, added up.

Traffic: the rows, a few hundred kilobytes that lie in the L2. The order is fixed: the same bits on every run.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_slice(OUT, total, column, BEGIN: tl.constexpr, SIZE: tl.constexpr):
    """The columns [BEGIN, BEGIN + SIZE) of `total`, rounded to OUT's dtype."""
    tl.store(OUT + (column - BEGIN), total.to(OUT.dtype.element_ty), mask=(column >= BEGIN) & (column < BEGIN + SIZE))


@triton.jit(do_not_specialize=("q_rows", "k_rows"))
def reduce_kernel(
    PARTIAL,
    QW,
    QB,
    KW,
    KB,
    q_rows,
    k_rows,
    QW_SIZE: tl.constexpr,
    QB_SIZE: tl.constexpr,
    KW_SIZE: tl.constexpr,
    KB_SIZE: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Sum the rows of PARTIAL, [q_rows, QW_SIZE + QB_SIZE] followed by [k_rows, KW_SIZE + KB_SIZE], in an order fixed
    by ROWS, into the gradients of the parameters.

    OVERLAPS (sm_90 and later): the kernel is set up while the backward still runs, and waits here for its end
    (programmatic dependent launch)."""
    Q: tl.constexpr = QW_SIZE + QB_SIZE
    K: tl.constexpr = KW_SIZE + KB_SIZE
    column = tl.program_id(0) * COLS + tl.arange(0, COLS)
    is_q = column < Q
    rows = tl.where(is_q, q_rows, tl.where(column < Q + K, k_rows, 0))
    corner = tl.where(is_q, column, q_rows * Q + column - Q)
    width = tl.where(is_q, Q, K)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([ROWS, COLS], ACC)
    for start in range(0, max(q_rows, k_rows), ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        total += tl.load(PARTIAL + row * width[None, :] + corner[None, :], mask=row < rows[None, :], other=0)
    result = tl.sum(total, 0)
    if QW_SIZE > 0:
        store_slice(QW, result, column, 0, QW_SIZE)
    if QB_SIZE > 0:
        store_slice(QB, result, column, QW_SIZE, QB_SIZE)
    if KW_SIZE > 0:
        store_slice(KW, result, column, Q, KW_SIZE)
    if KB_SIZE > 0:
        store_slice(KB, result, column, Q + KW_SIZE, KB_SIZE)
