"""The tile table: what every choice must satisfy whatever the shape."""

from __future__ import annotations

import itertools

import pytest

from fusion_pass.kernels.triton.norm_rope_tiles import (
    REGISTERS,
    Tiles,
    backward_tiles,
    forward_tiles,
    next_power_of_2,
    shares,
)

SHAPES = list(
    itertools.product((1, 3, 16, 40, 64), (0, 1, 2, 8, 40), (16, 64, 128, 256), (0, 1, 5, 100_000), (False, True))
)


@pytest.mark.parametrize("choose", [forward_tiles, backward_tiles])
@pytest.mark.parametrize("heavy", [False, True])
def test_every_tile_is_powers_of_two_and_fits(choose: object, heavy: bool) -> None:
    for q, k, lanes, tokens, all_heads in SHAPES:
        tiles: Tiles = choose(q, k, lanes, tokens, all_heads, heavy)  # type: ignore[operator]
        for size in (tiles.tokens, tiles.q_heads, tiles.k_heads, tiles.v_heads, tiles.warps):
            assert size > 0
            assert size & (size - 1) == 0
        assert tiles.tokens <= next_power_of_2(max(tokens, 1))
        assert tiles.warps <= 16
        assert tiles.tokens * tiles.q_heads * lanes <= 2**20  # Triton's limit of a tensor
        if all_heads:
            assert tiles.q_heads >= q
            assert tiles.k_heads >= k


@pytest.mark.parametrize("heavy", [False, True])
def test_persistent_programs_fit_together(heavy: bool) -> None:
    """A program more than fits would wait for all others to end."""
    for q, k, lanes, tokens, all_heads in SHAPES:
        tiles = backward_tiles(q, k, lanes, tokens, all_heads, heavy)
        used = tiles.programs * tiles.warps * 32 * (tiles.registers or 128)
        assert used <= REGISTERS or tiles.programs == 1


def test_shares_are_balanced_and_fit() -> None:
    for resident, tiles, v_tiles, blocks in itertools.product((1, 132, 528), (1, 5, 10), (0, 1, 4), (1, 7, 100_000)):
        walkers, copiers = shares(resident, tiles, v_tiles, blocks)
        assert 1 <= walkers <= blocks
        assert 1 <= copiers <= blocks
        if resident >= 132 and walkers < blocks:
            assert walkers * tiles + copiers * v_tiles <= resident
            # A block of v moves two thirds of the bytes; programs are whole.
            assert abs(copiers - 2 * walkers / 3) < 1
