"""Text towers of vision-language models: multi-axis rotary positions (MRoPE)."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from fusion_pass.zoo.base import BATCH, TOKENS, VOCABULARY, Builder, Inputs, Settings, cycle, token_ids

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
_IMAGE = (3, 4)
"""Rows and columns of the image in the middle of the tokens."""


def mrope_positions(batch: int = BATCH, tokens: int = TOKENS, image: tuple[int, int] = _IMAGE) -> torch.Tensor:
    """Positions `[3, batch, tokens]` (time, height, width) of text, an image of rows x columns, and text again.

    As in Qwen2-VL (arXiv 2409.12191, section 2.1): the three agree on text, an image has one time and its own rows and
    columns, and text goes on after the largest position before it. The three rows differ, so a mixed-up row shows.
    """
    rows, columns = image
    before = (tokens - rows * columns) // 2
    after = tokens - rows * columns - before
    text = torch.arange(before).expand(3, -1)
    height, width = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    middle = torch.stack((torch.zeros(rows, columns, dtype=torch.long), height, width)).flatten(1) + before
    rest = torch.arange(after).expand(3, -1) + before + max(rows, columns)
    return torch.cat((text, middle, rest), dim=1)[:, None].expand(3, batch, tokens).contiguous()


def _text_tower(module: str, config: str, model: str, rope: dict[str, Any], **options: Any) -> Builder:
    def build(settings: Settings) -> tuple[nn.Module, Inputs]:
        code = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
        chosen = {**_SIZES, "num_hidden_layers": settings.layers, **options}
        if "layer_types" in options:
            chosen["layer_types"] = cycle(options["layer_types"], settings.layers)
        if "mlp_layer_types" in options:
            chosen["mlp_layer_types"] = cycle(options["mlp_layer_types"], settings.layers)
        made = getattr(code, config)(rope_parameters={"rope_type": "default", "rope_theta": 1e4, **rope}, **chosen)
        made._attn_implementation = settings.attention
        inputs = {"input_ids": token_ids(), "position_ids": mrope_positions(), "use_cache": False}
        return getattr(code, model)(made), inputs

    return build


MODELS: dict[str, Builder] = {
    "qwen2_vl": _text_tower(
        "qwen2_vl",
        "Qwen2VLTextConfig",
        "Qwen2VLTextModel",
        {"mrope_section": [2, 3, 3]},
        layer_types=("full_attention",),
    ),
    "qwen2_5_vl": _text_tower(
        "qwen2_5_vl",
        "Qwen2_5_VLTextConfig",
        "Qwen2_5_VLTextModel",
        {"mrope_section": [2, 3, 3]},
        layer_types=("full_attention",),
    ),
    "glm4v": _text_tower(
        "glm4v", "Glm4vTextConfig", "Glm4vTextModel", {"mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0}
    ),
    "ernie4_5_vl": _text_tower(
        "ernie4_5_vl_moe",
        "Ernie4_5_VLMoeTextConfig",
        "Ernie4_5_VLMoeTextModel",
        {"mrope_section": [3, 3, 2]},
        moe_num_experts=2,
        mlp_layer_types=("dense",),
    ),
    "qwen3_vl": _text_tower(
        "qwen3_vl",
        "Qwen3VLTextConfig",
        "Qwen3VLTextModel",
        {"mrope_section": [4, 2, 2], "mrope_interleaved": True},
        head_dim=16,
    ),
    "qwen3_5": _text_tower(
        "qwen3_5",
        "Qwen3_5TextConfig",
        "Qwen3_5TextModel",
        {"mrope_section": [1, 1, 0], "mrope_interleaved": True, "partial_rotary_factor": 0.25},
        head_dim=16,
        layer_types=("full_attention",),
    ),
}
