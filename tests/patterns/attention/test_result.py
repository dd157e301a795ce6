"""Where a site of attention ends, and the order in memory of what its call gives."""

from __future__ import annotations

from collections.abc import Callable

import attention_graphs as graphs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from written_attention import B, D, H, S, qkv

Parts = Tensor | tuple[Tensor, ...]

OF_HEADS: dict[str, tuple[Callable[[Tensor], Parts], str]] = {
    "nothing": (lambda x: x * 2, "x bhsd transpose(1, 2)"),
    "moved": (lambda x: x.transpose(1, 2).flatten(2), "transpose bshd"),
    "moved, axes from the end": (lambda x: x.transpose(-3, -2).flatten(2), "transpose bshd"),
    "moved in two steps": (lambda x: x.permute(2, 1, 0, 3).permute(2, 0, 1, 3) * 2, "permute_1 bshd"),
    "moved and copied": (lambda x: x.transpose(1, 2).contiguous() * 2, "contiguous bshd"),
    "moved and back": (lambda x: x.transpose(1, 2).transpose(1, 2) * 2, "transpose bshd"),
    "moved elsewhere": (lambda x: x.transpose(1, 3) * 2, "x bhsd transpose(1, 2)"),
    "cast and moved": (lambda x: x.to(torch.float32).transpose(1, 2) * 2, "transpose bshd"),
    "widened and moved": (lambda x: x.double().transpose(1, 2) * 2, "x bhsd transpose(1, 2)"),
    "viewed as it is and moved": (lambda x: x.view(B, H, S, D).transpose(1, 2) * 2, "transpose bshd"),
    "read twice": (lambda x: (x.transpose(1, 2) * 2, x * 3), "x bhsd transpose(1, 2)"),
    "read twice behind a copy": (
        lambda x: ((y := x.contiguous()).transpose(1, 2) * 2, y * 3),
        "x bhsd transpose(1, 2)",
    ),
}


def ends(model: Callable[..., Parts], *inputs: Tensor) -> str:
    """The node that the site replaces, the order in memory, and the steps from `[B, S, H, D]`; the numbers checked."""
    module, given = graphs.captured(model, *inputs)
    (place,) = graphs.check(module, given)
    assert isinstance(place, graphs.Site), place.reason
    (output,) = place.outputs
    assert output.node in place.region
    steps = ".".join(f"{step.method}{step.args}" for step in output.steps)
    return f"{output.node.name} {place.call.options['out_order']} {steps}".rstrip()


@pytest.mark.parametrize("name", OF_HEADS)
def test_result_of_heads(name: str) -> None:
    behind, expected = OF_HEADS[name]

    def model(q: Tensor, k: Tensor, v: Tensor) -> Parts:
        x = F.scaled_dot_product_attention(q, k, v)
        return behind(x)

    assert ends(model, *qkv()) == expected


OF_ONE_AXIS: dict[str, tuple[Callable[[Tensor], Parts], str]] = {
    "nothing": (lambda x: x * 2, "x bhsd transpose(1, 2).flatten(0, 1)"),
    "split": (lambda x: x.view(B, H, S, D) * 2, "view_2 bhsd transpose(1, 2)"),
    "split and moved": (lambda x: x.view(B, H, S, D).transpose(1, 2) * 2, "transpose bshd"),
    "split by name": (lambda x: x.unflatten(0, (B, H)).transpose(1, 2) * 2, "transpose bshd"),
    "split otherwise": (lambda x: x.view(H, B, S, D) * 2, "x bhsd transpose(1, 2).flatten(0, 1)"),
    "split in lanes": (lambda x: x.view(B * H, S, 2, D // 2) * 2, "x bhsd transpose(1, 2).flatten(0, 1)"),
    "read twice": (lambda x: (x.view(B, H, S, D) * 2, x * 3), "x bhsd transpose(1, 2).flatten(0, 1)"),
}


@pytest.mark.parametrize("name", OF_ONE_AXIS)
def test_result_of_batch_and_heads_in_one_axis(name: str) -> None:
    behind, expected = OF_ONE_AXIS[name]

    def model(q: Tensor, k: Tensor, v: Tensor) -> Parts:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        scores = torch.bmm(q, k.mT).view(B, H, S, S) + torch.zeros(S)
        x = torch.bmm(scores.softmax(-1).view(B * H, S, S), v)
        return behind(x)

    assert ends(model, *qkv()) == expected


@pytest.mark.parametrize(
    ("letters", "steps"),
    [("bqd", "squeeze(2,)"), ("bdq", "squeeze(2,).permute(0, 2, 1)"), ("qbd", "squeeze(2,).permute(1, 0, 2)")],
)
def test_result_without_heads(letters: str, steps: str) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = torch.einsum(f"bqk,bkd->{letters}", (q @ k.mT).softmax(-1), v)
        return x * 2

    assert ends(model, *(x[:, 0] for x in qkv())) == f"x bshd {steps}"


def test_call_without_heads() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = F.scaled_dot_product_attention(q, k, v)
        return x * 2

    assert ends(model, *(x[:, 0] for x in qkv())) == "x bshd squeeze(2,)"
