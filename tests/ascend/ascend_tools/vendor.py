"""The vendor's attention operators, written from their documentation and nothing else, in float64.

They are registered under their own names with the schemas of the torch_npu wheel, so PyTorch's dispatcher checks each
argument's name, type and kind. They expand the sparse modes, the compressed mask, the token counts and the lengths of
packed documents to a full mask, and fail on what the documentation forbids. What the hardware does is not here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from . import schemas

NO_LIMIT = 2147483647  # the default in the schema; the dispatcher leaves out arguments that equal their default


def hidden(atten_mask: Tensor | None, mode: int, before: int, after: int, rows: int, cols: int) -> Tensor:
    """True where a score takes no part, from the documentation of `sparse_mode`."""
    if atten_mask is None:
        return torch.zeros(rows, cols, dtype=torch.bool)
    if mode == 1:
        assert atten_mask.shape[-2:] == (rows, cols)
        return atten_mask
    assert atten_mask.dtype == torch.bool
    assert torch.equal(atten_mask, torch.triu(torch.ones(2048, 2048), 1).bool())
    i, j = torch.arange(rows)[:, None], torch.arange(cols)[None, :]
    if mode == 2:
        return j > i
    i = i + cols - rows
    if mode == 3:
        assert rows <= cols, "mode 3 computes no rows without keys"
        return j > i
    assert mode == 4
    assert before + after >= 0, "the band is empty"
    return (j > i + after) | (j < i - before)


def scores_of(query: Tensor, key: Tensor, scale: float, hide: Tensor) -> Tensor:
    """`[B, N, Sq, Sk]` in float64 of `[B, S, N, D]`; -inf where hidden."""
    key = key.repeat_interleave(query.shape[2] // key.shape[2], 2)
    scores = torch.einsum("bind,bjnd->bnij", query.double(), key.double())
    return scores.mul(scale).masked_fill(hide, -torch.inf)


def softmax(scores: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """exp(S - m), m and the sum; with a sink m = max(sink, max(S)), and it is in the sum."""
    maximum = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    if sink is not None:
        assert sink.dtype == torch.float32
        assert sink.shape == (scores.shape[1],)
        sink = sink.double()[None, :, None, None]
        maximum = torch.maximum(maximum, sink)
    weights = (scores - maximum).exp()
    total = weights.sum(-1, keepdim=True)
    return weights, maximum, total if sink is None else total + (sink - maximum).exp()


def attend(
    query: Tensor, key: Tensor, value: Tensor, hide: Tensor, scale: float, sink: Tensor | None, empty_rows: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """out `[B, S, N, D]`, and maximum and sum eight times, `[B, N, S, 8]`."""
    scores = scores_of(query, key, scale, hide)
    assert empty_rows or scores.isfinite().any(-1).all(), "a row without keys, and invalid-row computation is off"
    weights, maximum, total = softmax(scores, sink)
    value = value.repeat_interleave(query.shape[2] // value.shape[2], 2).double()
    out = torch.einsum("bnij,bjnd->bind", weights / total.clamp(min=1e-30), value).to(query.dtype)
    eight = (*total.shape[:-1], 8)
    return out, maximum.expand(eight).float(), total.expand(eight).float()


def attend_grad(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, hide: Tensor, scale: float, o: dict[str, Any]
) -> tuple[Tensor, ...]:
    """dq, dk, dv and dsink (empty without a sink), from the statistics and out in `o`."""
    scores = scores_of(query, key, scale, hide)
    maximum, total = (o[name][..., :1].double() for name in ("softmax_max", "softmax_sum"))
    assert o["softmax_max"].shape == (*scores.shape[:-1], 8) == o["softmax_sum"].shape
    p = (scores - maximum).exp() / total
    group = query.shape[2] // key.shape[2]
    k, v = (t.repeat_interleave(group, 2).double() for t in (key, value))
    g = dy.double()
    delta = (g * o["attention_in"].double()).sum(-1).transpose(1, 2)[..., None]
    ds = p * (torch.einsum("bind,bjnd->bnij", g, v) - delta) * scale
    dq = torch.einsum("bnij,bjnd->bind", ds, k)
    dk = torch.einsum("bnij,bind->bjnd", ds, query.double()).unflatten(2, (-1, group)).sum(3)
    dv = torch.einsum("bnij,bind->bjnd", p, g).unflatten(2, (-1, group)).sum(3)
    dsink = torch.empty(0)
    if o.get("sink") is not None:
        assert query.dtype in (torch.bfloat16, torch.float16), "the gradient of a sink is for half precision"
        share = (o["sink"].double()[None, :, None, None] - maximum).exp() / total
        dsink = -(share * delta).sum((0, 2, 3)).float()
    return *(t.to(query.dtype) for t in (dq, dk, dv)), dsink


def _hide(o: dict[str, Any], rows: int, cols: int, tokens: str = "tokens") -> Tensor:
    before, after = (o.get(f"{side}_{tokens}", NO_LIMIT) for side in ("pre", "next"))
    return hidden(o.get("atten_mask"), o.get("sparse_mode", 0), before, after, rows, cols)


def _check_bsnd(query: Tensor, head_num: int, input_layout: str, o: dict[str, Any]) -> None:
    assert input_layout == "BSND"
    assert head_num == query.shape[2]
    assert o.get("keep_prob", 1.0) == 1.0
    mask = o.get("atten_mask")
    if mask is not None and mask.dim() == 4:
        batch, _, heads, _ = query.shape
        assert tuple(mask.shape[:2]) in ((batch, heads), (batch, 1), (1, 1))


def fusion_attention_v2(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **o: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    _check_bsnd(query, head_num, input_layout, o)
    hide = _hide(o, query.shape[1], key.shape[1])
    results = attend(query, key, value, hide, o["scale"], o.get("sink"), empty_rows=o.get("inner_precise", 0) == 2)
    return *results, torch.empty(0), 0, 0, 0


def fusion_attention_grad_v2(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, **o: Any
) -> tuple[Tensor, ...]:
    _check_bsnd(query, head_num, input_layout, o)
    *gradients, dsink = attend_grad(query, key, value, dy, _hide(o, query.shape[1], key.shape[1]), o["scale_value"], o)
    return *gradients, torch.empty(0), torch.empty(0), torch.empty(0), dsink


def fused_infer_attention_score(query: Tensor, key: Tensor, value: Tensor, **o: Any) -> tuple[Tensor, Tensor]:
    batch, queries, heads, head_dim = query.shape
    assert o["softmax_lse_flag"]
    assert o["input_layout"] == "BSND"
    assert (o["num_heads"], o["num_key_value_heads"]) == (heads, key.shape[2])
    assert heads <= 64 * key.shape[2]
    assert heads * head_dim < 65535
    assert head_dim % 16 == 0
    assert all(t.is_contiguous() for t in (query, key, value))
    assert query.dtype in (torch.float16, torch.bfloat16)
    mask, correct_rows = o.get("atten_mask"), o.get("inner_precise", 0) == 2
    if queries == 1:
        assert mask is None, "with a single query the mode has no effect"
    elif mask is not None:
        assert mask.is_contiguous()
        assert o["sparse_mode"] in (1, 2, 3), "from where a window counts is not documented"
        assert o["sparse_mode"] != 1 or tuple(mask.shape[:2]) in ((batch, 1), (1, 1))
    hide = _hide(o, queries, key.shape[1])
    out, maximum, total = attend(query, key, value, hide, o["scale"], None, empty_rows=correct_rows)
    return out, maximum[..., :1] + total[..., :1].log()


def _documents(o: dict[str, Any], query: Tensor, key: Tensor) -> list[tuple[slice, slice]]:
    """The tokens of each document, from the running totals of the lengths, which are integers of the host."""
    ends_q, ends_k = o["actual_seq_qlen"], o["actual_seq_kvlen"]
    assert len(ends_q) == len(ends_k) > 0
    assert all(type(end) is int for end in (*ends_q, *ends_k))
    assert (ends_q[-1], ends_k[-1]) == (query.shape[0], key.shape[0]), "tokens outside the documents"
    pairs = zip(_runs(ends_q), _runs(ends_k), strict=True)
    return list(pairs)


def _runs(ends: Sequence[int]) -> list[slice]:
    starts = [0, *ends[:-1]]
    assert all(start < end for start, end in zip(starts, ends, strict=True)), "an empty document"
    return [slice(start, end) for start, end in zip(starts, ends, strict=True)]


def fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *positional: Any, **o: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """The layout TND with the statistics in the same order: every document is attention of its own."""
    o = _by_name("npu_fusion_attention", 5, positional, o)
    assert (input_layout, o["softmax_layout"]) == ("TND", "TND")
    assert head_num == query.shape[1]
    assert o.get("keep_prob", 1.0) == 1.0
    parts = []
    for rows, cols in _documents(o, query, key):
        hide = _hide(o, rows.stop - rows.start, cols.stop - cols.start, "tockens")
        tokens = query[None, rows], key[None, cols], value[None, cols]
        out, maximum, total = attend(*tokens, hide, o["scale"], o.get("sink"))
        parts.append((out[0], maximum[0].transpose(0, 1), total[0].transpose(0, 1)))
    out, maximum, total = (torch.cat(part) for part in zip(*parts, strict=True))
    return out, maximum.contiguous(), total.contiguous(), torch.empty(0), 0, 0, 0


def fusion_attention_grad(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, **o: Any
) -> tuple[Tensor, ...]:
    assert (input_layout, o["softmax_layout"]) == ("TND", "TND")
    assert head_num == query.shape[1]
    assert o["softmax_max"].shape == (*query.shape[:2], 8) == o["softmax_sum"].shape
    parts = []
    for rows, cols in _documents(o, query, key):
        own = {
            "softmax_max": o["softmax_max"][rows].transpose(0, 1)[None],
            "softmax_sum": o["softmax_sum"][rows].transpose(0, 1)[None],
            "attention_in": o["attention_in"][None, rows],
            "sink": o.get("sink"),
        }
        hide = _hide(o, rows.stop - rows.start, cols.stop - cols.start, "tockens")
        *gradients, dsink = attend_grad(
            query[None, rows], key[None, cols], value[None, cols], dy[None, rows], hide, o["scale_value"], own
        )
        parts.append((*(g[0] for g in gradients), dsink))
    dq, dk, dv = (torch.cat([part[i] for part in parts]) for i in range(3))
    return dq, dk, dv, torch.empty(0), torch.stack([part[3] for part in parts]).sum(0)


def _by_name(operator: str, skip: int, positional: Sequence[Any], named: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name: the dispatcher passes on by position what a schema lets it."""
    names = schemas.argument_names(operator)[skip:]
    return dict(zip(names, positional, strict=False)) | named


OPERATORS = {
    "npu_fusion_attention_v2": fusion_attention_v2,
    "npu_fusion_attention_grad_v2": fusion_attention_grad_v2,
    "npu_fused_infer_attention_score": fused_infer_attention_score,
    "npu_fusion_attention": fusion_attention,
    "npu_fusion_attention_grad": fusion_attention_grad,
}


@contextmanager
def registered() -> Iterator[None]:
    """The operators exist under their real schemas, for CPU tensors."""
    library = torch.library.Library("npu", "FRAGMENT")
    for name, function in OPERATORS.items():
        library.define(schemas.read(name))
        library.impl(name, function, "CPU")
    yield
    library._destroy()
