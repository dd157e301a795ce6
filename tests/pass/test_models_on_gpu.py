"""Unedited models on a GPU, through Inductor and the kernels of one back end: a training step no worse than eager's own
error against float64 on the CPU."""

from __future__ import annotations

import pytest
import torch
from test_models import assert_no_worse, exact_step, step

import fusion_pass
from fusion_pass import FusionConfig, zoo

pytestmark = pytest.mark.gpu

NORM_AND_ROTATION = ("qkv_norm_rope", "qk_norm_rope", "norm_rope", "rope")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "kernel"),
    [(name, "triton") for name in ("qwen3", "qwen3_vl", "gemma3", "olmo2", "qwen3_fused_qkv")]
    + [(name, "cuda") for name in ("qwen3", "qwen3_vl", "gemma3", "qwen3_fused_qkv")],
)
def test_training_step(name: str, kernel: str, dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch._dynamo.reset()
    on_cpu, inputs = zoo.build(name, layers=2, dtype=dtype)
    on_gpu, gpu_inputs = zoo.build(name, layers=2, dtype=dtype, device="cuda")
    config = FusionConfig(expect=2, fusions=NORM_AND_ROTATION, kernels=(kernel,))
    compiled = torch.compile(on_gpu, backend=fusion_pass.backend(config), fullgraph=True)
    ours, plain = step(compiled, on_gpu, gpu_inputs), step(on_gpu, on_gpu, gpu_inputs)
    exact = exact_step(on_cpu, inputs)
    assert_no_worse(
        {key: value.cpu() for key, value in ours.items()},
        {key: value.cpu() for key, value in plain.items()},
        exact,
        torch.finfo(dtype).eps,
    )
