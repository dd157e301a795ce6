"""Models written here, for forms that transformers does not have. Need torch alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fusion_pass.zoo.base import VOCABULARY, Builder, Inputs, Settings, token_ids

_HIDDEN, _HEAD_DIM, _HEADS, _KV_HEADS = 64, 16, 4, 2
_EPS, _THETA = 1e-6, 1e4


class FusedQKV(nn.Module):
    """One projection for q, k and v, grouped by KV head: its query heads, then its key, then its value.

    This is the packing that torchtitan gives Qwen3 (`FusedQKVLinear`): it can be sharded by columns between KV heads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Linear(_HIDDEN, (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        batch, tokens, _ = x.shape
        queries = _HEADS // _KV_HEADS
        groups = self.wqkv(x).view(batch, tokens, _KV_HEADS, queries + 2, _HEAD_DIM)
        q, k, v = groups.split([queries, 1, 1], dim=3)
        return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate lane i with lane i + head_dim / 2. `x` is `[B, S, H, D]`, `cos` and `sin` are `[S, D]`."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos[None, :, None] + turned * sin[None, :, None]).to(x.dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(_HIDDEN, eps=_EPS)
        self.qkv = FusedQKV()
        self.q_norm = nn.RMSNorm(_HEAD_DIM, eps=_EPS)
        self.k_norm = nn.RMSNorm(_HEAD_DIM, eps=_EPS)
        self.output = nn.Linear(_HEADS * _HEAD_DIM, _HIDDEN, bias=False)
        self.mlp_norm = nn.RMSNorm(_HIDDEN, eps=_EPS)
        self.mlp = nn.Sequential(nn.Linear(_HIDDEN, 128, bias=False), nn.SiLU(), nn.Linear(128, _HIDDEN, bias=False))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.attention_norm(x))
        q, k = _rotate(self.q_norm(q), cos, sin), _rotate(self.k_norm(k), cos, sin)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class FusedQKVQwen3(nn.Module):
    """A Qwen3 whose attention projects q, k and v at once."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, _HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.RMSNorm(_HIDDEN, eps=_EPS)
        self.head = nn.Linear(_HIDDEN, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token ids `[B, S]` to logits `[B, S, VOCABULARY]`."""
        x = self.embedding(input_ids)
        frequencies = _THETA ** -(torch.arange(0, _HEAD_DIM, 2, device=x.device, dtype=torch.float32) / _HEAD_DIM)
        angles = torch.outer(torch.arange(x.shape[1], device=x.device, dtype=torch.float32), frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _qwen3_fused_qkv(settings: Settings) -> tuple[nn.Module, Inputs]:
    return FusedQKVQwen3(settings.layers), {"input_ids": token_ids()}


MODELS: dict[str, Builder] = {"qwen3_fused_qkv": _qwen3_fused_qkv}
