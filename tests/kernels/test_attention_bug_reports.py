"""Bugs of other attention kernels that were reported in public, and the test here that would show each of them.

A case is an entry of `test_attention_numerics.CASES`: forward and every gradient against float64 with memory poisoned,
in the reference, in Triton's interpreter, and under `-m gpu` on the card. Other names are tests of the modules
`MODULES`; those of `test_attention_hardware` need a GPU.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from attention_oracle import poisoned_memory
from test_attention_numerics import CASES

from fusion_pass.kernels import attention

MODULES = ("test_attention_numerics", "test_attention_operator", "test_attention_hardware", __name__)

REPORTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    # masks and rows that see nothing
    ("flash-attention 334", "NaN dq of one token", ("one", "two", "three_keys")),
    ("flash-attention 443", "NaN dq, more queries than keys", ("bottom_right_fewer_keys", "documents_unequal")),
    (
        "flash-attention 402, 436, 1778",
        "causal aligned to the wrong corner",
        ("top_left_fewer_queries", "top_left_fewer_keys", "bottom_right_fewer_queries", "bottom_right_fewer_keys"),
    ),
    (
        "TransformerEngine 3528",
        "lse of -inf gives NaN; windows of 0 and none",
        ("window_right_0", "window_0_0", "window_wider_than_keys", "lse_gradient_rows_see_nothing"),
    ),
    ("pytorch 196678, trl 7181", "keys past the end scored 0; lse below -88.7", ("large_logits",)),
    ("cudnn-frontend 160, 1072", "NaN from a negative lse of one query", ("one_query",)),
    ("triton 2059, 4541", "the backward is causal where the forward is not", ("full", "window_5_3")),
    ("Model-Optimizer 1034", "log2(0) before its guard", ("sinks_rows_see_nothing", "bias_left_padding_infinite")),
    ("flash-attention 2623", "tiles that are passed over are missed in the backward", ("mask_per_batch", "segments")),
    # strides
    ("flash-attention 355", "a gradient that is not contiguous", ("test_any_strides_of_inputs_and_gradients",)),
    ("FlagGems 2338", "an expanded gradient", ("test_any_strides_of_inputs_and_gradients",)),
    (
        "flash-attention 2541",
        "dv NaN for views of a packed qkv, head_dim 256",
        ("test_views_of_one_packed_buffer_and_gradients_into_one", "test_packed_views_of_wide_heads"),
    ),
    (
        "generative-recommenders 583, FlagAttention 45",
        "strides of k taken for those of v",
        ("test_any_strides_of_inputs_and_gradients",),
    ),
    (
        "pytorch 134001, 138581; FastVideo 1647, modded-nanogpt 83, Primus 362",
        "strides of the fake are not those of the result",
        ("test_opcheck", "test_compiled_without_a_break"),
    ),
    (
        "flash-attention 2552, 2896; TransformerEngine 3216",
        "head sizes that are no power of two; a second batch of wide heads",
        ("head_dim_24_40", "head_dim_40_24", "head_dim_72_72", "head_dim_104_104", "head_dim_256_256"),
    ),
    (
        "NSA 27, ColossalAI 6428, 6444",
        "query heads read the wrong key head",
        ("heads_3_3", "heads_7_1", "heads_8_2"),
    ),
    # sizes
    (
        "flash-attention 1311, 1500, 1786, 2611; TabPFN 1184; FlashDeBERTa 11; fla 769, 1080",
        "offsets past 2^31",
        ("test_more_than_2_31_elements",),
    ),
    ("fla 172, MagiAttention 40, flashinfer 3125", "more than 65535 heads", ("test_70000_heads_in_a_batch",)),
    (
        "pytorch 166318; flash-attention 1537, 1713, 2562, 2568; ROCm 179, 2421",
        "no batch, queries or keys; dk and dv left as memory held them",
        ("test_zero_sizes",),
    ),
    ("flash-attention 1254", "a document without tokens", ("documents", "documents_cross")),
    ("flash-attention 2324, fla 892", "gradients past the last document", ("documents_end_early",)),
    ("tilelang 2461", "rows past the end of a tile", ("full", "causal", "lse_gradient")),
    # softcap, determinism, races
    ("flash-attention 1033, 1065", "softcap in the backward", ("softcap_5", "softcap_30", "softcap_50")),
    (
        "flash-attention 414, 746, 988, 1596, 1678, 1839, 2244, 2510; exllamav3 316",
        "other bits in another run",
        ("test_same_bits_in_every_run", "test_shapes_in_turn"),
    ),
    (
        "flash-attention 359, 2033, 2481; ThunderKittens 142",
        "a result is read before it is there",
        ("test_back_to_back_launches_and_streams",),
    ),
    ("triton 9433, 11781; fla 1262", "registers overwritten under a product", ("test_integers_are_exact",)),
    ("fla 640, unsloth 5276", "a transposed result fed to the next product", ("full", "head_dim_128_128")),
    ("triton 621, 1975", "any length and head_dim", ("window_5_3", "head_dim_80_80", "head_dim_96_96")),
)
"""Repository and issue numbers, what went wrong, and what shows it. Not here: kernels we do not have (cuDNN's packed
sequences, TransformerEngine 2186), and norm + rotation (`test_norm_rope_numerics.py`)."""


@pytest.mark.parametrize(("report", "tests"), [(report, tests) for report, _, tests in REPORTS])
def test_every_report_has_its_tests(report: str, tests: tuple[str, ...]) -> None:
    modules = [importlib.import_module(name) for name in MODULES]
    for name in tests:
        assert name in CASES or any(callable(getattr(module, name, None)) for module in modules), (report, name)


def packed_step(backend: str, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    heads, head_dim = 3, 256
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 20, 3 * heads * head_dim, generator=generator).to(device, dtype).requires_grad_()
    grad = torch.randn(2, 20, heads, head_dim, generator=generator).to(device, dtype)
    q, k, v = (part.unflatten(-1, (heads, head_dim)) for part in qkv.chunk(3, -1))
    with poisoned_memory():
        out, _ = attention(q, k, v, causal="top_left", backend=backend)
        return [out.detach(), *torch.autograd.grad(out, qkv, grad)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels are tested on it")
def test_packed_views_of_wide_heads() -> None:
    exact = packed_step("reference", torch.device("cpu"), torch.float64)
    for actual, expected in zip(packed_step("triton", torch.device("cpu"), torch.float32), exact, strict=True):
        torch.testing.assert_close(actual, expected.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_packed_views_of_wide_heads_on_the_card(device: torch.device) -> None:
    exact = packed_step("reference", torch.device("cpu"), torch.float64)
    for actual, expected in zip(packed_step("triton", device, torch.bfloat16), exact, strict=True):
        error = (actual.cpu().double() - expected).norm() / expected.norm()
        assert error < 2e-2


@pytest.mark.gpu
def test_shapes_in_turn(device: torch.device) -> None:
    """Calls of two shapes one after the other leave each other's results alone."""
    shapes = [(300, 64), (700, 128)]
    inputs = [torch.randn(2, tokens, 4, head_dim, device=device, dtype=torch.bfloat16) for tokens, head_dim in shapes]

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaf = x.detach().requires_grad_()
        out, lse = attention(leaf, leaf, leaf, causal="top_left", backend="triton")
        return out.detach(), lse, *torch.autograd.grad(out, leaf, x)

    first = [step(x) for x in inputs]
    for _ in range(10):
        for x, expected in zip(inputs, first, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(step(x), expected, strict=True))
