"""The rotation as a serving engine asks for it: gathered tables, packed sequences, offsets, every integer dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusion_pass.kernels import rope
from fusion_pass.kernels.options import INTEGER_DTYPES


def rotated(x: Tensor, cos: Tensor, sin: Tensor, rows: list[list[int]]) -> Tensor:
    """Halves, token by token."""
    result = x.clone()
    half = cos.shape[-1]
    for b, line in enumerate(rows):
        for s, row in enumerate(line):
            a, c = x[b, s, :, :half], x[b, s, :, half : 2 * half]
            result[b, s, :, :half] = a * cos[row] - c * sin[row]
            result[b, s, :, half : 2 * half] = c * cos[row] + a * sin[row]
    return result


@pytest.fixture
def data() -> tuple[Tensor, Tensor, Tensor]:
    """x [2, 4, 3, 8] and the two halves of a cached table [20, cos | sin]."""
    cache = torch.randn(20, 8, dtype=torch.float64)
    return torch.randn(2, 4, 3, 8, dtype=torch.float64), cache[:, :4], cache[:, 4:]


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype", INTEGER_DTYPES, ids=str)
def test_positions_of_every_integer_dtype(
    data: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype, backend: str
) -> None:
    x, cos, sin = data
    rows = [[3, 0, 19, 7], [1, 1, 2, 0]]
    y = rope(x, cos, sin, torch.tensor(rows).to(dtype), backend=backend)
    torch.testing.assert_close(y, rotated(x, cos, sin, rows))


def test_offsets(data: tuple[Tensor, Tensor, Tensor]) -> None:
    x, cos, sin = data
    torch.testing.assert_close(rope(x, cos, sin, seqlen_offset=5), rotated(x, cos, sin, [[5, 6, 7, 8]] * 2))
    each = rope(x, cos, sin, seqlen_offset=torch.tensor([2, 9]))
    torch.testing.assert_close(each, rotated(x, cos, sin, [[2, 3, 4, 5], [9, 10, 11, 12]]))


def test_packed_sequences(data: tuple[Tensor, Tensor, Tensor]) -> None:
    """Lengths 2, 0, 5, 1, one after the other; the empty one takes no token."""
    x, cos, sin = data
    x = x.flatten(0, 1)
    bounds = torch.tensor([0, 2, 2, 7, 8], dtype=torch.int32)
    rows = [0, 1, 0, 1, 2, 3, 4, 0]
    torch.testing.assert_close(rope(x, cos, sin, cu_seqlens=bounds), rotated(x[None], cos, sin, [rows])[0])
    offset = torch.tensor([3, 0, 1, 9])
    rows = [3, 4, 1, 2, 3, 4, 5, 9]
    shifted = rope(x, cos, sin, cu_seqlens=bounds, seqlen_offset=offset)
    torch.testing.assert_close(shifted, rotated(x[None], cos, sin, [rows])[0])


def test_conjugate_undoes_a_rotation(data: tuple[Tensor, Tensor, Tensor]) -> None:
    x = data[0]
    angle = torch.randn(1, 4, 4, dtype=torch.float64)
    y = rope(x, angle.cos(), angle.sin(), pairing="adjacent")
    torch.testing.assert_close(rope(y, angle.cos(), angle.sin(), pairing="adjacent", conjugate=True), x)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_table_as_real_and_imaginary_view(data: tuple[Tensor, Tensor, Tensor], backend: str) -> None:
    """A complex table's parts are stride-2 views."""
    x = data[0]
    table = torch.polar(torch.ones(1, 4, 4, dtype=torch.float64), torch.randn(1, 4, 4, dtype=torch.float64))
    y = rope(x, table.real, table.imag, pairing="adjacent", backend=backend)
    exact = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * table.unsqueeze(2)).flatten(-2)
    torch.testing.assert_close(y, exact)


def test_gradient_reaches_the_table(data: tuple[Tensor, Tensor, Tensor]) -> None:
    x, cos, sin = (t.clone().requires_grad_() for t in data)
    positions = torch.tensor([[3, 0, 19, 3], [3, 1, 2, 0]])
    assert torch.autograd.gradcheck(lambda *t: rope(*t, positions, backend="reference"), (x, cos, sin), fast_mode=True)


def test_positions_exclude_offsets(data: tuple[Tensor, Tensor, Tensor]) -> None:
    x, cos, sin = data
    with pytest.raises(ValueError, match="positions is given together with cu_seqlens or seqlen_offset"):
        rope(x, cos, sin, torch.arange(4), seqlen_offset=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="x has batch size 2; with cu_seqlens it takes"):
        rope(x, cos, sin, cu_seqlens=torch.tensor([0, 4]))
