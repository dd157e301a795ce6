"""Unedited models through the pass: every layer fused, loss and all gradients no worse than eager's own error against
float64."""

from __future__ import annotations

import pytest
import torch
from compiling import CountingCompiler, eager, recomputing
from training_steps import NORM_AND_ROTATION, assert_no_worse, backend, exact_step, loss_of, step, terms_of

from fusion_pass import FusionBackend, FusionConfig, zoo
from fusion_pass.zoo.oracle import float64_call

ONE_SITE_PER_LAYER = ("qwen3", "gemma3", "olmo2", "qwen3_vl", "glm4", "qwen3_fused_qkv")


@pytest.mark.parametrize("name", ONE_SITE_PER_LAYER)
def test_training_step(name: str) -> None:
    """Two layers; `test_every_model.py` has one layer of all models, and the other settings."""
    module, inputs = zoo.build(name, layers=2, dtype=torch.bfloat16)
    compiler = backend(recomputing, expect=2)
    compiled = torch.compile(module, backend=compiler, fullgraph=True)
    ours, plain, exact = step(compiled, module, inputs), step(module, module, inputs), exact_step(module, inputs)
    assert_no_worse(ours, plain, exact, torch.finfo(torch.bfloat16).eps)
    assert len(compiler.reports) == 1
    layers = [site.layer for site in compiler.reports[0].fused]
    assert len(set(layers)) == 2, layers


@pytest.mark.parametrize(
    ("name", "dtype", "expect"),
    [
        ("qwen3", torch.bfloat16, {"qk_norm_rope": 1}),
        ("qwen3_vl", torch.float32, {"qk_norm_rope": 1}),
        ("qwen3_fused_qkv", torch.float32, {"qkv_norm_rope": 1}),
        ("deepseek_v3", torch.bfloat16, {"rope": 2}),
    ],
)
def test_training_step_traced_with_symbolic_shapes(name: str, dtype: torch.dtype, expect: dict[str, int]) -> None:
    """AOTAutograd traces forward and backward of each operator; a capture takes ten seconds."""
    module, inputs = zoo.build(name, dtype=dtype)
    compiler = backend(expect=expect)
    compiled = torch.compile(module, backend=compiler, fullgraph=True, dynamic=True)
    ours, plain, exact = step(compiled, module, inputs), step(module, module, inputs), exact_step(module, inputs)
    assert_no_worse(ours, plain, exact, torch.finfo(dtype).eps)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_training_step_with_every_fusion(dynamic: bool) -> None:
    module, inputs = zoo.build("qwen3", layers=2)
    compiler = backend(recomputing, fusions=None, verify=True, expect={"qk_norm_rope": 2, "attention": 2})
    compiled = torch.compile(module, backend=compiler, fullgraph=True, dynamic=dynamic)
    ours, plain, exact = step(compiled, module, inputs), step(module, module, inputs), exact_step(module, inputs)
    assert_no_worse(ours, plain, exact, torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_inference(dtype: torch.dtype) -> None:
    module, inputs = zoo.build("qwen3", layers=2, dtype=dtype)
    module.eval()
    with torch.no_grad():
        ours = terms_of(torch.compile(module, backend=backend(expect=2), fullgraph=True)(**inputs))
        plain = terms_of(module(**inputs))
    exact = terms_of(float64_call(module, inputs)[1]).detach()
    assert_no_worse({"out": ours}, {"out": plain}, {"out": exact}, torch.finfo(dtype).eps)


def test_activation_checkpoints() -> None:
    module, inputs = zoo.build("qwen3", layers=2)
    plain, exact = step(module, module, inputs), exact_step(module, inputs)
    module.gradient_checkpointing_enable({"use_reentrant": False})
    counted = CountingCompiler()
    compiler = FusionBackend(FusionConfig(allow_reference=True, fusions=NORM_AND_ROTATION, expect=2), inner=counted)
    ours = step(torch.compile(module, backend=compiler, fullgraph=True), module, inputs)
    assert_no_worse(ours, plain, exact, torch.finfo(torch.float32).eps)
    assert counted.forward["fusion_pass.qk_norm_rope.default"] == 2
    assert counted.backward["fusion_pass.qk_norm_rope.default"] >= 1, "nothing was recomputed"


def test_autocast() -> None:
    module, inputs = zoo.build("qwen3", layers=2)
    compiler = backend(expect=2, verify=True)
    with torch.autocast("cpu", torch.bfloat16):
        ours = step(torch.compile(module, backend=compiler, fullgraph=True), module, inputs)
        plain = step(module, module, inputs)
    assert_no_worse(ours, plain, exact_step(module, inputs), torch.finfo(torch.bfloat16).eps)


def test_frozen_weights_cost_no_gradient() -> None:
    """As with LoRA: norm weights are frozen, so nobody computes their gradient."""
    module, inputs = zoo.build("qwen3", layers=2)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.endswith("_norm.weight"))
    counted = CountingCompiler()
    compiler = FusionBackend(FusionConfig(allow_reference=True, fusions=NORM_AND_ROTATION, expect=2), inner=counted)
    ours = step(torch.compile(module, backend=compiler, fullgraph=True), module, inputs)
    plain, exact = step(module, module, inputs), exact_step(module, inputs)
    assert not any(name.endswith("_norm.weight") for name in ours)
    assert_no_worse(ours, plain, exact, torch.finfo(torch.float32).eps)


def test_dynamic_lengths_share_one_graph_and_a_changed_eps_recompiles() -> None:
    module, inputs = zoo.build("qwen3", layers=2)
    compiler = backend(expect=2)
    compiled = torch.compile(module, backend=compiler, fullgraph=True, dynamic=True)
    for tokens in (24, 17, 20, 13):
        shorter = {**inputs, "input_ids": inputs["input_ids"][:, :tokens].clone()}
        torch.testing.assert_close(loss_of(compiled(**shorter)), loss_of(module(**shorter)), rtol=1e-5, atol=1e-7)
        assert len(compiler.reports) == 1
    for layer in module.modules():
        if hasattr(layer, "variance_epsilon"):
            layer.variance_epsilon = 0.01
    torch.testing.assert_close(loss_of(compiled(**inputs)), loss_of(module(**inputs)), rtol=1e-5, atol=1e-7)
    assert [report.sites[0].arguments["eps"] for report in compiler.reports] == [1e-6, 0.01]


def test_two_kinds_of_model_in_one_process() -> None:
    compiler = backend(expect=1)
    for name in ("qwen3", "gemma3"):
        module, inputs = zoo.build(name)
        compiled = torch.compile(module, backend=compiler, fullgraph=True)
        torch.testing.assert_close(loss_of(compiled(**inputs)), loss_of(module(**inputs)), rtol=1e-5, atol=1e-7)
    assert [report.sites[0].arguments["norm"] for report in compiler.reports] == ["rms", "rms_one_plus"]


@pytest.mark.parametrize("name", ONE_SITE_PER_LAYER)
def test_verify_accepts(name: str) -> None:
    module, inputs = zoo.build(name, dtype=torch.bfloat16)
    torch.compile(module, backend=backend(expect=1, verify=True), fullgraph=True)(**inputs)


def test_without_a_kernel_the_model_is_left_alone_with_a_reason() -> None:
    module, inputs = zoo.build("qwen3")
    compiler = FusionBackend(FusionConfig(fusions=NORM_AND_ROTATION), inner=eager)
    compiled = torch.compile(module, backend=compiler, fullgraph=True)
    torch.testing.assert_close(loss_of(compiled(**inputs)), loss_of(module(**inputs)))
    (site,) = compiler.reports[0].sites
    assert (site.status, site.fusion) == ("skipped", "qk_norm_rope")
    assert site.reason.startswith("No kernel for cpu: ")


def test_a_named_kernel_that_cannot_run_raises() -> None:
    module, inputs = zoo.build("qwen3")
    compiler = FusionBackend(FusionConfig(fusions=NORM_AND_ROTATION, kernels=("ascend",)), inner=eager)
    with pytest.raises(Exception, match="kernels=ascend was asked for, but cannot serve qk_norm_rope"):
        torch.compile(module, backend=compiler, fullgraph=True)(**inputs)


@pytest.mark.slow
@pytest.mark.parametrize("hook", [False, True], ids=["backend", "inductor_options"])
def test_with_inductor(hook: bool) -> None:
    import fusion_pass

    module, inputs = zoo.build("qwen3", layers=2)
    config = FusionConfig(allow_reference=True, fusions=NORM_AND_ROTATION, expect=2)
    how = {"options": fusion_pass.inductor_options(config)} if hook else {"backend": fusion_pass.backend(config)}
    ours = step(torch.compile(module, fullgraph=True, **how), module, inputs)
    assert_no_worse(ours, step(module, module, inputs), exact_step(module, inputs), torch.finfo(torch.float32).eps)
