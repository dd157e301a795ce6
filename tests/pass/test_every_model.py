"""A training step of every model of the zoo with norm + rotation fused: loss and all gradients no worse than eager's.

What is found in which model is asserted in `tests/patterns/test_norm_rope_models.py`; here are the numbers.
"""

from __future__ import annotations

import pytest
import torch
from test_models import ONE_SITE_PER_LAYER, assert_no_worse, backend, exact_step, step

from fusion_pass import zoo

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

GRAPH_BREAKS = ("qwen2_vl_vision", "qwen2_5_vl_vision", "qwen3_vl_vision", "mochi")
"""Captured as several graphs: lengths read from a tensor decide how the model runs."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in zoo.names() if name not in ONE_SITE_PER_LAYER])
def test_training_step(name: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    module, inputs = zoo.build(name, dtype=dtype)
    compiled = torch.compile(module, backend=backend(), fullgraph=name not in GRAPH_BREAKS)
    ours, plain, exact = step(compiled, module, inputs), step(module, module, inputs), exact_step(module, inputs)
    assert_no_worse(ours, plain, exact, torch.finfo(dtype).eps)
