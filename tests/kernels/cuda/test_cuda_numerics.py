"""Every variant that the `cuda` back end takes against float64, forward and each gradient (on hardware)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cuda_cases import CUDA_CASES, FLAT, STAGED, STAGED_TABLES
from norm_rope_cases import Case
from test_norm_rope_numerics import check, poisoned_memory  # noqa: F401  the fixture poisons `torch.empty`

from fusion_pass.kernels import card
from fusion_pass.kernels.cuda import norm_rope, tiles
from fusion_pass.kernels.registration import forget_replays


@pytest.mark.gpu
@pytest.mark.parametrize("case", CUDA_CASES, ids=str)
def test_on_gpu(case: Case, device: torch.device) -> None:
    check(case, "cuda", device)


@pytest.fixture
def tiles_of_many_tokens(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What tens of megabytes are computed with, for few tokens; a forward asks for what comes 16 KB later."""
    monkeypatch.setattr(norm_rope, "FEW_BYTES", 0)
    monkeypatch.setattr(tiles, "PREFETCHES_FROM", 0)
    monkeypatch.setattr(tiles, "PREFETCHED_BYTES", dict.fromkeys((card.H100, card.H200), 2**14))
    forget_replays()
    yield
    forget_replays()


@pytest.mark.gpu
@pytest.mark.usefixtures("tiles_of_many_tokens")
@pytest.mark.parametrize("case", [*STAGED, *STAGED_TABLES, *FLAT], ids=str)
def test_tiles_of_many_tokens_on_gpu(case: Case, device: torch.device) -> None:
    check(case, "cuda", device)
