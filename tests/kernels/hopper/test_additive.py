"""Masks that are added: which pairs are seen, which blocks have numbers, the numbers in the order of the threads, and
the shifts of rows, against the definition. The kernels run in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from attention_oracle import visible
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_explicit import assert_ranges, tiled, unpacked
from torch import Tensor

from fusion_pass.kernels.attention_problem import mask_floor, resolve

pytest.importorskip("triton", reason="what is tested is Triton's, which is not installed")

LEAST = torch.finfo(torch.bfloat16).min


@st.composite
def masks(draw: st.DrawFn) -> dict[str, object]:
    """Numbers in one corner, zeros elsewhere, keys hidden by -inf or finfo.min, a row of nothing else; of batches and
    heads, or shared; alone or beside a window, segments."""
    batch, queries, keys = draw(st.integers(1, 2)), draw(st.integers(2, 300)), draw(st.integers(1, 300))
    heads = draw(st.sampled_from([1, 3]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    shape = draw(st.sampled_from([1, batch])), heads, draw(st.sampled_from([1, queries])), keys
    mask = torch.randn(shape, generator=generator).to(
        draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float]))
    )
    corner = draw(st.integers(0, 300))
    mask = torch.where(torch.arange(keys) < corner, mask, mask.new_zeros(()))
    hiding = draw(st.sampled_from([float("-inf"), torch.finfo(mask.dtype).min, -1e4]))
    mask = mask.masked_fill(torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.3])), hiding)
    if draw(st.booleans()):
        mask[:, :, shape[2] // 2] = hiding
    made: dict[str, object] = {"batch": batch, "queries": queries, "keys": keys, "mask": mask}
    if draw(st.booleans()):
        made |= {
            "causal": draw(st.sampled_from(["none", "bottom_right"])),
            "window_left": draw(st.sampled_from([-1, 40])),
        }
    if draw(st.booleans()):
        ids = (torch.randint(0, 3, (batch, n), generator=generator) for n in (queries, keys))
        made |= dict(zip(("q_segment_ids", "k_segment_ids"), ids, strict=True))
    return made


def numbers(values: Tensor, own: int, other: int) -> Tensor:
    """`[planes, own, other]` from the order of the threads: of 16 x 16 pairs, thread 4 g + c has rows g and g + 8 and
    columns 2 c and 2 c + 1 of each 8."""
    planes, rows, columns, _ = values.shape
    units = values.reshape(planes, rows, columns, 8, 4, 2, 2, 2)  # g, c, of 8 columns, of 8 rows, of 2 columns
    ordered = units.permute(0, 1, 6, 3, 2, 5, 4, 7)
    return ordered.reshape(planes, rows * 16, columns * 16)[:, :own, :other]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(masks(), st.sampled_from([(128, 64), (64, 128), (64, 64)]))
def test_bits_numbers_and_ranges(conditions: dict[str, object], blocks: tuple[int, int]) -> None:
    from fusion_pass.kernels.hopper import additive
    from fusion_pass.kernels.hopper.rows import batches

    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch, queries, keys = (int(conditions.pop(name)) for name in ("batch", "queries", "keys"))  # type: ignore[call-overload]
    conditions = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in conditions.items()}
    mask = conditions["mask"]
    assert isinstance(mask, Tensor)
    causality = {"causal": "none", "window_left": -1, "window_right": -1, **conditions}
    seen = resolve(queries, keys, **causality)  # type: ignore[arg-type]
    q, k = (torch.empty(batch, n, mask.shape[1], 1, device=device) for n in (queries, keys))
    added = mask.expand(batches(seen), -1, queries, keys).flatten(0, 1).float()
    allowed = visible(q, k, **conditions)[: batches(seen)].flatten(0, 1) & (added > float("-inf"))

    largest = added.masked_fill(~allowed, float("-inf")).amax(-1)
    shift = torch.where((largest.abs() >= 64) & ~largest.isinf(), largest, 0.0)
    found = additive.shifts(seen, queries, keys)
    assert torch.equal(found[:, :queries], shift)

    if seen.has_row_floors():
        allowed &= (added > mask_floor(mask.dtype)) | (shift[..., None] <= -1e7)
    counts = allowed & ((added != 0) | (shift[..., None] != 0))
    for forward in (True, False):
        expected, numbered, own, other = allowed, counts, queries, keys
        if not forward:
            expected, numbered, own, other = allowed.mT, counts.mT, keys, queries
        sizes = (queries, keys, *blocks)
        dtype = torch.float32 if mask.dtype == torch.float16 else mask.dtype
        if forward:
            rows = additive.values_of_forward(seen, found, dtype, sizes)
        else:
            rows = additive.values_of_backward(seen, found, dtype, sizes, order=True)
        own_tile, other_tile = blocks if forward else blocks[::-1]
        assert torch.equal(unpacked(rows.labels, own, other), expected)
        some, every = tiled(expected, own_tile, other_tile)
        with_numbers, _ = tiled(numbered, own_tile, other_tile)
        assert_ranges(rows.ranges, some, every & ~with_numbers, at_least_one=forward)
        assert torch.equal(rows.high[:, : found.shape[1]].view(torch.float32), found)
        flags = rows.high[:, found.shape[1] :].reshape(len(added), -(-own // 128) * 2, -(-other // 128) * 2)
        here, _ = tiled(numbered, 64, 64)
        assert torch.equal(flags[:, : here.shape[1], : here.shape[2]].bool(), here)
        got = numbers(rows.low, own, other)
        assert got.dtype == dtype
        expected_numbers = added if forward else added.mT
        assert torch.equal(got[numbered].float(), expected_numbers[numbered])
