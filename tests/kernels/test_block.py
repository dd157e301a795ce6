"""`norm_rope_attention`: norm, rotation and attention as one operator, against float64 and against its parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import attention_oracle
import norm_rope_cases
import pytest
import torch
from spills import allowed
from torch import Tensor

from fusion_pass.kernels import attention_reference, block, norm_rope_attention, registry
from fusion_pass.kernels.attention_problem import Problem, Unfinished

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A case of norm + rotation with conditions of `attention`."""

    before: dict[str, Any] = field(default_factory=dict)
    attention: dict[str, Any] = field(default_factory=lambda: {"causal": "top_left"})
    sinks: bool = False
    mask: bool = False


TOKENS = 21
CASES = {
    "qwen3": Case(),
    "qwen3_packed": Case({"packing": "blocked"}),
    "grouped": Case({"packing": "grouped"}, {"causal": "none"}),
    "gemma3": Case({"options": {"norm": "rms_one_plus"}}, {"causal": "top_left", "window_left": 6, "scale": 0.3}),
    "gemma2_packed": Case({"packing": "blocked", "options": {"norm": "none"}}, {"softcap": 5.0, "window_left": 6}),
    "olmo2": Case({"options": {"norm_scope": "hidden"}, "per_lane": True}),
    "olmo2_packed": Case({"packing": "blocked", "options": {"norm_scope": "hidden"}}),
    "qwen3_vl": Case({"options": norm_rope_cases.INTERLEAVED}),
    "llama": Case({"options": {"norm": "none"}, "per_lane": True}),
    "layer_norm_alone": Case({"affine": "wb", "options": {"norm": "layer", "rotary_dim": 0}}),
    "gpt_oss": Case({"options": {"norm": "none"}}, {"causal": "top_left", "window_left": 5}, sinks=True),
    "mask_of_data": Case(mask=True, attention={}),
    "positions_packed": Case({"positions": "per sample", "packing": "blocked", "options": {"rotary_dim": 8}}),
}


LAYERS = [(32, 8, 128, True), (32, 8, 128, False), (16, 1, 128, True), (12, 2, 64, True), (24, 24, 96, False)]
"""Query heads, key heads, head_dim, packed: 1 head of keys is spread over parts."""


@dataclass
class Setting:
    case: norm_rope_cases.Case
    inputs: norm_rope_cases.Inputs
    v: Tensor | None
    sinks: Tensor | None
    conditions: dict[str, Any]
    grad: Tensor
    fixed_tables: bool = False
    """cos and sin take no gradient, as in every model."""

    @classmethod
    def of(cls, case: Case, dtype: torch.dtype, device: torch.device, heads: int = 4) -> Setting:
        inner = norm_rope_cases.Case(
            "", dtype=dtype, **{"heads": heads, "kv_heads": 2, "sequence": TOKENS, **case.before}
        )
        generator = torch.Generator().manual_seed(3)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype).to(device)

        conditions = dict(case.attention)
        if case.mask:
            hidden = torch.rand(2, 1, TOKENS, TOKENS, generator=generator) > 0.6
            hidden[0, 0, 3] = True
            conditions["mask"] = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(dtype).min).to(device)
        return cls(
            inner,
            norm_rope_cases.make_inputs(inner, device),
            random(2, inner.sequence, inner.kv_heads, inner.head_dim) if inner.packing is None else None,
            random(heads) if case.sinks else None,
            conditions,
            random(2, inner.sequence, heads, inner.head_dim),
        )

    def leaves(self, dtype: torch.dtype) -> tuple[norm_rope_cases.Inputs, Tensor | None, Tensor | None, list[Tensor]]:
        device = str(self.grad.device)
        inputs = self.inputs.to(dtype, device)
        for table in (inputs.cos, inputs.sin):
            if table is not None and self.fixed_tables:
                table.requires_grad_(False)
        v, sinks = (None if x is None else x.detach().to(dtype).requires_grad_() for x in (self.v, self.sinks))
        return inputs, v, sinks, [x for x in (*inputs.differentiable(), v, sinks) if x is not None and x.requires_grad]

    def eager(self, dtype: torch.dtype) -> list[Tensor]:
        inputs, v, sinks, leaves = self.leaves(dtype)
        q, k, *packed = norm_rope_cases.model(self.case, inputs)
        out, _ = attention_oracle.eager(q, k, packed[0] if v is None else v, sinks, **self.conditions)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.grad.to(dtype))]

    def operator(self, dtype: torch.dtype, backend: str) -> list[Tensor]:
        inputs, v, sinks, leaves = self.leaves(dtype)
        out, _ = norm_rope_attention(**self.arguments(inputs, v, sinks), backend=backend)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.grad.to(dtype))]

    def arguments(self, inputs: norm_rope_cases.Inputs, v: Tensor | None, sinks: Tensor | None) -> dict[str, Any]:
        named: dict[str, Any] = dict(zip(("q_weight", "k_weight", "q_bias", "k_bias"), inputs.parameters, strict=True))
        named |= {"cos": inputs.cos, "sin": inputs.sin, "positions": inputs.positions, "sinks": sinks}
        case = self.case
        if case.packing is None:
            named |= {"q": inputs.x[0], "k": inputs.x[1], "v": v}
        else:
            sizes = {"num_heads": case.heads, "num_kv_heads": case.kv_heads, "head_dim": case.head_dim}
            named |= {"qkv": inputs.x[0], "packing": case.packing, **sizes}
        return {**named, **case.all_options, **self.conditions}


def check(case: Case, dtype: torch.dtype, device: torch.device, backend: str, fixed_tables: bool = False) -> None:
    """Each result's error at most eager's, up to how roundings fall (`attention_oracle.SLACK` says why float32 has more
    of them), plus a few roundings."""
    setting = Setting.of(case, dtype, device)
    setting.fixed_tables = fixed_tables
    with attention_oracle.poisoned_memory():
        ours = setting.operator(dtype, backend)
    eps = torch.finfo(dtype).eps
    for index, (actual, plain, exact) in enumerate(
        zip(ours, setting.eager(dtype), setting.eager(torch.float64), strict=True)
    ):
        error, allowed = (
            (actual - exact).norm(),
            max(1.5, attention_oracle.SLACK[dtype]) * (plain - exact).norm() + 4 * eps * exact.norm(),
        )
        assert error <= allowed, (index, error, allowed)


@pytest.mark.parametrize("name", CASES)
def test_reference(name: str) -> None:
    for dtype in (torch.float32, BF16):
        check(CASES[name], dtype, torch.device("cpu"), "reference")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels are tested on it")
@pytest.mark.parametrize("name", ["qwen3", "qwen3_packed", "grouped", "olmo2_packed", "mask_of_data"])
def test_triton_interpreted(name: str) -> None:
    check(CASES[name], torch.float32, torch.device("cpu"), "triton")


def in_parts(grad: Tensor, parts: int) -> Tensor:
    """A gradient [B, S, H, D] as the sum of `parts` that are neighbours, unequal."""
    shares = torch.arange(1, parts + 1, device=grad.device) * (2 / (parts * (parts + 1)))
    return (grad.unsqueeze(3) * shares[:, None]).flatten(2, 3)


def unfinished_reference(parts: int, in_place: bool) -> Any:
    """`AttentionBackend.unfinished_backward` by the reference, with `parts` of dK and dV; `in_place`: dV is written
    where it belongs."""

    def unfinished_backward(
        problem: Problem, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, dv: Any, sinks: bool
    ) -> Unfinished:
        needs = (True, True, True, sinks)
        dq, dk, own_dv, dsinks = attention_reference.backward(problem, grad_out, grad_lse, out, lse, needs)
        dq = (dq / problem.scale).transpose(1, 2).contiguous().transpose(1, 2)
        values = dv.copy_(own_dv) if in_place and dv is not None else in_parts(own_dv, parts)
        return Unfinished(dq, problem.scale, in_parts(dk, parts), values, parts, dsinks)

    return unfinished_backward


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels are tested on it")
@pytest.mark.parametrize(
    ("name", "parts", "in_place"),
    [
        *((name, parts, parts == 1) for name in ("qwen3", "qwen3_packed", "grouped", "gemma3") for parts in (1, 3)),
        *((name, 1, True) for name in ("gemma2_packed", "qwen3_vl", "gpt_oss", "mask_of_data")),
        ("qwen3_packed", 1, False),
    ],
)
def test_one_launch_ends_the_backward(name: str, parts: int, in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused end in Triton's interpreter, behind the reference's attention."""
    from fusion_pass.kernels.triton import block_end

    ends = []
    finish = block_end.finish
    monkeypatch.setattr(
        attention_reference, "unfinished_backward", unfinished_reference(parts, in_place), raising=False
    )
    monkeypatch.setattr(block_end, "finish", lambda *args: ends.append(args) or finish(*args))
    check(CASES[name], torch.float32, torch.device("cpu"), "triton+reference", fixed_tables=True)
    assert len(ends) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "triton+hopper", "auto"])
@pytest.mark.parametrize("name", CASES)
def test_on_the_card(name: str, backend: str, device: torch.device) -> None:
    if backend == "triton+hopper":
        hopper_or_skip()
    check(CASES[name], BF16, device, backend)


@pytest.mark.parametrize("arch", [80, 90])
def test_the_end_compiles_without_spills(arch: int) -> None:
    assert not spilled(arch, "qwen3", "partial adjacent")


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_every_end_compiles_without_spills(arch: int) -> None:
    assert not spilled(arch)


def spilled(arch: int, *names: str) -> dict[str, int]:
    """Bytes spilled by instances of `compile_block_end.py`, in a process of its own: what is imported to be
    interpreted cannot be compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_block_end.py")
    done = subprocess.run(
        [sys.executable, str(script), str(arch), *names], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return {name: used["spills"] for name, used in json.loads(done.stdout).items() if used["spills"] > allowed(0)}


def hopper_or_skip() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the Hopper kernels run on sm_90")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_one_launch_ends_the_backward_on_the_card(name: str, device: torch.device) -> None:
    hopper_or_skip()
    check(CASES[name], BF16, device, "triton+hopper", fixed_tables=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "packed"), LAYERS)
def test_one_launch_rounds_less(
    heads: int, kv_heads: int, head_dim: int, packed: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients are no further from float64 than with kernels that round dQ, and sum dK and dV over parts, first;
    a second run has the bits of the first."""
    hopper_or_skip()
    from fusion_pass.kernels.triton import block_end

    inner = {"packing": "blocked" if packed else None, "head_dim": head_dim, "kv_heads": kv_heads, "sequence": 300}
    setting = Setting.of(Case(inner), BF16, device, heads=heads)
    setting.fixed_tables = True
    exact = setting.eager(torch.float64)
    setting.conditions["deterministic"] = True
    with attention_oracle.poisoned_memory():
        ours, again = (setting.operator(BF16, "triton+hopper") for _ in range(2))
    assert all(map(torch.equal, ours, again))
    monkeypatch.setattr(block_end, "refuses", lambda *_: "the kernels of the parts are wanted.")
    apart = setting.operator(BF16, "triton+hopper")
    for index, (joined, separate, truth) in enumerate(zip(ours, apart, exact, strict=True)):
        # The weights' gradients are a few hundred numbers whose last rounding decides.
        assert (joined - truth).norm() <= 1.05 * (separate - truth).norm(), index


def test_the_gradient_is_one_packed_tensor_and_v_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """v reaches the attention, and its gradient dqkv, as views of the packed tensors."""
    from fusion_pass.kernels import attention_reference

    seen: dict[str, Any] = {}
    forward, backward = attention_reference.forward, attention_reference.backward

    def watched_forward(problem: Any, order: str) -> Any:
        seen["v"] = problem.v.data_ptr()
        return forward(problem, order)

    def watched_backward(*args: Any) -> Any:
        seen["dv"] = args[-1][2]
        return backward(*args)

    monkeypatch.setattr(attention_reference, "forward", watched_forward)
    monkeypatch.setattr(attention_reference, "backward", watched_backward)
    setting = Setting.of(CASES["qwen3_packed"], torch.float32, torch.device("cpu"))
    inputs, v, sinks, _ = setting.leaves(torch.float32)
    out, _ = norm_rope_attention(**setting.arguments(inputs, v, sinks), backend="reference")
    assert seen["v"] == inputs.x[0].data_ptr() + 4 * 16 * (4 + 2)
    (dqkv,) = torch.autograd.grad(out, inputs.x, setting.grad)
    assert dqkv.is_contiguous()
    assert seen["dv"].untyped_storage().data_ptr() == dqkv.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", ["qwen3", "qwen3_packed", "gpt_oss"])
def test_the_backward_is_given_what_the_forward_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting.of(CASES[name], torch.float32, torch.device("cpu"))
    expected = setting.operator(torch.float32, "reference")
    runs = []
    rotated = block._Call.rotated
    monkeypatch.setattr(block._Call, "rotated", lambda call: runs.append(call) or rotated(call))
    setting.conditions["keep"] = True
    assert all(map(torch.equal, setting.operator(torch.float32, "reference"), expected))
    assert len(runs) == 1


@pytest.mark.parametrize("kept", ["q_weight", "v", "cos", "q", "sinks"])
def test_only_the_gradients_that_are_needed(kept: str) -> None:
    case = Case(sinks=True)
    setting = Setting.of(case, torch.float32, torch.device("cpu"))
    inputs, v, sinks, _ = setting.leaves(torch.float32)
    arguments = setting.arguments(inputs, v, sinks)
    out, _ = norm_rope_attention(**arguments, backend="reference")
    (expected,) = torch.autograd.grad(out, arguments[kept], setting.grad)
    alone = {
        name: value.detach().requires_grad_(name == kept)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in arguments.items()
    }
    out, _ = norm_rope_attention(**alone, backend="reference")
    (actual,) = torch.autograd.grad(out, alone[kept], setting.grad)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_packed", "gpt_oss"])
def test_opcheck(name: str) -> None:
    setting = Setting.of(CASES[name], torch.float32, torch.device("cpu"))
    inputs, v, sinks, _ = setting.leaves(torch.float32)
    arguments = {**setting.arguments(inputs, v, sinks), "backend": "reference"}
    torch.library.opcheck(torch.ops.fusion_pass.norm_rope_attention.default, (), arguments)


@pytest.mark.parametrize(("batch", "tokens"), [(0, 5), (2, 0)])
def test_zero_sizes(batch: int, tokens: int) -> None:
    qkv = torch.randn(batch, tokens, 8 * 16, requires_grad=True)
    weight = torch.randn(16, requires_grad=True)
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    with attention_oracle.poisoned_memory():
        out, _ = norm_rope_attention(
            qkv, q_weight=weight, k_weight=weight, norm="rms", eps=1e-6, **sizes, backend="reference"
        )
        dqkv, dweight = torch.autograd.grad(out.sum(), (qkv, weight))
    assert out.shape == (batch, tokens, 4, 16)
    assert dqkv.shape == qkv.shape
    assert not dweight.any()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"qkv": torch.randn(2, 6, 128)}, "qkv is given beside q, k or v"),
        ({"v": None}, "q, k and v are not all given"),
        ({"k": torch.randn(2, 6, 2, 8)}, "batch, sequence and head_dim must be equal"),
        ({"k": torch.randn(2, 6, 2, 16).half()}, "they must be equal"),
        ({"q_weight": torch.randn(8), "norm": "rms", "eps": 1e-6}, r"q_weight has shape \[8\]"),
        ({"norm": "rms"}, "eps is missing"),
        ({"causal": "lower"}, "causal is 'lower'"),
        ({"backend": "triton+no_such"}, "backend is 'no_such'"),
    ],
)
def test_wrong_arguments_name_the_argument(changes: dict[str, Any], match: str) -> None:
    arguments: dict[str, Any] = {
        "q": torch.randn(2, 6, 4, 16),
        "k": torch.randn(2, 6, 2, 16),
        "v": torch.randn(2, 6, 2, 16),
        "backend": "reference",
    }
    changes = {**changes, "backend": changes.get("backend", "reference").replace("triton", "reference")}
    with pytest.raises((ValueError, TypeError), match=match):
        norm_rope_attention(**(arguments | changes))


def test_a_mask_that_requires_a_gradient_is_refused() -> None:
    q = torch.randn(1, 4, 1, 16)
    with pytest.raises(NotImplementedError, match="mask requires a gradient"):
        norm_rope_attention(q=q, k=q, v=q, mask=torch.zeros(4, 4, requires_grad=True))


def test_no_second_derivative() -> None:
    q = torch.randn(1, 4, 1, 16, requires_grad=True)
    out, _ = norm_rope_attention(q=q, k=q, v=q, backend="reference")
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
        dq.sum().backward()


# --- choice of the kernels ---


def request_of(packed: bool, **options: Any) -> registry.Request:
    shapes = {"qkv": (2, 8, 8 * 16)} if packed else {"q": (2, 8, 4, 16), "k": (2, 8, 2, 16), "v": (2, 8, 2, 16)}
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16} if packed else {}
    shapes["cos"] = (1, 8, 8)
    options = {"norm": "rms", "eps": 1e-6, "rotary_dim": 16, "causal": "top_left", **sizes, **options}
    return registry.Request(block.NAME, torch.device("cpu"), dict.fromkeys(shapes, BF16), shapes, options, True)


@pytest.mark.parametrize("packed", [False, True])
def test_the_request_of_the_parts(packed: bool) -> None:
    norm_rope, attention = block.parts(request_of(packed))
    assert norm_rope.op == ("qkv_norm_rope" if packed else "qk_norm_rope")
    assert set(norm_rope.dtypes) == ({"qkv", "cos"} if packed else {"q", "k", "cos"})
    assert norm_rope.options["norm"] == "rms"
    assert "causal" not in norm_rope.options
    assert attention.op == "attention"
    assert attention.shapes == {"q": (2, 8, 4, 16), "k": (2, 8, 2, 16), "v": (2, 8, 2, 16)}
    assert attention.options == {"causal": "top_left"}
    assert norm_rope.training
    assert attention.training


def test_both_parts_need_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = registry.choose(request_of(False), allow_reference=True, only=("reference",))
    assert choice.kernel is not None
    assert choice.kernel.name == "reference"
    refused = registry.choose(request_of(False), only=("reference",))
    assert refused.kernel is None
    assert "allow_reference is off" in refused.sentence()

    def only(op: str, name: str) -> registry.Kernel:
        return registry.Kernel(name, frozenset({op}), load=lambda: None, available=lambda: None)

    monkeypatch.setattr(registry, "_kernels", [only("qk_norm_rope", "fast"), only("attention", "faster")])
    named = registry.choose(request_of(False)).kernel
    assert named is not None
    assert named.name == "fast+faster"
    assert registry.choose(request_of(False), only=("fast",)).kernel is None
