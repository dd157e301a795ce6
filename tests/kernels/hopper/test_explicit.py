"""Masks as bits, a plane for every batch and head that they tell apart: against the definition, pair by pair, and the
ranges of tiles against a count over the square. The kernels run in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from attention_oracle import visible
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusion_pass.kernels.attention_problem import resolve

pytest.importorskip("triton", reason="what is tested is Triton's, which is not installed")


@st.composite
def masks(draw: st.DrawFn) -> dict[str, object]:
    """A mask of one or two batches, of one or three heads, at random, or causal with a padded start, or of keys alone;
    causality and a window beside it, and segment ids or documents."""
    batch, queries, keys = draw(st.integers(1, 2)), draw(st.integers(2, 300)), draw(st.integers(1, 300))
    heads, others = draw(st.sampled_from([1, 3])), draw(st.sampled_from(["", "segments", "documents"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    batch = 1 if others == "documents" else batch
    shared = 1 if draw(st.booleans()) else batch
    kind = draw(st.sampled_from(["random", "padded_start", "keys"]))
    if kind == "padded_start":
        start = torch.randint(0, keys, (shared, heads, 1, 1), generator=generator)
        mask = torch.ones(shared, heads, queries, keys, dtype=torch.bool).tril(keys - queries) & (
            torch.arange(keys) >= start
        )
    else:
        # A mask of keys that all heads share is no mask of bits but beside documents.
        heads = 3 if kind == "keys" and others != "documents" else heads
        rows = 1 if kind == "keys" else queries
        mask = torch.rand(shared, heads, rows, keys, generator=generator) < draw(st.sampled_from([0.0, 0.02, 0.5, 1.0]))
    made: dict[str, object] = {"batch": batch, "queries": queries, "keys": keys, "mask": mask}
    if draw(st.booleans()):
        made |= {
            "causal": draw(st.sampled_from(["none", "top_left", "bottom_right"])),
            "window_left": draw(st.sampled_from([-1, 0, 40])),
            "window_right": draw(st.sampled_from([-1, 5])),
        }
    if others == "segments":
        dtype = draw(st.sampled_from([torch.int64, torch.uint8]))
        ids = (
            torch.randint(0, 3, (draw(st.sampled_from([1, batch])), n), generator=generator) for n in (queries, keys)
        )
        made |= {name: x.to(dtype) for name, x in zip(("q_segment_ids", "k_segment_ids"), ids, strict=True)}
    elif others == "documents":
        for name, n in (("cu_seqlens_q", queries), ("cu_seqlens_k", keys)):
            inner = torch.randint(0, n + 1, (3,), generator=generator).sort()[0]
            made[name] = torch.cat([inner.new_zeros(1), inner]).int()
    return made


def unpacked(bits: Tensor, own: int, other: int) -> Tensor:
    """[batch, own, other] booleans."""
    spread = (bits[..., None] >> torch.arange(32, device=bits.device)) & 1
    return spread.flatten(-2)[:, :own, :other].bool()


def tiled(seen: Tensor, own: int, other: int) -> tuple[Tensor, Tensor]:
    """Of every tile whether some pair is seen, and whether every pair is: own tokens past the end do not count, others
    are not seen. [batch, tiles, blocks]."""
    batch, m, n = seen.shape
    padded = (0, -n % other, 0, -m % own)
    some = torch.nn.functional.pad(seen, padded)
    every = some.clone()
    every[:, m:] = True
    shape = batch, -(-m // own), own, -(-n // other), other
    return some.reshape(shape).amax((2, 4)), every.reshape(shape).amin((2, 4))


def assert_ranges(ranges: Tensor, some: Tensor, every: Tensor, at_least_one: bool) -> None:
    for (first, last, clear_first, clear_last), here, whole in zip(
        ranges.flatten(0, 1).tolist(), some.flatten(0, 1), every.flatten(0, 1), strict=True
    ):
        met = here.nonzero().flatten().tolist()
        expected = (met[0], met[-1] + 1) if met else (0, 0)
        assert (first, last) == (expected if met or not at_least_one else (0, 1))
        assert whole[clear_first:clear_last].all()
        run = whole.nonzero().flatten().tolist()
        assert (clear_last > clear_first) == bool(run)
        assert not run or (clear_first == run[0] and (clear_last == last or not whole[clear_last]))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(masks(), st.sampled_from([(64, 128), (128, 64), (192, 96)]))
def test_bits_and_ranges(conditions: dict[str, object], blocks: tuple[int, int]) -> None:
    from fusion_pass.kernels.hopper import explicit
    from fusion_pass.kernels.hopper.rows import batches

    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch, queries, keys = (conditions.pop(name) for name in ("batch", "queries", "keys"))
    conditions = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in conditions.items()}
    causality = {"causal": "none", "window_left": -1, "window_right": -1, **conditions}
    seen = resolve(queries, keys, **causality)  # type: ignore[arg-type]
    assert explicit.explicit(seen)
    heads = explicit.heads_apart(seen)
    assert heads == conditions["mask"].shape[1]  # type: ignore[attr-defined]
    q, k = (torch.empty(batch, n, heads, 1, device=device) for n in (queries, keys))  # type: ignore[call-overload]
    expected = visible(q, k, **conditions)[: batches(seen)].flatten(0, 1)
    forward = explicit.bits_of_forward(seen, queries, keys, *blocks)
    assert torch.equal(unpacked(forward.labels, queries, keys), expected)
    assert_ranges(forward.ranges, *tiled(expected, *blocks), at_least_one=True)
    block_m, block_n = (64, 128) if blocks[0] == 192 else blocks
    backward = explicit.bits_of_backward(seen, queries, keys, block_m, block_n, order=True)
    turned = expected.transpose(1, 2)
    assert torch.equal(unpacked(backward.labels, keys, queries), turned)
    assert_ranges(backward.ranges, *tiled(turned, block_n, block_m), at_least_one=False)
    first, last = backward.ranges[..., 0], backward.ranges[..., 1]
    tile = torch.arange(-(-queries // block_m), device=device)[:, None]
    visits = (first[:, None] <= tile) & (tile < last[:, None])
    assert backward.order is not None
    assert torch.equal(backward.order, (visits.cumsum(2) - visits.int()).int())
