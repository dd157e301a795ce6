"""`fusion-pass demo`: two real models from transformers, fused and trained beside the unfused ones.

For each model it prints the sites found, what changed in the graph of one layer, and for every training step the loss
of the fused and of the unfused model and the error of the gradients of both against float64 at the same weights.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from torch import nn

import fusion_pass
from fusion_pass import show
from fusion_pass.config import FusionConfig
from fusion_pass.report import Report, merged
from fusion_pass.zoo.oracle import float64_call
from fusion_pass.zoo.vision_language import mrope_positions

VOCABULARY = 512
_WARM_UP = 3


@dataclass(frozen=True)
class Size:
    """Sizes of both models and of a batch. On the CPU small enough for two cores, on a GPU large enough to time."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    tokens: int


ON_CPU = Size(hidden=256, heads=4, kv_heads=2, head_dim=64, batch=2, tokens=96)
ON_GPU = Size(hidden=2048, heads=16, kv_heads=8, head_dim=128, batch=2, tokens=2048)


class NextToken(nn.Module):
    """The mean next-token loss of an unedited text tower, its embedding also used as the output projection."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Token ids `[B, S]` to a scalar."""
        hidden = self.tower(input_ids=input_ids, use_cache=False, **inputs).last_hidden_state
        logits = F.linear(hidden[:, :-1], self.tower.get_input_embeddings().weight)  # type: ignore[operator]
        return F.cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten())


def qwen3(size: Size, layers: int) -> nn.Module:
    """Qwen3: RMSNorm on each head of q and k, then rotation of the two halves of a head."""
    from transformers import Qwen3Config, Qwen3Model

    tower: nn.Module = Qwen3Model(Qwen3Config(**_sizes(size, layers)))
    return tower


def qwen3_vl(size: Size, layers: int) -> nn.Module:
    """The text tower of Qwen3-VL: the same with three positions a token, interleaved over the lanes (MRoPE)."""
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextConfig, Qwen3VLTextModel

    pairs = size.head_dim // 2
    side = pairs // 4
    rope = {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_interleaved": True,
        "mrope_section": [pairs - 2 * side, side, side],
    }
    tower: nn.Module = Qwen3VLTextModel(Qwen3VLTextConfig(rope_parameters=rope, **_sizes(size, layers)))
    return tower


def _sizes(size: Size, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": size.hidden,
        "intermediate_size": 3 * size.hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "max_position_embeddings": 2 * size.tokens,
        "use_cache": False,
        "pad_token_id": 0,
    }


Build = Callable[[Size, int], nn.Module]
Compiler = Callable[..., Any]


def run(console: Console, *, layers: int = 3, steps: int = 5, inner: Compiler | None = None) -> int:
    """Print the demo; returns 0 when every layer of both models was fused, else 1.

    `inner` compiles the rewritten graph in the place of Inductor (tests use a fast one).
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = ON_GPU if device.type == "cuda" else ON_CPU
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    console.print(Panel(_introduction(device, size, dtype, layers), title="fusion-pass", title_align="left"))
    complete = True
    for name, build, inputs in (("Qwen3", qwen3, {}), ("Qwen3-VL, text tower", qwen3_vl, _image_positions(size))):
        console.rule(f"[bold]{name}", align="left")
        torch.manual_seed(0)
        model = NextToken(build(size, layers)).to(device=device, dtype=dtype)
        batch = {"input_ids": torch.randint(3, VOCABULARY, (size.batch, size.tokens)), **inputs}
        batch = {key: value.to(device) for key, value in batch.items()}
        console.print(_one_layer(build, size, device, dtype, batch))
        config = FusionConfig.load(allow_reference=device.type == "cpu")
        fused = fusion_pass.FusionBackend(config, inner)
        compiled = torch.compile(model, backend=fused, fullgraph=True)
        table = _train(model, compiled, batch, steps)
        report = merged(fused.reports)
        console.print("\n", show.sites(report, title="Found in the compiled training step"), sep="")
        console.print(f"{show.counts(report)}\n")
        console.print(table)
        if device.type == "cuda":
            console.print(_times(model, compiled, batch))
        complete &= _every_layer(report, layers, console)
    return 0 if complete else 1


def _introduction(device: torch.device, size: Size, dtype: torch.dtype, layers: int) -> str:
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"the CPU, {torch.get_num_threads()} threads"
    kernels = (
        "Fused sites run the kernels that this GPU supports."
        if device.type == "cuda"
        else "There is no GPU: fused sites run the [bold]reference kernels[/bold], plain ATen. Their numbers are "
        "checked here; their speed means nothing, so no times are shown."
    )
    return (
        f"Two unedited models of transformers with random weights on {where}, torch {torch.__version__}.\n"
        f"{layers} layers, hidden {size.hidden}, {size.heads} + {size.kv_heads} heads of {size.head_dim}, "
        f"{size.batch} x {size.tokens} tokens, {str(dtype).removeprefix('torch.')}.\n{kernels}"
    )


def _image_positions(size: Size) -> dict[str, torch.Tensor]:
    """Three different position rows: text around an image."""
    rows = mrope_positions(tokens=size.tokens, batch=size.batch, image=(4, size.tokens // 8))
    return {"position_ids": rows}


def _one_layer(build: Build, size: Size, device: torch.device, dtype: torch.dtype, batch: dict[str, Any]) -> Panel:
    model = NextToken(build(size, 1)).to(device=device, dtype=dtype)
    config = FusionConfig.load(allow_reference=device.type == "cpu")
    report = fusion_pass.explain(model, config=config, **batch)
    return Panel(
        show.graph_change(report), title="The graph of one layer, before (-) and after (+)", title_align="left"
    )


@dataclass(frozen=True)
class Gradients:
    """One loss and the gradients of all parameters, the latter as one vector."""

    loss: float
    vector: torch.Tensor


def _gradients(model: nn.Module, loss: torch.Tensor) -> Gradients:
    model.zero_grad(set_to_none=True)
    torch.autograd.backward(loss)
    parts = [parameter.grad.flatten().double() for parameter in model.parameters() if parameter.grad is not None]
    return Gradients(loss.item(), torch.cat(parts))


def _train(model: nn.Module, compiled: Any, batch: dict[str, Any], steps: int) -> Table:
    """Train `model` through `compiled`, and a copy of it unfused and eager; compare them at every step."""
    unfused = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, unfused)]
    title = "Training, fused beside unfused (eager PyTorch)"
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for heading in (
        "step",
        "loss fused",
        "loss unfused",
        "difference",
        "gradient error fused",
        "gradient error unfused",
    ):
        table.add_column(heading, justify="right")
    for step in range(steps):
        ours = _gradients(model, compiled(**batch))
        theirs = _gradients(unfused, unfused(**batch))
        difference = abs(ours.loss - theirs.loss)
        errors = (f"{_error(ours, model, batch):.2e}", f"{_error(theirs, unfused, batch):.2e}")
        table.add_row(str(step), f"{ours.loss:.6f}", f"{theirs.loss:.6f}", f"{difference:.1e}", *errors)
        for optimizer in optimizers:
            optimizer.step()
    table.caption = "gradient error: |g - g64| / |g64| over all parameters, g64 from float64 at the same weights"
    table.caption_justify = "left"
    return table


def _error(found: Gradients, model: nn.Module, batch: dict[str, Any]) -> float:
    """Relative error of `found` against float64 at the weights of `model`."""
    truth = _gradients(*float64_call(model, batch)).vector
    return float((found.vector - truth).norm() / truth.norm())


def _times(model: nn.Module, compiled: Any, batch: dict[str, Any], repeats: int = 20) -> str:
    """Median time of forward and backward on a GPU, with the pass and with torch.compile alone, in turns."""
    plain = copy.deepcopy(model)
    calls = {"fused": (model, compiled), "unfused": (plain, torch.compile(plain, fullgraph=True))}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + _WARM_UP):
        for name, (module, call) in calls.items():
            module.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            started = time.perf_counter()
            call(**batch).backward()
            torch.cuda.synchronize()
            times[name].append(1e3 * (time.perf_counter() - started))
    ours, theirs = (statistics.median(times[name][_WARM_UP:]) for name in ("fused", "unfused"))
    return (
        f"\nForward and backward, median of {repeats}: {ours:.1f} ms fused, {theirs:.1f} ms with torch.compile alone "
        f"({theirs / ours:.2f}x)."
    )


def _every_layer(report: Report, layers: int, console: Console) -> bool:
    fused = {site.layer for site in report.fused}
    if len(fused) < layers:
        console.print(f"[red]Only {len(fused)} of {layers} layers were fused.[/red]")
    return len(fused) >= layers
