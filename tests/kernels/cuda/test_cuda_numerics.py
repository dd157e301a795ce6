"""Every variant that the `cuda` back end takes against float64, forward and each gradient (on hardware)."""

from __future__ import annotations

import pytest
import torch
from cuda_cases import CUDA_CASES
from norm_rope_cases import Case
from test_norm_rope_numerics import check, poisoned_memory  # noqa: F401  the fixture poisons `torch.empty`


@pytest.mark.gpu
@pytest.mark.parametrize("case", CUDA_CASES, ids=str)
def test_on_gpu(case: Case, device: torch.device) -> None:
    check(case, "cuda", device)
