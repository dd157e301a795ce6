"""What only a GPU can show: cuDNN behind the operator, races, determinism, very large tensors and grids."""

from __future__ import annotations

import pytest
import torch
from attention_oracle import Case, make_inputs, poisoned_memory, run_eager, run_operator

from fusion_pass.kernels import attention, registry

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2)])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_sdpa(head_dim: int, value_dim: int, heads: int, kv_heads: int, causal: str, device: torch.device) -> None:
    case = Case(
        queries=384,
        keys=384,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        conditions=lambda *_: {"causal": causal},
    )
    inputs = make_inputs(case, BF16, device)
    with torch.no_grad():  # the forward of cuDNN and the backward of Triton fit together, and the other way round
        crossed = attention(inputs.q, inputs.k, inputs.v, causal=causal, backend="triton")[1]
        assert torch.allclose(
            crossed, attention(inputs.q, inputs.k, inputs.v, causal=causal, backend="sdpa")[1], atol=1e-4
        )
    run_operator(inputs, BF16, "sdpa").assert_no_worse(run_eager(inputs, BF16), run_eager(inputs, torch.float64))


@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_same_bits_in_every_run(head_dim: int, device: torch.device) -> None:
    """flash-attention 1839, 2244; exllamav3 316."""
    case = Case(queries=700, keys=700, heads=8, head_dim=head_dim, value_dim=head_dim, sinks=True)
    inputs = make_inputs(case, BF16, device)
    inputs.conditions = {"causal": "top_left"}
    first = run_operator(inputs, BF16, "triton").values
    for _ in range(50):
        for name, value in run_operator(inputs, BF16, "triton").values.items():
            assert torch.equal(value, first[name]), name


def test_integers_are_exact(device: torch.device) -> None:
    """Equal scores average small integers over 2^n keys: no rounding anywhere (triton 9433: corrupted registers)."""
    tokens, heads, head_dim = 256, 8, 128
    k = torch.zeros(2, tokens, heads, head_dim, device=device, dtype=BF16)
    q = torch.randint(-4, 5, k.shape, device=device).to(BF16)
    v = torch.randint(-4, 5, k.shape, device=device).to(BF16)
    sums = v.double().sum(1)
    for _ in range(200):
        out, lse = attention(q, k, v, backend="triton")
        assert torch.equal(out.double(), (sums / tokens)[:, None].to(BF16).double().expand(out.shape))
        assert torch.allclose(lse, torch.full_like(lse, tokens).log(), rtol=1e-6)


def test_70000_heads_in_a_batch(device: torch.device) -> None:
    """Grid axes y and z end at 65535 (fla 172)."""
    case = Case(batch=8750, queries=16, keys=16, heads=8, kv_heads=8, conditions=lambda *_: {"causal": "top_left"})
    inputs = make_inputs(case, BF16, device)
    run_operator(inputs, BF16, "triton").assert_no_worse(run_eager(inputs, BF16), run_eager(inputs, torch.float64))


def test_more_than_2_31_elements(device: torch.device) -> None:
    """q, k and v as parts of one buffer whose last tokens lie past 2^31 elements (flash-attention 1500, 2611; fla
    1080).
    """
    tokens, width = 1100, 2_000_000
    buffer = torch.empty(1, tokens, width, device=device, dtype=BF16)
    parts = [buffer[:, :, i * 1000 : i * 1000 + 256].unflatten(2, (4, 64)) for i in range(3)]
    small = [torch.randn(part.shape, device=device).to(BF16) for part in parts]
    for part, value in zip(parts, small, strict=True):
        part.copy_(value)
    for large, dense in zip(_run(*parts), _run(*small), strict=True):
        assert torch.equal(large, dense)


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, _ = attention(*leaves, causal="top_left", backend="triton")
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def test_back_to_back_launches_and_streams(device: torch.device) -> None:
    """Results are read as soon as they are launched, on several streams (ThunderKittens 142, flash-attention 2481)."""
    case = Case(queries=500, keys=500, heads=8, head_dim=64, value_dim=64, conditions=lambda *_: {"causal": "top_left"})
    inputs = make_inputs(case, BF16, device)
    first = run_operator(inputs, BF16, "triton").values
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    for _ in range(20):
        results = []
        for stream in streams:
            with torch.cuda.stream(stream), poisoned_memory():
                results.append({n: t.clone() for n, t in run_operator(inputs, BF16, "triton").values.items()})
        torch.cuda.synchronize()
        for result in results:
            assert all(torch.equal(result[name], first[name]) for name in first)


def test_auto_takes_a_faster_kernel_than_triton_where_there_is_one(device: torch.device) -> None:
    q = torch.randn(1, 256, 4, 64, device=device, dtype=BF16)
    shapes, dtypes = {name: tuple(q.shape) for name in "qkv"}, dict.fromkeys("qkv", q.dtype)
    chosen = registry.choose(registry.Request("attention", q.device, dtypes, shapes, {"causal": "top_left"})).kernel
    assert chosen is not None
    assert (chosen.name in ("hopper", "sdpa")) == (torch.cuda.get_device_capability()[0] in (9, 10))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool, device: torch.device) -> None:
    case = Case(queries=200, keys=200, head_dim=64, value_dim=64, conditions=lambda *_: {"causal": "top_left"})
    inputs = make_inputs(case, BF16, device)
    leaves = inputs.leaves(BF16)
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, causal="top_left", backend="triton")[0] * 2, fullgraph=True, dynamic=dynamic
    )
    eager = attention(*leaves, causal="top_left", backend="triton")[0] * 2
    grads = torch.autograd.grad(eager, leaves, inputs.grad_out)
    for actual, expected in zip(torch.autograd.grad(compiled(*leaves), leaves, inputs.grad_out), grads, strict=True):
        assert torch.equal(actual, expected)
