"""The kernels of a backward overlap (programmatic dependent launch, kernels/hopper/prepare.py): each must find what the
one before it wrote.

Two inputs by turns, whose temporary tensors lie at the same addresses: a kernel that does not wait reads what the other
input left there. Expected are the bits of calls whose kernels run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu

Gradients = tuple[Tensor | None, ...]

CALLS = {
    # batch, tokens, query heads, key heads, options
    "full": (1, 1000, 2, 2, {}),
    "causal": (4, 1024, 8, 8, {"causal": "top_left"}),
    "window": (1, 2000, 4, 4, {"causal": "top_left", "window_left": 300}),
    "grouped": (2, 512, 8, 2, {"causal": "top_left"}),
    "more_memory": (4, 4096, 16, 16, {"causal": "top_left"}),
    "segments": (2, 1500, 4, 4, {"causal": "top_left"}),
}


@pytest.fixture(autouse=True)
def on_hopper(device: torch.device) -> None:
    from fusion_pass.kernels import registry

    reason = registry.kernels("attention")[0].available()
    if reason is not None:
        pytest.skip(reason)


def call(name: str, dim: int, device: torch.device, *, deterministic: bool = True) -> Callable[[], Gradients]:
    """A backward of new random tensors."""
    from fusion_pass.kernels.attention_ops import problem_of
    from fusion_pass.kernels.hopper import launch

    batch, tokens, heads, kv_heads, options = CALLS[name]
    q, grad = (torch.randn(batch, tokens, heads, dim, device=device, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(batch, tokens, kv_heads, dim, device=device, dtype=torch.bfloat16) for _ in range(2))
    if name == "segments":
        ids = torch.arange(tokens, device=device).div(tokens // 3, rounding_mode="floor").expand(batch, -1)
        options = {**options, "q_segment_ids": ids, "k_segment_ids": ids}
    problem = problem_of(q, k, v, deterministic=deterministic, **options)
    out, lse = launch.forward(problem, "bshd")
    return lambda: launch.backward(problem, grad, None, out, lse, (True, True, True, False))[:3]


def one_by_one(backward: Callable[[], Gradients], monkeypatch: pytest.MonkeyPatch) -> Gradients:
    """The gradients, no kernel launched before everything is done that was launched before it."""
    from fusion_pass.kernels import recording

    with monkeypatch.context() as patch:
        patch.setattr(recording, "launched", lambda _launch, _addresses: torch.cuda.synchronize())
        return backward()


def assert_same_bits(actual: Gradients, expected: Gradients) -> None:
    for name, a, b in zip(("dq", "dk", "dv"), actual, expected, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b), name


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", CALLS)
def test_calls_by_turns(name: str, dim: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [call(name, dim, device) for _ in range(2)]
    expected = [one_by_one(backward, monkeypatch) for backward in calls]
    for _ in range(20):
        for backward, gradients in zip(calls, expected, strict=True):
            assert_same_bits(backward(), gradients)


def assert_same_sums(actual: Gradients, expected: Gradients) -> None:
    """dQ up to the order of its additions in float32, which rounds to a neighbour; dK and dV bit by bit."""
    assert_same_bits((expected[0], *actual[1:]), expected)
    dq, sums = actual[0], expected[0]
    assert dq is not None
    assert sums is not None
    torch.testing.assert_close(dq.float(), sums.float(), rtol=2**-7, atol=1e-5 * sums.abs().max().item())


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", CALLS)
def test_zeros_are_there(name: str, dim: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody waits for a turn the main kernel zeroes what it adds to, by turns on two streams and on one."""
    calls = [call(name, dim, device, deterministic=False) for _ in range(2)]
    expected = [one_by_one(backward, monkeypatch) for backward in calls]
    streams = [torch.cuda.Stream(device) for _ in calls]
    for step in range(20):
        results = []
        for stream, backward in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream if step % 2 else torch.cuda.current_stream(device)):
                results.append(backward())
        torch.cuda.synchronize(device)
        for result, gradients in zip(results, expected, strict=True):
            assert_same_sums(result, gradients)


@pytest.mark.parametrize("dim", [64, 128])
def test_on_two_streams(dim: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither has all of its thread blocks running: who waits for others' sums or zeros waits for blocks that run."""
    calls = [call("causal", dim, device) for _ in range(2)]
    expected = [one_by_one(backward, monkeypatch) for backward in calls]
    streams = [torch.cuda.Stream(device) for _ in calls]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(device))
    results: list[list[Gradients]] = [[], []]
    for _ in range(10):
        for stream, backward, made in zip(streams, calls, results, strict=True):
            with torch.cuda.stream(stream):
                made.append(backward())
    torch.cuda.synchronize(device)
    for made, gradients in zip(results, expected, strict=True):
        for result in made:
            assert_same_bits(result, gradients)


@pytest.mark.parametrize("name", ["causal", "segments"])
def test_in_a_cuda_graph(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [call(name, 128, device) for _ in range(2)]
    expected = [one_by_one(backward, monkeypatch) for backward in calls]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [backward() for backward in calls * 4]
    for _ in range(5):
        for result in results:
            for gradient in result:
                assert gradient is not None
                gradient.fill_(float("nan"))
        graph.replay()
        for result, gradients in zip(results, expected * 4, strict=True):
            assert_same_bits(result, gradients)
