"""Unedited models on a GPU with the kernels that are chosen there: no worse than eager's own error against float64 on
the CPU."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from compiling import as_it_is, eager
from every_model import (
    GRAPH_BREAKS,
    ONE_SIZE,
    Combination,
    assert_every_attention_fused,
    assert_found,
    expected,
    shorter,
    tensors,
)
from torch import nn
from torch.utils import _pytree as pytree
from training_steps import assert_no_worse, eager_steps, exact_step, step

import fusion_pass
from fusion_pass import FusionBackend, FusionConfig, zoo
from fusion_pass.zoo.oracle import float64_call

pytestmark = pytest.mark.gpu

NORM_AND_ROTATION = ("qkv_norm_rope", "qk_norm_rope", "norm_rope", "rope")
BF16 = torch.bfloat16
TOO_NARROW = ("cogview4", "mochi", "sana")
"""Their heads have four lanes in the zoo; attention kernels take multiples of 8."""


@pytest.fixture(autouse=True)
def on_a_card() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch._dynamo.reset()


def to(device: str, values: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, values)


def assert_step(compiled: Any, module: nn.Module, inputs: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Loss and all gradients; `compiled` is `module`, which is on the GPU."""
    ours, plain = step(compiled, module, inputs), eager_steps(module, inputs)
    exact = exact_step(copy.deepcopy(module).cpu(), to("cpu", inputs))
    assert_no_worse(to("cpu", ours), to("cpu", plain), exact, torch.finfo(dtype).eps)


def assert_outputs(compiled: Any, module: nn.Module, inputs: Mapping[str, Any], dtype: torch.dtype) -> None:
    with torch.no_grad():
        ours, plain = tensors(compiled(**inputs)), tensors(module(**inputs))
        exact = tensors(float64_call(copy.deepcopy(module).cpu(), to("cpu", inputs))[1])
    assert_no_worse(to("cpu", ours), to("cpu", plain), exact, torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    "how",
    [
        Combination(dynamic=False, training=True, dtype=BF16),
        Combination(dynamic=False, training=True, dtype=torch.float32),
        Combination(dynamic=False, training=False, dtype=BF16),
        Combination(dynamic=True, training=True, dtype=BF16),
        Combination(dynamic=True, training=False, dtype=BF16),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", zoo.names())
def test_every_model(name: str, how: Combination) -> None:
    """Every fusion at once, by the kernels of this card alone (no `allow_reference`), without Inductor's code beside
    them."""
    try:
        module, inputs = zoo.build(name, dtype=how.dtype, device="cuda")
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("fusion_pass"):
            raise
        pytest.skip(str(missing))  # names the package of the extra `zoo` that is not installed
    module.train(how.training)
    if name == "gpt_oss" and how.dtype == torch.float32:
        # AOTAutograd cannot trace what transformers 5.17 takes for the grouped products of float32.
        module.set_experts_implementation("batched_mm")
    compiler = FusionBackend(FusionConfig(), inner=as_it_is if how.dynamic else eager)
    compiled = torch.compile(module, backend=compiler, fullgraph=name not in GRAPH_BREAKS, dynamic=how.dynamic)
    compare = assert_step if how.training else assert_outputs
    if how.dynamic and name not in ONE_SIZE:
        compare(compiled, module, to("cuda", shorter(name, inputs)), how.dtype)
    compare(compiled, module, inputs, how.dtype)
    assert_found(compiler.reports, expected(name, how))
    if name in TOO_NARROW:
        reasons = [site.reason for report in compiler.reports for site in report.sites if site.fusion == "attention"]
        assert reasons
        assert all("multiple of 8" in reason for reason in reasons)
    else:
        assert_every_attention_fused(compiler.reports)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "kernel"),
    [(name, "triton") for name in ("qwen3", "qwen3_vl", "gemma3", "olmo2", "qwen3_fused_qkv")]
    + [(name, "cuda") for name in ("qwen3", "qwen3_vl", "gemma3", "olmo2", "qwen3_fused_qkv")],
)
def test_training_step_through_inductor(name: str, kernel: str, dtype: torch.dtype) -> None:
    """Norm and rotation by the kernels of one back end."""
    module, inputs = zoo.build(name, layers=2, dtype=dtype, device="cuda")
    config = FusionConfig(expect=2, fusions=NORM_AND_ROTATION, kernels=(kernel,))
    assert_step(torch.compile(module, backend=fusion_pass.backend(config), fullgraph=True), module, inputs, dtype)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_vl", "gemma3", "gpt_oss", "qwen3_fused_qkv"])
def test_every_fusion_through_inductor(name: str, mode: str | None) -> None:
    """Three steps: with CUDA graphs (`reduce-overhead`) the third one replays."""
    module, inputs = zoo.build(name, layers=2, dtype=BF16, device="cuda")
    compiled = torch.compile(module, backend=fusion_pass.backend(strict=True), fullgraph=True, mode=mode)
    for _ in range(2):
        step(compiled, module, inputs)
    assert_step(compiled, module, inputs, BF16)


@pytest.mark.parametrize("kept", [False, True], ids=["", "keep_rotated"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_vl", "gemma3", "olmo2", "qwen3_fused_qkv"])
def test_whole_block(name: str, kept: bool) -> None:
    module, inputs = zoo.build(name, layers=2, dtype=BF16, device="cuda")
    config = FusionConfig(whole_block=True, keep_rotated=kept, expect={"norm_rope_attention": 2})
    compiler = FusionBackend(config, inner=eager)
    assert_step(torch.compile(module, backend=compiler, fullgraph=True), module, inputs, BF16)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_autocast(name: str, dtype: torch.dtype) -> None:
    """Weights in float32, as in mixed-precision training."""
    module, inputs = zoo.build(name, layers=2, device="cuda")
    compiler = FusionBackend(FusionConfig(strict=True), inner=eager)
    with torch.autocast("cuda", dtype):
        ours = step(torch.compile(module, backend=compiler, fullgraph=True), module, inputs)
        plain = eager_steps(module, inputs)
    exact = exact_step(copy.deepcopy(module).cpu(), to("cpu", inputs))
    assert_no_worse(to("cpu", ours), to("cpu", plain), exact, torch.finfo(dtype).eps)
