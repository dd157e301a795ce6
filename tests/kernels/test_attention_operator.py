"""The operator around the kernels: edge rows, strides, schema, errors, choice of the kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from attention_oracle import Case, eager, make_inputs, poisoned_memory, run_operator
from torch import Tensor

from fusion_pass.kernels import attention, registry

CPU = torch.device("cpu")


@pytest.fixture(params=["reference", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both back ends of the CPU; Triton's (interpreted) with small tiles."""
    if request.param == "triton":
        if torch.cuda.is_available():
            pytest.skip("with a GPU the kernels are tested on it")
        from fusion_pass.kernels.triton import attention as launchers
        from fusion_pass.kernels.triton.attention_tiles import Tile

        monkeypatch.setattr(launchers, "choose_tile", lambda *_: Tile(32, 16, 4, 1))
    return str(request.param)


def heads(tokens: int, number: int, head_dim: int = 16, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, tokens, number, head_dim, dtype=dtype, requires_grad=True)


def gradients(output: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output, leaves, torch.randn(output.shape, generator=torch.Generator().manual_seed(1)))


# --- rows that see nothing ---


def test_a_row_that_sees_no_key_is_zero_and_has_no_gradient(backend: str) -> None:
    q, k, v = heads(20, 2), heads(20, 2), heads(20, 2)
    mask = torch.ones(20, 20, dtype=torch.bool).tril()
    mask[3] = False
    mask[:, 5] = False
    with poisoned_memory():
        out, lse = attention(q, k, v, mask, backend=backend)
        dq, dk, dv = gradients(out, q, k, v)
    assert not out[:, 3].any()
    assert (lse[:, :, 3] == float("-inf")).all()
    assert lse[:, :, 4].isfinite().all()
    assert not dq[:, 3].any()
    assert not dk[:, 5].any()
    assert not dv[:, 5].any()
    assert all(g.isfinite().all() for g in (dq, dk, dv))


@pytest.mark.parametrize("value", [float("-inf"), torch.finfo(torch.float32).min, -1e9])
def test_a_hidden_key_leaves_no_trace_in_a_row_that_sees_another(value: float, backend: str) -> None:
    q, k, v = heads(20, 2), heads(20, 2), heads(20, 2)
    seen = torch.rand(2, 1, 20, 20) > 0.5
    seen[..., 3], seen[..., 7] = True, False
    added = torch.zeros(seen.shape).masked_fill(~seen, value)
    results = []
    for mask in (added, seen):
        out, lse = attention(q, k, v, mask, backend=backend)
        results.append((out, lse, *gradients(out, q, k, v)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
    dk, dv = results[0][3:]
    assert not dk[:, 7].any()
    assert not dv[:, 7].any()


@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min, -1e9])
def test_a_row_of_equal_large_numbers_is_the_mean_of_all_values(value: float, backend: str) -> None:
    """As the softmax of an eager model, which loses the scores in the sum: the padding of a left-padded batch. All keys
    have an equal part in the row's gradient."""
    q, k, v = heads(20, 2), heads(20, 2), heads(20, 2)
    mask = torch.zeros(20, 20).masked_fill(torch.ones(20, 20).triu(1) > 0, value)
    mask[3] = value
    with poisoned_memory():
        out, lse = attention(q, k, v, mask, backend=backend)
        dq, dk, dv = gradients(out[:, 3], q, k, v)
    torch.testing.assert_close(out[:, 3], v.mean(1))
    assert torch.equal(lse[:, :, 3], torch.full((2, 2), value))
    (expected,) = gradients(v.mean(1), v)
    torch.testing.assert_close(dv, expected)
    assert not dq[:, 4:].any()
    assert dk.isfinite().all()
    assert dk[:, 19].any()


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
def test_zero_sizes(batch: int, queries: int, keys: int, backend: str) -> None:
    """pytorch 166318; flash-attention 2562, 1713; dK and dV of no queries are 0 and not what memory held (ROCm
    2421).
    """
    q, k, v = (torch.randn(batch, n, 2, 16, requires_grad=True) for n in (queries, keys, keys))
    with poisoned_memory():
        out, lse = attention(q, k, v, causal="bottom_right", backend=backend)
        dq, dk, dv = torch.autograd.grad(out.sum() + 0 * lse.nan_to_num(neginf=0).sum(), (q, k, v))
    assert out.shape == q.shape
    assert not out.any()
    assert (lse == float("-inf")).all()
    assert not dq.any()
    assert not dk.any()
    assert not dv.any()


# --- documents ---


def test_packed_documents_equal_the_documents_apart(backend: str) -> None:
    q, k, v = (torch.randn(1, 40, h, 16, requires_grad=True) for h in (4, 2, 2))
    cu = torch.tensor([0, 13, 40])
    ids = torch.bucketize(torch.arange(40), cu[1:], right=True)[None]
    apart = [
        attention(*(x[:, a:b] for x in (q, k, v)), causal="top_left", backend=backend)[0]
        for a, b in ((0, 13), (13, 40))
    ]
    expected = torch.cat(apart, 1)
    wanted = gradients(expected, q, k, v)
    for packed in ({"cu_seqlens_q": cu}, {"q_segment_ids": ids}):
        out, _ = attention(q, k, v, causal="top_left", backend=backend, **packed)
        torch.testing.assert_close(out, expected)
        for actual, value in zip(gradients(out, q, k, v), wanted, strict=True):
            torch.testing.assert_close(actual, value)


def test_segment_ids_are_not_truncated_to_32_bits(backend: str) -> None:
    q = heads(6, 1)
    ids = torch.tensor([[1, 1, 1, 1 + 2**32, 1 + 2**32, 1 + 2**32]])
    narrow = torch.tensor([[0, 0, 0, 1, 1, 1]])
    wide = attention(q, q, q, q_segment_ids=ids, backend=backend)[0]
    assert torch.equal(wide, attention(q, q, q, q_segment_ids=narrow, backend=backend)[0])


def visited(own: int, other: int, own_are_keys: bool, conditions: dict[str, Any], tokens: int = 64) -> list[list[int]]:
    """What the kernel before the kernels writes: [begin, full_begin, full_end, end] of each block."""
    from fusion_pass.kernels.attention_problem import Problem, resolve
    from fusion_pass.kernels.triton.attention import _ranges

    q = torch.randn(1, tokens, 1, 16)
    bounds = {"causal": "none", "window_left": -1, "window_right": -1}
    problem = Problem(q, q, q, None, resolve(tokens, tokens, **(bounds | conditions)), 0.25, 0.0)
    blocks: list[list[int]] = _ranges(problem, own, other, own_are_keys).blocks[0, 0].tolist()
    return blocks


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the interpreter")
@pytest.mark.parametrize("own_are_keys", [False, True])
def test_only_tiles_of_the_own_document_are_visited(own_are_keys: bool) -> None:
    """Documents of 16, 24 and 24 tokens, tiles of 8: each block walks its own document, and no tile of it needs a
    mask.
    """
    ids = torch.tensor([[0] * 16 + [1] * 24 + [2] * 24])
    begins = [0] * 2 + [2] * 3 + [5] * 3
    ends = [2] * 2 + [5] * 3 + [8] * 3
    blocks = visited(8, 8, own_are_keys, {"q_segment_ids": ids})
    assert blocks == [[begin, begin, end, end] for begin, end in zip(begins, ends, strict=True)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the interpreter")
def test_an_explicit_causal_mask_costs_half_the_square() -> None:
    mask = torch.ones(64, 64, dtype=torch.bool).tril()
    assert visited(16, 8, False, {"mask": mask}) == [[0, 2, 2, 2], *([0, 0, 2 * i, 2 * i + 2] for i in (1, 2, 3))]
    assert visited(8, 16, True, {"mask": mask}) == [[i // 2, i // 2 + 1, 4, 4] for i in range(8)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the interpreter")
@pytest.mark.parametrize("value", [float("-inf"), torch.finfo(torch.float32).min, -1e9])
def test_an_additive_mask_is_passed_over_where_it_leaves_no_trace(value: float) -> None:
    """A causal mask of numbers costs half the square too. A row of nothing but such numbers is their softmax: its block
    visits them all. -inf is never visited."""
    mask = torch.zeros(64, 64).masked_fill(torch.ones(64, 64).triu(1) > 0, value)
    assert [block[::3] for block in visited(16, 8, False, {"mask": mask})] == [[0, 2 * i] for i in (1, 2, 3, 4)]
    mask[5] = value
    first = [0, 2] if value == float("-inf") else [0, 8]
    assert [block[::3] for block in visited(16, 8, False, {"mask": mask})] == [first, [0, 4], [0, 6], [0, 8]]
    if value != float("-inf"):  # another condition could hide the very key that makes the others negligible
        window = visited(16, 8, False, {"mask": mask, "window_left": 63})
        assert [block[::3] for block in window] == [[0, 8]] * 4


# --- strides ---


def test_views_of_one_packed_buffer_and_gradients_into_one(backend: str) -> None:
    """flash-attention 2541; nothing is copied, and nothing beside the parts is written."""
    qkv = torch.randn(2, 20, (4 + 2 + 2) * 16 + 8)
    q, k, v = (qkv[..., a * 16 : b * 16].unflatten(-1, (-1, 16)) for a, b in ((0, 4), (4, 6), (6, 8)))
    dqkv = torch.full_like(qkv, 7.0)
    parts = [dqkv[..., a * 16 : b * 16].unflatten(-1, (-1, 16)) for a, b in ((0, 4), (4, 6), (6, 8))]
    from fusion_pass.kernels.attention_problem import Problem, resolve

    seen = resolve(20, 20, causal="top_left", window_left=-1, window_right=-1)
    problem = Problem(q, k, v, None, seen, 0.25, 0.0)
    kernel = registry.get("attention", backend).load()
    out, lse = kernel.forward(problem, "bshd")
    grad = torch.randn_like(out)
    returned = kernel.backward(problem, grad, None, out, lse, (True, True, True, False), parts)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(eager(*leaves, causal="top_left")[0], leaves, grad)
    for part, given, wanted in zip(parts, returned, expected, strict=False):
        assert given is part
        torch.testing.assert_close(part, wanted)
    assert (dqkv[..., -8:] == 7.0).all()


@pytest.mark.parametrize("order", ["bshd", "bhsd"])
def test_any_strides_of_inputs_and_gradients(order: str, backend: str) -> None:
    """q, k and v each strided otherwise (FlagAttention 45); gradients transposed, sliced and expanded
    (flash-attention 355).
    """
    q = torch.randn(2, 4, 20, 16).transpose(1, 2).requires_grad_()
    k = torch.randn(20, 2, 2, 16).transpose(0, 1).requires_grad_()
    v = torch.randn(2, 20, 2, 32)[..., :16].requires_grad_()
    out, _ = attention(q, k, v, causal="top_left", out_order=order, backend=backend)
    assert out.stride() == ((1280, 64, 16, 1) if order == "bshd" else (1280, 16, 320, 1))
    wanted = eager(q, k, v, causal="top_left")[0]
    torch.testing.assert_close(out, wanted)
    for grad in (
        torch.randn(2, 4, 16, 20).permute(0, 3, 1, 2),
        torch.randn(2, 20, 4, 40)[..., 3:19],
        torch.randn(1, 20, 1, 16).expand(2, 20, 4, 16),
        torch.ones(()).expand(2, 20, 4, 16),
    ):
        expected = torch.autograd.grad(wanted, (q, k, v), grad, retain_graph=True)
        for actual, value in zip(torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), expected, strict=True):
            assert actual.is_contiguous()
            torch.testing.assert_close(actual, value, rtol=1e-4, atol=1e-5)


def test_only_the_gradients_that_are_needed(backend: str) -> None:
    q, k, v = heads(20, 2), heads(20, 2).detach(), heads(20, 2)
    out, _ = attention(q, k, v, backend=backend)
    dq, dv = gradients(out, q, v)
    wanted = gradients(eager(q, k, v)[0], q, v)
    torch.testing.assert_close(dq, wanted[0])
    torch.testing.assert_close(dv, wanted[1])


def test_same_bits_in_every_run(backend: str) -> None:
    inputs = make_inputs(Case(sinks=True, lse_gradient=True), torch.float32, CPU)
    first, second = (run_operator(inputs, torch.float32, backend).values for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


# --- PyTorch's view of it ---


@pytest.mark.parametrize("order", ["bshd", "bhsd"])
def test_opcheck(order: str) -> None:
    """Schema, fake, strides, autograd, dynamic shapes."""
    q, k, v, sinks = heads(20, 4), heads(24, 2), heads(24, 2), torch.randn(4, requires_grad=True)
    options = {"causal": "bottom_right", "out_order": order, "backend": "reference"}
    mask = torch.rand(20, 24) > 0.2
    k = k.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    torch.library.opcheck(torch.ops.fusion_pass.attention.default, (q, k, v, mask, sinks), options)


def test_gradcheck_of_the_reference() -> None:
    q, k, v = (torch.randn(1, 5, h, 3, dtype=torch.float64, requires_grad=True) for h in (2, 1, 1))
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    mask = torch.randn(5, 5, dtype=torch.float64)

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, mask, sinks, causal="top_left", softcap=2.0, backend="reference")

    assert torch.autograd.gradcheck(call, (q, k, v, sinks))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_a_break(dynamic: bool) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        swapped = (x.transpose(1, 2) for x in (q, k, v))
        return attention(*swapped, causal="top_left", window_left=q.shape[2] // 2, backend="reference")[0]

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for tokens in (12, 20):
        q, k, v = (torch.randn(2, 3, tokens, 16, requires_grad=True) for _ in range(3))
        out, wanted = compiled(q, k, v), step(q, k, v)
        torch.testing.assert_close(out, wanted)
        for actual, value in zip(gradients(out, q, k, v), gradients(wanted, q, k, v), strict=True):
            torch.testing.assert_close(actual, value)


def test_no_second_derivative() -> None:
    q = heads(4, 1)
    (dq,) = torch.autograd.grad(attention(q, q, q, backend="reference")[0].sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
        dq.sum().backward()


def test_a_mask_that_requires_a_gradient_is_refused() -> None:
    q = heads(4, 1)
    with pytest.raises(NotImplementedError, match="mask requires a gradient"):
        attention(q, q, q, torch.zeros(4, 4, requires_grad=True))


def wrong(**changes: Any) -> tuple[dict[str, Any], str]:
    match = changes.pop("match")
    return changes, match


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        wrong(q=torch.randn(2, 6, 16), match=r"q has shape \[2, 6, 16\]; it takes \[batch"),
        wrong(k=torch.randn(2, 6, 2, 8), match="batch and head_dim must be equal"),
        wrong(v=torch.randn(2, 7, 2, 16), match="only head_dim may differ"),
        wrong(k=torch.randn(2, 6, 3, 16), v=torch.randn(2, 6, 3, 16), match="q has 4 heads and k 3"),
        wrong(k=torch.randn(2, 6, 2, 16).half(), match="they must be equal"),
        wrong(v=torch.randn(2, 6, 16, 2).transpose(2, 3), match="the last must be 1"),
        wrong(q=torch.zeros(2, 6, 4, 16, dtype=torch.int64), match="q has dtype torch.int64"),
        wrong(mask=torch.ones(2, 6, 6, dtype=torch.bool), match=r"mask has shape \[2, 6, 6\]"),
        wrong(mask=torch.ones(6, 6, dtype=torch.int64), match="mask has dtype torch.int64"),
        wrong(sinks=torch.randn(2), match=r"one logit a query head, \[4\]"),
        wrong(q_segment_ids=torch.zeros(2, 5, dtype=torch.int64), match="q_segment_ids has shape"),
        wrong(q_segment_ids=torch.zeros(2, 6), match="q_segment_ids has dtype torch.float32"),
        wrong(k_segment_ids=torch.zeros(2, 6, dtype=torch.int64), match="k_segment_ids is given without"),
        wrong(cu_seqlens_q=torch.tensor([0, 6]), match="pack the documents into a batch of 1"),
        wrong(cu_seqlens_k=torch.tensor([0, 6]), match="cu_seqlens_k is given without"),
        wrong(
            causal="lower_right", match="causal is 'lower_right'; it takes one of 'none', 'top_left', 'bottom_right'"
        ),
        wrong(window_left=-2, match="window_left is -2"),
        wrong(softcap=-1.0, match="softcap is -1.0"),
        wrong(out_order="sbhd", match="out_order is 'sbhd'"),
        wrong(backend="no_such", match="backend is 'no_such'"),
    ],
)
def test_wrong_arguments_name_the_argument(changes: dict[str, Any], match: str) -> None:
    arguments: dict[str, Any] = {
        "q": torch.randn(2, 6, 4, 16),
        "k": torch.randn(2, 6, 2, 16),
        "v": torch.randn(2, 6, 2, 16),
    }
    with pytest.raises((ValueError, TypeError), match=match):
        attention(**(arguments | changes))


# --- choice of the kernel ---


def request_of(
    tokens: int | None = 256, head_dim: int = 64, dtype: torch.dtype = torch.bfloat16, **more: Any
) -> registry.Request:
    shapes = dict.fromkeys("qkv", (2, tokens, 8, head_dim))
    dtypes = dict.fromkeys("qkv", dtype) | dict.fromkeys(more.pop("tensors", ()), torch.float32)
    return registry.Request("attention", torch.device("cuda"), dtypes, shapes, more)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (request_of(tensors=("mask",)), "mask is given"),
        (request_of(tensors=("sinks",)), "sinks is given"),
        (request_of(tensors=("q_segment_ids",)), "q_segment_ids is given"),
        (request_of(tensors=("grad_lse",)), "lse has a gradient"),
        (request_of(window_left=5), "window_left is 5"),
        (request_of(softcap=30.0), "softcap is set"),
        (request_of(deterministic=True), "deterministic is set"),
        (request_of(dtype=torch.float32), "q is torch.float32"),
        (request_of(tokens=250), "it is used for multiples of 128"),
        (request_of(head_dim=68), "multiples of 8"),
        (request_of(tokens=None, causal="bottom_right"), "PyTorch aligns to the top left"),
        (request_of(scale=-1.0), "it takes a positive scale"),
    ],
)
def test_sdpa_is_refused_where_it_would_compute_something_else(request_: registry.Request, reason: str) -> None:
    sdpa = next(kernel for kernel in registry.kernels("attention") if kernel.name == "sdpa")
    assert reason in (sdpa.supports(request_) or "")


def test_sdpa_supports_plain_and_causal_attention() -> None:
    sdpa = next(kernel for kernel in registry.kernels("attention") if kernel.name == "sdpa")
    for causal in ("none", "top_left", "bottom_right"):
        assert sdpa.supports(request_of(causal=causal)) is None


@pytest.mark.parametrize(("dims", "supported"), [((192, 128), True), ((128, 192), False), ((128, 64), False)])
def test_head_dims_that_differ_of_sdpa(dims: tuple[int, int], supported: bool) -> None:
    """Those of multi-head latent attention alone are tested on cuDNN."""
    sdpa = next(kernel for kernel in registry.kernels("attention") if kernel.name == "sdpa")
    request = request_of(head_dim=dims[0])
    shapes = {**request.shapes, "v": (*request.shapes["v"][:3], dims[1])}
    assert (sdpa.supports(dataclasses.replace(request, shapes=shapes)) is None) == supported


def test_a_named_back_end_that_cannot_serve_raises() -> None:
    q = heads(4, 1, head_dim=300)
    with pytest.raises(RuntimeError, match="cannot run"):
        attention(q, q, q, backend="triton")
