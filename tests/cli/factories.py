"""Models that tests name as `factories:FUNCTION` on the command line."""

from __future__ import annotations

import torch
from torch import nn

from fusion_pass import zoo


def with_keywords() -> tuple[nn.Module, zoo.Inputs]:
    return zoo.build("qwen3_fused_qkv", layers=2)


def with_positions() -> tuple[nn.Module, tuple[torch.Tensor]]:
    model, inputs = zoo.build("qwen3_fused_qkv", layers=2)
    return model, (inputs["input_ids"],)


def module_alone() -> nn.Module:
    return nn.Identity()


def bad_inputs() -> tuple[nn.Module, int]:
    return nn.Identity(), 3
