"""Scores with more than one mask that stays: one can be passed on."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from written_attention import Model, qkv, refused


def keys_after_the_middle(scores: Tensor) -> Tensor:
    """Hides the keys after the middle of a row's past."""
    place = torch.arange(scores.shape[-1])
    return 2 * place[None, :] > place[:, None] + 5


REFUSED: dict[str, tuple[Model, str]] = {
    "two masks of data": (
        lambda q, k, v: (q @ k.mT + k.sum(-1)[:, :, None] + q.sum(-1)[..., None]).softmax(-1) @ v,
        "The scores have more than one mask of data, 'getitem' and 'getitem_1'; one",
    ),
    "a mask of data beside one that is no bound": (
        lambda q, k, v: (
            ((s := q @ k.mT).masked_fill(keys_after_the_middle(s), -math.inf) + k.sum(-1)[:, :, None]).softmax(-1) @ v
        ),
        "The scores have two masks that cannot be proved, ",
    ),
    "two masks that no tensor holds together": (
        lambda q, k, v: (
            (s := q @ k.mT)
            .masked_fill(keys_after_the_middle(s), -math.inf)
            .masked_fill(keys_after_the_middle(s).mT, -math.inf)
            .softmax(-1)
            @ v
        ),
        "No single tensor of the graph holds what the masks 'gt' and ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    model, reason = REFUSED[name]
    assert reason in refused(model, *qkv())
