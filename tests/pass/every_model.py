"""What is found in each model of the zoo, how its inputs are made shorter, and how its numbers are compared: for the
tests that run all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from training_steps import assert_no_worse, eager_steps, exact_step, step

from fusion_pass import zoo
from fusion_pass.patterns.norm_rope.unrotated import NOT_ROTATED
from fusion_pass.report import Report, merged
from fusion_pass.zoo.oracle import float64_call

WRITTEN_BACK = (
    "The rotation is written back into the tensor it was cut from, whose other tokens are normalised but not rotated."
)
TABLE_PER_HEAD = "The tables differ between heads; the operator takes one table for all heads."
NO_ROTATION = f"qk_norm_rope: {NOT_ROTATED}"


@dataclass(frozen=True)
class Found:
    """What one layer of a model has: fused sites by operator, and how often each reason leaves a place alone."""

    sites: Mapping[str, int] = field(default_factory=dict)
    reasons: Mapping[str, int] = field(default_factory=dict)


ONE_PAIR = Found({"qk_norm_rope": 1})
PACKED = Found({"qkv_norm_rope": 1})

# A new refusal, or one that is gone, shows here.
FOUND = {
    "llama": ONE_PAIR,
    "qwen3": ONE_PAIR,
    "gemma2": ONE_PAIR,
    "gemma3": ONE_PAIR,
    "gemma4": ONE_PAIR,
    "olmo2": ONE_PAIR,
    "llama4": ONE_PAIR,
    "gpt_oss": ONE_PAIR,
    "qwen3_next": ONE_PAIR,
    "deepseek_v3": Found({"rope": 2}),  # q and k are rotated at different lanes
    "glm4_moe": ONE_PAIR,
    "ernie4_5": ONE_PAIR,
    "gpt_neox": PACKED,
    "gptj": ONE_PAIR,
    "glm4": ONE_PAIR,
    "bloom": Found(),  # ALiBi: attention alone
    "mpt": Found(),
    "falcon_rw": Found(),
    "qwen2_vl": ONE_PAIR,
    "qwen2_5_vl": ONE_PAIR,
    "glm4v": ONE_PAIR,
    "ernie4_5_vl": ONE_PAIR,
    "qwen3_vl": ONE_PAIR,
    "qwen3_5": ONE_PAIR,
    "qwen2_vl_vision": ONE_PAIR,
    "qwen2_5_vl_vision": ONE_PAIR,
    "qwen3_vl_vision": ONE_PAIR,
    "dinov3": ONE_PAIR,
    "modernbert": PACKED,
    "flux": Found({"qk_norm_rope": 2}),  # one block of each kind
    "qwen_image": Found({"qk_norm_rope": 2}),  # two streams
    "sd3": Found(reasons={NO_ROTATION: 2}),  # the last block of two has no text stream
    "wan": Found({"qk_norm_rope": 1}, {NO_ROTATION: 1}),  # attention to the image, and to the text
    "hunyuan_video": Found({"qk_norm_rope": 1, "rope": 2}),  # one stream reads the rotated q before k is cut out
    "cogvideox": Found(reasons={f"norm_rope: {WRITTEN_BACK}": 2}),
    "mochi": Found(reasons={f"norm_rope: {TABLE_PER_HEAD}": 1}),  # q and k are rotated by one graph
    "sana": Found(reasons={NO_ROTATION: 2}),
    "cogview4": Found(reasons={f"norm_rope: {WRITTEN_BACK}": 2}),
    "qwen3_fused_qkv": PACKED,
}

GRAPH_BREAKS = ("qwen2_vl_vision", "qwen2_5_vl_vision", "qwen3_vl_vision", "mochi")
"""Captured as several graphs: lengths read from a tensor decide how the model runs."""


# --- another length -------------------------------------------------------------------------------------------------

Change = Callable[[Any], Any]


def _first(count: int, axis: int) -> Change:
    return lambda tensor: tensor.narrow(axis, 0, count).clone(memory_format=torch.contiguous_format)


_IMAGE = {"hidden_states": _first(6, -2)}
"""Six rows of pixels in the place of eight."""

SHORTER: dict[str, Mapping[str, Change]] = {
    "flux": {"hidden_states": _first(12, 1), "img_ids": _first(12, 0)},
    "qwen_image": {"hidden_states": _first(12, 1), "img_shapes": lambda _: [(1, 3, 4)]},
    "sd3": _IMAGE,
    "wan": _IMAGE,
    "hunyuan_video": {"hidden_states": _first(3, -2)},
    "cogvideox": {**_IMAGE, "image_rotary_emb": lambda tables: tuple(map(_first(24, 0), tables))},
    "mochi": _IMAGE,
    "sana": _IMAGE,
    "cogview4": _IMAGE,
    "dinov3": {"pixel_values": _first(24, -2)},
    "qwen2_vl_vision": {"hidden_states": _first(48, 0), "grid_thw": lambda _: torch.tensor([[1, 4, 8], [1, 2, 8]])},
    "qwen2_5_vl_vision": {"hidden_states": _first(48, 0), "grid_thw": lambda _: torch.tensor([[1, 6, 8]])},
    "qwen3_vl_vision": {"hidden_states": _first(48, 0), "grid_thw": lambda _: torch.tensor([[1, 6, 8]])},
}
"""How inputs are cut to fewer tokens. The models that are not listed take token ids and positions, cut at their end."""

ONE_SIZE = ("qwen_image", "sana")
"""These compute their sizes in Python from `img_shapes` or the config, so Dynamo fixes them whatever the pass does."""


def shorter(name: str, inputs: zoo.Inputs) -> zoo.Inputs:
    if name in SHORTER:
        return {**inputs, **{key: change(inputs[key]) for key, change in SHORTER[name].items()}}
    return {key: _first(17, -1)(x) if isinstance(x, torch.Tensor) else x for key, x in inputs.items()}


# --- the sweep ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Combination:
    dynamic: bool
    training: bool
    dtype: torch.dtype

    def __str__(self) -> str:
        shapes, mode = ("static", "dynamic")[self.dynamic], ("inference", "training")[self.training]
        return f"{shapes}-{mode}-{str(self.dtype).removeprefix('torch.')}"


def expected(name: str, how: Combination) -> Found:
    if name == "mochi" and how.dynamic:
        return Found()  # its rotation is a graph of its own, and in that even head_dim is symbolic
    found = FOUND[name]
    if how.training or "qkv_norm_rope" not in found.sites:
        return found
    # Without a gradient the parts of a packed projection are views: q and k are read where they lie.
    return Found({"qk_norm_rope": found.sites["qkv_norm_rope"]}, found.reasons)


def assert_found(reports: Iterable[Report], wanted: Found) -> None:
    """Over all graphs of the model, norm and rotation."""
    found = merged(reports)
    print(found)  # what is fused, and why the rest is not: shown by `pytest -rP`
    counts = {fusion: count for fusion, count in found.counts.items() if fusion != "attention"}
    reasons = {reason: count for reason, count in found.reasons.items() if not reason.startswith("attention: ")}
    assert (counts, reasons) == (wanted.sites, wanted.reasons)


def assert_every_attention_fused(reports: Iterable[Report]) -> None:
    """At least one, and none is left alone."""
    attentions = [site for report in reports for site in report.sites if site.fusion == "attention"]
    assert attentions
    assert not [site.reason for site in attentions if site.status != "fused"]


def compare_steps(compiled: Any, module: nn.Module, inputs: zoo.Inputs, dtype: torch.dtype) -> None:
    """Loss and all gradients of one training step."""
    ours = step(compiled, module, inputs)
    assert_no_worse(ours, eager_steps(module, inputs), exact_step(module, inputs), torch.finfo(dtype).eps)


def compare_outputs(compiled: Any, module: nn.Module, inputs: zoo.Inputs, dtype: torch.dtype) -> None:
    """The outputs without gradients."""
    with torch.no_grad():
        ours, plain, exact = (
            tensors(compiled(**inputs)),
            tensors(module(**inputs)),
            tensors(float64_call(module, inputs)[1]),
        )
    assert_no_worse(ours, plain, exact, torch.finfo(dtype).eps)


def tensors(output: Any) -> dict[str, torch.Tensor]:
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return {f"output {index}": leaf.double() for index, leaf in enumerate(leaves)}
