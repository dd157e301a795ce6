# ruff: noqa: E402 (the cases of three folders are imported behind their paths)
"""Calls for compute-sanitizer: `compute-sanitizer python tests/kernels/sanitized_calls.py attention_128`.

Small ones, because each instruction that touches memory runs a hundred times as long; each forward and backward, with
every gradient. `test_sanitizer.py` runs them.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE / "hopper"), str(HERE / "cuda")]

import attention_oracle
import hopper_cases
import norm_rope_cases

BF16 = torch.bfloat16


def attention(dim: int, value_dim: int, cases: Iterable[attention_oracle.Case]) -> None:
    """The Hopper kernels, with and without an order among what is added to dQ, as on three multiprocessors: each thread
    block draws many blocks, and its rings wrap round."""
    from fusion_pass.kernels.attention_ops import problem_of
    from fusion_pass.kernels.hopper import launch, plans

    plans._multiprocessors = lambda _device: 3  # type: ignore[assignment]
    for case in cases:
        sized = dataclasses.replace(case, head_dim=dim, value_dim=value_dim)
        inputs = attention_oracle.make_inputs(sized, BF16, torch.device("cuda"))
        q, k, v, *sinks = (leaf.detach() for leaf in inputs.leaves(BF16))
        problem = problem_of(q, k, v, sinks=sinks[0] if sinks else None, **inputs.conditions)  # type: ignore[arg-type]
        out, lse = launch.forward(problem, "bshd")
        for deterministic in (False, True):
            again = dataclasses.replace(problem, deterministic=deterministic)
            wanted = (True, True, True, bool(sinks))
            launch.backward(again, inputs.grad_out.to(BF16), inputs.grad_lse, out, lse, wanted)
        done()


def narrow(dim: int, *others: attention_oracle.Case) -> Callable[[], None]:
    """A kind of mask, of documents and of lengths each, and what else a template tells apart."""
    names = [
        "full_fewer_keys", "causal_333", "bottom_right_rows_see_nothing", "window_70_30", "documents",
        "segments_any_order", "padding_gaps", "heads_random", "bias_causal", "sinks_window", "softcap_30",
    ]  # fmt: skip
    return lambda: attention(dim, dim, [*(hopper_cases.CASES[name] for name in names), *others])


def wide(dim: int, value_dim: int) -> Callable[[], None]:
    cases = [case for case in hopper_cases.WIDE.values() if (case.head_dim, case.value_dim) == (dim, value_dim)]
    return lambda: attention(dim, value_dim, cases)


def portable_attention() -> None:
    """The Triton kernels of every other card."""
    for name in (
        "causal_333", "window_70_30", "documents", "segments_any_order", "padding_gaps", "bias_causal", "sinks_window",
    ):  # fmt: skip
        inputs = attention_oracle.make_inputs(hopper_cases.CASES[name], BF16, torch.device("cuda"))
        attention_oracle.run_operator(inputs, BF16, "triton")
        done()


def whole_block() -> None:
    """`norm_rope_attention`: fixed tables, so that on Hopper one launch ends its backward."""
    import test_block

    for case in test_block.CASES.values():
        setting = test_block.Setting.of(case, BF16, torch.device("cuda"))
        setting.fixed_tables = True
        setting.operator(BF16, "triton+hopper")
        done()


def norm_rope(backend: str, cases: Iterable[norm_rope_cases.Case]) -> None:
    for case in cases:
        inputs = norm_rope_cases.make_inputs(case, torch.device("cuda"))
        results = norm_rope_cases.call(case, inputs, backend)
        grads = [torch.randn_like(result) for result in results]
        torch.autograd.grad(results, inputs.differentiable(), grads, allow_unused=True)
        done()


def heads_of_few_tokens() -> None:
    import cuda_cases

    rings = [*cuda_cases.STAGED, *cuda_cases.STAGED_TABLES, *cuda_cases.FLAT]
    norm_rope("cuda", [*rings, *(case for case in cuda_cases.MORE if case not in rings)])


def heads_of_many_tokens() -> None:
    """The tiles of a model's training, with prefetches, on sizes that a sanitizer gets through."""
    import cuda_cases

    from fusion_pass.kernels import card
    from fusion_pass.kernels.cuda import norm_rope as launches
    from fusion_pass.kernels.cuda import tiles

    launches.FEW_BYTES = 0
    tiles.PREFETCHES_FROM = 0
    tiles.PREFETCHED_BYTES = dict.fromkeys((card.H100, card.H200), 2**14)
    norm_rope("cuda", [*cuda_cases.STAGED, *cuda_cases.STAGED_TABLES, *cuda_cases.FLAT])


def hidden_rows() -> None:
    """The norm over a token's whole row, with the tiles of few tokens and of many."""
    import hidden_cases

    from fusion_pass.kernels.cuda import hidden

    shorter = [dataclasses.replace(case, sequence=case.sequence // 2 + 150) for case in hidden_cases.MODELS]
    for few in (2**27, 0):
        hidden.FEW_BYTES = few
        norm_rope("cuda", [*shorter, *hidden_cases.MORE])


def norm_rope_in_triton() -> None:
    norm_rope("triton", norm_rope_cases.CASES)


GROUPS: dict[str, Callable[[], None]] = {
    "attention_64": narrow(64, *hopper_cases.LONG.values(), hopper_cases.SHORT["many_tiles"]),
    "attention_96": narrow(96),
    "attention_128": narrow(128),
    "attention_192_128": wide(192, 128),
    "attention_256": wide(256, 256),
    "portable_attention": portable_attention,
    "whole_block": whole_block,
    "heads_of_few_tokens": heads_of_few_tokens,
    "heads_of_many_tokens": heads_of_many_tokens,
    "hidden_rows": hidden_rows,
    "norm_rope_in_triton": norm_rope_in_triton,
}


def done() -> None:
    torch.cuda.synchronize()
    print(".", end="", flush=True)


if __name__ == "__main__":
    for group in sys.argv[1:]:
        GROUPS[group]()
    print("all calls returned")
