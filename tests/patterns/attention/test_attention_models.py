"""Attention in real models: every one found, its mask proved, its numbers those of the graph."""

from __future__ import annotations

from typing import Any

import attention_graphs as graphs
import pytest
import torch

from fusion_pass import zoo

transformers = pytest.importorskip("transformers")
pytest.importorskip("diffusers")

CAUSAL = {"causal": "top_left"}
WINDOW = {"causal": "top_left", "window_left": 7}

LANGUAGE: dict[str, dict[str, Any]] = {
    "llama": CAUSAL,
    "qwen3": CAUSAL,
    "gemma2": WINDOW,
    "gemma3": WINDOW,
    "gemma4": CAUSAL,
    "olmo2": CAUSAL,
    "llama4": CAUSAL,
    "gpt_oss": CAUSAL,
    "qwen3_next": CAUSAL,
    "deepseek_v3": CAUSAL,
    "gpt_neox": CAUSAL,
    "gptj": CAUSAL,
    "glm4": CAUSAL,
    "qwen2_vl": CAUSAL,
    "qwen3_vl": CAUSAL,
    "dinov3": {},
    "modernbert": {},
}
ONLY_EAGER = {"gemma2", "gpt_oss"}


def sites(name: str, attention: str | None, dynamic: bool | None = None, **inputs: Any) -> list[dict[str, Any]]:
    """The conditions of every site of one model, whose numbers are checked on the way."""
    model, given = zoo.build(name, attention=attention)
    found = []
    for module, values in graphs.capture(model, dynamic=dynamic, **{**given, **inputs}):
        for place in graphs.check(module, values):
            assert isinstance(place, graphs.Site), place.reason
            found.append(graphs.conditions(place))
    return found


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", LANGUAGE)
def test_language_model(name: str, attention: str) -> None:
    if attention == "sdpa" and name in ONLY_EAGER:
        pytest.skip("the model has no SDPA")
    assert sites(name, attention) == [LANGUAGE[name]]


@pytest.mark.parametrize(
    ("name", "expected"), [("flux", [{}, {}]), ("wan", [{}, {}]), ("sd3", [{}, {}]), ("cogvideox", [{}])]
)
def test_diffusion_model(name: str, expected: list[dict[str, Any]]) -> None:
    assert sites(name, None) == expected


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("name", "bias"),
    [
        ("bloom", "alibi_1.unflatten(0, (-1, 4))"),  # [B * H, 1, S]
        ("mpt", "position_bias"),  # [H, 1, S]
        ("falcon_rw", "truediv"),  # [B, H, 1, S], masked as a whole by the model
    ],
)
def test_bias_by_distance(name: str, bias: str, dynamic: bool | None) -> None:
    """ALiBi stays a small tensor, and causality is proved beside it."""
    assert sites(name, None, dynamic=dynamic) == [{"mask": bias, **CAUSAL}]


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_batch_and_heads_in_one_axis(dynamic: bool | None) -> None:
    """XGLM, which is not in the zoo: it raises its scores to a number that float64 has and its tensor has not."""
    sizes = {"d_model": 64, "ffn_dim": 64, "num_layers": 1, "attention_heads": 4, "vocab_size": 128}
    dropouts = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0}
    model = transformers.XGLMForCausalLM(transformers.XGLMConfig(**sizes, **dropouts))
    module, values = graphs.captured(model, dynamic=dynamic, input_ids=torch.randint(3, 128, (2, 24)), use_cache=False)
    (place,) = graphs.check(module, values)
    assert isinstance(place, graphs.Site), place.reason
    assert graphs.conditions(place) == CAUSAL


def test_bias_by_distance_in_a_padded_batch_is_refused() -> None:
    """Its rows may see no key. BLOOM counts positions of an input too."""
    model, inputs = zoo.build("mpt")
    padding = torch.tensor([[0] * 5 + [1] * 19, [1] * 24])
    ((module, _),) = graphs.capture(model, **inputs, attention_mask=padding)
    assert "hide keys by finite numbers, and a row may see no key" in graphs.refusal(module)


def test_masks_of_data_stay() -> None:
    found = sites("hunyuan_video", None)
    assert [set(conditions) for conditions in found] == [{"mask"}] * 3


@pytest.mark.parametrize(
    ("name", "attention", "expected"),
    [("qwen3", "sdpa", CAUSAL), ("gemma3", "sdpa", WINDOW), ("gemma2", "eager", WINDOW)],
)
def test_dynamic_shapes(name: str, attention: str, expected: dict[str, Any]) -> None:
    assert sites(name, attention, dynamic=True) == [expected]


POSITIONS = torch.cat([torch.arange(9), torch.arange(15)])[None].expand(2, -1).contiguous()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_become_segments(attention: str) -> None:
    assert sites("llama", attention, position_ids=POSITIONS) == [{"q_segment_ids": "packed_sequence_mask", **CAUSAL}]


def test_packed_documents_with_a_window() -> None:
    assert sites("gemma3", "sdpa", position_ids=POSITIONS) == [{"q_segment_ids": "packed_sequence_mask_1", **WINDOW}]


def test_padding_is_a_mask_of_one_row() -> None:
    padding = torch.tensor([[0] * 5 + [1] * 19, [1] * 24])
    ((conditions),) = sites("llama", "sdpa", attention_mask=padding)
    assert conditions == {"mask": "to_2", **CAUSAL}


def test_cache() -> None:
    assert sites("llama", "sdpa", use_cache=True) == [CAUSAL]
    assert sites("gemma3", "sdpa", use_cache=True) == [WINDOW]


def test_mask_of_the_caller_stays() -> None:
    assert sites("llama", "sdpa", attention_mask=torch.randn(2, 1, 24, 24)) == [{"mask": "l_kwargs_attention_mask_"}]


def test_layers_of_different_masks() -> None:
    model, inputs = zoo.build("gemma3", attention="sdpa", layers=4)
    ((module, _),) = graphs.capture(model, **inputs)
    found = [graphs.conditions(place) for place in graphs.places(module) if isinstance(place, graphs.Site)]
    assert found == [WINDOW, CAUSAL] * 2


def test_weights_that_the_caller_wants_are_refused() -> None:
    model, inputs = zoo.build("llama", attention="eager")
    found = [
        place
        for module, _ in graphs.capture(model, output_attentions=True, **inputs)
        for place in graphs.places(module)
    ]
    (refusal,) = found
    assert isinstance(refusal, graphs.Refusal)
    assert "are also read by" in refusal.reason
