"""Whole models with and without the pass, time and memory: `python -m benchmarks.models`.

Two layers of published models' sizes from Hugging Face, unedited, random weights, bf16, in the three uses of a model:

- `training`: forward and backward of 2 x 4096 tokens (no optimiser); `training, padded`: with an attention mask that
  hides 0 and 1000 tokens at the left;
- `prefill`: the forward of 1 x 4096 tokens without gradients;
- `decode`: one token each of 8 sequences, over a static cache of 4096 of which 2048 to 3072 are filled, in
  `reduce-overhead` (CUDA graphs). Not Gemma 3, whose cache counts in Python: a graph for every token.

`torch.compile(model)` and `torch.compile(model, backend="fusion_pass")` take turns, in one process for a model; models
compile side by side and are timed one after the other. Milliseconds, and GiB that a call allocates beyond what was
there. Needs the extra `zoo` and a GPU.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import itertools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier, Lock
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fusion_pass
from benchmarks.timing import RESULTS, Row, write_results
from fusion_pass.report import merged

LAYERS = 2
VOCABULARY = 1024
PROMPT, CACHE = (2, 4096), (8, 4096)
PADDED = 1000
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Model:
    """A config of transformers and the sizes of a published model, from its `config.json`."""

    name: str
    module: str
    config: str
    model: str
    hidden: int
    intermediate: int
    heads: tuple[int, int]
    """Query heads, KV heads."""
    options: dict[str, Any] = field(default_factory=dict)
    decodes: bool = True

    def build(self) -> nn.Module:
        """Two layers on the GPU, bf16."""
        code = importlib.import_module(f"transformers.models.{self.module}.modeling_{self.module}")
        config = getattr(code, self.config)(
            vocab_size=VOCABULARY,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=LAYERS,
            num_attention_heads=self.heads[0],
            num_key_value_heads=self.heads[1],
            max_position_embeddings=32768,
            pad_token_id=0,
            **self.options,
        )
        config._attn_implementation = "sdpa"
        torch.manual_seed(0)
        with torch.device("cuda"):
            model: nn.Module = getattr(code, self.model)(config).to(torch.bfloat16)
        return model


def rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **more}


MODELS = (
    Model("Llama-3.1-8B", "llama", "LlamaConfig", "LlamaModel", 4096, 14336, (32, 8), {"rope_parameters": rope(5e5)}),
    Model(
        "Qwen3-0.6B", "qwen3", "Qwen3Config", "Qwen3Model", 1024, 3072, (16, 8),
        {"head_dim": 128, "rope_parameters": rope(1e6)},
    ),
    Model(
        "Qwen3-8B", "qwen3", "Qwen3Config", "Qwen3Model", 4096, 12288, (32, 8),
        {"head_dim": 128, "rope_parameters": rope(1e6)},
    ),
    Model(
        "Qwen3-VL-8B, text", "qwen3_vl", "Qwen3VLTextConfig", "Qwen3VLTextModel", 4096, 12288, (32, 8),
        {"head_dim": 128, "rope_parameters": rope(5e6, mrope_section=[24, 20, 20], mrope_interleaved=True)},
    ),
    Model(
        "Qwen2.5-VL-7B, text", "qwen2_5_vl", "Qwen2_5_VLTextConfig", "Qwen2_5_VLTextModel", 3584, 18944, (28, 4),
        {"rope_parameters": rope(1e6, mrope_section=[16, 24, 24]), "layer_types": ["full_attention"] * LAYERS},
    ),
    Model(
        "Gemma 3 4B, text", "gemma3", "Gemma3TextConfig", "Gemma3TextModel", 2560, 10240, (8, 4),
        {"head_dim": 256, "sliding_window": 1024, "layer_types": ["sliding_attention", "full_attention"]},
        decodes=False,
    ),
    Model("OLMo 2 7B", "olmo2", "Olmo2Config", "Olmo2Model", 4096, 11008, (32, 32), {"rope_parameters": rope(5e5)}),
    Model(
        "GLM-4-9B-0414", "glm4", "Glm4Config", "Glm4Model", 4096, 13696, (32, 2),
        {"head_dim": 128, "rope_parameters": rope(1e4, partial_rotary_factor=0.5)},
    ),
    Model("Phi-3-mini", "phi3", "Phi3Config", "Phi3Model", 3072, 8192, (32, 32), {"rope_parameters": rope(1e4)}),
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------- uses


def _inputs(name: str, batch: int, tokens: int) -> dict[str, Any]:
    given: dict[str, Any] = {"input_ids": torch.randint(3, VOCABULARY, (batch, tokens), device="cuda")}
    if "VL" in name:  # one row each of time, height and width
        given["position_ids"] = torch.arange(tokens, device="cuda").expand(3, batch, -1).contiguous()
    return given


def training(model: nn.Module, options: dict[str, Any], name: str, padded: bool = False) -> Call:
    batch, tokens = PROMPT
    given = _inputs(name, batch, tokens)
    if padded:
        mask = torch.ones(batch, tokens, dtype=torch.long, device="cuda")
        mask[-1, :PADDED] = 0
        given["attention_mask"] = mask
    compiled = torch.compile(model.train(), dynamic=False, **options)
    upstream = torch.randn(batch, tokens, model.config.hidden_size, device="cuda", dtype=torch.bfloat16)

    def step() -> Tensor:
        out: Tensor = compiled(**given, use_cache=False).last_hidden_state
        out.backward(upstream)
        for parameter in model.parameters():
            parameter.grad = None
        return out.detach()[:, PADDED:] if padded else out.detach()

    return step


def padded_training(model: nn.Module, options: dict[str, Any], name: str) -> Call:
    return training(model, options, name, padded=True)


def prefill(model: nn.Module, options: dict[str, Any], name: str) -> Call:
    given = _inputs(name, 1, PROMPT[1])
    compiled = torch.compile(model.eval(), dynamic=False, **options)

    def call() -> Tensor:
        with torch.no_grad():
            out: Tensor = compiled(**given, use_cache=False).last_hidden_state
        return out

    return call


def decode(model: nn.Module, options: dict[str, Any], name: str) -> Call:
    from transformers import StaticCache

    batch, longest = CACHE
    cache = StaticCache(config=model.config, max_cache_len=longest)
    with torch.no_grad():
        model.eval()(**_inputs(name, batch, longest // 2), past_key_values=cache)
    token = torch.randint(3, VOCABULARY, (batch, 1), device="cuda")
    compiled = torch.compile(model, mode="reduce-overhead", **options)
    calls = itertools.count()

    def call() -> Tensor:
        if next(calls) % (longest // 4) == 0:  # every call appends a token
            for layer in cache.layers:
                layer.cumulative_length.fill_(longest // 2)
        with torch.no_grad():
            out: Tensor = compiled(input_ids=token, past_key_values=cache).last_hidden_state
        return out

    return call


USES: dict[str, Callable[[nn.Module, dict[str, Any], str], Call]] = {
    "training": training,
    "training, padded": padded_training,
    "prefill": prefill,
    "decode": decode,
}


# ---------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Compared:
    """A use of a model, compiled both ways."""

    calls: dict[str, Call]
    found: str
    """What the pass reports."""
    difference: float
    """Of the results, relative, in the norm."""


def compiled_both_ways(original: nn.Module, use: str, name: str) -> Compared:
    backend = fusion_pass.backend()
    options: dict[str, dict[str, Any]] = {"torch.compile": {}, "fusion_pass": {"backend": backend}}
    calls = {}
    for who, given in options.items():
        torch.manual_seed(0)  # of the inputs
        calls[who] = USES[use](copy.deepcopy(original), given, name)
    outs = {who: [call() for _ in range(3)][-1].double() for who, call in calls.items()}
    difference = (outs["fusion_pass"] - outs["torch.compile"]).norm() / outs["torch.compile"].norm()
    return Compared(calls, str(merged(backend.reports)), difference.item())


def repeated(call: Call, seconds: float) -> list[float]:
    """Milliseconds of calls that follow each other; the first half, at another's clock and temperature, is left out."""
    events = [torch.cuda.Event(enable_timing=True)]
    events[0].record()
    started = time.monotonic()
    while time.monotonic() - started < seconds or len(events) < 9:
        call()
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
        events[-2].synchronize()  # the host stays one call ahead
    torch.cuda.synchronize()
    times = [first.elapsed_time(then) for first, then in itertools.pairwise(events)]
    return times[len(times) // 2 :]


def allocated(call: Call) -> float:
    """GiB that a call allocates at the most, beyond what is allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def timed(name: str, use: str, compared: Compared, rounds: int, seconds: float) -> Row:
    medians: dict[str, list[float]] = {who: [] for who in compared.calls}
    draw = random.Random(0)
    for _ in range(rounds):
        for who in draw.sample(list(compared.calls), len(compared.calls)):
            medians[who].append(statistics.median(repeated(compared.calls[who], seconds)))
    times = {who: statistics.median(values) for who, values in medians.items()}
    spreads = {who: round(max(values) - min(values), 4) for who, values in medians.items()}
    memory = {who: allocated(call) for who, call in compared.calls.items()}
    ours, theirs = times["fusion_pass"], times["torch.compile"]
    print(
        f"{name:22} {use:17} {ours:8.3f} ms, torch.compile {theirs:8.3f} ({theirs / ours:.2f}x)   "
        f"{memory['fusion_pass']:6.2f} GiB, torch.compile {memory['torch.compile']:6.2f}   "
        f"out differs by {compared.difference:.1e}",
        flush=True,
    )
    return Row(
        case=f"{name}, {use}",
        pass_=use,
        unit="ms",
        ours=round(ours, 4),
        baselines={"torch.compile": round(theirs, 4)},
        spread=spreads["fusion_pass"],
        baseline_spreads={"torch.compile": spreads["torch.compile"]},
        facts={
            "GiB": {who: round(value, 3) for who, value in memory.items()},
            "difference": compared.difference,
            "found": compared.found,
        },
    )


def measure(
    model: Model, uses: list[str], rounds: int, seconds: float, compiled: Barrier, card: Lock, rows: Queue[Row | None]
) -> None:
    """In a process of its own: compile, wait until all models are compiled, then time while no other does."""
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # all uses of a model share its code
    ready: dict[str, Compared] = {}
    try:
        original = model.build()
        for use in uses:
            if use == "decode" and not model.decodes:
                continue
            try:
                ready[use] = compiled_both_ways(original, use, model.name)
            except Exception as error:  # a use that a model does not have must not keep the others waiting
                print(f"{model.name}, {use}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    finally:
        compiled.wait()
    with card:
        for use, compared in ready.items():
            rows.put(timed(model.name, use, compared, rounds, seconds))
    rows.put(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[model.name for model in MODELS], metavar="NAME")
    parser.add_argument("--uses", nargs="+", choices=list(USES), default=list(USES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.3, help="that one of the two runs in a round")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    arguments = parser.parse_args()
    models = [model for model in MODELS if not arguments.models or model.name in arguments.models]
    processes = get_context("spawn")
    compiled, card, results = processes.Barrier(len(models)), processes.Lock(), processes.Queue()
    fixed = (arguments.uses, arguments.rounds, arguments.seconds, compiled, card, results)
    workers = [processes.Process(target=measure, args=(model, *fixed)) for model in models]
    for worker in workers:
        worker.start()
    rows: list[Row] = []
    left = len(workers)
    while left:
        row = results.get()
        if row is None:
            left -= 1
            continue
        rows.append(row)
        path = write_results("models", sorted(rows, key=lambda row: row.case), folder=arguments.out)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
