"""Padded batches of transformers: every row has eager's numbers, the padding's own rows too.

A row of padding on the left sees no key. Through SDPA the mask is boolean and PyTorch gives 0; the eager attention adds
finfo.min, and its softmax gives the mean of all values, keys of the future included (docs/masks.md).
"""

from __future__ import annotations

import pytest
import torch
from training_steps import assert_no_worse, backend, exact_step, step

from fusion_pass import zoo

pytest.importorskip("transformers")

PADDING = {
    "left": [[0] * 7 + [1] * 17, [1] * 24],
    "right": [[1] * 17 + [0] * 7, [1] * 24],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("side", PADDING)
@pytest.mark.parametrize(("name", "attention"), [("qwen3", "sdpa"), ("qwen3", "eager"), ("gemma2", "eager")])
def test_training_step(name: str, attention: str, side: str, dtype: torch.dtype) -> None:
    """The loss reads every row. gemma2 has a window and a soft cap."""
    torch._dynamo.reset()
    module, inputs = zoo.build(name, attention=attention, dtype=dtype)
    inputs = {**inputs, "attention_mask": torch.tensor(PADDING[side])}
    compiler = backend(fusions=None, expect={"attention": 1, "qk_norm_rope": 1})
    ours = step(torch.compile(module, backend=compiler, fullgraph=True), module, inputs)
    plain, exact = step(module, module, inputs), exact_step(module, inputs)
    assert_no_worse(ours, plain, exact, torch.finfo(dtype).eps)
    (site,) = (site for site in compiler.reports[-1].fused if site.fusion == "attention")
    assert "mask" in site.arguments
    by_numbers = attention == "eager"
    assert (site.arguments["causal"] == "none") == by_numbers
    assert site.arguments["mask"].startswith("bool") != by_numbers
