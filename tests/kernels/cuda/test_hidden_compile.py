"""The kernels of a norm over the whole row compile for GPUs that need not be here, and none spills registers."""

from __future__ import annotations

import pytest
from cuda_cases import by_kernel
from hidden_cases import HIDDEN_CASES, MODELS, OLMO2_7B
from norm_rope_cases import Case
from test_cuda_compile import check, spilled_bytes

from fusion_pass.kernels.card import H100, H200, Card
from fusion_pass.kernels.cuda import compiler

CARDS = {"sm_80": Card(80, 2039), "sm_90": H200, "sm_100": Card(100, 8000)}
_missing = compiler.unavailable()
pytestmark = pytest.mark.skipif(_missing is not None, reason=f"NVRTC: {_missing}")


@pytest.mark.parametrize("card", [H100, H200])
@pytest.mark.parametrize("case", MODELS, ids=str)
def test_models(case: Case, card: Card) -> None:
    check([case], "sm_90", card)


@pytest.mark.parametrize("arch", CARDS)
def test_every_architecture(arch: str) -> None:
    check([OLMO2_7B], arch, CARDS[arch])


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", CARDS)
def test_no_spills_in_any_instance(arch: str) -> None:
    check(HIDDEN_CASES, arch, CARDS[arch])


@pytest.mark.parametrize("kernel", ["hidden_forward", "hidden_backward"])
def test_narrow_accesses_compile(kernel: str) -> None:
    """Addresses that are multiples of less than 16 bytes narrow the accesses, and nothing comes by bulk copies."""
    instance = by_kernel(OLMO2_7B, H200)[kernel].launch.instance  # type: ignore[attr-defined]
    for alignment in (8, 4, 2):
        assert spilled_bytes(instance, "sm_90", alignment) == 0
