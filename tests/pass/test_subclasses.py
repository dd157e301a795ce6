"""Tensors that are made of other tensors (DTensor, jagged nested tensors, quantised weights) are left alone, with a
reason."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from compiling import backend
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_a_tensor_made_of_two() -> None:
    compiler = backend(allow_reference=True)
    pairs = [TwoTensor(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)) for _ in range(3)]
    found = torch.compile(attention, backend=compiler, fullgraph=True)(*pairs)
    expected = attention(*pairs)
    torch.testing.assert_close((found.a, found.b), (expected.a, expected.b))
    (report,) = compiler.reports
    (reason,) = report.reasons
    assert reason.endswith("is a TwoTensor, a tensor made of others, which the operators do not take.")
