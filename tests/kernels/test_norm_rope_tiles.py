"""The tile table: what every choice must satisfy whatever the shape."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from fusion_pass.kernels.triton.norm_rope_tiles import (
    CHOICES,
    REGISTERS,
    Site,
    Tiles,
    backward_choice,
    backward_tiles,
    forward_choice,
    forward_tiles,
    next_power_of_2,
    shares,
)

QWEN3 = Site(32, 8, 128, 128, 16384, 16384, all_heads=False, norm=True, heavy=False, itemsize=2)
SITES = [
    Site(q, k, dim, next_power_of_2(dim), tokens, tokens, all_heads, norm, heavy, itemsize, 132, architecture)
    for q, k, dim, tokens, all_heads, norm, heavy, itemsize, architecture in itertools.product(
        (1, 3, 40, 64), (0, 2, 8, 40), (16, 64, 80, 256), (0, 5, 10**5), *[(False, True)] * 3, (2, 4, 8), (80, 90)
    )
]


@pytest.mark.parametrize("choose", [forward_tiles, backward_tiles])
def test_every_tile_is_powers_of_two(choose: Callable[[Site], Tiles]) -> None:
    for site in SITES:
        tiles = choose(site)
        for size in (tiles.tokens, tiles.q_heads, tiles.k_heads, tiles.v_heads, tiles.warps):
            assert size > 0
            assert size & (size - 1) == 0
        assert tiles.tokens <= next_power_of_2(max(site.tokens, 1))
        assert tiles.warps <= 16
        assert tiles.tokens * tiles.q_heads * site.head_lanes <= 2**20  # Triton's limit of a tensor
        if site.all_heads:
            assert tiles.q_heads >= site.q_heads
            assert tiles.k_heads >= site.k_heads


def test_persistent_programs_fit_together() -> None:
    """A program more than fits would wait for all others to end."""
    for site in SITES:
        tiles = backward_tiles(site)
        assert tiles.programs * tiles.warps * 32 * (tiles.registers or 128) <= REGISTERS or tiles.programs == 1


def test_every_choice_is_reached() -> None:
    reached = {choose(site) for site in SITES for choose in (forward_choice, backward_choice)}
    assert reached == set(CHOICES)


@pytest.mark.parametrize(
    ("site", "forward", "backward"),
    [
        (QWEN3, "forward", "backward"),
        (replace(QWEN3, q_heads=16, k_heads=2), "forward", "backward, few keys"),
        (replace(QWEN3, tokens=256, sequence=256), "forward, small", "backward, small"),
        (replace(QWEN3, head_dim=256, head_lanes=256), "forward, wide heads", "backward"),
        (replace(QWEN3, head_dim=64, head_lanes=64), "forward", "backward, narrow heads"),
        (replace(QWEN3, head_dim=80), "forward", "backward, padded heads"),
        (replace(QWEN3, norm=False), "forward, no norm", "backward, no norm"),
        (replace(QWEN3, all_heads=True), "forward, all heads", "backward, all heads"),
    ],
)
def test_choice_of_models(site: Site, forward: str, backward: str) -> None:
    assert (forward_choice(site), backward_choice(site)) == (forward, backward)


def test_shares_are_balanced_and_fit() -> None:
    for resident, tiles, v_tiles, blocks in itertools.product((1, 132, 528), (1, 5, 10), (0, 1, 4), (1, 7, 100_000)):
        walkers, copiers = shares(resident, tiles, v_tiles, blocks)
        assert 1 <= walkers <= blocks
        assert 1 <= copiers <= blocks
        if resident >= 132 and walkers < blocks:
            assert walkers * tiles + copiers * v_tiles <= resident
            # A block of v moves two thirds of the bytes; programs are whole.
            assert abs(copiers - 2 * walkers / 3) < 1
