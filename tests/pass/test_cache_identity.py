"""The caches: a changed source never meets an old artefact, and a warm start still reports."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compiling import as_it_is, capture
from torch._dynamo.package import CompilePackage
from toy import ScaledSin

from fusion_pass import FusionBackend, FusionConfig, identity, inductor_options
from fusion_pass.identity import sources_digest, uuid

SCRIPT = """
import json, os, sys, torch
sys.path.insert(0, {tests!r})
import toy, fusion_pass
from fusion_pass import extensions, identity
from torch._dynamo.utils import counters
extensions.BUILT_IN = ()
fusion_pass.register(toy.ScaledSin())
model = lambda x: torch.sin(x) * 3.0 + 1

def compile_once(hook, sources):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join({folder!r}, str(hook))
    torch._dynamo.reset()
    counters.clear()
    identity.sources_digest = lambda roots: sources
    identity._code_digest.cache_clear()
    config = fusion_pass.FusionConfig()
    if hook:
        options = fusion_pass.inductor_options(config)
        compiled, owner = torch.compile(model, options=options), options["pre_grad_custom_pass"]
    else:
        owner = fusion_pass.backend(config)
        compiled = torch.compile(model, backend=owner)
    x = torch.linspace(0, 1, 8, requires_grad=True)
    compiled(x).sum().backward()
    found = counters["aot_autograd"]
    result = {{name: found[f"autograd_cache_{{name}}"] for name in ("hit", "miss", "bypass")}}
    error = float((x.grad - 3 * torch.cos(x)).abs().max())
    return {{**result, "counts": owner.reports[-1].counts, "exact": error < 1e-6}}

print(json.dumps([compile_once(hook, sources) for hook, sources in {runs!r}]))
"""


def compile_in_a_process(folder: Path, *runs: tuple[bool, bytes]) -> list[dict[str, object]]:
    """For each of `runs`, (with `inductor_options`, digest of the sources): what AOTAutograd's cache did. Each of the
    two ways into `torch.compile` has a cache of its own."""
    script = SCRIPT.format(tests=str(Path(__file__).parent), folder=str(folder), runs=runs)
    environment = {**os.environ, "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    results: list[dict[str, object]] = json.loads(done.stdout.splitlines()[-1])
    return results


@pytest.mark.slow
def test_a_second_process_hits_the_cache_and_still_reports(tmp_path: Path) -> None:
    """As a backend and in Inductor's hook."""
    cold = compile_in_a_process(tmp_path, (False, b"one"), (True, b"one"))
    later = compile_in_a_process(tmp_path, (False, b"one"), (True, b"one"), (False, b"two"), (True, b"two"))
    hit, miss = (
        {"hit": int(hit), "miss": int(not hit), "bypass": 0, "counts": {"scaled_sin": 1}, "exact": True}
        for hit in (True, False)
    )
    assert cold == [miss, miss]
    assert later == [hit, hit, miss, miss]


def test_the_digest_follows_every_source_file(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    kernel, note = tmp_path / "kernels" / "k.cu", tmp_path / "notes.txt"
    kernel.write_text("a")
    first = sources_digest([tmp_path])
    note.write_text("not a source")
    assert sources_digest([tmp_path]) == first
    kernel.write_text("b")
    second = sources_digest([tmp_path])
    kernel.rename(tmp_path / "kernels" / "l.cu")
    third = sources_digest([tmp_path])
    assert len({first, second, third}) == 3


def test_the_digest_covers_pass_patterns_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []
    monkeypatch.setattr(identity, "sources_digest", lambda roots: seen.extend(roots) or b"")
    identity._code_digest.__wrapped__(())
    files = {str(file) for root in seen for file in root.rglob("*.py")}
    for module in ("plan", "graph.site", "patterns.base", "patterns.attention.written_out.scores", "kernels.cuda"):
        spec = importlib.util.find_spec(f"fusion_pass.{module}")
        assert spec is not None
        assert spec.origin in files


def test_the_digest_follows_the_package_of_a_pattern(
    tmp_path: Path, only: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only the file of its class: what it calls, or its operator, may stand beside it."""
    folder = tmp_path / "somebodys_fusions" / "inner"
    folder.mkdir(parents=True)
    for path in (folder.parent / "__init__.py", folder / "__init__.py"):
        path.write_text("")
    (folder / "formula.py").write_text("LIMIT = 1")
    (folder / "pattern.py").write_text("class P:\n name = 'p'\n def find(self, graph):\n  return ()\n")
    monkeypatch.syspath_prepend(tmp_path)
    only(importlib.import_module("somebodys_fusions.inner.pattern").P())
    assert identity._pattern_sources() == (folder,)
    before = uuid(FusionConfig())
    (folder / "formula.py").write_text("LIMIT = 2")
    identity._code_digest.cache_clear()  # read once a process
    assert uuid(FusionConfig()) != before


@pytest.mark.parametrize("hook", [False, True])
def test_the_store_of_precompiled_functions_gets_no_fused_graph(
    hook: bool, toy: ScaledSin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key is a function's name and first line: a process with other settings would be given the graph."""
    left_out: list[CompilePackage] = []
    monkeypatch.setattr(CompilePackage, "bypass_current_entry", lambda package: left_out.append(package))
    config = FusionConfig(expect=1)
    x = torch.randn(3)
    for stored in (False, True):
        torch._dynamo.reset()
        with torch._dynamo.config.patch(caching_precompile=stored):
            if hook:
                compiled = torch.compile(tripled_sine, options=inductor_options(config))
            else:
                compiled = torch.compile(tripled_sine, backend=FusionBackend(config, inner=as_it_is))
            torch.testing.assert_close(compiled(x), tripled_sine(x))
        assert len(left_out) == stored


def test_a_pattern_registered_after_the_options_were_made(only: Callable[..., None]) -> None:
    config = FusionConfig()
    only()
    options = inductor_options(config)
    only(ScaledSin())
    graph = capture(tripled_sine, torch.randn(3)).graph
    before = torch._inductor.config.unsafe_marked_cacheable_functions
    with torch._inductor.config.patch(options):
        options["pre_grad_custom_pass"](graph)
        key = torch._inductor.config.unsafe_marked_cacheable_functions["fusion_pass"]
    assert key == uuid(config).hex() != options["unsafe_marked_cacheable_functions"]["fusion_pass"]
    assert torch._inductor.config.unsafe_marked_cacheable_functions == before


def tripled_sine(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 3.0


def test_uuid_follows_what_shapes_the_graph() -> None:
    base = uuid(FusionConfig())
    assert len(base) == 32
    assert uuid(FusionConfig(report="r.json", log_level="debug")) == base
    assert uuid(FusionConfig(allow_reference=True)) != base
    assert uuid(FusionConfig(on_error="raise")) != base
    assert uuid(FusionConfig(skip_fusions=("rope",))) != base
