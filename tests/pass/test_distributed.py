"""Models that are trained by several processes: what DDP, FSDP and tensor parallelism do to a graph leaves the sites
whole, and gradients right. One process, so every collective is there and moves nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import eager
from torch import distributed, nn
from training_steps import assert_no_worse, eager_steps, exact_step, step

from fusion_pass import FusionBackend, FusionConfig, explain, zoo

LAYERS = 3
EVERY_LAYER = {"qk_norm_rope": LAYERS, "attention": LAYERS}


@pytest.fixture(autouse=True)
def _one_process() -> Iterator[None]:
    torch._dynamo.reset()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def backend(**settings: Any) -> FusionBackend:
    return FusionBackend(FusionConfig(allow_reference=True, **settings), inner=eager)


def fused(compiler: FusionBackend) -> Counter[str]:
    """Sites in all graphs together."""
    return sum((Counter(report.counts) for report in compiler.reports), Counter())


def assert_right(model: Any, module: nn.Module, inputs: Mapping[str, Any], references: tuple[Any, Any]) -> None:
    plain, exact = references
    ours = step(model, module, inputs)
    ours = {name: value.to_local() if hasattr(value, "to_local") else value for name, value in ours.items()}
    assert_no_worse(ours, plain, exact, torch.finfo(torch.float32).eps)


def qwen3() -> tuple[nn.Module, Mapping[str, Any], tuple[Any, Any]]:
    module, inputs = zoo.build("qwen3", layers=LAYERS)
    return module, inputs, (eager_steps(module, inputs), exact_step(module, inputs))


def test_a_graph_that_ddp_cuts_at_its_buckets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The parts share the name of the compilation, and all of them are reported."""
    module, inputs, references = qwen3()
    monkeypatch.setattr(distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 2**10)
    written = tmp_path / "report.json"
    compiler = backend(report=str(written))
    replicated = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=0.05)
    assert_right(torch.compile(replicated, backend=compiler), module, inputs, references)
    assert len(compiler.reports) > 1, "one graph: nothing was cut"
    assert fused(compiler) == EVERY_LAYER
    assert json.loads(written.read_text())["counts"] == EVERY_LAYER
    torch._dynamo.reset()
    assert explain(replicated, **inputs, config=FusionConfig(allow_reference=True)).counts == EVERY_LAYER


@pytest.mark.parametrize("compiled", ["layers", "model"])
def test_fully_sharded_layers(compiled: str) -> None:
    """Hooks that gather parameters break the graph between layers; a layer is compiled once for all of its kind."""
    module, inputs, references = qwen3()
    compiler = backend()
    if compiled == "layers":
        for layer in module.model.layers:
            layer.compile(backend=compiler)
    for layer in module.model.layers:
        distributed.fsdp.fully_shard(layer)
    distributed.fsdp.fully_shard(module)
    model = module if compiled == "layers" else torch.compile(module, backend=compiler)
    assert_right(model, module, inputs, references)
    assert fused(compiler) == {"qk_norm_rope": 1, "attention": 1}


def test_heads_that_are_spread_over_processes() -> None:
    """Projections by columns, the output by rows: a process has some of the heads, which are tensors like any other."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    module, inputs, references = qwen3()
    mesh = distributed.init_device_mesh("cpu", (1,))
    for layer in module.model.layers:
        projections = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        parallelize_module(layer, mesh, {**projections, "self_attn.o_proj": RowwiseParallel()})
    compiler = backend()
    assert_right(torch.compile(module, backend=compiler), module, inputs, references)
    assert fused(compiler) == EVERY_LAYER
