"""The end of the backward of `norm_rope_attention` (`block.py`) as one launch; `block_end_kernels.py` has the idea."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
from torch import Tensor

from ..attention_problem import Unfinished
from ..options import Options
from ..streams import Gradients, GradStream, Tables, arithmetic_dtype
from .block_end_kernels import end_kernel
from .norm_rope import ARITHMETIC, Geometry, Layout, add_partials, device_facts, launched, may_overlap, site_of
from .norm_rope_tiles import Choice, next_power_of_2, tiles_of

CHOICE = Choice(heads=4, elements=16, warps=4, registers=128)
"""How to cut a tile: as a backward of norm + rotation."""
PARTIAL = Choice(heads=4, elements=16, warps=4, registers=168)
"""With lanes that are not rotated, which are held apart: 128 registers are too few."""


def refuses(needs: Mapping[str, bool], given: Mapping[str, Tensor | None], options: Options) -> str | None:
    """Why these gradients take the kernels one after the other; None if one launch can finish them. Both by the names
    of `block.TENSORS`: which gradients are needed, and the tensors."""
    if not (needs["qkv"] or (needs["q"] and needs["k"])):
        return "a gradient of q or k is not needed; it writes both."
    for name in ("cos", "sin", "q_bias", "k_bias"):
        if needs[name]:
            return f"a gradient of {name} is needed; it has none."
    if options.norm != "none" and options.norm_scope == "hidden":
        return "the norm is over all heads of a token; it takes a norm a head."
    for name in ("q_weight", "k_weight"):
        weight = given[name]
        if weight is not None and weight.dim() > 1:
            return f"{name} has a row for every head; it takes one for all heads."
    return None


def finish(
    unfinished: Unfinished,
    streams: Sequence[GradStream],
    dv: Tensor | None,
    tables: Tables | None,
    options: Options,
) -> Gradients:
    """Fill `dx` of both streams, and `dv` (`[B, S, Hkv, Dv]`) if it is not what was written already; the gradients of
    the weights are returned. `grad` of the streams is not looked at."""
    q, k = streams
    dq, dk, parts = unfinished.dq, unfinished.dk, unfinished.parts
    assert q.dx is not None
    assert k.dx is not None
    batch, sequence, q_heads, head_dim = dq.shape
    k_heads = dk.shape[2] // parts
    geometry = Geometry(options, q.weight, None, k.weight, None, head_dim)
    sums_v = dv is not None and dv is not unfinished.dv
    # The parts themselves are in the list for the alignment of their strides.
    k_grad = dk[:, :, ::parts]
    tensors = [t for t in (dq, q.x, q.dx, dk, k_grad, k.x, k.dx) if t is not None]
    v_grad = unfinished.dv[:, :, ::parts]
    if sums_v:
        assert dv is not None
        tensors += [unfinished.dv, v_grad, dv]
    layout = Layout(tensors, tables, options, batch, sequence)
    acc = arithmetic_dtype(*(t.dtype for t in tensors))
    tiles = tiles_of(
        PARTIAL if geometry.constants["P"] else CHOICE, site_of(geometry, layout, q_heads, k_heads, False, q.dx)
    )
    blocks = triton.cdiv(layout.sequence, tiles.tokens)
    total = layout.batch * blocks
    device = dq.device
    weights = [
        torch.empty_like(stream.weight) if stream.needs_weight and stream.weight is not None else None
        for stream in streams
    ]
    q_tiles, k_tiles = triton.cdiv(q_heads, tiles.q_heads), triton.cdiv(k_heads, tiles.k_heads)
    size = q.dx.element_size()
    walkers = _walkers(
        tiles.programs * device_facts(device)[0],
        total,
        (q_tiles, k_tiles, k_tiles if sums_v else 0),
        (4 + 2 * size, (parts + 2) * size, (parts + 1) * size),
    )
    rows = [
        n * count if weight is not None else 0
        for n, count, weight in zip(walkers, (q_tiles, k_tiles), weights, strict=False)
    ]
    partial = torch.empty(sum(rows) * head_dim, dtype=acc, device=device) if sum(rows) else None
    none = dq  # stands for a pointer that is not read
    q_b, q_s, q_g, q_h = layout.strides(q.x)
    dq_b, dq_s, dq_g, dq_h = layout.strides(q.dx)
    gq_b, gq_s, _, gq_h = layout.strides(dq)
    gk_b, gk_s, _, gk_h = layout.strides(k_grad)
    k_b, k_s, _, k_h = layout.strides(k.x)
    dk_b, dk_s, _, dk_h = layout.strides(k.dx)
    gv_b, gv_s, _, gv_h = layout.strides(v_grad if sums_v else None)
    dv_b, dv_s, _, dv_h = layout.strides(dv if sums_v else None)
    gk_part, gv_part = layout.strides(dk)[3], layout.strides(unfinished.dv if sums_v else None)[3]
    qw, _, kw, _ = geometry.parameters(none)
    pointers = [
        dq, none if q.x is None else q.x, q.dx, dk, none if k.x is None else k.x, k.dx, unfinished.dv,
        none if dv is None else dv, qw, kw, *layout.table_arguments(none), none if partial is None else partial,
    ]  # fmt: skip
    numbers = [
        unfinished.dq_scale,
        layout.sequence,
        blocks,
        total,
        *walkers,
        *layout.table_strides,
        *(gq_b, gq_s, gq_h, q_b, q_s, q_g, q_h, dq_b, dq_s, dq_g, dq_h),
        *(gk_b, gk_s, gk_h, gk_part, k_b, k_s, k_h, dk_b, dk_s, dk_h, gv_b, gv_s, gv_h, gv_part, dv_b, dv_s, dv_h),
    ]
    unused = ("HIDDEN", "PER_HEAD", "HAS_QB", "HAS_KB")
    constants = {
        "HQ": q_heads,
        "HK": k_heads,
        "SUMS_V": sums_v,
        "GROUP": q.dx.shape[3] if q.dx.dim() == 5 else 0,
        "PARTS": parts,
        **{name: value for name, value in geometry.constants.items() if name not in unused},
        **layout.constants(tiles.tokens, max(tiles.q_heads, tiles.k_heads)),
        "HAS_X": q.x is not None,
        "NEEDS_QW": weights[0] is not None,
        "NEEDS_KW": weights[1] is not None,
        "ACC": ARITHMETIC[acc],
        "BT": tiles.tokens,
        "BHQ": tiles.q_heads,
        "BHK": tiles.k_heads,
        "V_DIM": unfinished.dv.shape[3],
        "V_PAD": next_power_of_2(unfinished.dv.shape[3]),
        "OVERLAPS": partial is not None and may_overlap(device),
    }
    grid = walkers[0] * q_tiles + (walkers[1] + walkers[2]) * k_tiles
    launched(end_kernel, grid, pointers, numbers, constants, tiles.warps, tiles.registers)
    if partial is not None:
        sizes = [0 if weight is None else head_dim for weight in weights]
        add_partials(partial, [weights[0], None, weights[1], None], (sizes[0], 0, sizes[1], 0), (rows[0], rows[1]), acc)
    return Gradients(weights, [None, None])


def _walkers(resident: int, blocks: int, tiles: Sequence[int], costs: Sequence[int]) -> tuple[int, int, int]:
    """How many of the `resident` programs walk over the blocks of each head tile of q, k and v, so that all end at the
    same time: in proportion to the bytes an element (`costs`), not a block. A block with fewer heads takes no less time
    than a whole one: 12+2 heads had 79 % of a copy that way, for want of loads in flight."""
    whole = sum(count * cost for count, cost in zip(tiles, costs, strict=True))
    q, k, v = (
        max(1, min(blocks, resident * cost // whole)) if count else 0 for count, cost in zip(tiles, costs, strict=True)
    )
    return q, k, v
