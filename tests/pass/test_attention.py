"""Attention through the whole pass, beside norm + rotation: training steps of real models, packed documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fusion_pass import FusionBackend, FusionConfig, zoo
from fusion_pass.zoo.oracle import float64_call

pytest.importorskip("transformers")

FACTOR, SLACK = 1.5, 8.0
"""Accepted: `|ours - oracle| <= FACTOR |eager - oracle| + SLACK eps |oracle|` in the 2-norm: both round one value."""


class Compiled:
    """A model through the pass, run eagerly behind AOTAutograd, and the graph that the pass left."""

    def __init__(self, model: nn.Module, dynamic: bool | None = None, **settings: Any) -> None:
        self.graphs: list[fx.GraphModule] = []

        def inner(module: fx.GraphModule, inputs: Any) -> Any:
            from torch._dynamo.backends.debugging import aot_eager_default_partitioner

            self.graphs.append(module)
            return aot_eager_default_partitioner(module, inputs)

        self.backend = FusionBackend(FusionConfig(allow_reference=True, **settings), inner=inner)
        self.model = torch.compile(model, backend=self.backend, fullgraph=True, dynamic=dynamic)

    def counts(self) -> dict[str, int]:
        return dict(self.backend.reports[-1].counts)


def loss_of(output: Any) -> torch.Tensor:
    first = next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))
    weights = torch.randn(first.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return (first.double() * weights).mean()


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.double().clone() for name, p in model.named_parameters() if p.grad is not None}


def check_step(name: str, attention: str, dtype: torch.dtype, expected: dict[str, int]) -> Compiled:
    torch._dynamo.reset()
    model, inputs = zoo.build(name, attention=attention, layers=2, dtype=dtype)
    compiled = Compiled(model)
    ours = gradients(model, loss_of(compiled.model(**inputs)))
    plain = gradients(model, loss_of(model(**inputs)))
    copy, output = float64_call(model, inputs)
    exact = gradients(copy, loss_of(output))
    assert compiled.counts() == expected
    assert ours.keys() == exact.keys()
    for parameter, truth in exact.items():
        allowed = FACTOR * (plain[parameter] - truth).norm() + SLACK * torch.finfo(dtype).eps * truth.norm()
        assert (ours[parameter] - truth).norm() <= allowed, parameter
    return compiled


BOTH = {"qk_norm_rope": 2, "attention": 2}


@pytest.mark.parametrize(
    ("name", "attention"),
    [("qwen3", "sdpa"), ("qwen3", "eager"), ("gemma3", "sdpa"), ("gpt_oss", "eager"), ("gptj", "eager")],
)
def test_training_step(name: str, attention: str) -> None:
    """Two layers in bfloat16. Every model in float32: `tests/pass/test_attention_every_model.py`; verified, and with
    symbolic shapes: `tests/pass/test_models.py`."""
    check_step(name, attention, torch.bfloat16, BOTH)


def test_no_tensor_of_queries_by_keys_is_left() -> None:
    """What is proved needs no mask, and the nodes that built it are gone."""
    compiled = check_step("qwen3", "sdpa", torch.float32, BOTH)
    ((graph),) = compiled.graphs
    tokens = 24
    for node in graph.graph.nodes:
        value = node.meta.get("example_value")
        assert not isinstance(value, torch.Tensor) or value.shape[-2:] != (tokens, tokens), node.name


def test_two_documents_in_one_row_are_two_documents() -> None:
    """With `position_ids` that start again, loss and gradients are those of the documents run apart."""
    torch._dynamo.reset()
    model, _ = zoo.build("llama", attention="sdpa", layers=2, dtype=torch.float64)
    first, second = torch.randint(3, 128, (2, 9)), torch.randint(3, 128, (2, 14))
    positions = torch.cat([torch.arange(9), torch.arange(14)])[None].expand(2, -1).contiguous()
    compiled = Compiled(model, fusions=("attention",))
    packed = compiled.model(input_ids=torch.cat([first, second], 1), position_ids=positions, use_cache=False).logits
    apart = torch.cat([model(input_ids=ids, use_cache=False).logits for ids in (first, second)], 1)
    assert compiled.counts() == {"attention": 2}
    assert all(site.arguments["causal"] == "top_left" for site in compiled.backend.reports[-1].sites)
    ours, expected = gradients(model, loss_of(packed)), gradients(model, loss_of(apart))
    for name, truth in expected.items():
        # transformers rounds norms, rotary tables and softmax to float32 in a float64 model
        assert (ours[name] - truth).norm() <= 1e-5 * truth.norm() + 1e-12, name


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


@torch.fx.experimental._config.patch(use_duck_shape=False)  # as in a graph after a break: each input its own symbols
def test_numbers_of_keys_and_values_that_are_different_symbols() -> None:
    torch._dynamo.reset()
    found = Compiled(_sdpa, dynamic=True)  # type: ignore[arg-type]
    for length in (7, 9):
        q, k, v = (torch.randn(1, 2, tokens, 8) for tokens in (5, length, length))
        torch.testing.assert_close(found.model(q, k, v), _sdpa(q, k, v))
    assert found.counts() == {"attention": 1}


@torch.fx.experimental._config.patch(use_duck_shape=False)
@pytest.mark.parametrize("dynamic", [False, True])
def test_more_keys_than_values(dynamic: bool) -> None:
    """PyTorch does not check: it reads past the end of one of them. Left alone, and said."""
    torch._dynamo.reset()
    found = Compiled(_sdpa, dynamic=dynamic)  # type: ignore[arg-type]
    found.model(*(torch.randn(1, 2, tokens, 8) for tokens in (5, 7, 6)))
    (site,) = found.backend.reports[-1].sites
    assert site.status == "skipped"
    assert "7 keys and 6 values" in site.reason or "only head_dim may differ" in site.reason
