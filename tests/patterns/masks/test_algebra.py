"""Masks made at random: their formulas, and what is proved of them, against the mask itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import attention_graphs as graphs
import pytest
import torch
from torch import Tensor, fx

from fusion_pass.graph.effects import Effects
from fusion_pass.graph.site import Operand
from fusion_pass.graph.vocabulary import fake, fake_tensor, size, sizes
from fusion_pass.kernels.attention_problem import mask_floor, resolve
from fusion_pass.patterns.formulas import terms
from fusion_pass.patterns.formulas.reading import IndexReader
from fusion_pass.patterns.masks.masked_scores import Frame, MaskRefused, MaskTerm, Meaning
from fusion_pass.patterns.masks.proof import SeenKeys, prove

BATCH = 2
LOWEST = torch.finfo(torch.float32).min

Condition = Callable[[dict[str, Tensor]], Tensor]


def _leaf(draw: random.Random) -> Condition:
    c, w = draw.randint(-2, 3), draw.randint(1, 6)
    kinds: list[Condition] = [
        lambda t: t["j"] <= t["i"] + c,
        lambda t: t["j"] < t["i"] + c,
        lambda t: t["i"] - t["j"] < w,
        lambda t: t["j"] > t["i"] - w,
        lambda t: (t["i"] - t["j"]).abs() <= w,
        lambda t: (t["j"] - t["i"] + c).abs() > w,
        lambda t: t["j"] // w == t["i"] // w,
        lambda t: t["j"] >= c,
        lambda t: t["i"] != c,
        lambda t: torch.ones(t["i"].shape[-2], t["j"].shape[-1], dtype=torch.bool).tril(c),
        lambda t: torch.ones(t["i"].shape[-2], t["j"].shape[-1]).triu(c).bool(),
        lambda t: t["q_ids"][:, None, :, None] == t["k_ids"][:, None, None, :],
        lambda t: t["keep"][:, None, None, :],
        lambda t: t["numbers"][:, None, None, :] > c,
        lambda t: t["k_positions"][:, None, None, :] <= t["q_positions"][:, None, :, None] + c,
        lambda t: t["q_positions"][:, None, :, None] - t["k_positions"][:, None, None, :] < w,
        lambda t: t["q_runs"][:, None, :, None] == t["k_runs"][:, None, None, :],
    ]
    return draw.choice(kinds)


def _condition(draw: random.Random, depth: int) -> Condition:
    if depth == 0:
        return _leaf(draw)
    a, b = _condition(draw, depth - 1), _condition(draw, draw.randrange(depth))
    kinds: list[Condition] = [
        lambda t: a(t) & b(t),
        lambda t: a(t) & b(t),
        lambda t: a(t).logical_and(b(t)),
        lambda t: a(t) * b(t),
        lambda t: a(t) | b(t),
        lambda t: ~a(t),
        lambda t: torch.where(a(t), b(t), False),
        lambda t: a(t).masked_fill(~b(t), False),
        lambda t: a(t).to(torch.int64).bool(),
        lambda t: a(t) & (t["i"] >= 0),
    ]
    return draw.choice(kinds)


def _mask(draw: random.Random) -> Condition:
    a, b = _condition(draw, draw.randint(0, 3)), _condition(draw, 0)
    kinds: list[Condition] = [
        a,
        a,
        lambda t: torch.where(a(t), 0.0, LOWEST),
        lambda t: torch.where(a(t), 0.0, float("-inf")),
        lambda t: torch.where(a(t), 0.0, LOWEST) + torch.zeros_like(b(t), dtype=torch.float32).masked_fill(b(t), -1e9),
        lambda t: (1.0 - a(t).float()) * LOWEST,
        lambda t: torch.where(a(t), 0.0, -5.0),
    ]
    return draw.choice(kinds)


def _tensors(queries: int, keys: int) -> list[Tensor]:
    ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [4, 4, 1, 1, 1, 1, 1, 1, 0]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3], [5, 6, 7, 8, 0, 1, 2, 1, 2]])
    keep = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1, 1]]).bool()
    views = (
        ids[:, :queries],
        ids[:, :keys],
        positions[:, :queries],
        positions[:, :keys],
        keep[:, :keys],
        3 - ids[:, :keys],
    )
    return [view.clone() for view in views]


def _masks(conditions: list[Condition]) -> Callable[..., list[Tensor]]:
    def model(
        q_ids: Tensor, k_ids: Tensor, q_pos: Tensor, k_pos: Tensor, keep: Tensor, numbers: Tensor
    ) -> list[Tensor]:
        queries, keys = q_ids.shape[1], k_ids.shape[1]
        runs = (torch.diff(k_pos, prepend=k_pos[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        same = queries == keys
        known = {
            "i": torch.arange(queries)[:, None],
            "j": torch.arange(keys)[None, :],
            "q_ids": q_ids,
            "k_ids": k_ids,
            "q_positions": k_pos if same else q_pos,
            "k_positions": k_pos,
            "q_runs": runs if same else q_ids,
            "k_runs": runs,
            "keep": keep,
            "numbers": numbers,
        }
        return [*(condition(known).clone() for condition in conditions), q_ids.clone(), k_ids.clone()]

    return model


def _at(element: terms.Element, place: dict[int, int], known: dict[str, Any]) -> Any:
    """The value of a formula at one position."""
    match element:
        case terms.Linear():
            return sum((c * _atom_at(t, place, known) for t, c in element.terms), start=_size(element.constant, known))
        case terms.Number(value) | terms.Truth(value):
            return value
        case terms.Unknown(entry) | terms.Fact(entry):
            return _atom_at(entry, place, known)
        case terms.Select(condition, yes, no):
            return _at(yes if _at(condition, place, known) else no, place, known)
        case terms.AtMostZero(linear):
            return _at(linear, place, known) <= 0
        case terms.IsZero(linear):
            return _at(linear, place, known) == 0
        case terms.Not(formula):
            return not _at(formula, place, known)
        case terms.All(formulas):
            return all(_at(f, place, known) for f in formulas)
        case terms.Any(formulas):
            return any(_at(f, place, known) for f in formulas)
    raise AssertionError(element)


def _size(size: Any, known: dict[str, Any]) -> int:
    return size if isinstance(size, int) else int(size.subs(known["symbols"]))


def _atom_at(atom: terms.Atom, place: dict[int, int], known: dict[str, Any]) -> Any:
    match atom:
        case terms.Axis(number):
            return place[number]
        case terms.Entry(node, _, index):
            return known[node.name][tuple(_at(i, place, known) for i in index)].item()
        case terms.Quotient(numerator, divisor):
            return _at(numerator, place, known) // divisor
        case terms.Magnitude(argument):
            return abs(_at(argument, place, known))


def _positions(shape: torch.Size) -> list[tuple[int, ...]]:
    return [tuple(index) for index in torch.ones(shape).nonzero().tolist()]


def _outputs(module: fx.GraphModule) -> list[fx.Node]:
    (output,) = module.graph.find_nodes(op="output")
    return list(output.args[0])


@pytest.mark.parametrize(
    ("lengths", "dynamic"),
    [
        ((9, 9), None),
        ((5, 9), None),
        ((9, 6), None),
        ((9, 9), True),
    ],
)
def test_random_masks(lengths: tuple[int, int], dynamic: bool | None) -> None:
    draw = random.Random(repr((lengths, dynamic)))
    conditions = [_mask(draw) for _ in range(24)]
    module, inputs = graphs.captured(_masks(conditions), *_tensors(*lengths), dynamic=dynamic)
    known = graphs.values(module, inputs)
    known["symbols"] = {
        size(fake(node)): known[node.name]
        for node in module.graph.find_nodes(op="placeholder")
        if isinstance(fake(node), torch.SymInt)
    }
    reader = IndexReader(Effects(module.graph))
    (output,) = module.graph.find_nodes(op="output")
    proofs = 0
    *masks, q_ids, k_ids = _outputs(module)
    frame = _frame(q_ids, k_ids)
    for node in masks:
        mask = known[node.name]
        _check_formula(reader.read(node, output), mask, known, draw)
        proofs += _check_proof(reader, node, output, frame, lengths, mask, known)
    assert proofs >= 2


def _frame(q_ids: fx.Node, k_ids: fx.Node) -> Frame:
    (batch, queries), (_, keys) = (sizes(cast(Tensor, fake_tensor(node))) for node in (q_ids, k_ids))
    return Frame(batch, 1, queries, keys)


def _check_formula(element: terms.Element, mask: Tensor, known: dict[str, Any], draw: random.Random) -> None:
    rank = mask.dim()
    for position in draw.sample(_positions(mask.shape), min(50, mask.numel())):
        place = {rank - d: index for d, index in enumerate(position)}
        assert _at(element, place, known) == mask[position].item(), element


def _check_proof(
    reader: IndexReader,
    node: fx.Node,
    output: fx.Node,
    frame: Frame,
    lengths: tuple[int, int],
    mask: Tensor,
    known: dict[str, Any],
) -> bool:
    """What is proved lets exactly the same keys be seen, and a row of nothing but finite numbers keeps its numbers.
    Returns whether less than the mask itself is passed on."""
    meaning = Meaning.SEEN if mask.dtype == torch.bool else Meaning.ADDED
    try:
        seen = prove(reader, [MaskTerm(node, output, meaning)], frame, output)
    except MaskRefused:
        return False
    tensors = {
        name: None if operand is None else graphs.move(known[operand.node.name], operand.steps)
        for name, operand in (
            ("mask", seen.mask),
            ("q_segment_ids", seen.q_segments),
            ("k_segment_ids", seen.k_segments),
        )
    }
    explicit = tensors.pop("mask")
    keep = resolve(
        *lengths, causal=seen.causal, window_left=seen.window_left, window_right=seen.window_right, **tensors
    ).keep(*lengths, torch.device("cpu"))
    shape = (BATCH, 1, *lengths)
    got = torch.ones(shape, dtype=torch.bool) if keep is None else keep.expand(shape)
    if explicit is not None:
        got = got & _seen(explicit)
    expected = _seen(mask).expand(shape)
    assert torch.equal(got, expected), (node, seen)
    blind = ~expected.any(-1)
    if mask.dtype != torch.bool and (mask.expand(shape)[blind] > float("-inf")).any():
        assert seen == SeenKeys(mask=Operand(node)), (node, seen)
    return seen.mask is None or seen.mask.node is not node


def _seen(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask > mask_floor(mask.dtype)
