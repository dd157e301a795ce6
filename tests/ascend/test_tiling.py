"""Properties of the attention tiling: every score computed once, cores balanced, memory respected, keys unique."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_pass.kernels.ascend.platform import PLATFORMS, Platform, platform_named
from fusion_pass.kernels.ascend.tiling import (
    CAUSAL,
    CAUSAL_RIGHT_DOWN,
    FRACTAL,
    FULL,
    VECTOR_BUFFER,
    Mask,
    Problem,
    Template,
    tile_attention,
)
from fusion_pass.kernels.ascend.tiling_key import (
    OFFSET,
    Axis,
    Buffering,
    DType,
    Format,
    Layout,
    Mode,
    Sparse,
    TemplateKey,
    decode,
    encode,
)

TOKENS = st.one_of(st.just(inf), st.integers(-300, 3000))
MASKS = st.one_of(
    st.sampled_from([FULL, CAUSAL, CAUSAL_RIGHT_DOWN, replace(FULL, dense=True)]),
    st.builds(Mask, pre_tokens=TOKENS, next_tokens=TOKENS, right_down=st.booleans(), dense=st.booleans()),
)
PLATFORM = st.sampled_from(list(PLATFORMS.values()))


def problems(most_batches: int, most_length: int, fewest: int = 0) -> st.SearchStrategy[Problem]:
    return st.builds(
        Problem,
        B=st.integers(fewest, most_batches),
        N2=st.integers(fewest, 4),
        G=st.integers(fewest, 8),
        S1=st.integers(fewest, most_length),
        S2=st.integers(fewest, most_length),
        D=st.one_of(st.sampled_from([64, 72, 80, 96, 128, 192, 256]), st.integers(1, 768)),
        dtype=st.sampled_from(DType),
        mask=MASKS,
        layout=st.sampled_from(Layout),
        dropout=st.booleans(),
        pse=st.booleans(),
    )


@given(problems(most_batches=60, most_length=400), PLATFORM)
@settings(max_examples=150, deadline=None)
def test_every_query_row_is_dealt_to_exactly_one_core(problem: Problem, platform: Platform) -> None:
    tiling = tile_attention(problem, platform)
    times = torch.zeros(problem.B, problem.N2 * problem.G, problem.S1, dtype=torch.int32)
    for core in range(tiling.cores):
        for block in tiling.blocks_of(core):
            batches = slice(block.batch, block.batch + block.batches)
            heads = slice(block.head, block.head + block.heads)
            rows = slice(block.row, block.row + block.rows)
            stops = (batches.stop, heads.stop, rows.stop)
            assert all(stop <= size for stop, size in zip(stops, times.shape, strict=True)), "outside the problem"
            times[batches, heads, rows] += 1
    expected = 0 if problem.S2 == 0 else 1
    assert (times == expected).all()


@given(problems(most_batches=2, most_length=5000, fewest=1), PLATFORM)
@settings(max_examples=150, deadline=None)
def test_steps_cover_the_visible_keys(problem: Problem, platform: Platform) -> None:
    """The cost of a block is the number of `step_cols` tiles that hold a visible score, found here score by score."""
    tiling = tile_attention(problem, platform)
    if tiling.template is Template.BATCH:
        return
    mask, shift = problem.mask, problem.S2 - problem.S1 if problem.mask.right_down else 0
    for index in range(0, tiling.block_count, max(1, tiling.block_count // 7)):
        block = tiling.block(index)
        tiles = set()
        for row in {block.row, block.row + block.rows // 2, block.row + block.rows - 1}:
            tiles |= {
                key // tiling.step_cols
                for key in range(problem.S2)
                if row + shift - mask.pre_tokens <= key <= row + shift + mask.next_tokens
            }
        assert block.steps >= len(tiles)
        start, stop = mask.columns(block.row, block.row + block.rows - 1, problem.S1, problem.S2)
        assert tiles <= set(range(start // tiling.step_cols, start // tiling.step_cols + block.steps))
        assert (start < stop) or not tiles


@given(problems(most_batches=64, most_length=20_000, fewest=1), PLATFORM)
@settings(max_examples=150, deadline=None)
def test_cores_are_within_one_block_of_balance(problem: Problem, platform: Platform) -> None:
    tiling = tile_attention(problem, platform)
    load = [sum(block.steps for block in tiling.blocks_of(core)) for core in range(tiling.cores)]
    assert max(load) - min(load) <= tiling.block(0).steps
    assert tiling.block(0).steps == max(tiling.block(i).steps for i in range(0, tiling.block_count, 13))


@given(problems(most_batches=64, most_length=20_000, fewest=1), PLATFORM)
@settings(max_examples=150, deadline=None)
def test_no_core_is_idle_while_rows_could_be_cut_further(problem: Problem, platform: Platform) -> None:
    tiling = tile_attention(problem, platform)
    assert tiling.cores == platform.cube_cores or tiling.step_rows <= FRACTAL
    assert all(next(tiling.blocks_of(core), None) is not None for core in range(tiling.cores))


@given(problems(most_batches=64, most_length=1_000_000, fewest=1), PLATFORM)
@settings(max_examples=300, deadline=None)
def test_buffers_fit_the_platform(problem: Problem, platform: Platform) -> None:
    tiling = tile_attention(problem, platform)
    assert sum(tiling.ub_bytes().values()) <= platform.ub
    assert tiling.ub_bytes()["scores"] <= tiling.buffers * VECTOR_BUFFER
    assert sum(tiling.l1_bytes().values()) <= platform.l1
    l0 = tiling.l0_bytes()
    assert l0["l0a"] <= platform.l0a
    assert l0["l0b"] <= platform.l0b
    assert l0["l0c"] <= platform.l0c
    assert tiling.ratio * tiling.vector_rows * platform.vectors_per_cube >= tiling.step_rows
    assert 0 <= tiling.cube_steps_ahead <= 2


def test_the_published_tile() -> None:
    """The vendor's design document: 128 x 1024 for the cube, 8 x 1024 for the vector cores, 16 : 1 between them."""
    tiling = tile_attention(Problem(4, 8, 4, 8192, 8192, 128, DType.BFLOAT16, CAUSAL), PLATFORMS["Ascend910B2"])
    assert (tiling.step_rows, tiling.step_cols, tiling.vector_rows) == (128, 1024, 8)
    assert tiling.step_rows // tiling.vector_rows == 16
    assert tiling.ratio == 8  # each of the two vector cores takes half of them
    assert tiling.template is Template.S1_S2
    assert tiling.buffers == 2


@pytest.mark.parametrize(
    ("sizes", "template"),
    [
        ({"B": 1, "S1": 4096, "S2": 1025}, Template.S1_S2),
        ({"B": 1, "S1": 4096, "S2": 1024}, Template.S1),
        ({"B": 64, "S1": 64, "S2": 128}, Template.BATCH),
        ({"B": 2, "S1": 64, "S2": 128}, Template.S1),
        ({"B": 64, "S1": 64, "S2": 129}, Template.S1),
        ({"B": 0, "S1": 64, "S2": 64}, Template.EMPTY),
        ({"B": 4, "S1": 0, "S2": 64}, Template.EMPTY),
        ({"B": 4, "S1": 64, "S2": 0}, Template.EMPTY),
    ],
)
def test_template_by_size(sizes: dict[str, int], template: Template) -> None:
    problem = Problem(N2=2, G=2, D=64, dtype=DType.FLOAT16, **sizes)
    assert tile_attention(problem, PLATFORMS["Ascend910B4"]).template is template


def test_the_slower_side_decides_how_far_the_cube_runs_ahead() -> None:
    platform = PLATFORMS["Ascend910B2"]
    narrow = tile_attention(Problem(1, 8, 1, 8192, 8192, 64, DType.BFLOAT16), platform)
    wide = tile_attention(Problem(1, 8, 1, 8192, 8192, 256, DType.BFLOAT16), platform)
    single = tile_attention(Problem(1, 8, 1, 8192, 512, 256, DType.BFLOAT16), platform)
    assert (narrow.cube_steps_ahead, wide.cube_steps_ahead, single.cube_steps_ahead) == (1, 2, 0)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="S1=-1 is negative"):
        Problem(1, 1, 1, -1, 1, 64, DType.FLOAT16)
    with pytest.raises(ValueError, match="head_dim of at least 1"):
        tile_attention(Problem(1, 1, 1, 1, 1, 0, DType.FLOAT16), PLATFORMS["Ascend910B1"])
    with pytest.raises(ValueError, match="not even one row"):
        tile_attention(Problem(1, 1, 1, 1, 1, 100_000, DType.FLOAT16), PLATFORMS["Ascend910B1"])


KEYS = st.builds(
    TemplateKey,
    ub0=st.sampled_from(Axis),
    ub1=st.sampled_from(Axis),
    block=st.sampled_from(Axis),
    mode=st.sampled_from(Mode),
    dtype=st.sampled_from(DType),
    layout=st.sampled_from(Layout),
    score_format=st.sampled_from(Format),
    sparse=st.sampled_from(Sparse),
    buffering=st.sampled_from(Buffering),
    dropout=st.booleans(),
    mask=st.booleans(),
    pse=st.booleans(),
    l1_reuse=st.booleans(),
)


@given(KEYS)
def test_a_key_decodes_to_its_template(key: TemplateKey) -> None:
    number = encode(key)
    assert decode(number) == key
    assert OFFSET <= number < 2**64


@given(KEYS, KEYS)
def test_distinct_templates_have_distinct_keys(one: TemplateKey, other: TemplateKey) -> None:
    assert (one == other) == (encode(one) == encode(other))


def test_every_reachable_template_has_a_key_of_its_own() -> None:
    """All templates that tile_attention can choose, enumerated, not sampled."""
    lengths = (0, 16, 128, 512, 4096)
    masks = (FULL, CAUSAL, CAUSAL_RIGHT_DOWN, Mask(64, 0), Mask(dense=True), Mask(next_tokens=0, dense=True))
    seen: dict[int, TemplateKey] = {}
    for B, S1, S2, D, dtype, mask, layout, dropout, pse in product(
        (1, 64), lengths, lengths, (64, 256), DType, masks, Layout, (False, True), (False, True)
    ):
        key = tile_attention(
            Problem(B, 2, 2, S1, S2, D, dtype, mask, layout, dropout, pse), PLATFORMS["Ascend910B2"]
        ).key
        assert seen.setdefault(encode(key), key) == key
    assert len(seen) > 500
    assert len(set(seen.values())) == len(seen)


@given(st.integers(0, 2**64 - 1))
def test_a_number_that_is_no_key_is_refused(number: int) -> None:
    try:
        key = decode(number)
    except ValueError:
        return
    assert encode(key) == number


@pytest.mark.parametrize(
    ("number", "problem"),
    [
        (5, "10\\^19 plus 13"),
        (OFFSET + 10**13, "10\\^19 plus 13"),
        (OFFSET + 7, "digit for ub0 is 7"),
        (2 * OFFSET - 1, "10\\^19 plus 13"),
        (encode(TemplateKey(Axis.B, Axis.B, Axis.B, Mode(0), DType(0), Layout(0), Format(0), Sparse(1), Buffering(1),
                            False, False, False, False)) + 2 * 10**9, "digit for dropout is 2"),
    ],
)  # fmt: skip
def test_the_refusal_says_what_is_wrong(number: int, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        decode(number)


def test_a_key_reads_off_by_digit() -> None:
    key = TemplateKey(
        Axis.S1, Axis.S2, Axis.S1, Mode.HIGH_PRECISION, DType.BFLOAT16, Layout.BSND, Format.ND,
        Sparse.CAUSAL, Buffering.DOUBLE, dropout=False, mask=True, pse=False, l1_reuse=True,
    )  # fmt: skip
    # Digits from the right: S1 S2 S1, precision, bf16, BSND, ND, causal, double buffers, no dropout, mask, no bias,
    # reuse.
    assert encode(key) == 10_000_001_010_230_020_343


@pytest.mark.parametrize("name", ["Ascend910B2", "Ascend910B2C"])
def test_platform_by_device_name(name: str) -> None:
    assert platform_named(name) is PLATFORMS["Ascend910B2"]


def test_unknown_platform_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Ascend310P3.*not in the table"):
        platform_named("Ascend310P3")
