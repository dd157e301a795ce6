"""A training step of the models of the zoo with every fusion at once and the softmax of attention written out: every
attention fused, loss and all gradients no worse than eager's own error against float64.

Through SDPA, which the models take by themselves where they can, it is a case of `test_every_model.py`
(`WITH_ATTENTION`). What each mask becomes is asserted in
`tests/patterns/attention/test_attention_models.py`; here are the numbers.
"""

from __future__ import annotations

import pytest
import torch
from compiling import as_it_is, eager
from every_model import (
    GRAPH_BREAKS,
    ONE_SIZE,
    Combination,
    assert_every_attention_fused,
    compare_outputs,
    compare_steps,
    shorter,
)
from training_steps import backend

from fusion_pass import FusionBackend, FusionConfig, zoo

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

DIFFUSION = ("flux", "qwen_image", "sd3", "wan", "hunyuan_video", "cogvideox", "mochi", "sana", "cogview4")
OWN_CHOICE = (*DIFFUSION, "qwen3_fused_qkv")
"""Models without the choice: they call `scaled_dot_product_attention`."""
ONLY_EAGER = ("gemma2", "gpt_oss", "bloom", "mpt")
ONLY_SDPA = ("falcon_rw",)
"""Written out it adds ALiBi twice, once in the mask: two masks of data."""

WRITTEN_OUT = [name for name in zoo.names() if name not in (*OWN_CHOICE, *ONLY_EAGER, *ONLY_SDPA)]
"""Models that call SDPA by themselves and can also write the softmax out."""

CASES = [(name, attention) for name in WRITTEN_OUT for attention in ("sdpa", "eager")]
CASES += [(name, "eager") for name in ONLY_EAGER] + [(name, "sdpa") for name in ONLY_SDPA]
CASES += [(name, "") for name in OWN_CHOICE]


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_training_step_written_out(name: str) -> None:
    torch._dynamo.reset()
    module, inputs = zoo.build(name, attention="eager")
    compiler = backend(fusions=None)
    compiled = torch.compile(module, backend=compiler, fullgraph=name not in GRAPH_BREAKS)
    compare_steps(compiled, module, inputs, torch.float32)
    assert_every_attention_fused(compiler.reports)


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
    assert_every_attention_fused(compiler.reports)
