"""A training step of every model of the zoo with every fusion at once, through SDPA and the model's own softmax: every
attention fused, loss and all gradients no worse than eager's own error against float64.

What each mask becomes is asserted in `tests/patterns/test_attention_models.py`; here are the numbers.
"""

from __future__ import annotations

import functools

import pytest
import torch
from compiling import as_it_is, eager
from test_every_model import GRAPH_BREAKS, ONE_SIZE, Combination, compare_outputs, compare_steps, shorter
from test_models import assert_no_worse, backend, exact_step, step

from fusion_pass import FusionBackend, FusionConfig, zoo

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

DIFFUSION = ("flux", "qwen_image", "sd3", "wan", "hunyuan_video", "cogvideox", "mochi", "sana", "cogview4")
OWN_CHOICE = (*DIFFUSION, "qwen3_fused_qkv")
"""Models without the choice: they call `scaled_dot_product_attention`."""
ONLY_EAGER = ("gemma2", "gpt_oss")

CASES = [(name, "sdpa") for name in zoo.names() if name not in OWN_CHOICE and name not in ONLY_EAGER]
CASES += [(name, "eager") for name in zoo.names() if name not in OWN_CHOICE]
CASES += [(name, "") for name in OWN_CHOICE]


@functools.cache
def exact_of(name: str) -> dict[str, torch.Tensor]:
    """The float64 step; the same for every way to write the attention."""
    return exact_step(*zoo.build(name))


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_training_step(name: str, attention: str) -> None:
    torch._dynamo.reset()
    module, inputs = zoo.build(name, attention=attention or None)
    compiler = backend(fusions=None)
    compiled = torch.compile(module, backend=compiler, fullgraph=name not in GRAPH_BREAKS)
    ours, plain = step(compiled, module, inputs), step(module, module, inputs)
    assert_no_worse(ours, plain, exact_of(name), torch.finfo(torch.float32).eps)
    attentions = [site for report in compiler.reports for site in report.sites if site.fusion == "attention"]
    assert attentions
    assert not [site.reason for site in attentions if site.status != "fused"]


OTHERS = (
    Combination(dynamic=False, training=False, dtype=torch.bfloat16),
    Combination(dynamic=True, training=True, dtype=torch.float32),
    Combination(dynamic=True, training=False, dtype=torch.bfloat16),
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", OTHERS, ids=str)
@pytest.mark.parametrize(("name", "attention"), CASES)
def test_other_settings(name: str, attention: str, how: Combination) -> None:
    """The same with symbolic shapes, at two lengths, and without gradients."""
    torch._dynamo.reset()
    module, inputs = zoo.build(name, dtype=how.dtype, attention=attention or None)
    module.train(how.training)
    compiler = FusionBackend(FusionConfig(allow_reference=True), inner=as_it_is if how.dynamic else eager)
    compiled = torch.compile(module, backend=compiler, fullgraph=name not in GRAPH_BREAKS, dynamic=how.dynamic)
    compare = compare_steps if how.training else compare_outputs
    if how.dynamic and name not in ONE_SIZE:
        compare(compiled, module, shorter(name, inputs), how.dtype)
    compare(compiled, module, inputs, how.dtype)
    attentions = [site for report in compiler.reports for site in report.sites if site.fusion == "attention"]
    assert attentions
    assert not [site.reason for site in attentions if site.status != "fused"]
