"""The Hopper kernels on the card: forward and every gradient against float64, no worse than eager PyTorch in the same
dtype. The cases are in `hopper_cases.py`; numbers in a docstring are bug reports (flash-attention unless named)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_oracle import (
    Case,
    Inputs,
    Results,
    make_inputs,
    poisoned_memory,
    run_eager,
    run_operator,
)
from hopper_cases import ADDED, CASES, CAUSAL, HEADS, LONG, MASKS, REPEATED, SHORT, WIDE, case, options
from torch import Tensor

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_hopper(device: torch.device) -> None:
    from fusion_pass.kernels import registry

    reason = registry.kernels("attention")[0].available()
    if reason is not None:
        pytest.skip(reason)


def run(inputs: Inputs, dtype: torch.dtype, *, deterministic: bool = False) -> Results:
    """Forward and gradients of the back end itself, so that `deterministic` is ours to choose; every buffer starts as
    NaN."""
    from fusion_pass.kernels.attention_ops import problem_of
    from fusion_pass.kernels.hopper import launch

    q, k, v, *sinks = (leaf.detach() for leaf in inputs.leaves(dtype))
    with poisoned_memory():
        problem = problem_of(q, k, v, sinks=sinks[0] if sinks else None, **inputs.conditions)  # type: ignore[arg-type]
        problem = dataclasses.replace(problem, deterministic=deterministic)
        out, lse = launch.forward(problem, "bshd")
        names = ("dq", "dk", "dv", "dsinks")
        gradients = launch.backward(
            problem, inputs.grad_out.to(dtype), inputs.grad_lse, out, lse, (True,) * 3 + (bool(sinks),)
        )
    computed = {name: gradient for name, gradient in zip(names, gradients, strict=True) if gradient is not None}
    return Results({"out": out, "lse": lse, **computed})


def assert_no_worse_than_eager(inputs: Inputs, dtype: torch.dtype, actual: Results) -> None:
    saturated = inputs.q.abs().mean().item() > 10
    actual.assert_no_worse(run_eager(inputs, dtype), run_eager(inputs, torch.float64), saturated=saturated)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("name", CASES)
def test_no_worse_than_eager(name: str, deterministic: bool, dtype: torch.dtype, device: torch.device) -> None:
    if dtype == torch.float16 and (deterministic or name not in {*HEADS, "bias_float16"}):
        pytest.skip("one dtype is enough where the code is the same")
    inputs = make_inputs(CASES[name], dtype, device)
    assert_no_worse_than_eager(inputs, dtype, run(inputs, dtype, deterministic=deterministic))


@pytest.mark.parametrize(
    "name", [name for name in MASKS | ADDED if not name.startswith(("full", "top_left", "bottom_right"))]
)
def test_head_dim_64_masks(name: str, device: torch.device) -> None:
    inputs = make_inputs(dataclasses.replace(CASES[name], head_dim=64, value_dim=64), torch.bfloat16, device)
    for deterministic in (False, True):
        assert_no_worse_than_eager(inputs, torch.bfloat16, run(inputs, torch.bfloat16, deterministic=deterministic))


@pytest.mark.parametrize("name", ["full", "ragged", "softcap", "sinks"])
def test_three_warpgroups(name: str, device: torch.device) -> None:
    """Head_dim 64, enough queries for tiles of 192, keys that do not differ from tile to tile."""
    long = case(1800, 1777 if name == "ragged" else 1792, head_dim=64, value_dim=64)
    changes = {"softcap": {"conditions": options(softcap=30.0), "logits": 4}, "sinks": {"sinks": True}}.get(name, {})
    inputs = make_inputs(dataclasses.replace(long, **changes), torch.bfloat16, device)
    assert_no_worse_than_eager(inputs, torch.bfloat16, run(inputs, torch.bfloat16))


@pytest.mark.parametrize("name", SHORT)
def test_two_thread_blocks_a_multiprocessor(name: str, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The tile of many short sequences (head_dim 64), here whatever their number and length."""
    from fusion_pass.kernels.hopper import plans, templates

    _, _, tile = templates._SHORT_CAUSAL_TILES[64, 64]
    monkeypatch.setitem(templates._SHORT_CAUSAL_TILES, (64, 64), (8191, 0, tile))
    inputs = make_inputs(dataclasses.replace(SHORT[name], head_dim=64, value_dim=64), torch.bfloat16, device)
    plans.forward_plan.cache_clear()
    try:
        assert_no_worse_than_eager(inputs, torch.bfloat16, run(inputs, torch.bfloat16))
        assert plans.forward_plan.cache_info().currsize == 1
    finally:
        plans.forward_plan.cache_clear()


@pytest.mark.parametrize("name", LONG)
def test_long_causal(name: str, device: torch.device) -> None:
    """Head_dim 64, enough queries for causal tiles of 192, whose warpgroups skip blocks that their rows do not see."""
    inputs = make_inputs(dataclasses.replace(LONG[name], head_dim=64, value_dim=64), torch.bfloat16, device)
    assert_no_worse_than_eager(inputs, torch.bfloat16, run(inputs, torch.bfloat16))


@pytest.mark.parametrize("causal", ["none", "top_left"])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_maxima_that_grow(dim: int, value_dim: int, causal: str, device: torch.device) -> None:
    """Blocks of keys are visited from the last one to the first, and the keys grow on the way: maxima of rows are left
    behind by less than 2^8, and by more, and others of the same warp are not."""
    from fusion_pass.kernels.attention_ops import problem_of
    from fusion_pass.kernels.hopper import launch

    sizes = case(1024, head_dim=dim, value_dim=value_dim, conditions=options(causal=causal))
    inputs = make_inputs(sizes, torch.bfloat16, device)
    growth = torch.linspace(12.0, 0.1, inputs.k.shape[1], device=device)[None, :, None, None]
    inputs = dataclasses.replace(inputs, k=(inputs.k * growth).to(torch.bfloat16))
    with poisoned_memory():
        problem = problem_of(inputs.q, inputs.k, inputs.v, **inputs.conditions)  # type: ignore[arg-type]
        out, lse = launch.forward(problem, "bshd")
    oracle, eager = run_eager(inputs, torch.float64).values, run_eager(inputs, torch.bfloat16).values
    # Eager, which rounds the scores, is off by 1.7 and 2.4 eps; P and the result, each rounded, by a quarter of one.
    assert (out - oracle["out"]).norm() <= torch.finfo(torch.bfloat16).eps / 3 * oracle["out"].norm()
    # And its lse by 0.12 to 0.28 in some row; ours is of scores that nothing rounded to 16 bits.
    assert (lse - oracle["lse"]).abs().max() <= (eager["lse"] - oracle["lse"]).abs().max() / 100


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    "name",
    [
        "full_more_keys", "top_left_fewer_queries", "window_100_causal", "documents_rows_see_nothing",
        "segments_any_order", "heads_random", "bias", "softcap_30",
    ],
)  # fmt: skip
def test_few_thread_blocks(name: str, dim: int, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """As on three multiprocessors: each thread block draws many blocks of keys, also such that no query sees."""
    from fusion_pass.kernels.hopper import plans

    caches = plans.forward_plan, plans.backward_plan, plans.order_of
    monkeypatch.setattr(plans, "_multiprocessors", lambda _device: 3)
    inputs = make_inputs(dataclasses.replace(CASES[name], head_dim=dim, value_dim=dim), torch.bfloat16, device)
    for cache in caches:
        cache.cache_clear()
    try:
        for deterministic in (False, True):
            assert_no_worse_than_eager(inputs, torch.bfloat16, run(inputs, torch.bfloat16, deterministic=deterministic))
    finally:
        for cache in caches:
            cache.cache_clear()


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("name", WIDE)
def test_wide_heads(name: str, deterministic: bool, device: torch.device) -> None:
    inputs = make_inputs(WIDE[name], torch.bfloat16, device)
    assert_no_worse_than_eager(inputs, torch.bfloat16, run(inputs, torch.bfloat16, deterministic=deterministic))


@pytest.mark.parametrize("causal", ["none", "top_left"])
@pytest.mark.parametrize(
    # At head_dim 64 each has a tile of its own under causality.
    ("dim", "tokens", "heads"),
    [(64, 1024, 128), (64, 2048, 8), (64, 8192, 8), (128, 2048, 8), (192, 2048, 8), (256, 2048, 8)],
)
def test_integers_are_exact(dim: int, tokens: int, heads: int, causal: str, device: torch.device) -> None:
    """A product that reads registers too late gives wrong integers now and then (triton 9433, 11781; flash-linear-
    attention 1262)."""
    from fusion_pass.kernels.attention_ops import problem_of
    from fusion_pass.kernels.hopper import launch

    generator = torch.Generator(device=device).manual_seed(0)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-4, 5, shape, device=device, generator=generator).to(torch.bfloat16)

    # Scores of 0 make every probability a power of two where the number of keys is one: sums of small integers, exact
    # in float32.
    value_dim = 128 if dim == 192 else dim
    q, k, v, grad = (
        torch.zeros(2, tokens, heads, dim, device=device, dtype=torch.bfloat16),
        *(integers(2, tokens, heads, lanes) for lanes in (dim, value_dim, value_dim)),
    )
    problem = problem_of(q, k, v, causal=causal)
    out, lse = launch.forward(problem, "bshd")
    expected = v.double().cumsum(1) if causal != "none" else v.double().sum(1, keepdim=True).expand(v.shape)
    count = torch.arange(1, tokens + 1, device=device)[None, :, None, None] if causal != "none" else tokens
    torch.testing.assert_close(out.double() * count, expected, rtol=0.005, atol=0)
    first = launch.backward(problem, grad, None, out, lse, (True, True, True, False))
    if causal == "none":
        # dV = mean over the queries: exact.
        assert torch.equal(first[2], (grad.double().sum(1, keepdim=True) / tokens).expand(v.shape).to(torch.bfloat16))
    for _ in range(250):
        again = launch.forward(problem, "bshd")
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)
        gradients = launch.backward(problem, grad, None, out, lse, (True, True, True, False))
        assert torch.equal(gradients[1], first[1])
        assert torch.equal(gradients[2], first[2])


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", REPEATED)
def test_deterministic_gradients_repeat(name: str, dim: int, device: torch.device) -> None:
    inputs = make_inputs(dataclasses.replace(REPEATED[name], head_dim=dim, value_dim=dim), torch.bfloat16, device)
    first = run(inputs, torch.bfloat16, deterministic=True)
    assert_no_worse_than_eager(inputs, torch.bfloat16, first)
    for _ in range(50):
        again = run(inputs, torch.bfloat16, deterministic=True)
        for gradient, expected in first.values.items():
            assert torch.equal(again.values[gradient], expected), gradient


def test_packed_qkv_in_place(device: torch.device) -> None:
    """q, k, v are views of one buffer, their gradients of another; what lies between is not touched (2541)."""
    from fusion_pass.kernels.attention_ops import problem_of
    from fusion_pass.kernels.hopper import launch

    batch, rows, heads, kv_heads, dim = 2, 300, 4, 2, 128
    width = (heads + 2 * kv_heads) * dim

    def parts(packed: Tensor) -> list[Tensor]:
        return [x.unflatten(2, (-1, dim)) for x in packed.split([heads * dim, kv_heads * dim, kv_heads * dim], 2)]

    qkv = torch.randn(batch, rows, width + 64, device=device, dtype=torch.bfloat16)[..., :width]
    packed = torch.full((batch, rows, width + 64), float("nan"), device=device, dtype=torch.bfloat16)
    grad = torch.randn(batch, heads, rows, dim, device=device, dtype=torch.bfloat16).transpose(1, 2)
    results = []
    for tensors, into in (
        (parts(qkv), parts(packed[..., :width])),
        ([x.contiguous() for x in parts(qkv)], (None, None, None)),
    ):
        problem = problem_of(*tensors, causal="top_left", deterministic=True)
        out, lse = launch.forward(problem, "bhsd")
        results.append((out, lse, *launch.backward(problem, grad, None, out, lse, (True, True, True, False), into)[:3]))
    assert packed[..., width:].isnan().all()
    assert not packed[..., :width].isnan().any()
    assert results[0][4].data_ptr() == packed.data_ptr() + (heads + kv_heads) * dim * 2
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_misaligned_and_expanded_inputs(device: torch.device) -> None:
    """Tensor maps cannot read these in place (355, FlagGems 2338)."""
    from fusion_pass.kernels.attention_ops import problem_of
    from fusion_pass.kernels.hopper import launch

    base = torch.randn(2, 200, 4 * 64 + 3, device=device, dtype=torch.bfloat16)[..., 3:].unflatten(2, (4, 64))
    shared = torch.randn(2, 200, 1, 64, device=device, dtype=torch.bfloat16).expand(2, 200, 4, 64)
    expanded = torch.ones((), device=device, dtype=torch.bfloat16).expand(2, 200, 4, 64)
    results = []
    for q, k, grad in ((base, shared, expanded), (base.contiguous(), shared.contiguous(), expanded.contiguous())):
        problem = problem_of(q, k, k, causal="top_left", deterministic=True)
        out, lse = launch.forward(problem, "bshd")
        results.append((out, lse, *launch.backward(problem, grad, None, out, lse, (True, True, True, False))[:3]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("sizes", [(0, 5, 5, 2), (2, 0, 5, 2), (2, 5, 0, 2), (2, 0, 0, 2)])
def test_zero_sizes(sizes: tuple[int, int, int, int], device: torch.device) -> None:
    batch, queries, keys, heads = sizes
    inputs = make_inputs(
        Case(batch=batch, queries=queries, keys=keys, heads=heads, kv_heads=heads, head_dim=64, value_dim=64),
        torch.bfloat16,
        device,
    )
    results = run(inputs, torch.bfloat16).values
    if queries and not keys:
        assert (results["out"] == 0).all()
        assert (results["lse"] == float("-inf")).all()
    assert all((results[name] == 0).all() for name in ("dq", "dk", "dv"))


def test_many_heads(device: torch.device) -> None:
    """More (batch, head) pairs than the y and z axes of a grid hold (fla 172, flashinfer 3125)."""
    inputs = make_inputs(
        Case(batch=35001, queries=16, keys=16, heads=2, kv_heads=2, head_dim=64, value_dim=64, conditions=CAUSAL),
        torch.bfloat16,
        device,
    )
    assert_no_worse_than_eager(inputs, torch.bfloat16, run(inputs, torch.bfloat16))


@pytest.mark.parametrize("name", ["heads_random", "bias", "added_least"])
def test_repeated_calls_with_masks(name: str, device: torch.device) -> None:
    """Through the operator: the second and third call repeat what the first one launched, with other tensors."""
    for seed in range(3):
        inputs = make_inputs(CASES[name], torch.bfloat16, device, seed)
        assert_no_worse_than_eager(inputs, torch.bfloat16, run_operator(inputs, torch.bfloat16, "hopper"))


def test_operator_chooses_hopper(device: torch.device) -> None:
    """Through the operator and autograd, one gradient not needed."""
    from fusion_pass.kernels import attention

    q, k, v = (torch.randn(2, 300, 4, 128, device=device, dtype=torch.bfloat16, requires_grad=i != 1) for i in range(3))
    out, _ = attention(q, k, v, causal="top_left", backend="hopper")
    out.sum().backward()
    assert q.grad is not None
    assert v.grad is not None
    assert k.grad is None
