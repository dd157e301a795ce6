"""`import fusion_pass` needs torch alone and changes nothing outside itself."""

from __future__ import annotations

import subprocess
import sys

BLOCKED = """
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
absent = {"triton", "transformers", "diffusers", "rich"}
PathFinder.find_spec = lambda name, *rest: None if name.split(".")[0] in absent else find_spec(name, *rest)
"""


def run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_triton_and_everything_optional() -> None:
    script = """
import torch, fusion_pass
report = fusion_pass.explain(lambda x: torch.sin(x) * 3.0, torch.randn(3))
print(report.to_dict())
"""
    assert run(BLOCKED + script).strip() == "{'sites': [], 'counts': {}}"


def test_nothing_global_changes() -> None:
    script = """
import torch, torch._dynamo.config, torch._inductor.config, torch._functorch.config, warnings, logging
def state():
    configs = [c.save_config() for c in (torch._dynamo.config, torch._inductor.config, torch._functorch.config)]
    return (configs, list(warnings.filters), logging.root.handlers[:], logging.root.level, torch.get_default_dtype(),
            torch.backends.cuda.matmul.allow_tf32, torch.is_grad_enabled(), torch._dynamo.list_backends(None))
before = state()
modules = set(__import__("sys").modules)
import fusion_pass
assert state() == before
new = set(__import__("sys").modules) - modules
print(sorted(name for name in new if name.split(".")[0] in ("triton", "transformers", "rich")))
"""
    assert run(script).strip() == "[]"
