"""Diffusion transformers of diffusers. Their blocks normalise q and k per head and rotate image tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fusion_pass.zoo.base import Builder, Inputs, Settings

_HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16}


def _noise(settings: Settings, *shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(settings.dtype)


def _flux(settings: Settings) -> tuple[nn.Module, Inputs]:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=settings.layers,
        num_single_layers=settings.layers,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=False,
        **_HEADS,
    )
    return model, {
        "hidden_states": _noise(settings, 1, 16, 4),
        "encoder_hidden_states": _noise(settings, 1, 8, 32),
        "pooled_projections": _noise(settings, 1, 32),
        "timestep": torch.tensor([1.0]).to(settings.dtype),
        "img_ids": torch.stack((torch.zeros(16), torch.arange(16) // 4, torch.arange(16) % 4), dim=-1),
        "txt_ids": torch.zeros(8, 3),
        "return_dict": False,
    }


def _qwen_image(settings: Settings) -> tuple[nn.Module, Inputs]:
    from diffusers import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=settings.layers,
        joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6),
        **_HEADS,
    )
    return model, {
        "hidden_states": _noise(settings, 1, 16, 16),
        "encoder_hidden_states": _noise(settings, 1, 8, 16),
        "encoder_hidden_states_mask": None,
        "timestep": torch.tensor([1.0]).to(settings.dtype),
        "img_shapes": [(1, 4, 4)],
        "return_dict": False,
    }


def _sd3(settings: Settings) -> tuple[nn.Module, Inputs]:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=settings.layers + 1,  # the last block has no text stream, so it is not of the kind asked for
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
        dual_attention_layers=(),
        **_HEADS,
    )
    return model, {
        "hidden_states": _noise(settings, 1, 4, 8, 8),
        "encoder_hidden_states": _noise(settings, 1, 8, 32),
        "pooled_projections": _noise(settings, 1, 32),
        "timestep": torch.tensor([1.0]).to(settings.dtype),
        "return_dict": False,
    }


def _wan(settings: Settings) -> tuple[nn.Module, Inputs]:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=settings.layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    return model, {
        "hidden_states": _noise(settings, 1, 4, 2, 8, 8),
        "timestep": torch.tensor([5]),
        "encoder_hidden_states": _noise(settings, 1, 8, 16),
        "return_dict": False,
    }


def _hunyuan_video(settings: Settings) -> tuple[nn.Module, Inputs]:
    from diffusers import HunyuanVideoTransformer3DModel

    model = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_layers=settings.layers,
        num_single_layers=settings.layers,
        num_refiner_layers=1,
        patch_size=1,
        patch_size_t=1,
        guidance_embeds=False,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(4, 6, 6),
        **_HEADS,
    )
    return model, {
        "hidden_states": _noise(settings, 1, 4, 2, 4, 4),
        "timestep": torch.tensor([5.0]).to(settings.dtype),
        "encoder_hidden_states": _noise(settings, 1, 8, 16),
        "encoder_attention_mask": torch.ones(1, 8, dtype=torch.bool),
        "pooled_projections": _noise(settings, 1, 8),
        "return_dict": False,
    }


def _cogvideox(settings: Settings) -> tuple[nn.Module, Inputs]:
    from diffusers import CogVideoXTransformer3DModel

    model = CogVideoXTransformer3DModel(
        in_channels=4,
        out_channels=4,
        time_embed_dim=2,
        text_embed_dim=8,
        num_layers=settings.layers,
        sample_width=8,
        sample_height=8,
        sample_frames=8,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=8,
        use_rotary_positional_embeddings=True,
        **_HEADS,
    )
    patches = 2 * 4 * 4  # frames x height x width, in patches
    angles = torch.randn(patches, 8).repeat_interleave(2, dim=-1)
    return model, {
        "hidden_states": _noise(settings, 1, 2, 4, 8, 8),
        "encoder_hidden_states": _noise(settings, 1, 8, 8),
        "timestep": torch.tensor([5]),
        "image_rotary_emb": (angles.cos(), angles.sin()),
        "return_dict": False,
    }


def _mochi(settings: Settings) -> tuple[nn.Module, Inputs]:
    from diffusers import MochiTransformer3DModel

    model = MochiTransformer3DModel(
        patch_size=2,
        num_layers=settings.layers + 1,  # as in SD3, the last block has no text stream
        pooled_projection_dim=32,
        in_channels=4,
        text_embed_dim=32,
        time_embed_dim=8,
        max_sequence_length=8,
        **_HEADS,
    )
    return model, {
        "hidden_states": _noise(settings, 1, 4, 2, 8, 8),
        "encoder_hidden_states": _noise(settings, 1, 8, 32),
        "timestep": torch.tensor([5]),
        "encoder_attention_mask": torch.ones(1, 8, dtype=torch.bool),
        "return_dict": False,
    }


def _sana(settings: Settings) -> tuple[nn.Module, Inputs]:
    from diffusers import SanaTransformer2DModel

    model = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=settings.layers,
        attention_head_dim=4,
        num_attention_heads=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=8,
        sample_size=8,
        patch_size=1,
        qk_norm="rms_norm_across_heads",
    )
    return model, {
        "hidden_states": _noise(settings, 1, 4, 8, 8),
        "timestep": torch.tensor([5]),
        "encoder_hidden_states": _noise(settings, 1, 8, 8),
        "return_dict": False,
    }


def _cogview4(settings: Settings) -> tuple[nn.Module, Inputs]:
    from diffusers import CogView4Transformer2DModel

    model = CogView4Transformer2DModel(
        patch_size=2,
        in_channels=4,
        num_layers=settings.layers,
        attention_head_dim=4,
        num_attention_heads=4,
        out_channels=4,
        text_embed_dim=32,
        time_embed_dim=8,
        condition_dim=4,
    )
    return model, {
        "hidden_states": _noise(settings, 1, 4, 8, 8),
        "encoder_hidden_states": _noise(settings, 1, 8, 32),
        "timestep": torch.tensor([5]),
        "original_size": torch.tensor([[8.0, 8.0]]),
        "target_size": torch.tensor([[8.0, 8.0]]),
        "crop_coords": torch.zeros(1, 2),
        "return_dict": False,
    }


MODELS: dict[str, Builder] = {
    "flux": _flux,
    "qwen_image": _qwen_image,
    "sd3": _sd3,
    "wan": _wan,
    "hunyuan_video": _hunyuan_video,
    "cogvideox": _cogvideox,
    "mochi": _mochi,
    "sana": _sana,
    "cogview4": _cogview4,
}
