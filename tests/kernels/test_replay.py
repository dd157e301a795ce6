"""Repeated calls: the addresses of a replay, which calls may be repeated, and on a GPU that the numbers are those of
the first call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion_pass.kernels import qk_norm_rope, qkv_norm_rope
from fusion_pass.kernels.ops import OPERATORS
from fusion_pass.kernels.registration import forget_replays, plain
from fusion_pass.kernels.replay import Replay, Work, call_key


class Recorder:
    """A launch that keeps its addresses."""

    repeatable = True

    def __init__(self) -> None:
        self.addresses: list[int] = []

    def here(self, addresses: Sequence[int]) -> None:
        self.addresses = list(addresses)


def test_addresses_follow_the_arguments_and_the_allocations() -> None:
    launch, packed, weight, out = Recorder(), torch.zeros(4, 12), torch.zeros(3), torch.zeros(4, 2)
    work = Work(launch, [packed[:, :4], packed[:, 4:], weight, out])
    replay = Replay.of([packed, None, weight], [out], [], [work])
    assert replay is not None
    packed, weight = torch.zeros(4, 12), torch.zeros(3)
    (out,) = replay([packed, None, weight])
    assert launch.addresses == [t.data_ptr() for t in (packed, packed[:, 4:], weight, out)]
    assert out.shape == (4, 2)


def test_scratch_is_allocated_and_not_returned() -> None:
    launch, x, out, scratch = Recorder(), torch.zeros(3), torch.zeros(3), torch.zeros(7)
    replay = Replay.of([x], [out], [scratch], [Work(launch, [x, scratch, out])])
    assert replay is not None
    results = replay([x])
    assert len(results) == 1
    assert launch.addresses[2] == results[0].data_ptr()
    assert launch.addresses[1] not in (0, x.data_ptr(), scratch.data_ptr())


@pytest.mark.parametrize("kind", ["one tensor twice", "a copy", "two arguments in one storage", "not repeatable"])
def test_calls_that_are_not_repeated(kind: str) -> None:
    launch, x, y = Recorder(), torch.zeros(8), torch.zeros(8)
    used = x
    if kind == "one tensor twice":
        y = x
    elif kind == "a copy":
        used = x.clone()
    elif kind == "two arguments in one storage":
        x, y = x[:4], x[4:]
        used = x[1:2]
    else:
        launch.repeatable = False
    assert Replay.of([x, y], [], [], [Work(launch, [used])]) is None


def test_the_key_has_shapes_strides_dtypes_devices_and_options() -> None:
    x, options = torch.zeros(2, 3), ("rms", 1e-6, (1, 2))
    key = call_key([x, None], options)
    assert key == call_key([torch.ones(2, 3), None], options)
    assert hash(key) == hash(call_key([torch.ones(2, 3), None], options))
    others: list[tuple[list[Tensor | None], tuple[Any, ...]]] = [
        ([torch.zeros(3, 2), None], options),
        ([torch.zeros(3, 2).T, None], options),
        ([x.half(), None], options),
        ([x.to("meta"), None], options),
        ([None, x], options),
        ([x, None], ("rms", 1e-6, (2, 1))),
        ([x, None], ("rms", 1e-5, (1, 2))),
    ]
    assert all(call_key(tensors, values) != key for tensors, values in others)


def test_only_plain_eager_calls_take_the_short_way() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.zeros(2)
    assert plain([x, None, torch.nn.Parameter(x)])
    with FakeTensorMode() as mode:
        assert not plain([x])
    assert not plain([mode.from_tensor(x)])
    with torch.profiler.profile():
        assert not plain([x])
    assert torch.func.vmap(lambda row: torch.tensor(plain([row])))(x).tolist() == [False, False]


def test_every_way_in_is_replayed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trailing arguments left out, given as None, through the dispatcher or not: one replay, the right addresses."""
    from fusion_pass.kernels import reference

    launch = Recorder()

    def forward(streams: Any, tables: Any, options: Any, copy: Any = None) -> list[Work]:
        tensors = [t for s in streams for t in (s.x, s.out, s.weight)] + [tables.cos, tables.sin]
        return [Work(launch, tensors)]

    monkeypatch.setattr(reference, "forward", forward)
    forget_replays()
    options: dict[str, Any] = {"norm": "rms", "eps": 1e-6, "rotary_dim": 8, "backend": "reference"}
    overload = torch.ops.fusion_pass.qk_norm_rope.default
    for call, extra in ((overload, ()), (qk_norm_rope, ()), (overload, (None, None)), (qk_norm_rope, (None, None))):
        q, k, cos, sin = torch.zeros(1, 3, 4, 8), torch.zeros(1, 3, 2, 8), torch.zeros(1, 3, 4), torch.zeros(1, 3, 4)
        weights = torch.zeros(8), torch.zeros(8)
        launch.addresses = []
        q_out, k_out = call(q, k, cos, sin, None, *weights, *extra, **options)
        if call is overload and not extra:
            continue  # the first call plans
        expected = (q, q_out, weights[0], k, k_out, weights[1], cos, sin)
        assert launch.addresses == [t.data_ptr() for t in expected]
    forget_replays()


OPTIONS: dict[str, Any] = {"norm": "rms", "eps": 1e-6, "rotary_dim": 64}


def fresh(device: torch.device, offset: int = 0) -> dict[str, Any]:
    """Random inputs; `offset`: elements by which the activations are off their allocation's alignment."""

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        flat = torch.randn(torch.Size(shape).numel() + offset, device=device).to(dtype)
        return flat[offset:].view(shape).detach()

    tensors = {"q": random(2, 5, 4, 64), "k": random(2, 5, 2, 64), "q_weight": random(64), "k_weight": random(64)}
    for name in tensors:
        tensors[name].requires_grad_()
    return tensors | {"cos": random(1, 5, 32, dtype=torch.float32), "sin": random(1, 5, 32, dtype=torch.float32)}


def step(inputs: dict[str, Any], backend: str) -> list[Tensor]:
    """Results and gradients of one call."""
    results = qk_norm_rope(**inputs, **OPTIONS, backend=backend)
    torch.manual_seed(1)
    grads = [torch.randn_like(t) for t in results]
    wanted = [t for t in inputs.values() if t.requires_grad]
    return [*results, *torch.autograd.grad(results, wanted, grads)]


def check(inputs: dict[str, Any]) -> None:
    torch.testing.assert_close(step(inputs, "triton"), step(inputs, "reference"), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_repeated_calls_are_right(device: torch.device) -> None:
    """The same shapes again: other tensors, other alignment, one tensor in two places, another stream."""
    operator = OPERATORS["qk_norm_rope"]
    for offset in (0, 0, 0, 1, 1, 8, 8, 0):
        check(fresh(device, offset))
    assert operator._replays
    twice = fresh(device)
    twice["sin"] = twice["cos"]
    check(twice)
    check(twice)
    check(fresh(device))
    with torch.cuda.stream(torch.cuda.Stream()):
        check(fresh(device))
        torch.cuda.synchronize()
    with torch.profiler.profile():
        check(fresh(device))


@pytest.mark.gpu
def test_one_tensor_twice_first(device: torch.device) -> None:
    """A first call whose cos is its sin teaches nothing wrong about the next."""
    q, k = torch.randn(1, 3, 4, 64, device=device), torch.randn(1, 3, 2, 64, device=device)
    twice = {**fresh(device), "q": q, "k": k}
    table = torch.randn(1, 3, 32, device=device)
    for name in ("q", "k"):
        twice[name].requires_grad_()
    check({**twice, "cos": table, "sin": table})
    check({**twice, "cos": table, "sin": torch.randn_like(table)})


@pytest.mark.gpu
def test_packed_calls_are_repeated(device: torch.device) -> None:
    def call(backend: str, seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        qkv = torch.randn(1, 7, 8 * 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        cos, sin, weight = (torch.randn(*shape, device=device) for shape in ((1, 7, 32), (1, 7, 32), (64,)))
        sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
        results = qkv_norm_rope(qkv, cos, sin, None, weight, weight.clone(), **OPTIONS, **sizes, backend=backend)
        grads = [torch.randn_like(t) for t in results]
        return [*results, *torch.autograd.grad(results, qkv, grads)]

    for seed in range(3):
        torch.testing.assert_close(call("triton", seed), call("reference", seed), rtol=2e-2, atol=2e-2)
    assert OPERATORS["qkv_norm_rope"]._replays
