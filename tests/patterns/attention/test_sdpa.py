"""Calls of `scaled_dot_product_attention`: every argument form, every layout, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attention_graphs as graphs
import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

sdpa = F.scaled_dot_product_attention

B, H, S, D = 2, 4, 7, 8


def qkv(kv_heads: int = H, queries: int = S, value_dim: int = D) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, H, queries, D), torch.randn(B, kv_heads, S, D), torch.randn(B, kv_heads, S, value_dim)]


def found(model: Callable[..., Any], *inputs: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of the only site. Checks the numbers on the way."""
    module, given = graphs.captured(model, *inputs, **kwargs)
    (place,) = graphs.check(module, given)
    assert isinstance(place, graphs.Site), place.reason
    return graphs.arguments(place)


def refused(model: Callable[..., Any], *inputs: Any, **kwargs: Any) -> str:
    module, _ = graphs.captured(model, *inputs, **kwargs)
    return graphs.refusal(module)


PLAIN = {"q": "l_q_.transpose(1, 2)", "k": "l_k_.transpose(1, 2)", "v": "l_v_.transpose(1, 2)"}

CALLS: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "three": (lambda q, k, v: sdpa(q, k, v), {}),
    "defaults": (lambda q, k, v: sdpa(q, k, v, None, 0.0, False), {}),
    "positional": (lambda q, k, v: sdpa(q, k, v, None, 0.0, True), {"causal": "top_left"}),
    "keywords": (lambda q, k, v: sdpa(q, k, v, is_causal=True, scale=0.5), {"causal": "top_left", "scale": 0.5}),
    "all keywords": (
        lambda q, k, v: sdpa(
            query=q, key=k, value=v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
        ),
        {},
    ),
    "aten": (
        lambda q, k, v: torch.ops.aten.scaled_dot_product_attention(q, k, v, is_causal=True),
        {"causal": "top_left"},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_call(name: str) -> None:
    call, expected = CALLS[name]
    arguments = found(lambda q, k, v: call(q, k, v).transpose(1, 2), *qkv())
    assert arguments == {**PLAIN, **expected}


@pytest.mark.parametrize("dynamic", [None, True])
def test_causal_of_unequal_lengths_is_top_left(dynamic: bool | None) -> None:
    assert (
        found(lambda q, k, v: sdpa(q, k, v, is_causal=True), *qkv(queries=4), dynamic=dynamic)["causal"] == "top_left"
    )


def test_grouped_heads() -> None:
    assert found(lambda q, k, v: sdpa(q, k, v, enable_gqa=True), *qkv(kv_heads=2))["k"] == "l_k_.transpose(1, 2)"
    assert found(lambda q, k, v: sdpa(q, k, v, enable_gqa=True), *qkv(kv_heads=1))["k"] == "l_k_.transpose(1, 2)"


def test_value_of_another_head_dim() -> None:
    found(lambda q, k, v: sdpa(q, k, v, is_causal=True), *qkv(value_dim=5))


def test_three_axes() -> None:
    q, k, v = (x[0] for x in qkv())
    arguments = found(lambda q, k, v: sdpa(q, k, v, torch.ones(S, S, dtype=torch.bool).tril()), q, k, v)
    assert arguments == {
        "q": "l_q_.unsqueeze(2)",
        "k": "l_k_.unsqueeze(2)",
        "v": "l_v_.unsqueeze(2)",
        "causal": "top_left",
    }


def test_exported_graph() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            place = torch.arange(S)
            return sdpa(q, k, v, place[None, :] <= place[:, None]).transpose(1, 2).reshape(B, S, -1)

    program = torch.export.export(Model(), tuple(qkv()))
    (place,) = graphs.places(program.graph_module)
    assert isinstance(place, graphs.Site)
    assert graphs.arguments(place)["causal"] == "top_left"


def test_snapshot() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x[:, :, None].expand(B, 2, 2, S, D).reshape(B, H, S, D) for x in (k, v))
        place = torch.arange(S)
        out = sdpa(q, k, v, attn_mask=place[None, :] <= place[:, None], dropout_p=0.0, scale=0.25, is_causal=False)
        return out.reshape(B, -1, S, D).transpose(1, 2).contiguous().reshape(B, S, -1)

    module, inputs = graphs.captured(model, *qkv(kv_heads=2))
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site)
    assert_expected_inline(
        graphs.show(place),
        """\
contiguous = attention(
    q=l_q_.transpose(1, 2),
    k=l_k_.transpose(1, 2),
    v=l_v_.transpose(1, 2),
    scale=0.25,
    causal=top_left,
)[0]""",
    )
    assert_expected_inline(
        "\n".join(sorted(node.name for node in place.region)),
        """\
contiguous
expand
expand_1
getitem
getitem_1
k
out
reshape_2
transpose
v""",
    )


def test_key_repeated_for_another_reader_too_stays() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        many = k.repeat_interleave(2, 1)
        return sdpa(q, many, v.repeat_interleave(2, 1)), many

    module, inputs = graphs.captured(model, *qkv(kv_heads=2))
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site)
    assert "many" not in {node.name for node in place.region}
    assert graphs.heads(place, "k") == 2


def test_autocast_narrows_as_the_model_does() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return sdpa(q, k, v)

    q, k, v = qkv()
    module, _ = graphs.captured(model, q, k, v.bfloat16())
    place = graphs.site(module)
    assert graphs.arguments(place)["q"] == "l_q_.transpose(1, 2).to(torch.bfloat16)"
    assert graphs.arguments(place)["v"] == "l_v_.transpose(1, 2)"


def test_dropout_is_refused() -> None:
    reason = "The attention drops out weights with p = 0.1, and no kernel of ours does; set the dropout to 0."
    assert refused(lambda q, k, v: sdpa(q, k, v, dropout_p=0.1), *qkv()) == reason
    assert refused(lambda q, k, v: sdpa(q, k, v, None, 0.1), *qkv()) == reason


def test_five_axes_are_refused() -> None:
    assert "axes" in refused(lambda q, k, v: sdpa(q, k, v), *(x[None] for x in qkv()))


def test_mask_beside_is_causal_is_refused() -> None:
    """On the CPU the call raises when it runs; a graph may hold it all the same."""
    module, _ = graphs.captured(lambda q, k, v, mask: sdpa(q, k, v, mask), *qkv(), torch.ones(S, S, dtype=torch.bool))
    (call,) = (node for node in module.graph.nodes if node.op == "call_function")
    call.kwargs = {**call.kwargs, "is_causal": True}
    reason = "attn_mask and is_causal are both given, which scaled_dot_product_attention does not take."
    assert graphs.refusal(module) == reason


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("is_causal", "is_causal is known only at run time."),
        ("scale", "The scale at_run_time is known only at run time."),
        ("dropout_p", "The dropout probability of the attention is known only at run time."),
        ("another", "The call 'scaled_dot_product_attention' has arguments that are not known: ['another']."),
    ],
)
def test_argument_that_is_not_known_is_refused(argument: str, reason: str) -> None:
    """Dynamo breaks the graph before such a call; other tracers pass the input on."""
    module, _ = graphs.captured(lambda q, k, v: sdpa(q, k, v, is_causal=True, scale=0.5), *qkv())
    (call,) = (node for node in module.graph.nodes if node.op == "call_function")
    with module.graph.inserting_before(call):
        given = module.graph.placeholder("at_run_time")
    call.kwargs = {**call.kwargs, argument: given}
    assert graphs.refusal(module) == reason


def test_key_that_carries_no_shape() -> None:
    module, _ = graphs.captured(lambda *args: sdpa(*args), *qkv())
    _, key, _ = module.graph.find_nodes(op="placeholder")
    key.meta.clear()
    reason = "The call 'scaled_dot_product_attention' has arguments that are not known: tensors of no shape."
    assert graphs.refusal(module) == reason


def test_broadcast_batch_is_refused() -> None:
    q, k, v = qkv()
    assert "batch sizes" in refused(lambda q, k, v: sdpa(q, k, v), q, k[:1], v[:1])


def test_keys_without_values_are_refused() -> None:
    """PyTorch does not check: it reads past the end of the values."""
    q, k, v = qkv()
    assert refused(lambda q, k, v: sdpa(q, k, v), q, k, v[:, :, :-1]) == "There are 7 keys and 6 values."


def test_mask_written_before_the_result_is_moved() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        mask = mask.clone()
        out = sdpa(q, k, v, mask)
        mask.fill_(0.0)
        return out.transpose(1, 2).contiguous() + mask.sum()

    reason = refused(model, *qkv(), torch.randn(S, S))
    assert reason == "The mask 'mask' is overwritten before the attention is finished."


def test_mask_that_carries_no_shape() -> None:
    """Another pass may add nodes without a fake tensor."""
    module, _ = graphs.captured(lambda *args: sdpa(*args), *qkv(), torch.randn(S, S))
    *_, mask = module.graph.find_nodes(op="placeholder")
    mask.meta.clear()
    assert graphs.refusal(module) == f"The shape of the mask {mask.name!r} is not known."


@pytest.mark.parametrize("head_dim", [8, S])
@pytest.mark.parametrize("shape", [(2, 1, S, S), (1, 3, S, S), (2, S, S)], ids=("batches", "heads", "three axes"))
def test_mask_of_more_than_the_scores(shape: tuple[int, ...], head_dim: int) -> None:
    """torch.export takes it; the result has the mask's batches, or heads."""

    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            return sdpa(q, k, v, mask)

    scores = [1, 1, S, S][-len(shape) :]
    qkv = (torch.randn(*scores[:-1], head_dim) for _ in range(3))
    exported = torch.export.export(Model(), (*qkv, torch.randn(shape)))
    reason = f"The mask 'mask' has shape {list(shape)}, which does not broadcast to the scores, {scores}."
    assert graphs.refusal(exported.graph_module) == reason


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "method": lambda x: x.mul_(2.0),
    "method of an operator": lambda x: x.__imul__(2.0),
    "operator without arithmetic": lambda x: x.__imod__(2.0),
    "inplace by name": lambda x: F.relu(x, inplace=True),
    "inplace by position": lambda x: F.relu(x, True),
    "out by name": lambda x: torch.sin(x, out=x),
    "out by position": lambda x: F.normalize(x, 2.0, -1, 1e-9, x),
}


@pytest.mark.parametrize("write", WRITES)
def test_key_written_before_the_result_is_moved(write: str) -> None:
    """The call stands where the result is transposed; the key has changed by then."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k.clone()
        out = sdpa(q, k, v)
        WRITES[write](k)
        return out.transpose(1, 2).contiguous() + k.sum()

    assert "is overwritten by" in refused(model, *qkv())


def test_scaled_query_that_is_written_in_part() -> None:
    """The factor of the first heads is another one, so none is taken out."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scaled = q * 0.5
        scaled[:, :2] *= 3.0
        return sdpa(scaled, k, v)

    module, inputs = graphs.captured(model, *qkv())
    (place,) = graphs.check(module, inputs)
    assert graphs.arguments(place)["q"].startswith("scaled")


@pytest.mark.parametrize("grad", [False, True])
def test_result_written_in_place(grad: bool) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = sdpa(q, k, v)
        out.mul_(2.0)
        return out.transpose(1, 2)

    module, _ = graphs.captured(model, *(x.requires_grad_(grad) for x in qkv()))
    if grad:
        assert "'out', which the backward of the operator reads, is written by 'mul_'" in graphs.refusal(module)
    else:
        assert graphs.site(module).outputs[0].node.name == "out"
