"""Every model of the zoo builds, runs, and is what its docstring says."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.utils import _pytree as pytree

from fusion_pass import zoo
from fusion_pass.zoo.oracle import float64_call


def output(model: torch.nn.Module, inputs: zoo.Inputs) -> torch.Tensor:
    return next(leaf for leaf in pytree.tree_leaves(model(**inputs)) if isinstance(leaf, torch.Tensor))


@pytest.mark.parametrize("name", zoo.names())
def test_runs_forward_and_backward(name: str) -> None:
    model, inputs = zoo.build(name, layers=2, dtype=torch.bfloat16)
    result = output(model, inputs)
    assert result.isfinite().all()
    torch.testing.assert_close(result, output(model, inputs), rtol=0, atol=0)  # no dropout, though in training mode
    result.float().square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters() if p.is_floating_point())


@pytest.mark.parametrize("name", ["qwen3", "qwen3_vl", "flux", "dinov3", "qwen3_fused_qkv"])
def test_seed_decides_the_model_and_the_random_state_stays(name: str) -> None:
    before = torch.random.get_rng_state()
    first, again, other = (output(*zoo.build(name, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", ["gemma3", "llama4", "glm4v", "modernbert"])
def test_attention_implementations_agree(name: str) -> None:
    sdpa = output(*zoo.build(name, layers=2, attention="sdpa"))
    eager = output(*zoo.build(name, layers=2, attention="eager"))
    torch.testing.assert_close(sdpa, eager)


def test_norm_weights_of_q_and_k_differ() -> None:
    model, _ = zoo.build("qwen3")
    attention = model.model.layers[0].self_attn
    assert (attention.q_norm.weight - attention.k_norm.weight).abs().max() > 1e-2


def test_mrope_rows_differ() -> None:
    _, inputs = zoo.build("qwen3_vl")
    time, height, width = inputs["position_ids"]
    assert not torch.equal(time, height)
    assert not torch.equal(height, width)
    assert not torch.equal(time, width)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "qwen9"}, "name is 'qwen9', which the zoo does not have; take one of llama, qwen3"),
        ({"name": "qwen3", "layers": 0}, "layers is 0; take 1 or more"),
        ({"name": "qwen3", "attention": "flash"}, "attention is 'flash'; take 'sdpa' or 'eager', or leave it out"),
        ({"name": "flux", "attention": "eager"}, "attention is 'eager', but 'flux' always calls SDPA"),
    ],
)
def test_errors_name_the_argument(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zoo.build(**arguments)


def test_without_the_extra() -> None:
    """Without transformers the names are listed, the own model is built, and the error says what to install."""
    program = """
import sys
sys.modules["transformers"] = sys.modules["diffusers"] = None
from fusion_pass import zoo
from fusion_pass.zoo.oracle import float64_call
assert "qwen3" in zoo.names()
zoo.build("qwen3_fused_qkv")
for name in ("qwen3", "qwen3_vl", "dinov3", "flux"):
    try:
        zoo.build(name)
    except ModuleNotFoundError as error:
        assert "fusion-pass[zoo]" in str(error), error
    else:
        raise SystemExit(f"{name} was built")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "llama4", "qwen3_vl", "gpt_oss"])
def test_oracle_is_exact_beyond_float32(name: str) -> None:
    """Twice the float64 answer, from inputs that differ by less than float32 resolves: the outputs must differ too."""
    model, inputs = zoo.build(name)
    model = model.double()
    ids = inputs.pop("input_ids")
    embedded = model.get_input_embeddings()(ids).detach()
    nudged = embedded * (1 + 1e-10)
    first, second = (
        next(leaf for leaf in pytree.tree_leaves(float64_call(model, {**inputs, "inputs_embeds": e})[1]))
        for e in (embedded, nudged)
    )
    assert first.dtype == torch.float64
    difference = (first - second).norm() / first.norm()
    assert 0 < difference < 1e-8
