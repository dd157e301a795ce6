"""The folders at the top of the repository do no harm where it is the current folder (`python -m pytest`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_at_the_top(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_transformers_takes_our_kernels_for_no_version_of_its_own() -> None:
    """transformers imports any `kernels` it finds to ask for its version; the operators must not be defined twice."""
    run_at_the_top("""
import importlib.util, os
assert importlib.util.find_spec("kernels").origin == os.path.join(os.getcwd(), "kernels", "__init__.py")
import fusion_pass.kernels
from transformers.utils import is_kernels_available
assert not is_kernels_available()
from transformers import Qwen3Model
""")


def test_either_name_of_the_kernels_leads_to_one_package() -> None:
    run_at_the_top("""
import kernels, fusion_pass.kernels
assert kernels.ops is fusion_pass.kernels.ops
""")
