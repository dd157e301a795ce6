"""The rotation as a serving engine asks for it: gathered tables, packed sequences, offsets, every integer dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusion_pass.kernels import rope, rope_
from fusion_pass.kernels.options import INTEGER_DTYPES

BACKENDS = [
    pytest.param("reference", id="reference"),
    pytest.param("triton", id="triton"),
    pytest.param("triton", id="triton on gpu", marks=pytest.mark.gpu),
    pytest.param("cuda", id="cuda", marks=pytest.mark.gpu),
]
"""Those marked `gpu` run on hardware (the `device` fixture)."""


def rotated(x: Tensor, cos: Tensor, sin: Tensor, rows: list[list[int]]) -> Tensor:
    """Halves, token by token."""
    x, cos, sin = x.cpu(), cos.cpu(), sin.cpu()
    result = x.clone()
    half = cos.shape[-1]
    for b, line in enumerate(rows):
        for s, row in enumerate(line):
            a, c = x[b, s, :, :half], x[b, s, :, half : 2 * half]
            result[b, s, :, :half] = a * cos[row] - c * sin[row]
            result[b, s, :, half : 2 * half] = c * cos[row] + a * sin[row]
    return result


@pytest.fixture
def data(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """x [2, 4, 3, 8] and the two halves of a cached table [20, cos | sin]."""
    cache = torch.randn(20, 8, dtype=torch.float64, device=device)
    return torch.randn(2, 4, 3, 8, dtype=torch.float64, device=device), cache[:, :4], cache[:, 4:]


def check(result: Tensor, exact: Tensor) -> None:
    """Float64 is computed in float64."""
    torch.testing.assert_close(result.cpu(), exact)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", INTEGER_DTYPES, ids=str)
def test_positions_of_every_integer_dtype(
    data: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype, backend: str
) -> None:
    x, cos, sin = data
    rows = [[3, 0, 19, 7], [1, 1, 2, 0]]
    positions = torch.tensor(rows).to(x.device, dtype)
    check(rope(x, cos, sin, positions, backend=backend), rotated(x, cos, sin, rows))
    check(rope(x, cos, sin, positions[0], backend=backend), rotated(x, cos, sin, [rows[0]] * 2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets(data: tuple[Tensor, Tensor, Tensor], backend: str) -> None:
    x, cos, sin = data
    shifted = rope(x, cos, sin, seqlen_offset=5, backend=backend)
    check(shifted, rotated(x, cos, sin, [[5, 6, 7, 8]] * 2))
    for dtype in (torch.int32, torch.int64):
        each = rope(x, cos, sin, seqlen_offset=torch.tensor([2, 9], device=x.device, dtype=dtype), backend=backend)
        check(each, rotated(x, cos, sin, [[2, 3, 4, 5], [9, 10, 11, 12]]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_sequences(data: tuple[Tensor, Tensor, Tensor], backend: str) -> None:
    """Lengths 2, 0, 5, 1, one after the other; the empty one takes no token."""
    x, cos, sin = data
    x = x.flatten(0, 1)
    bounds = torch.tensor([0, 2, 2, 7, 8], dtype=torch.int32, device=x.device)
    rows = [0, 1, 0, 1, 2, 3, 4, 0]
    check(rope(x, cos, sin, cu_seqlens=bounds, backend=backend), rotated(x[None], cos, sin, [rows])[0])
    offset = torch.tensor([3, 0, 1, 9], device=x.device)
    rows = [3, 4, 1, 2, 3, 4, 5, 9]
    shifted = rope(x, cos, sin, cu_seqlens=bounds, seqlen_offset=offset, backend=backend)
    check(shifted, rotated(x[None], cos, sin, [rows])[0])
    # Tokens from the last bound on count as one more sequence, without an offset of their own.
    padded = rope(x, cos, sin, cu_seqlens=bounds[:-1] - 1, seqlen_offset=offset[:3], backend=backend)
    assert padded[6:].isfinite().all()
    check(padded[6:], rotated(x[None, 6:], cos, sin, [[0, 1]])[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_packed_sequences(device: torch.device, backend: str) -> None:
    """A search that is wrong at a boundary would show here."""
    lengths = torch.randint(0, 4, (50,))
    bounds = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    rows = [i for length in lengths.tolist() for i in range(length)]
    x = torch.randn(len(rows), 2, 8, dtype=torch.float64, device=device)
    angle = torch.randn(4, 4, dtype=torch.float64, device=device)
    y = rope(x, angle.cos(), angle.sin(), cu_seqlens=bounds.to(device), backend=backend)
    check(y, rotated(x[None], angle.cos(), angle.sin(), [rows])[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_of_packed_sequences(data: tuple[Tensor, Tensor, Tensor], backend: str) -> None:
    """The rotation's transpose, at the same rows; and the table's gradient."""
    x, cos, sin = (t.clone().requires_grad_() for t in data)
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32, device=x.device)
    y = rope(x.flatten(0, 1), cos, sin, cu_seqlens=bounds, backend=backend)
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, cos, sin), grad)
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4], device=x.device)
    a, b = x.flatten(0, 1).chunk(2, -1)
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    exact = torch.autograd.grad(torch.cat((a * c - b * s, b * c + a * s), -1), (x, cos, sin), grad)
    for mine, truth in zip(found, exact, strict=True):
        torch.testing.assert_close(mine, truth)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pairing", ["halves", "adjacent", "adjacent_to_halves"])
@pytest.mark.parametrize("kind", ["dense", "strided", "one token"])
def test_in_place(device: torch.device, kind: str, pairing: str, backend: str) -> None:
    """x itself holds what `rope` returns; nothing around a view is touched; the write is counted."""
    memory = torch.randn(2, 5, 7, 72, dtype=torch.float64, device=device)
    x = {"dense": memory, "strided": memory[:, 1:4, 2:5, :64], "one token": memory[:, :1]}[kind]
    table = torch.randn(20, 32, dtype=torch.float64, device=device)
    positions = torch.randint(0, 20, x.shape[:2], device=device)
    options = {"pairing": pairing, "backend": backend}
    expected = memory.clone()
    inner = {"dense": expected, "strided": expected[:, 1:4, 2:5, :64], "one token": expected[:, :1]}[kind]
    inner.copy_(rope(x, table, table * 2, positions, **options))
    version = x._version
    assert rope_(x, table, table * 2, positions, **options) is x
    assert x._version > version
    torch.testing.assert_close(memory, expected, rtol=0, atol=0)
    # The second call of a shape is a replay.
    inner.copy_(rope(x, table, table * 2, positions, **options))
    rope_(x, table, table * 2, positions, **options)
    torch.testing.assert_close(memory, expected, rtol=0, atol=0)


def test_in_place_under_compile() -> None:
    """Functionalisation keeps its order with other readers and writers of x."""
    table = torch.randn(1, 4, 4)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        before = x * 2
        rope_(x, table, table, backend="reference")
        x.add_(1)
        return before, x

    x = torch.randn(2, 4, 3, 8)
    expected = (x * 2, rope(x, table, table, backend="reference") + 1)
    results = torch.compile(step, backend="aot_eager", fullgraph=True)(x)
    for result, exact in zip((*results, x), (*expected, expected[1]), strict=True):
        torch.testing.assert_close(result, exact)


def test_opcheck_in_place() -> None:
    x, table = torch.randn(2, 4, 3, 8), torch.randn(20, 4)
    options = {"rotary_dim": 8, "backend": "reference"}
    torch.library.opcheck(
        torch.ops.fusion_pass.rope_.default, (x, table, table * 2, torch.tensor([3, 0, 19, 7])), options
    )


def test_in_place_refuses_a_gradient_and_shared_memory() -> None:
    x, table = torch.randn(2, 4, 3, 8, requires_grad=True), torch.randn(1, 4, 4)
    with pytest.raises(RuntimeError, match="rope_ writes over x and records no gradient"):
        rope_(x * 1, table, table)
    with torch.no_grad():
        rope_(x, table, table)
    with pytest.raises(ValueError, match="no two elements may share memory"):
        rope_(torch.randn(1, 1, 3, 8).expand(2, 4, 3, 8), table, table)


@pytest.mark.parametrize("backend", BACKENDS)
def test_cos_sin_cache(data: tuple[Tensor, Tensor, Tensor], backend: str) -> None:
    x, cos, sin = data
    cache = torch.cat((cos, sin), -1)
    positions = torch.tensor([3, 0, 19, 7], device=x.device)
    check(
        rope(x, None, None, positions, cos_sin_cache=cache, backend=backend), rotated(x, cos, sin, [[3, 0, 19, 7]] * 2)
    )
    check(rope(x, cos_sin_cache=cache, backend=backend), rotated(x, cos, sin, [[0, 1, 2, 3]] * 2))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["sectioned", "interleaved"])
def test_mrope_positions_and_gathered_tables(device: torch.device, layout: str, backend: str) -> None:
    """Positions [3, tokens] into a cache, and the same tables gathered before, [3, tokens, rotary_dim]."""
    cache = torch.randn(20, 16, dtype=torch.float64, device=device)
    x = torch.randn(5, 3, 24, dtype=torch.float64, device=device)
    positions = torch.randint(0, 20, (3, 5), device=device)
    options = {"mrope_layout": layout, "mrope_section": (4, 2, 2), "rotary_dim": 16, "backend": backend}
    gathered = rope(x, None, None, positions, cos_sin_cache=cache, **options)
    cos, sin = (t[positions].repeat(1, 1, 2) for t in cache.chunk(2, -1))
    check(rope(x, cos, sin, **options), gathered.cpu())
    pair_rows = [0, 0, 0, 0, 1, 1, 2, 2] if layout == "sectioned" else [0, 1, 2, 0, 1, 2, 0, 0]
    c, s = (torch.stack([t[row, :, j] for j, row in enumerate(pair_rows)], -1).unsqueeze(1) for t in (cos, sin))
    a, b, rest = x.split((8, 8, 8), -1)
    check(gathered, torch.cat((a * c - b * s, b * c + a * s, rest), -1).cpu())


def test_conjugate_undoes_a_rotation(data: tuple[Tensor, Tensor, Tensor]) -> None:
    x = data[0]
    angle = torch.randn(1, 4, 4, dtype=torch.float64)
    y = rope(x, angle.cos(), angle.sin(), pairing="adjacent")
    torch.testing.assert_close(rope(y, angle.cos(), angle.sin(), pairing="adjacent", conjugate=True), x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_table_as_real_and_imaginary_view(data: tuple[Tensor, Tensor, Tensor], backend: str) -> None:
    """A complex table's parts are stride-2 views."""
    x = data[0]
    angle = torch.randn(1, 4, 4, dtype=torch.float64, device=x.device)
    table = torch.polar(torch.ones_like(angle), angle)
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


def test_positions_are_checked_where_asked(data: tuple[Tensor, Tensor, Tensor]) -> None:
    x, cos, sin = data
    for wrong in (-1, 20):
        positions = torch.tensor([0, wrong, 3, 4])
        with pytest.raises(
            IndexError, match="but the table has 20 rows; build a longer table or correct the positions"
        ):
            rope(x, cos, sin, positions, check_positions=True, backend="triton")
    huge = torch.tensor([0, 1, 2, 2**64 - 1], dtype=torch.uint64)
    with pytest.raises(IndexError, match="positions go from -1"):
        rope(x, cos, sin, huge, check_positions=True, backend="triton")
    with pytest.raises(IndexError, match="positions go from 18 to 21"):
        rope(x, cos, sin, seqlen_offset=18, check_positions=True, backend="triton")
    rope(x, cos, sin, seqlen_offset=16, check_positions=True, backend="triton")
    bounds = torch.tensor([0, 8])
    with pytest.raises(ValueError, match="max_seqlen is 8 and seqlen_offset 13, but the table has 20 rows"):
        rope(x.flatten(0, 1), cos, sin, cu_seqlens=bounds, max_seqlen=8, seqlen_offset=13)


def test_errors_name_argument_value_and_remedy(data: tuple[Tensor, Tensor, Tensor]) -> None:
    x, cos, sin = data
    cache = torch.cat((cos, sin), -1)
    with pytest.raises(TypeError, match=r"x is None; it takes a tensor \[sequence, heads, head_dim\] or"):
        rope(None, cos, sin)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"x has shape \[3, 8\]; it takes"):
        rope(x[0, 0], cos, sin)
    with pytest.raises(TypeError, match="cos or sin is missing; pass both tables, or cos_sin_cache"):
        rope(x, cos)
    with pytest.raises(ValueError, match="cos or sin is given together with cos_sin_cache"):
        rope(x, cos, sin, cos_sin_cache=cache)
    with pytest.raises(ValueError, match=r"cos_sin_cache has shape \[20, 7\]; it takes \[max_position, cos | sin\]"):
        rope(x, cos_sin_cache=cache[:, :7])
    with pytest.raises(ValueError, match="x has 4 tokens a sequence, but cos_sin_cache only 3 rows"):
        rope(x, cos_sin_cache=cache[:3])
    with pytest.raises(ValueError, match=r"seqlen_offsets has shape \[3\]; for 2 sequences it takes \[2\]"):
        rope(x, cos, sin, seqlen_offset=torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match=r"cu_seqlens has shape \[2\] and dtype torch.float32; it takes"):
        rope(x[:1], cos, sin, cu_seqlens=torch.tensor([0.0, 4.0]))
    with pytest.raises(ValueError, match="mrope_layout is 'sectioned', but cu_seqlens and seqlen_offset count one"):
        rope(x, cos, sin, seqlen_offset=2, mrope_layout="sectioned", mrope_section=(2, 1, 1))
