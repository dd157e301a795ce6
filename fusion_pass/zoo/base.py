"""What the builders of the zoo share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

VOCABULARY = 128
BATCH, TOKENS = 2, 24

Inputs: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What a caller of `build` chose."""

    layers: int
    dtype: torch.dtype
    attention: str | None
    """Attention implementation of transformers; None leaves the choice to the model."""


Builder: TypeAlias = Callable[[Settings], tuple[nn.Module, Inputs]]


def token_ids() -> torch.Tensor:
    """Random token ids `[BATCH, TOKENS]` without the special tokens 0, 1, 2."""
    return torch.randint(3, VOCABULARY, (BATCH, TOKENS))


def cycle(kinds: tuple[str, ...], layers: int) -> list[str]:
    """`kinds` over and over, one for each layer."""
    return [kinds[index % len(kinds)] for index in range(layers)]
