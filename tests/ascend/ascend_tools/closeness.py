"""When a result is right: as near to float64 as PyTorch's own arithmetic in the same dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

SLACK = {torch.bfloat16: 1.1, torch.float16: 1.1, torch.float32: 2.0}
"""How much larger than eager's the largest error may be. In half precision eager rounds more often than a kernel does;
in float32 both round every operation and the order of the sums decides."""
FLOOR = {torch.bfloat16: 0.5, torch.float16: 0.5, torch.float32: 4.0}
"""Steps (`finfo.eps`) of the largest value that are allowed however lucky eager is: half of one is the rounding of the
result; float32 has the arithmetic before it as well."""


def assert_no_worse(actual: Tensor, eager: Tensor, exact: Tensor, name: str) -> None:
    """The largest error of `actual`, computed in its dtype, against that of `eager` in the same dtype.

    `exact` is float64. Where it is infinite, `actual` is the same.
    """
    assert actual.dtype == eager.dtype, (name, actual.dtype, eager.dtype)
    assert actual.shape == exact.shape, (name, actual.shape, exact.shape)
    finite = exact.isfinite()
    assert torch.equal(actual[~finite].double(), exact[~finite]), f"{name}: another value where it is infinite"
    value, expected = actual[finite].double(), exact[finite]
    assert not value.isnan().any(), f"{name}: elements were not written"
    if not expected.numel():
        return
    error = (value - expected).abs().max().item()
    yardstick = (eager[finite].double() - expected).abs().max().item()
    floor = FLOOR[actual.dtype] * torch.finfo(actual.dtype).eps * expected.abs().max().item()
    allowed = max(SLACK[actual.dtype] * yardstick, floor)
    assert error <= allowed, (
        f"{name}: error {error:.3g}, eager's {yardstick:.3g}, {error - allowed:.3g} more than allowed"
    )


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every buffer that PyTorch allocates starts as NaN (integers: their largest value)."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan().item()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
