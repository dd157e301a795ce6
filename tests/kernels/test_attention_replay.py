"""Attention, called again: on a GPU the numbers are those of the first call, whatever changed between; without one,
what the operator keeps and when it plans anew."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_oracle import SLACK, Case, Inputs, Results, eager, make_inputs, run_eager, run_operator
from torch import Tensor
from torch.nn.functional import rms_norm

from fusion_pass.kernels import attention, attention_ops, attention_reference, qk_norm_rope, recording, registry
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


CASE = Case(batch=2, queries=256, keys=256, heads=4, kv_heads=2, head_dim=64, value_dim=64)
BF16 = torch.bfloat16


def given(device: torch.device, seed: int = 0, sinks: bool = False, **conditions: Any) -> Inputs:
    """Fresh random tensors of one shape."""
    case = replace(CASE, sinks=sinks, conditions=lambda _generator, _case: conditions)
    return make_inputs(case, BF16, device, seed)


def assert_right(found: Results, inputs: Inputs) -> None:
    found.assert_no_worse(run_eager(inputs, BF16), run_eager(inputs, torch.float64))


def _skip_unless(backend: str) -> None:
    """A back end that this machine does not have (`hopper` beside another card, `sdpa` without cuDNN)."""
    kernel = next(k for k in registry.kernels("attention") if k.name == backend)
    if kernel.available() is not None:
        pytest.skip(f"{backend}: {kernel.available()}")


BACKENDS = ("hopper", "sdpa", "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_repeated_steps_are_right(backend: str, device: torch.device) -> None:
    _skip_unless(backend)
    forget_replays()
    for seed, causal in enumerate(("top_left",) * 4 + ("none", "top_left")):
        inputs = given(device, seed, causal=causal)
        assert_right(run_operator(inputs, BF16, backend), inputs)
    if backend != "triton":
        assert attention_ops._OPERATOR._replays


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["deterministic", "window", "documents", "sinks"])
def test_repeated_steps_of_other_kinds(kind: str, device: torch.device) -> None:
    _skip_unless("hopper")
    for seed in range(3):
        bounds = sorted(torch.randint(1, 255, (3,), generator=torch.Generator().manual_seed(seed)).tolist())
        ids = torch.bucketize(torch.arange(256), torch.tensor([*bounds, 256]), right=True)[None].expand(2, 256)
        options: dict[str, Any] = {
            "deterministic": {"deterministic": True},
            "window": {"window_left": 70, "causal": "top_left"},
            "documents": {"q_segment_ids": ids},
            "sinks": {"sinks": True},
        }[kind]
        inputs = given(device, seed, **options)
        assert_right(run_operator(inputs, BF16, "hopper"), inputs)


@pytest.mark.gpu
def test_streams_threads_and_the_deterministic_mode(device: torch.device) -> None:
    _skip_unless("hopper")
    inputs = [given(device, seed) for seed in range(4)]
    run_operator(inputs[0], BF16, "hopper")
    torch.cuda.synchronize()
    found: dict[int, Results] = {}

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                found[seed] = run_operator(inputs[seed], BF16, "hopper")
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        assert_right(found[seed], inputs[seed])
    torch.use_deterministic_algorithms(True)
    try:
        first = run_operator(inputs[0], BF16, "hopper").values
        for _ in range(5):
            again = run_operator(inputs[0], BF16, "hopper").values
            assert all(torch.equal(first[name], again[name]) for name in first)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_right(run_operator(inputs[0], BF16, "hopper"), inputs[0])


@pytest.mark.gpu
def test_launches_go_to_the_driver(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Triton 3.6 with CUDA 12.4 or newer: where this fails, calls are right and slow."""
    triton = pytest.importorskip("triton", reason="the launches are Triton's, which is not installed")
    if not triton.__version__.startswith("3.6"):
        pytest.skip(f"what is asserted is of Triton 3.6, and this is {triton.__version__}")
    _skip_unless("hopper")
    from fusion_pass.kernels.driver_launch import DriverLaunch

    names: list[str] = []
    launch = DriverLaunch.__call__

    def counting(self: DriverLaunch, *arguments: Any) -> None:
        names.append(self.name)
        launch(self, *arguments)

    inputs = given(device, causal="top_left")
    run_operator(inputs, BF16, "hopper")
    monkeypatch.setattr(DriverLaunch, "__call__", counting)
    run_operator(inputs, BF16, "hopper")
    assert names == ["forward_kernel", "before", "backward_kernel", "after"]


@pytest.mark.gpu
def test_cuda_graph(device: torch.device) -> None:
    _skip_unless("hopper")
    q, k, v = (torch.randn(1, 256, 4, 64, device=device, dtype=BF16) for _ in range(3))
    attention(q, k, v, backend="hopper", causal="top_left")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attention(q, k, v, backend="hopper", causal="top_left")
    for seed in range(3):
        torch.manual_seed(seed)
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        plain, exact = (
            Results(dict(zip(("out", "lse"), eager(*(x.to(dtype) for x in (q, k, v)), causal="top_left"), strict=True)))
            for dtype in (BF16, torch.float64)
        )
        Results({"out": out, "lse": lse}).assert_no_worse(plain, exact)


class Block(torch.nn.Module):
    """Norm, rotation and attention in one; by plain PyTorch without back ends."""

    def __init__(self, backends: tuple[str, str] | None) -> None:
        super().__init__()
        self.backends = backends
        self.qkv = torch.nn.Linear(256, 8 * 64)
        self.weights = torch.nn.Parameter(torch.rand(2, 64))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (8, 64)).split((4, 2, 2), 2)
        if self.backends is None:
            q, k = (_rotated(rms_norm(x, (64,), w, 1e-6), cos, sin) for x, w in zip((q, k), self.weights, strict=True))
            return eager(q, k, v, causal="top_left")[0].flatten(2)
        options: dict[str, Any] = {"norm": "rms", "eps": 1e-6, "rotary_dim": 64, "backend": self.backends[0]}
        q, k = qk_norm_rope(q, k, cos, sin, None, self.weights[0], self.weights[1], **options)
        return attention(q, k, v, causal="top_left", backend=self.backends[1])[0].flatten(2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return (x * cos[:, :, None] + torch.cat((-b, a), -1) * sin[:, :, None]).to(x.dtype)


def check_block(ours: Block, compiled: Callable[..., Tensor], device: torch.device) -> None:
    """One call of `compiled`, which is `ours`: result and gradients no further from float64 than plain PyTorch's."""
    plain, exact = (Block(None).to(device, dtype) for dtype in (BF16, torch.float64))
    for other in (plain, exact):
        other.load_state_dict(ours.state_dict())
    x, upstream = (torch.randn(2, 256, 256, device=device).to(BF16) for _ in range(2))
    cos, sin = torch.rand(2, 1, 256, 64, device=device).unbind()
    values = []
    for block, call, dtype in ((ours, compiled, BF16), (plain, plain, BF16), (exact, exact, torch.float64)):
        table = torch.promote_types(dtype, torch.float32)
        out = call(x.to(dtype), cos.to(table), sin.to(table))
        gradients = torch.autograd.grad(out, list(block.parameters()), upstream.to(dtype))
        values.append([t.detach().double().clone() for t in (out, *gradients)])
    for found, other, truth in zip(*values, strict=True):
        allowed = max(SLACK[BF16] * (other - truth).norm(), torch.finfo(BF16).eps / 16 * truth.norm())
        assert (found - truth).norm() <= allowed


@pytest.mark.gpu
def test_reduce_overhead(device: torch.device) -> None:
    """Both operators in one compiled model whose forward and backward are CUDA graphs."""
    _skip_unless("hopper")
    torch.manual_seed(0)
    ours = Block(("triton", "hopper")).to(device, BF16)
    compiled = torch.compile(ours, mode="reduce-overhead", fullgraph=True)
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        check_block(ours, compiled, device)


def test_the_block_by_plain_pytorch() -> None:
    """What the compiled block is compared with computes the same."""
    torch.manual_seed(0)
    ours = Block(("reference", "reference")).to(BF16)
    check_block(ours, ours, torch.device("cpu"))
