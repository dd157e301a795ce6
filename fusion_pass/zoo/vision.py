"""Encoders without a causal mask: vision towers with packed QKV, DINOv3 and ModernBERT.

The Qwen towers read `grid_thw` on the host, so `torch.compile` cuts them into several graphs (`fullgraph=True` fails),
and rotation and attention land in different ones.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from fusion_pass.zoo.base import VOCABULARY, Builder, Inputs, Settings, token_ids

_PATCHES, _PATCH_VALUES = 64, 3 * 2 * 4 * 4
"""Patches in all, and the values of one: channels x temporal_patch_size x patch_size x patch_size."""

_TOWER: dict[str, Any] = {
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def _tower(module: str, config: str, model: str, grid: list[list[int]], **options: Any) -> Builder:
    """A vision tower of the Qwen family; `grid` has (time, height, width) in patches for each image."""

    def build(settings: Settings) -> tuple[nn.Module, Inputs]:
        configuration = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
        modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
        made = getattr(configuration, config)(depth=settings.layers, **_TOWER, **options)
        made._attn_implementation = settings.attention
        inputs = {
            "hidden_states": torch.randn(_PATCHES, _PATCH_VALUES).to(settings.dtype),
            "grid_thw": torch.tensor(grid),
        }
        return getattr(modeling, model)(made), inputs

    return build


def _dinov3(settings: Settings) -> tuple[nn.Module, Inputs]:
    import transformers

    config = transformers.DINOv3ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=settings.layers,
        num_attention_heads=2,
        image_size=32,
        pos_embed_rescale=None,  # the published model rescales its positions at random while it trains
        patch_size=4,
    )
    config._attn_implementation = settings.attention
    return transformers.DINOv3ViTModel(config), {"pixel_values": torch.randn(1, 3, 32, 32).to(settings.dtype)}


def _modernbert(settings: Settings) -> tuple[nn.Module, Inputs]:
    import transformers

    config = transformers.ModernBertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=settings.layers,
        num_attention_heads=4,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )
    config._attn_implementation = settings.attention
    return transformers.ModernBertModel(config), {"input_ids": token_ids()}


MODELS: dict[str, Builder] = {
    "qwen2_vl_vision": _tower(
        "qwen2_vl",
        "Qwen2VLVisionConfig",
        "Qwen2VisionTransformerPretrainedModel",
        grid=[[1, 4, 8], [1, 4, 8]],
        embed_dim=32,
        hidden_size=64,
        in_channels=3,
        mlp_ratio=2,
    ),
    "qwen2_5_vl_vision": _tower(
        "qwen2_5_vl",
        "Qwen2_5_VLVisionConfig",
        "Qwen2_5_VisionTransformerPretrainedModel",
        grid=[[1, 8, 8]],
        hidden_size=32,
        out_hidden_size=64,
        intermediate_size=64,
        window_size=16,
        fullatt_block_indexes=[0],
    ),
    "qwen3_vl_vision": _tower(
        "qwen3_vl",
        "Qwen3VLVisionConfig",
        "Qwen3VLVisionModel",
        grid=[[1, 8, 8]],
        hidden_size=32,
        out_hidden_size=64,
        intermediate_size=64,
        num_position_embeddings=64,
        deepstack_visual_indexes=[0],
    ),
    "dinov3": _dinov3,
    "modernbert": _modernbert,
}
