"""Real models of transformers and diffusers: what is found in each, exact in float64 (`exactness.py`)."""

from __future__ import annotations

import pytest
import torch
from exactness import assert_exact, capture, find

from fusion_pass import zoo
from fusion_pass.patterns.norm_rope.unrotated import NOT_ROTATED

pytest.importorskip("transformers")

# model -> (sites by operator, norm, pairing, rotary_dim, rotary_start)
PLAIN = {
    "llama": ("none", "halves", 16),
    "qwen3": ("rms", "halves", 16),
    "gemma2": ("none", "halves", 16),
    "gemma3": ("rms_one_plus", "halves", 16),
    "gemma4": ("rms", "halves", 16),
    "olmo2": ("rms", "halves", 16),
    "llama4": ("rms", "adjacent", 16),
    "gpt_oss": ("none", "halves", 16),
    "qwen3_next": ("rms_one_plus", "halves", 4),
    "glm4_moe": ("rms", "halves", 8),
    "ernie4_5": ("none", "adjacent", 16),
    "gptj": ("none", "adjacent", 8),
    "glm4": ("none", "adjacent", 8),
    "qwen2_vl": ("none", "halves", 16),
    "qwen2_5_vl": ("none", "halves", 16),
    "glm4v": ("none", "adjacent", 16),
    "ernie4_5_vl": ("none", "adjacent", 16),
    "qwen3_vl": ("rms", "halves", 16),
    "qwen3_5": ("rms_one_plus", "halves", 4),
    "dinov3": ("none", "halves", 16),
}
PACKED = {
    "gpt_neox": ("none", "halves", 4),
    "modernbert": ("none", "halves", 16),
    "qwen3_fused_qkv": ("rms", "halves", 16),
}


def sites(name: str, grad: bool = True, dynamic: bool | None = None, **options):
    model, inputs = zoo.build(name, **options)
    with torch.set_grad_enabled(grad):
        module, actual = capture(model, dynamic=dynamic, **inputs)
    found, refusals = find(module)
    assert_exact(module, actual, found)
    return found, refusals


def summary(site) -> tuple[object, ...]:
    options = site.call.options
    return options.get("norm"), options["pairing"], options["rotary_dim"]


@pytest.mark.parametrize("name", PLAIN)
def test_separate_projections(name):
    found, refusals = sites(name, layers=1)
    assert not refusals
    assert [(s.fusion, summary(s)) for s in found] == [("qk_norm_rope", PLAIN[name])]


@pytest.mark.parametrize("name", PACKED)
def test_packed_projection(name):
    """One gradient buffer in training; views in inference, where v must not be copied."""
    found, refusals = sites(name)
    assert not refusals
    assert [(s.fusion, summary(s)) for s in found] == [("qkv_norm_rope", PACKED[name])]
    found, refusals = sites(name, grad=False)
    assert not refusals
    assert [(s.fusion, summary(s)) for s in found] == [("qk_norm_rope", PACKED[name])]


def test_wan_rotates_attention_to_the_image_and_not_that_to_the_text():
    (site,), (refusal,) = sites("wan")
    assert (site.fusion, summary(site)) == ("qk_norm_rope", ("rms", "adjacent", 24))
    assert refusal.reason == NOT_ROTATED


def test_olmo2_normalises_all_heads_together():
    (site,), _ = sites("olmo2")
    assert site.call.options["norm_scope"] == "hidden"


def test_llama4_normalises_after_the_rotation():
    (site,), _ = sites("llama4")
    assert site.call.options["norm_first"] is False


def test_deepseek_rotates_q_and_k_at_different_lanes():
    found, refusals = sites("deepseek_v3")
    assert not refusals
    assert {(s.fusion, s.call.options["rotary_start"], s.call.options["pairing"]) for s in found} == {
        ("rope", 0, "adjacent_to_halves"),
        ("rope", 16, "adjacent_to_halves"),
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("flux", {("qk_norm_rope", "none"), ("qk_norm_rope", "rms")}),
        ("qwen_image", {("qk_norm_rope", "rms")}),
        ("hunyuan_video", {("qk_norm_rope", "rms"), ("rope", "none")}),
    ],
)
def test_joint_attention(name, expected):
    """Streams that are normalised before they are concatenated keep their norms; the rotation of the whole is fused.

    Where the rotated image tokens of q are joined with text before those of k are cut out (HunyuanVideo), each is a
    call of its own.
    """
    found, refusals = sites(name)
    assert not refusals
    assert {(s.fusion, s.call.options.get("norm", "none")) for s in found} == expected


@pytest.mark.parametrize(
    ("name", "reason"),
    [("cogvideox", "written back"), ("cogview4", "written back"), ("mochi", "differ between heads")],
)
def test_refused(name, reason):
    found, refusals = sites(name)
    assert not found
    assert refusals
    assert all(reason in r.reason for r in refusals)


@pytest.mark.parametrize("name", ["qwen3", "olmo2", "gemma3", "qwen3_vl"])
def test_dynamic_shapes(name):
    found, refusals = sites(name, dynamic=True)
    assert not refusals
    assert [s.fusion for s in found] == ["qk_norm_rope"]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_vl", "wan"])
def test_layers_repeat(name):
    """Verdicts taken over from another layer are as exact as the first, and name the layer's own nodes."""
    found, refusals = sites(name, layers=3)
    assert {r.reason for r in refusals} == ({NOT_ROTATED} if name == "wan" else set())
    assert len(found) == 3
    assert len({s.layer for s in found}) == 3
    assert len({s.call.tensors["q"].node for s in found}) == len({s.call.tensors["q_weight"].node for s in found}) == 3


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "olmo2", "llama4", "qwen3_vl"])
@pytest.mark.parametrize("decomposed", [False, True], ids=("exported", "decomposed"))
def test_aten_graphs(name, decomposed):
    """The same sites in the graphs of `torch.export`, before and after decomposition to core ATen."""
    model, inputs = zoo.build(name)
    program = torch.export.export(model, (), inputs, strict=False)
    found, refusals = find(program.run_decompositions().graph_module if decomposed else program.graph_module)
    assert not refusals
    assert [(s.fusion, summary(s)) for s in found] == [("qk_norm_rope", PLAIN[name])]
