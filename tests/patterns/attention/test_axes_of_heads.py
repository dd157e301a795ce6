"""Attention written out with two axes of heads, as grouped attention is in einsum, or with one for batch and heads.

The operator has one axis of heads, and folds repeated key heads; every form is compared with what it replaces.
"""

from __future__ import annotations

from collections.abc import Callable

import attention_graphs as graphs
import pytest
import torch
from torch import Tensor

B, S, D = 2, 7, 8
K, G = 2, 3
H = K * G
"""Key heads, query heads of each, query heads."""

LOWEST = torch.finfo(torch.float32).min
Model = Callable[..., Tensor]


def qkv(kv_heads: int = K) -> list[Tensor]:
    """`[B, S, heads D]`, as projections give them."""
    torch.manual_seed(0)
    return [torch.randn(B, S, heads * D, requires_grad=True) for heads in (H, kv_heads, kv_heads)]


def future(tokens: int) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).triu(1)


def causal(scores: Tensor) -> Tensor:
    return scores.masked_fill(future(scores.shape[-1]), LOWEST)


def split(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`[B, S, K, G, D]` and `[B, S, K, D]`."""
    b, s, _ = q.shape
    return q.view(b, s, K, G, D), k.view(b, s, K, D), v.view(b, s, K, D)


def by_einsum(change: Model = causal, result: str = "bskgd") -> Model:
    """`change`: what is done to the scores `[B, K, G, S, S]` before the softmax."""

    def model(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
        q, k, v = split(q, k, v)
        scores = torch.einsum("bskgd,btkd->bkgst", q, k) * 0.25
        return torch.einsum(f"bkgst,btkd->{result}", change(scores, *others).softmax(-1), v)

    return model


def by_matmul(repeat: Callable[[Tensor], Tensor], change: Model = causal) -> Model:
    """`repeat`: `[B, K, S, D]` to what broadcasts with `[B, K, G, S, D]`."""

    def model(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
        q, k, v = split(q, k, v)
        k, v = (repeat(x.transpose(1, 2)) for x in (k, v))
        scores = q.permute(0, 2, 3, 1, 4) @ k.mT * 0.25
        return (change(scores, *others).softmax(-1) @ v).permute(0, 3, 1, 2, 4).flatten(2)

    return model


def viewed(scores: Callable[[Tensor], Tensor], weights: Callable[[Tensor], Tensor] = lambda w: w) -> Model:
    """Products of three axes, `[B H, S, D]`. What is done to the scores, and to the weights."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, s, _ = q.shape
        q, k, v = (x.view(b, s, H, D).transpose(1, 2).reshape(b * H, s, D) for x in (q, k, v))
        w = weights(scores(torch.bmm(q, k.transpose(1, 2)) * 0.25).softmax(-1))
        return torch.bmm(w.view(b * H, s, s), v).view(b, H, s, D).transpose(1, 2).reshape(b, s, H * D)

    return model


def masked_in_four(scores: Tensor) -> Tensor:
    tokens = scores.shape[-1]
    return causal(scores.view(-1, H, tokens, tokens))


def swapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Query head (k, g) is the g-th of all, then the k-th: nothing of this is one axis."""
    b, s, _ = q.shape
    q, k, v = q.view(b, s, G, K, D), k.view(b, s, K, D), v.view(b, s, K, D)
    scores = causal(torch.einsum("bsgkd,btkd->bkgst", q, k) * 0.25)
    return torch.einsum("bkgst,btkd->bsgkd", scores.softmax(-1), v).reshape(b, s, H * D)


GROUPED: dict[str, Model] = {
    "einsum": by_einsum(),
    "einsum, joined": lambda *x: by_einsum()(*x).flatten(2),
    "einsum, another order": by_einsum(result="btdkg".replace("t", "s")),
    "einsum, heads in another order": swapped,
    "einsum, added mask": by_einsum(lambda s: s + future(S) * torch.tensor(LOWEST)),
    "einsum, mask of five axes": by_einsum(lambda s: s.masked_fill(future(S)[None, None, None], LOWEST)),
    "einsum, key heads with an axis of one": lambda q, k, v: torch.einsum(
        "bkgst,btkgd->bskgd",
        causal(torch.einsum("bskgd,btkgd->bkgst", q.view(B, S, K, G, D), k.view(B, S, K, 1, D))).softmax(-1),
        v.view(B, S, K, 1, D),
    ),
    "matmul, one key head for a group": by_matmul(lambda x: x.unsqueeze(2)),
    "matmul, by an index": by_matmul(lambda x: x[:, :, None]),
    "matmul, expanded": by_matmul(lambda x: x[:, :, None].expand(-1, -1, G, -1, -1)),
    "matmul, mask between views": by_matmul(
        lambda x: x.unsqueeze(2),
        lambda s: causal(s.flatten(1, 2)).unflatten(1, (K, G)),
    ),
}


DYNAMIC = ("einsum", "matmul, expanded", "matmul, mask between views")


@pytest.mark.parametrize(
    ("name", "dynamic"), [*((name, None) for name in GROUPED), *((name, True) for name in DYNAMIC)]
)
def test_two_axes_of_heads(name: str, dynamic: bool | None) -> None:
    module, inputs = graphs.captured(GROUPED[name], *qkv(), dynamic=dynamic)
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site), place.reason
    assert (graphs.heads(place, "q"), graphs.heads(place, "k"), graphs.heads(place, "v")) == (H, K, K)
    assert graphs.conditions(place) == {"causal": "top_left"}


VIEWED: dict[str, Model] = {
    "four": viewed(masked_in_four),
    "and back": viewed(lambda s: masked_in_four(s).flatten(0, 1)),
    "weights": viewed(lambda s: masked_in_four(s).flatten(0, 1), lambda w: w.unflatten(0, (-1, H))),
    "a mask in three": viewed(lambda s: causal(s).view(-1, H, *s.shape[-2:])),
    "four, twice": viewed(lambda s: masked_in_four(s).view(-1, H, *s.shape[-2:])),
}


@pytest.mark.parametrize(("name", "dynamic"), [*((name, None) for name in VIEWED), ("and back", True)])
def test_one_axis_of_batch_and_heads(name: str, dynamic: bool | None) -> None:
    module, inputs = graphs.captured(VIEWED[name], *qkv(H), dynamic=dynamic)
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site), place.reason
    assert (graphs.heads(place, "q"), graphs.heads(place, "k"), graphs.heads(place, "v")) == (H, H, H)
    assert graphs.conditions(place) == {"causal": "top_left"}


def test_the_queries_are_read_before_they_are_split() -> None:
    """Where another site ends."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(2, (-1, D)).sin() for x in (q, k, v))
        scores = torch.einsum("bskgd,btkd->bkgst", q.view(B, S, K, G, D), k)
        return torch.einsum("bkgst,btkd->bskgd", scores.softmax(-1), v)

    place = graphs.site(graphs.captured(model, *qkv())[0])
    assert [graphs.arguments(place)[name] for name in "qkv"] == ["q", "k", "v"]


def test_one_key_head_for_all() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bskgd,btd->bkgst", q.view(B, S, K, G, D), k[..., :D])
        return torch.einsum("bkgst,btkd->bskgd", scores.softmax(-1), v.view(B, S, K, D)[:, :, 1:])

    module, inputs = graphs.captured(model, *qkv())
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site), place.reason
    assert (graphs.heads(place, "q"), graphs.heads(place, "k"), graphs.heads(place, "v")) == (H, 1, 1)


@pytest.mark.parametrize("axis", [2, 3])
def test_one_of_two_axes_of_heads_is_repeated(axis: int) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.view(B, S, K, G, D).narrow(axis, 0, 1).repeat_interleave((K, G)[axis - 2], axis) for x in (k, v))
        scores = torch.einsum("bskgd,btkgd->bkgst", q.view(B, S, K, G, D), k)
        return torch.einsum("bkgst,btkgd->bskgd", scores.softmax(-1), v)

    module, inputs = graphs.captured(model, *qkv(H))
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site), place.reason


KEYS_OF_EACH_GROUP: dict[str, Callable[[Tensor], Tensor]] = {
    "another for each query head": lambda k: k.unsqueeze(3) * torch.arange(1.0, G + 1).view(G, 1),
    "of one batch": lambda k: k[:1].unsqueeze(3).expand(B, -1, -1, G, -1),
    "of heads in another order": lambda k: k[:, :, [1, 0], None].expand(-1, -1, -1, G, -1),
    "of heads in another order, not expanded": lambda k: k[:, :, [1, 0], None],
}


@pytest.mark.parametrize("name", KEYS_OF_EACH_GROUP)
def test_keys_that_are_not_one_for_each_group(name: str) -> None:
    """Or of other heads: what is read further upstream has other numbers."""
    change = KEYS_OF_EACH_GROUP[name]

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = split(q, k, v)
        scores = torch.einsum("bskgd,btkgd->bkgst", q, change(k))
        return torch.einsum("bkgst,btkgd->bskgd", scores.softmax(-1), change(v))

    module, inputs = graphs.captured(model, *qkv())
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site), place.reason


# --- masks ------------------------------------------------------------------------------------------------------------

PADDING = torch.tensor([[True] * S, [False] * 3 + [True] * (S - 3)])


MASKS: dict[str, tuple[Model, Tensor, str]] = {
    "padding": (
        lambda s, seen: s.masked_fill(~seen[:, None, None, None], -torch.inf),
        PADDING,
        "getitem.select(2, 0)",
    ),
    "of each head": (lambda s, bias: s + bias, torch.randn(1, K, G, 1, S), "l_others_0_.flatten(1, 2)"),
    "of each head, for all batches": (lambda s, bias: s + bias, torch.randn(K, G, S, S), "l_others_0_.flatten(0, 1)"),
    "of all heads, of four axes": (lambda s, bias: s + bias, torch.randn(1, 1, S, S), "l_others_0_.select(1, 0)"),
    "of all heads": (lambda s, bias: s + bias, torch.randn(1, S, S), "l_others_0_"),
    "of all heads, of two axes": (lambda s, bias: s + bias, torch.randn(S, S), "l_others_0_"),
    "of each head, scaled": (
        lambda s, bias: (s + bias) * 0.5,
        torch.randn(1, K, G, 1, S),
        "l_others_0_.to(torch.float32).mul(0.5).flatten(1, 2)",
    ),
    "padding, repeated along one axis": (
        lambda s, seen: s.masked_fill(~seen.expand(-1, K, -1, -1, -1), -torch.inf),
        PADDING[:, None, None, None],
        "l_others_0_.select(2, 0)",
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_mask_for_two_axes_of_heads(name: str) -> None:
    change, mask, expected = MASKS[name]
    module, inputs = graphs.captured(by_einsum(change), *qkv(), mask)
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site), place.reason
    assert graphs.conditions(place) == {"mask": expected}


def test_finite_numbers_for_two_axes_of_heads() -> None:
    """A row may see no key, and no gradient is asked for."""
    change: Model = lambda s, seen: s.masked_fill(~seen[:, None, None, None], LOWEST)  # noqa: E731
    module, inputs = graphs.captured(by_einsum(change), *(x.detach() for x in qkv()), PADDING)
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site), place.reason
    lowest = torch.finfo(torch.bfloat16).min
    assert graphs.conditions(place) == {"mask": f"invert.to(torch.bfloat16).mul({lowest}).select(2, 0)"}


IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [5, 5, 3, 3, 3, 3, 3]])


def test_documents_for_two_axes_of_heads() -> None:
    change: Model = lambda s, ids: s.masked_fill(ids[:, None, None, :, None] != ids[:, None, None, None], -torch.inf)  # noqa: E731
    module, inputs = graphs.captured(by_einsum(change), *qkv(), IDS)
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site), place.reason
    assert graphs.conditions(place) == {"q_segment_ids": "l_others_0_"}


OF_ONE_AXIS: dict[str, Model] = {
    "documents of the first": lambda s, ids: ids[:, None, :, None] != ids[:, None, None],
    "documents of the second": lambda s, ids: (ids[:1] + torch.arange(G)[:, None])[..., None] != ids[:1, None],
    "the first": lambda s, ids: future(S) & (torch.arange(K)[:, None, None, None] > 0),
    "the second": lambda s, ids: future(S) & (torch.arange(G)[:, None, None] > 0),
}


@pytest.mark.parametrize("name", OF_ONE_AXIS)
def test_condition_along_one_of_two_axes_of_heads(name: str) -> None:
    """As many key heads as batches."""
    change: Model = lambda s, ids: s.masked_fill(OF_ONE_AXIS[name](s, ids), -torch.inf)  # noqa: E731
    module, _ = graphs.captured(by_einsum(change), *qkv(), IDS)
    assert "varies along one of two axes of heads" in graphs.refusal(module)


@pytest.mark.parametrize(("first", "found"), [(0, {"causal"}), (1, {"mask"}), (H, {"mask"})])
def test_condition_along_one_axis_of_batch_and_heads(first: int, found: set[str]) -> None:
    """Causal in all but the first of them."""
    hidden: Model = lambda s: future(S) & (torch.arange(B * H)[:, None, None] >= first)  # noqa: E731
    model = viewed(lambda s: s.masked_fill(hidden(s), -torch.inf).view(-1, H, S, S))
    module, inputs = graphs.captured(model, *qkv(H))
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site), place.reason
    assert graphs.conditions(place).keys() == found


def test_sum_of_truths_along_batch_and_heads() -> None:
    """A key is seen where one of them says so."""
    seen: Model = lambda s: (torch.arange(B * H)[:, None, None] < H) + ~future(S)  # noqa: E731
    model = viewed(lambda s: torch.where(seen(s), s, -torch.inf).view(-1, H, S, S))
    module, inputs = graphs.captured(model, *qkv(H))
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site), place.reason
    assert graphs.conditions(place) == {"mask": "add.unflatten(0, (-1, 6))"}


def test_condition_along_batch_and_heads_that_may_hide_a_whole_row() -> None:
    """By a finite number, as causality does: neither is left out for the other."""
    first: Model = lambda s: (torch.arange(B * H)[:, None, None] >= H) & (torch.arange(S) == 0)  # noqa: E731
    model = viewed(lambda s: causal(s.masked_fill(first(s), LOWEST)).view(-1, H, S, S))
    assert "a row may see no key" in graphs.refusal(graphs.captured(model, *qkv(H))[0])


NOT_SQUARE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], dict[str, str]]] = {
    "keys behind all queries": (lambda i, j: j <= S + 1, {"mask": "le"}),
    "what every query sees": (lambda i, j: (i < S) & (j <= i), {"causal": "top_left"}),
    "what every key is": (lambda i, j: (j < S + 4) & (j <= i), {"causal": "top_left"}),
}


@pytest.mark.parametrize("name", NOT_SQUARE)
def test_one_axis_of_batch_and_heads_of_more_keys(name: str) -> None:
    seen, expected = NOT_SQUARE[name]

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT)
        hidden = ~seen(torch.arange(S)[:, None], torch.arange(S + 4)[None, :])
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.bmm(weights, v.flatten(0, 1)).view(B, H, S, D)

    module, inputs = graphs.captured(model, torch.randn(B, H, S, D), *torch.randn(2, B, H, S + 4, D))
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site), place.reason
    assert graphs.conditions(place) == expected


@pytest.mark.parametrize("documents", [False, True])
def test_one_head_without_an_axis(documents: bool) -> None:
    """Masked where the scores have one."""

    def model(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        scores = (q @ k.mT).view(B, 1, S, S)
        hidden = ids[:, None, :, None] != ids[:, None, None] if documents else future(S)
        return scores.masked_fill(hidden, -torch.inf).view(B, S, S).softmax(-1) @ v

    module, inputs = graphs.captured(model, *torch.randn(3, B, S, D), IDS)
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site), place.reason
    assert graphs.conditions(place) == ({"q_segment_ids": "l_ids_"} if documents else {"causal": "top_left"})


@pytest.mark.parametrize("shape", [(1, K, 1, S, S), (1, 1, G, S, S), (G, S, S)], ids=["first", "second", "three axes"])
def test_mask_along_one_of_two_axes_of_heads(shape: tuple[int, ...]) -> None:
    module, _ = graphs.captured(by_einsum(lambda s, bias: s + bias), *qkv(), torch.randn(shape))
    assert "varies along one of two axes of heads" in graphs.refusal(module)


def bias_in_three(bias: Tensor) -> Model:
    return viewed(lambda s: (s + bias).view(-1, H, S, S))


@pytest.mark.parametrize(
    ("bias", "steps"),
    [
        (torch.randn(B * H, 1, S), ".unflatten(0, (-1, 6))"),
        (torch.randn(1, S, S), ".unsqueeze(1)"),
        (torch.randn(S), ""),
    ],
    ids=["of batch and head", "of all", "of keys"],
)
def test_mask_for_one_axis_of_batch_and_heads(bias: Tensor, steps: str) -> None:
    module, inputs = graphs.captured(bias_in_three(bias), *qkv(H))
    (place,) = graphs.check(module, inputs)
    assert isinstance(place, graphs.Site), place.reason
    mask = graphs.conditions(place)["mask"]
    assert mask.removesuffix(steps).isidentifier()
    assert mask.endswith(steps)


# --- near misses ------------------------------------------------------------------------------------------------------

NOT_FUSED: dict[str, tuple[Model, str]] = {
    "keys of the other axis": (
        by_matmul(lambda x: x.repeat(1, 2, 1, 1)[:, :G].unsqueeze(1)),
        "multiplies queries and keys in a way that is not known",
    ),
    "keys of the other axis, in letters": (
        lambda q, k, v: torch.einsum(
            "bkgst,btkd->bskgd",
            torch.einsum("bskgd,btgd->bkgst", q.view(B, S, K, G, D), k.repeat(1, 1, 2)[..., : G * D].view(B, S, G, D))
            .softmax(-1),
            v.view(B, S, K, D),
        ),
        "multiplies queries and keys in a way that is not known",
    ),
    "keys of the other axis, broadcast": (
        lambda q, k, v: torch.einsum(
            "bkgst,btkd->bskgd",
            torch.einsum("bskgd,btkgd->bkgst", q.view(B, S, K, G, D), q.view(B, S, H, D)[:, :, None, :G]).softmax(-1),
            v.view(B, S, K, D),
        ),
        "multiplies queries and keys in a way that is not known",
    ),
    "queries that are broadcast": (
        lambda q, k, v: torch.einsum(
            "bkgst,btkd->bskgd",
            torch.einsum("bskgd,btkd->bkgst", q.view(B, S, K, G, D)[:, :, :1], k.view(B, S, K, D)).softmax(-1),
            v.view(B, S, K, D),
        ),
        "multiplies queries and keys in a way that is not known",
    ),
    "values of the other axis, broadcast": (
        lambda q, k, v: torch.einsum(
            "bkgst,btkgd->bskgd",
            torch.einsum("bskgd,btkd->bkgst", q.view(B, S, K, G, D), k.view(B, S, K, D)).softmax(-1),
            q.view(B, S, H, D)[:, :, None, :G],
        ),
        "multiplies the attention weights with values in a way that is not known",
    ),
    "values of the other axis": (
        lambda q, k, v: torch.einsum(
            "bkgst,btgd->bskgd",
            torch.einsum("bskgd,btkd->bkgst", q.view(B, S, K, G, D), k.view(B, S, K, D)).softmax(-1),
            v.repeat(1, 1, 2)[..., : G * D].view(B, S, G, D),
        ),
        "multiplies the attention weights with values in a way that is not known",
    ),
    "queries in the place of a head": (
        by_matmul(lambda x: x.unsqueeze(2), lambda s: s.view(B, K, S, G, S).view(s.shape)),
        "'view",
    ),
    "batch and heads exchanged by a view": (
        lambda q, k, v: viewed(lambda s: masked_in_four(s).view(H, B, S, S))(
            q, k.repeat(1, 1, G), v.repeat(1, 1, G)
        ),
        "views move batches and heads",
    ),
    "the bits of the scores": (
        lambda q, k, v: viewed(lambda s: masked_in_four(s).view(torch.int32).view(torch.float32))(
            q, k.repeat(1, 1, G), v.repeat(1, 1, G)
        ),
        "stands between the scores and their softmax",
    ),
    "weights viewed as another tensor's": (
        lambda q, k, v: viewed(masked_in_four, lambda w: torch.ones(B * H, S, S).view_as(w))(
            q, k.repeat(1, 1, G), v.repeat(1, 1, G)
        ),
        "The attention weights meet no values.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_FUSED)
def test_near_miss(name: str) -> None:
    model, reason = NOT_FUSED[name]
    module, _ = graphs.captured(model, *qkv())
    assert reason in graphs.refusal(module)


def test_number_of_heads_that_is_a_symbol() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, h, s, _ = q.shape
        weights = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(b, h, s, s).softmax(-1)
        return torch.bmm(weights.flatten(0, 1), v.flatten(0, 1))

    module, _ = graphs.captured(model, *torch.randn(3, B, H, S, D), dynamic=True)
    assert "The number of heads is known only at run time" in graphs.refusal(module)


def test_experts_are_none_of_our_business() -> None:
    def router(x: Tensor, w: Tensor, experts: Tensor) -> Tensor:
        return ((x @ w) * 2.0).softmax(-1) @ experts

    module, _ = graphs.captured(router, torch.randn(B, H, S, D), torch.randn(D, 4), torch.randn(4, D))
    assert graphs.places(module) == []
