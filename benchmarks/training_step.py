"""A training step of full-size decoder layers, with and without the pass: `python -m benchmarks.training_step`.

Four layers of Qwen3-8B's sizes (and of Qwen3-VL-8B's text model) from Hugging Face, unedited, random weights, bf16. In
one run, in turns, each timed step behind others of its own kind:

- `torch.compile`: what a user has today (Hugging Face hands SDPA an explicit mask that only says "causal");
- `is_causal by hand`: torch.compile, attention replaced by a call with `is_causal=True` and no mask;
- `fusion_pass`: `torch.compile(model, backend="fusion_pass")`;
- `whole block`, `whole block, kept` (only if named by `--variants`): the same with `FusionConfig(whole_block=True)`,
  and with `keep_rotated=True` beside it.

The optimiser is left out: it is the same in all of them. Needs the extra `zoo` and a GPU.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import fusion_pass
from benchmarks.timing import RESULTS, Row, write_results

LAYERS = 4
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 65536,
    "use_cache": False,
}
TOKENS = ((2, 8192), (1, 32768))


def qwen3() -> nn.Module:
    import transformers

    model = transformers.Qwen3Model(transformers.Qwen3Config(**SIZES))
    model.set_attn_implementation("sdpa")
    return model


def qwen3_vl() -> nn.Module:
    from transformers.models.qwen3_vl import modeling_qwen3_vl

    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    config = modeling_qwen3_vl.Qwen3VLTextConfig(**SIZES, rope_parameters=rope)
    config._attn_implementation = "sdpa"
    model: nn.Module = modeling_qwen3_vl.Qwen3VLTextModel(config)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {"qwen3": qwen3, "qwen3_vl": qwen3_vl}


def causal_by_hand(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """A Hugging Face attention function for a user who knows that the mask is causal. Not a general one."""
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


def arguments_of(name: str, batch: int, tokens: int) -> dict[str, Any]:
    given: dict[str, Any] = {"input_ids": torch.randint(0, SIZES["vocab_size"], (batch, tokens), device="cuda")}
    if name == "qwen3_vl":
        rows = torch.arange(tokens, device="cuda").view(1, 1, -1)
        given["position_ids"] = rows.expand(3, batch, -1).contiguous()
    return given


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "torch.compile": ("sdpa", {}),
    "is_causal by hand": ("causal_by_hand", {}),
    "fusion_pass": ("sdpa", {"backend": "fusion_pass"}),
    "whole block": ("sdpa", {"backend": fusion_pass.backend(fusion_pass.FusionConfig(whole_block=True))}),
    "whole block, kept": (
        "sdpa",
        {"backend": fusion_pass.backend(fusion_pass.FusionConfig(whole_block=True, keep_rotated=True))},
    ),
}
"""Name: attention function of transformers, arguments of `torch.compile`."""
ALWAYS = ("torch.compile", "is_causal by hand", "fusion_pass")


def steps_of(name: str, batch: int, tokens: int, variants: Sequence[str] = ALWAYS) -> dict[str, Callable[[], Tensor]]:
    """One step per variant; each returns the gradient of the first layer's query projection, a copy of it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("causal_by_hand", causal_by_hand)
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.device("cuda"):  # so that the random weights are made there: seconds instead of minutes
        original = MODELS[name]().to(torch.bfloat16).train()
    given = arguments_of(name, batch, tokens)
    upstream = torch.randn(batch, tokens, SIZES["hidden_size"], device="cuda", dtype=torch.bfloat16)

    def make(attention: str, options: dict[str, Any]) -> Callable[[], Tensor]:
        model = copy.deepcopy(original)
        model.config._attn_implementation = attention
        compiled = torch.compile(model, dynamic=False, **options)

        def step() -> Tensor:
            compiled(**given, use_cache=False).last_hidden_state.backward(upstream)
            gradient = model.layers[0].self_attn.q_proj.weight.grad
            for parameter in model.parameters():
                parameter.grad = None
            return gradient

        return step

    return {variant: make(*VARIANTS[variant]) for variant in variants}


def time_steps(steps: dict[str, Callable[[], Tensor]], rounds: int, seconds: float = 1.6) -> dict[str, list[float]]:
    """Milliseconds of every timed step.

    As in training, a step follows many of its own kind: in each round every variant, in an order drawn anew, runs for
    `seconds`, and the later half of its steps counts. The card runs at its power limit, and the clock that a step
    finds depends on what the last steps drew."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    draw = random.Random(0)
    for _ in range(rounds):
        for name in draw.sample(list(steps), len(steps)):
            milliseconds = repeat(steps[name], seconds)
            times[name] += milliseconds[len(milliseconds) // 2 :]
    return times


def repeat(step: Callable[[], Tensor], seconds: float) -> list[float]:
    """Milliseconds of each of the steps that begin within `seconds` and follow each other without a pause."""
    events = [torch.cuda.Event(enable_timing=True)]
    events[0].record()
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        step()
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
        events[-2].synchronize()  # the host stays one step ahead, so its clock tells how long the device ran
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]


def kernels_of(step: Callable[[], Tensor], most: int = 40, steps: int = 4) -> list[tuple[float, int, str]]:
    """The kernels that take the most device time: milliseconds in a step, launches in a step, name. Of the last of some
    steps in a row, as the clock of a card at its power limit depends on what ran before."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(steps):
        step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    averages = (
        (item.self_device_time_total / steps / 1e3, item.count // steps, item.key) for item in profiled.key_averages()
    )
    return sorted(averages, reverse=True)[:most]


def peak_of(step: Callable[[], Tensor]) -> float:
    """GiB allocated at the most during a step."""
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def benchmark(name: str, batch: int, tokens: int, rounds: int, profiled: bool, variants: Sequence[str] = ALWAYS) -> Row:
    steps = steps_of(name, batch, tokens, variants)
    gradients = {}
    for variant, step in steps.items():
        start = time.monotonic()
        gradients[variant] = step().float()
        print(f"  {variant:18s} compiled and run once in {time.monotonic() - start:.0f} s", flush=True)
    expected = gradients["torch.compile"]
    for variant, gradient in gradients.items():
        difference = ((gradient - expected).norm() / expected.norm()).item()
        peak = peak_of(steps[variant])
        print(f"  {variant:18s} dW(q_proj) differs by {difference:.1e}, peak {peak:.1f} GiB", flush=True)
    times = time_steps(steps, rounds)
    medians = {variant: statistics.median(values) for variant, values in times.items()}
    spreads = {variant: max(values) - min(values) for variant, values in times.items()}
    ours = medians.pop("fusion_pass")
    ratios = "  ".join(f"{variant} {median / ours:.2f}x" for variant, median in medians.items())
    print(f"{name} {LAYERS} layers, {batch} x {tokens} tokens: {ours:.1f} ms  {ratios}", flush=True)
    if profiled:
        for variant in (name for name in steps if name != "torch.compile"):
            print(f"  {variant}: kernels of one step")
            for milliseconds, launches, kernel in kernels_of(steps[variant]):
                print(f"    {milliseconds:8.2f} ms {launches:4d}  {kernel[:110]}")
    return Row(
        case=f"{name} {LAYERS} layers, {batch} x {tokens} tokens",
        pass_="training step",
        unit="ms",
        ours=round(ours, 2),
        baselines={variant: round(median, 2) for variant, median in medians.items()},
        spread=round(spreads.pop("fusion_pass"), 2),
        baseline_spreads={variant: round(spread, 2) for variant, spread in spreads.items()},
    )


def size(text: str) -> tuple[int, int]:
    batch, tokens = text.split("x")
    return int(batch), int(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=size, default=TOKENS, help="batch x tokens, e.g. 2x8192")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=[], help="more than the usual three")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    rows = []
    variants = [variant for variant in VARIANTS if variant in ALWAYS or variant in arguments.variants]
    for batch, tokens in arguments.tokens:
        for name in arguments.models:
            rows.append(benchmark(name, batch, tokens, arguments.rounds, arguments.profile, variants))
            path = write_results("training_step", rows, folder=arguments.out)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
