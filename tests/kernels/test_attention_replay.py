"""Attention, called again: on a GPU the numbers are those of the first call, whatever changed between; without one,
what the operator keeps and when it plans anew."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion_pass.kernels import attention, attention_ops, attention_reference, qk_norm_rope, recording
from fusion_pass.kernels.attention_problem import Problem
from fusion_pass.kernels.registration import forget_replays


class Launch:
    """A launch that keeps its addresses."""

    repeatable = True

    def __init__(self) -> None:
        self.addresses: list[list[int]] = []

    def here(self, addresses: Sequence[int]) -> None:
        self.addresses.append(list(addresses))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The reference back end as one that launches: counts its calls and keeps the addresses of repetitions."""
    kept: dict[str, Any] = {"forward": 0, "backward": 0, "launch": Launch()}

    def forward(problem: Problem, order: str) -> tuple[Tensor, Tensor]:
        kept["forward"] += 1
        out, lse = problem.empty_out(order), problem.empty_lse()
        recording.launched(kept["launch"], [x.data_ptr() for x in (problem.q, problem.k, problem.v, out, lse)])
        return out.zero_(), lse.zero_()

    def backward(problem: Problem, grad_out: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
        kept["backward"] += 1
        dq, dk, dv = (torch.empty_like(x) for x in (problem.q, problem.k, problem.v))
        recording.launched(kept["launch"], [x.data_ptr() for x in (problem.q, grad_out, dq, dk, dv)])
        return dq, dk, dv, None

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(attention_reference, "forward", forward)
    monkeypatch.setattr(attention_reference, "backward", backward)
    monkeypatch.setattr(attention_reference, "REPEATABLE", True, raising=False)
    forget_replays()
    yield kept
    forget_replays()


def inputs(tokens: int = 4, grad: bool = False) -> list[Tensor]:
    return [torch.randn(1, tokens, 2, 8, requires_grad=grad) for _ in range(3)]


def test_every_way_in_is_repeated_with_its_addresses(calls: dict[str, Any]) -> None:
    ways = (attention, torch.ops.fusion_pass.attention, torch.ops.fusion_pass.attention.default)
    attention(*inputs(), causal="top_left")
    for way in (*ways, *ways):
        tensors = inputs()
        out, lse = way(*tensors, causal="top_left")
        assert calls["launch"].addresses[-1] == [x.data_ptr() for x in (*tensors, out, lse)]
    assert calls["forward"] == 1
    assert len(calls["launch"].addresses) == 6


def test_compiled_code_is_repeated(calls: dict[str, Any]) -> None:
    """Inductor gives optional tensors by name."""
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal="top_left"), fullgraph=True)
    for _ in range(4):
        out, _ = compiled(*inputs())
        assert out.shape == (1, 4, 2, 8)
    assert calls["forward"] == 1
    assert len(calls["launch"].addresses) == 3


def test_arguments_that_the_schema_refuses(calls: dict[str, Any]) -> None:
    operator, (q, k, v) = torch.ops.fusion_pass.attention.default, inputs()
    operator(q, k, v)
    for arguments, named in (((q, k, v), {"q": q}), ((q, k, v), {"window": 3}), ((q, k), {}), ((q,) * 10, {})):
        with pytest.raises((TypeError, RuntimeError)):
            operator(*arguments, **named)


def test_with_a_gradient(calls: dict[str, Any]) -> None:
    for _ in range(3):
        tensors = inputs(grad=True)
        out, _ = attention(*tensors)
        upstream = torch.randn_like(out)
        gradients = torch.autograd.grad(out, tensors, upstream)
    assert (calls["forward"], calls["backward"]) == (1, 1)
    q, grad_out, *rest = calls["launch"].addresses[-1]
    assert (q, grad_out) == (tensors[0].data_ptr(), upstream.data_ptr())
    assert rest == [x.data_ptr() for x in gradients]


def test_what_makes_another_call(calls: dict[str, Any]) -> None:
    attention(*inputs())
    attention(*inputs())
    assert calls["forward"] == 1
    q, k, v = inputs()
    for number, (tensors, options) in enumerate(
        [
            (inputs(5), {}),
            ([x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)], {}),
            ([x.double() for x in (q, k, v)], {}),
            ((q, k, v), {"causal": "top_left"}),
            ((q, k, v), {"scale": 0.5}),
            ((q, k, v), {"deterministic": True}),
            ((q, k, v), {"out_order": "bhsd"}),
            ((q, k, v, None, torch.zeros(2)), {}),
        ]
    ):
        attention(*tensors, **options)  # type: ignore[arg-type]
        assert calls["forward"] == number + 2, options
    planned = calls["forward"]
    torch.use_deterministic_algorithms(True)
    try:
        attention(*inputs())
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls["forward"] == planned + 1
    attention(*inputs())
    assert calls["forward"] == planned + 1


def test_what_is_planned_every_time(calls: dict[str, Any]) -> None:
    """Where a tensor stands in two places first, or is not aligned, nothing is learnt."""
    q, _, _ = inputs()
    attention(q, q, q)
    attention(*inputs())
    assert calls["forward"] == 2
    attention(q, q, q)  # which takes the replay: its addresses come from the places
    assert calls["forward"] == 2
    assert len(set(calls["launch"].addresses[-1][:3])) == 1
    shifted = torch.randn(65)[1:].view(1, 4, 2, 8)
    attention(shifted, *inputs()[1:])
    attention(shifted, *inputs()[1:])
    assert calls["forward"] == 4


# --- on a GPU ---


def step(backend: str, seed: int = 0, tokens: int = 256, **options: Any) -> list[Tensor]:
    """Result, lse and gradients for fresh random inputs."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = [(2, tokens, heads, 64) for heads in (4, 2, 2)]
    q, k, v = (torch.randn(s, device="cuda", generator=generator).to(torch.bfloat16).requires_grad_() for s in shapes)
    out, lse = attention(q, k, v, backend=backend, **options)
    upstream = torch.randn(out.shape, device="cuda", generator=generator).to(out.dtype)
    return [out, lse, *torch.autograd.grad(out, (q, k, v), upstream)]


def close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    torch.testing.assert_close(list(found), list(expected), rtol=3e-2, atol=3e-2)


def _skip_unless(backend: str) -> None:
    from fusion_pass.kernels import registry

    kernel = next(k for k in registry.kernels("attention") if k.name == backend)
    if kernel.available() is not None:
        pytest.skip(str(kernel.available()))


BACKENDS = ("hopper", "sdpa", "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_repeated_steps_are_right(backend: str, device: torch.device) -> None:
    _skip_unless(backend)
    forget_replays()
    for seed in range(4):
        close(step(backend, seed, causal="top_left"), step("reference", seed, causal="top_left"))
    close(step(backend, 5), step("reference", 5))
    close(step(backend, 6, causal="top_left"), step("reference", 6, causal="top_left"))
    if backend != "triton":
        assert attention_ops._OPERATOR._replays


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [{"deterministic": True}, {"window_left": 70, "causal": "top_left"}, {"documents": True}, {"sinks": True}],
    ids=["deterministic", "window", "documents", "sinks"],
)
def test_repeated_steps_of_other_kinds(options: dict[str, Any], device: torch.device) -> None:
    _skip_unless("hopper")
    for seed in range(3):
        given = dict(options)
        if given.pop("documents", False):
            bounds = sorted(torch.randint(1, 255, (3,), generator=torch.Generator().manual_seed(seed)).tolist())
            bound = torch.tensor([0, *bounds, 256], device=device, dtype=torch.int32)
            given |= {"q_segment_ids": torch.bucketize(torch.arange(256, device=device), bound[1:], right=True)[None]}
        if given.pop("sinks", False):
            given["sinks"] = torch.randn(4, device=device, generator=torch.Generator(device).manual_seed(seed))
        close(step("hopper", seed, **given), step("reference", seed, **given))


@pytest.mark.gpu
def test_streams_threads_and_the_deterministic_mode(device: torch.device) -> None:
    _skip_unless("hopper")
    expected = [step("reference", seed) for seed in range(4)]
    step("hopper")
    torch.cuda.synchronize()
    found: dict[int, list[Tensor]] = {}

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                found[seed] = step("hopper", seed)
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        close(found[seed], expected[seed])
    torch.use_deterministic_algorithms(True)
    try:
        first = step("hopper", 0)
        assert all(torch.equal(a, b) for _ in range(5) for a, b in zip(first, step("hopper", 0), strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
    close(step("hopper", 0), expected[0])


@pytest.mark.gpu
def test_launches_go_to_the_driver(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Triton 3.6 with CUDA 12.4 or newer: where this fails, calls are right and slow."""
    triton = pytest.importorskip("triton")
    if not triton.__version__.startswith("3.6"):
        pytest.skip("another Triton")
    _skip_unless("hopper")
    from fusion_pass.kernels.driver_launch import DriverLaunch

    names: list[str] = []
    launch = DriverLaunch.__call__

    def counting(self: DriverLaunch, *arguments: Any) -> None:
        names.append(self.name)
        launch(self, *arguments)

    step("hopper", causal="top_left")
    monkeypatch.setattr(DriverLaunch, "__call__", counting)
    step("hopper", causal="top_left")
    assert names == ["forward_kernel", "before", "backward_kernel", "after"]


@pytest.mark.gpu
def test_cuda_graph(device: torch.device) -> None:
    _skip_unless("hopper")
    q, k, v = (torch.randn(1, 256, 4, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    attention(q, k, v, backend="hopper", causal="top_left")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = attention(q, k, v, backend="hopper", causal="top_left")
    for seed in range(3):
        torch.manual_seed(seed)
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
        out.fill_(float("nan"))
        graph.replay()
        close([out], [attention(q, k, v, backend="reference", causal="top_left")[0]])


class Block(torch.nn.Module):
    """Norm, rotation and attention in one."""

    def __init__(self, backends: tuple[str, str]) -> None:
        super().__init__()
        self.backends = backends
        self.qkv = torch.nn.Linear(256, 8 * 64, dtype=torch.bfloat16)
        self.weights = torch.nn.Parameter(torch.rand(2, 64, dtype=torch.bfloat16))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (8, 64)).split((4, 2, 2), 2)
        options: dict[str, Any] = {"norm": "rms", "eps": 1e-6, "rotary_dim": 64, "backend": self.backends[0]}
        q, k = qk_norm_rope(q, k, cos, sin, None, self.weights[0], self.weights[1], **options)
        return attention(q, k, v, causal="top_left", backend=self.backends[1])[0].flatten(2)


@pytest.mark.gpu
def test_reduce_overhead(device: torch.device) -> None:
    """Both operators in one compiled model whose forward and backward are CUDA graphs."""
    _skip_unless("hopper")
    torch.manual_seed(0)
    ours, expected = Block(("triton", "hopper")).to(device), Block(("reference", "reference")).to(device)
    expected.load_state_dict(ours.state_dict())
    compiled = torch.compile(ours, mode="reduce-overhead", fullgraph=True)
    for _ in range(5):
        x = torch.randn(2, 256, 256, device=device, dtype=torch.bfloat16)
        cos, sin = torch.rand(2, 1, 256, 64, device=device).unbind()
        upstream = torch.randn(2, 256, 256, device=device, dtype=torch.bfloat16)
        torch.compiler.cudagraph_mark_step_begin()
        found = compiled(x, cos, sin)
        found_grads = [g.clone() for g in torch.autograd.grad(found, list(ours.parameters()), upstream)]
        wanted = expected(x, cos, sin)
        close([found], [wanted])
        for grad, want in zip(
            found_grads, torch.autograd.grad(wanted, list(expected.parameters()), upstream), strict=True
        ):
            assert (grad - want).norm() < 0.03 * want.norm()
