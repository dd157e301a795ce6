"""The `cuda` back end on a card: determinism, huge and empty tensors, odd strides and addresses, CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from norm_rope_cases import CASES, Case, call, make_inputs
from torch import Tensor

from fusion_pass.kernels import norm_rope, qkv_norm_rope

pytestmark = pytest.mark.gpu
BY_NAME = {case.name: case for case in CASES}


BY_LAYER = {"affine": "wb", "options": {"norm": "layer"}}
INTERLEAVED = {"options": {"mrope_layout": "interleaved", "mrope_section": [24, 20, 20]}}


@pytest.mark.parametrize(
    ("packing", "how"),
    [
        ("blocked", BY_LAYER),
        ("blocked", {"per_head": True, **BY_LAYER}),
        (None, BY_LAYER),
        ("blocked", {}),
        (None, {"per_lane": True, "table_dtype": torch.bfloat16}),
        (None, INTERLEAVED),
    ],
)
def test_backward_is_reproducible(device: torch.device, packing: str | None, how: dict[str, Any]) -> None:
    """Also where x and g come through shared memory, which is filled again while other warps read a lot."""
    case = Case("", 16, 8, 128, 2, 8000, torch.bfloat16, packing=packing, **how)
    inputs = make_inputs(case, device)
    results = call(case, inputs, "cuda")
    grads = [torch.randn_like(t) for t in results]
    first = torch.autograd.grad(results, inputs.differentiable(), grads, retain_graph=True)
    for _ in range(50):
        again = torch.autograd.grad(results, inputs.differentiable(), grads, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_more_than_two_to_the_31_elements(device: torch.device) -> None:
    """The last tokens of 2.3e9 elements, packed, equal the same tokens alone."""
    tokens = 375_000
    sizes = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    options: dict[str, Any] = {"norm": "rms", "eps": 1e-6, "rotary_dim": 128, "backend": "cuda", **sizes}
    qkv = torch.randn(1, tokens, 48 * 128, device=device, dtype=torch.bfloat16)
    table = torch.randn(1, tokens, 64, device=device)
    weight = torch.randn(128, device=device, requires_grad=True)

    def step(x: Tensor, cos: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        results = qkv_norm_rope(x, cos, cos, None, weight, weight, **options)
        tail = [t.detach()[:, -50:].clone() for t in results]
        return [*tail, torch.autograd.grad(results, x, [t.detach() for t in results])[0][:, -50:].clone()]

    whole, alone = step(qkv, table), step(qkv[:, -50:].clone(), table[:, -50:])
    for a, b in zip(whole, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0, 3, 4, 8), (2, 0, 4, 8)])
def test_no_tokens(device: torch.device, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True, device=device)
    table, weight = torch.randn(1, shape[1], 4, device=device), torch.randn(8, requires_grad=True, device=device)
    y = norm_rope(x, table, table, None, weight, norm="rms", eps=1e-6, rotary_dim=8, backend="cuda")
    y.sum().backward()
    assert y.shape == shape
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0] * 8


@pytest.mark.parametrize("kind", ["expanded", "transposed", "sliced"])
def test_gradients_of_any_strides(device: torch.device, kind: str) -> None:
    case = BY_NAME["packed"]
    inputs = make_inputs(case, device)
    results = call(case, inputs, "cuda")
    grads = []
    for result in results:
        grad = torch.randn(result.shape, device=device, dtype=result.dtype)
        if kind == "expanded":
            grad = torch.randn((), device=device, dtype=result.dtype).expand(result.shape)
        elif kind == "transposed":
            grad = torch.randn(result.shape[::-1], device=device, dtype=result.dtype).permute(3, 2, 1, 0)
        else:
            grad = torch.randn(*result.shape[:3], 2 * result.shape[3], device=device, dtype=result.dtype)[..., ::2]
        grads.append(grad)
    given = torch.autograd.grad(results, inputs.differentiable(), grads, retain_graph=True)
    dense = torch.autograd.grad(results, inputs.differentiable(), [g.contiguous() for g in grads])
    for a, b in zip(given, dense, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_addresses_that_are_not_multiples_of_16(device: torch.device, offset: int) -> None:
    """The accesses narrow; the second call of a shape is a replay, and its addresses may be aligned otherwise."""
    options: dict[str, Any] = {"norm": "rms", "eps": 1e-6, "rotary_dim": 64, "backend": "cuda"}
    table = torch.randn(1, 5, 32, device=device)
    buffer = torch.randn(2 * 5 * 4 * 64 + 16, device=device, dtype=torch.bfloat16)
    aligned, shifted = (buffer[n : n + 2 * 5 * 4 * 64].view(2, 5, 4, 64) for n in (0, offset))
    for _ in range(2):
        for x in (aligned, shifted):
            exact = norm_rope(x.clone(), table, table, **options)
            torch.testing.assert_close(norm_rope(x, table, table, **options), exact, rtol=0, atol=0)


def test_tables_that_no_bulk_copy_takes(device: torch.device) -> None:
    """The call of a shape whose tables may come by bulk copies, with tables that are no multiples of 16 bytes."""
    case = Case("", 16, 4, 128, 1, 600, torch.bfloat16, packing="blocked")
    inputs = make_inputs(case, device)
    assert inputs.cos is not None
    assert inputs.sin is not None
    grads = [torch.randn_like(t) for t in call(case, inputs, "cuda")]
    found = []
    for offset in (0, 1, 4):
        for name in ("cos", "sin"):
            table = getattr(inputs, name).detach()
            moved = torch.empty(table.numel() + offset, device=device, dtype=table.dtype)[offset:].view(table.shape)
            setattr(inputs, name, moved.copy_(table))
        parameters = [p for p in inputs.parameters if p is not None]
        found.append(torch.autograd.grad(call(case, inputs, "cuda"), [*inputs.x, *parameters], grads))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_positions_outside_the_table(device: torch.device) -> None:
    """NaN for the token, and nothing outside of the table is read (its surroundings are huge)."""
    memory = torch.full((40, 4), 1e30, device=device)
    table = memory[10:21]
    table.copy_(torch.randn(11, 4))
    x = torch.randn(1, 5, 2, 8, device=device)
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        positions = torch.tensor([0, -1, 11, 10, 12], dtype=dtype, device=device)
        y = norm_rope(x, table, table, positions, norm="none", rotary_dim=8, backend="cuda")
        assert y.isnan().flatten(2).all(-1).tolist() == [[False, True, True, False, True]]
        assert y[:, [0, 3]].abs().max() < 1e3


def test_cuda_graph_capture(device: torch.device) -> None:
    case = Case("", 8, 2, 64, 1, 5, torch.bfloat16)
    inputs = make_inputs(case, device)
    with torch.no_grad():
        expected = [t.clone() for t in call(case, inputs, "cuda")]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call(case, inputs, "cuda")
        graph.replay()
    for a, b in zip(captured, expected, strict=True):
        assert torch.equal(a, b)


def test_first_use_on_another_thread(device: torch.device) -> None:
    """A thread that has not used the device has no context yet."""
    from concurrent.futures import ThreadPoolExecutor

    case = Case("", 8, 2, 64, 1, 5, torch.bfloat16)
    inputs = make_inputs(case, device)
    with torch.no_grad():
        expected = call(case, inputs, "cuda")

        def run() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return call(case, inputs, "cuda")

        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(run).result()
    for a, b in zip(result, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_what_the_launch_before_writes_is_read(device: torch.device, backend: str) -> None:
    """Kernels are set up while the launch before them ends: what that one writes last must be seen, by the forward and
    by the backward, on one stream and from another one, called and replayed by a graph."""
    case = Case("", 32, 8, 128, 1, 3000, torch.bfloat16, packing="blocked")
    inputs = make_inputs(case, device)
    x = inputs.x[0].data  # without the version that autograd compares
    source = x.clone()
    results = call(case, inputs, backend)
    grads = [torch.randn_like(t) for t in results]
    wanted = [inputs.x[0], *(p for p in inputs.parameters if p is not None)]

    def step(gradients: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            forward = call(case, inputs, backend)
        return [*forward, *torch.autograd.grad(results, wanted, gradients, retain_graph=True)]

    def written_again() -> None:
        x.fill_(float("nan"))
        torch.cuda._sleep(100_000)
        x.copy_(source)

    expected = [t.clone() for t in step(grads)]
    other, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    for round_ in range(20):
        other.wait_stream(current)
        with torch.cuda.stream(other if round_ % 2 else current):
            written_again()
        current.wait_stream(other)
        for ours, theirs in zip(step([(t * 2).mul_(0.5) for t in grads]), expected, strict=True):
            assert torch.equal(ours, theirs)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        written_again()
        captured = [*call(case, inputs, backend)]
        capturing = torch.cuda.current_stream(device)
        other.wait_stream(capturing)
        with torch.cuda.stream(other):
            written_again()
        captured[0].sum()  # a kernel before the launch that has to wait for both streams
        capturing.wait_stream(other)
        captured += call(case, inputs, backend)
    for _ in range(20):
        graph.replay()
        for ours, theirs in zip(captured, [*expected[:3], *expected[:3]], strict=True):
            assert torch.equal(ours, theirs)
