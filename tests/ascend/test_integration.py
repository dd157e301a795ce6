# ruff: noqa: E402 (what follows a `needs` imports the tool it asks for)
"""An unedited model through the pass on a device called `npu`: matched, given to the Ascend kernels, forward and
backward.

The device is registered from Python and its tensors are fake, so Dynamo, the pass and AOTAutograd do what they would do
on an NPU. The two graphs that come out are then run on the CPU, norm + rotation by the Ascend kernels lowered and
executed on the host, attention by an emulation of the vendor's operators, and compared with the model in float64.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from ascend_tools import cases, device, needs, toolchain, vendor
from ascend_tools.closeness import assert_no_worse, poisoned_memory
from torch import fx

needs(device.missing())
needs(toolchain.missing_host())
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("with TRITON_INTERPRET=1 nothing is lowered", allow_module_level=True)

from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion_pass.compiler import FusionBackend
from fusion_pass.config import FusionConfig
from fusion_pass.kernels import registry
from fusion_pass.kernels.ascend import attention, norm_rope

BATCH, LENGTH, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 2, 5, 32, 4, 2, 16


class Attention(torch.nn.Module):
    """Qwen3's attention layer, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.q = torch.nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.k = torch.nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.v = torch.nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.q_weight = torch.nn.Parameter(torch.rand(HEAD_DIM) + 0.5)
        self.k_weight = torch.nn.Parameter(torch.rand(HEAD_DIM) + 0.5)
        self.o = torch.nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], -1, HEAD_DIM)
        q = normalise(self.q(x).view(shape), self.q_weight).transpose(1, 2)
        k = normalise(self.k(x).view(shape), self.k_weight).transpose(1, 2)
        v = self.v(x).view(shape).transpose(1, 2)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q, k = (t * cos + rotate_half(t) * sin for t in (q, k))
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        scores = (q @ k.transpose(-1, -2)) * HEAD_DIM**-0.5
        out = scores.softmax(-1) @ v
        return self.o(out.transpose(1, 2).reshape(*x.shape[:2], -1))


def normalise(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((-x[..., HEAD_DIM // 2 :], x[..., : HEAD_DIM // 2]), -1)


def compile_on_stand_in(inner: Callable[..., Any]) -> Any:
    """The report of compiling the model and running it forward and backward on fake `npu` tensors."""
    npu = device.stand_in()
    torch._dynamo.reset()
    backend = FusionBackend(FusionConfig(), inner)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with npu:
            model = Attention()
            x, cos, sin = torch.randn(BATCH, LENGTH, WIDTH), *torch.randn(2, BATCH, LENGTH, HEAD_DIM)
            x.requires_grad_()
        out = torch.compile(model, backend=backend, fullgraph=True)(x, cos, sin)
        assert out.device == npu
        out.sum().backward()
        assert model.q_weight.grad is not None
    return backend.reports[-1]


def site_of(report: Any, fusion: str) -> Any:
    (site,) = [site for site in report.sites if site.fusion == fusion]
    return site


def test_without_the_tools_the_site_says_what_is_missing() -> None:
    report = compile_on_stand_in(lambda module, inputs: module.forward)
    for fusion in ("qk_norm_rope", "attention"):
        site = site_of(report, fusion)
        assert site.status == "skipped"
        assert "ascend: torch_npu is not installed; install the torch-npu release made for torch" in site.reason


def test_forward_and_backward_of_a_compiled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_there_is_a_chip(monkeypatch)
    graphs: dict[str, fx.GraphModule] = {}

    def keep(name: str) -> Callable[..., Any]:
        def compiler(module: fx.GraphModule, _: Any) -> Any:
            graphs[name] = module
            return make_boxed_func(module.forward)

        return compiler

    report = compile_on_stand_in(aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward")))
    called = {name: [str(node.target) for node in graph.graph.nodes] for name, graph in graphs.items()}
    for fusion in ("qk_norm_rope", "attention"):
        site = site_of(report, fusion)
        assert (site.status, site.kernel) == ("fused", "ascend")
        assert called["forward"].count(f"fusion_pass.{fusion}.default") == 1
        assert called["backward"].count(f"fusion_pass.{fusion}_backward.default") == 1

    launched: list[str] = []

    def call(self: attention.Call) -> Any:
        launched.append(self.name)
        return vendor.OPERATORS[self.name](*self.arguments, **self.options)

    def start(launch: Any) -> None:
        launched.append(launch.kernel.__name__)
        toolchain.run_on_host(launch)

    monkeypatch.setattr(attention.Call, "__call__", call)
    monkeypatch.setattr(norm_rope, "start", start)
    monkeypatch.setattr(norm_rope, "platform_of", lambda _: cases.FEW_CORES)
    for graph in graphs.values():
        for node in graph.graph.nodes:
            if str(node.target).startswith("fusion_pass."):
                node.kwargs = {**node.kwargs, "backend": "ascend"}
        graph.recompile()
    with poisoned_memory():
        check_graphs(graphs["forward"], graphs["backward"])
    assert launched == [
        "forward_kernel",
        "npu_fusion_attention_v2",
        "npu_fusion_attention_grad_v2",
        "backward_kernel",
    ]


def pretend_there_is_a_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """The `ascend` kernels are available, and take CPU tensors for those of an NPU."""
    registry.kernels()
    npu = device.stand_in()

    def with_chip(kernel: registry.Kernel) -> registry.Kernel:
        def supports(request: registry.Request) -> str | None:
            # PyTorch poisons memory only in deterministic mode, which nobody asks of the kernels here.
            options = {**request.options, "deterministic": False}
            return kernel.supports(replace(request, device=npu, options=options))

        return replace(kernel, available=lambda: None, supports=supports)

    changed = [with_chip(kernel) if kernel.name == "ascend" else kernel for kernel in registry._kernels]
    monkeypatch.setattr(registry, "_kernels", changed)


def check_graphs(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Run both on the CPU and compare with the eager model in float64. Values pass between them by name."""
    torch.manual_seed(0)
    model = Attention()
    x, cos, sin = torch.randn(BATCH, LENGTH, WIDTH), *torch.randn(2, BATCH, LENGTH, HEAD_DIM)
    x.requires_grad_()
    leaves = [
        x,
        model.q.weight,
        model.q_weight,
        model.k.weight,
        model.k_weight,
        model.v.weight,
        cos,
        sin,
        model.o.weight,
    ]
    placeholders = [node for node in forward.graph.nodes if node.op == "placeholder"]
    shapes = [tuple(node.meta["val"].shape) for node in placeholders]
    assert shapes == [tuple(leaf.shape) for leaf in leaves], "the order of the graph's inputs is another one"
    (returned,) = forward.graph.output_node().args
    values = forward(*[leaf.detach() for leaf in leaves])
    saved = {node.name: value for node, value in zip(returned, values, strict=True) if isinstance(node, fx.Node)}
    grad = torch.randn_like(values[0])
    inputs = [
        grad if node.name.startswith("tangents") else saved[node.name]
        for node in backward.graph.nodes
        if node.op == "placeholder"
    ]
    gradients = backward(*inputs)

    # The same model eagerly, in float64 as the truth and in float32 as the yardstick.
    results = []
    for dtype in (torch.float32, torch.float64):
        eager = Attention().to(dtype)
        eager.load_state_dict(model.state_dict())
        eager_x = x.detach().to(dtype).requires_grad_()
        out = eager(eager_x, cos.to(dtype), sin.to(dtype))
        out.backward(grad.to(dtype))
        results.append({"out": out.detach(), "x": eager_x.grad, **{n: p.grad for n, p in eager.named_parameters()}})
    by_position = {0: "x", 1: "q.weight", 2: "q_weight", 3: "k.weight", 4: "k_weight", 5: "v.weight", 8: "o.weight"}
    computed = {"out": values[0].detach()} | {name: gradients[i] for i, name in by_position.items()}
    for name, value in computed.items():
        assert_no_worse(value, results[0][name], results[1][name], name)
