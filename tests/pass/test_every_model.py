"""Every model of the zoo with norm + rotation fused: what is found, and numbers no worse than eager's.

A model is captured with fixed and with symbolic shapes (`dynamic=True`), to train and to infer, in float32 and in
bfloat16. `make test` runs four of the eight combinations, chosen so that every pair of settings occurs (the one of
dynamic inference for some models only); the others are marked exhaustive. One of the four, `WITH_ATTENTION`, has
attention fused too: `test_attention_every_model.py` has the other ways to write it. What the kernels do is the same in
all: here they are the reference, so an error is one of the pass.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from compiling import as_it_is, eager
from every_model import (
    FOUND,
    GRAPH_BREAKS,
    ONE_SIZE,
    Combination,
    assert_every_attention_fused,
    assert_found,
    compare_outputs,
    compare_steps,
    expected,
    shorter,
)
from training_steps import NORM_AND_ROTATION

from fusion_pass import FusionBackend, FusionConfig, zoo

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

IN_MAKE_TEST = {
    Combination(False, True, torch.float32),
    Combination(False, False, torch.bfloat16),
    Combination(True, True, torch.bfloat16),
    Combination(True, False, torch.float32),
}
"""Any two settings of two of the three columns stand in one row."""

WITH_ATTENTION = Combination(dynamic=False, training=True, dtype=torch.float32)
"""Every fusion at once: one compilation serves norm, rotation and attention."""

DYNAMIC_INFERENCE = (
    "qwen3",
    "qwen3_vl",
    "deepseek_v3",
    "gpt_neox",
    "modernbert",
    "qwen3_fused_qkv",
    "dinov3",
    "flux",
)
"""One model of each form. In the others this graph is that of dynamic training, which alone has gradients."""

COSTLY = ("mochi", "qwen2_vl_vision", "qwen2_5_vl_vision", "qwen3_vl_vision")
"""Dynamic training of these is many graphs: left to `make test-exhaustive`."""

ALL = [Combination(*row) for row in product((False, True), (True, False), (torch.float32, torch.bfloat16))]


def cases() -> list[Any]:
    found = []
    for name, how in product(zoo.names(), ALL):
        without_need = how.dynamic and (name in COSTLY if how.training else name not in DYNAMIC_INFERENCE)
        left_out = how not in IN_MAKE_TEST or without_need
        found.append(pytest.param(name, how, id=f"{name}-{how}", marks=pytest.mark.exhaustive if left_out else ()))
    return found


@pytest.mark.parametrize(("name", "how"), cases())
def test_every_model(name: str, how: Combination) -> None:
    module, inputs = zoo.build(name, dtype=how.dtype)
    module.train(how.training)
    # AOTAutograd traces forward and backward of the operators with fixed shapes here; with symbolic ones
    # `test_models.py` has it trace one model for each operator, because it takes four times as long.
    fusions = None if how == WITH_ATTENTION else NORM_AND_ROTATION
    config = FusionConfig(allow_reference=True, fusions=fusions)
    compiler = FusionBackend(config, inner=as_it_is if how.dynamic else eager)
    compiled = torch.compile(module, backend=compiler, fullgraph=name not in GRAPH_BREAKS, dynamic=how.dynamic)
    compare = compare_steps if how.training else compare_outputs

    if how.dynamic and name not in ONE_SIZE:
        # First, because height and width of an image that start as one number stay one (Dynamo's "duck sizing").
        compare(compiled, module, shorter(name, inputs), how.dtype)
    compare(compiled, module, inputs, how.dtype)
    # Of both lengths together: had the second been compiled again, it would be twice as much.
    assert_found(compiler.reports, expected(name, how))
    if how == WITH_ATTENTION:
        assert_every_attention_fused(compiler.reports)


def test_the_table_has_every_model() -> None:
    assert tuple(sorted(FOUND)) == tuple(sorted(zoo.names()))
