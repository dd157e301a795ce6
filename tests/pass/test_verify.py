"""verify=True accepts what is right, catches what is wrong, and writes a script that shows it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import backend
from toy import ScaledSin

from fusion_pass import verify
from fusion_pass.graph.site import Call


def run(function: Callable[..., Any], *args: torch.Tensor, **settings: Any) -> None:
    torch.compile(function, backend=backend(verify=True, **settings), fullgraph=True)(*args)


def verified(monkeypatch: pytest.MonkeyPatch, compilation: Callable[[], Any]) -> int:
    """How many sites `compilation` compares with what they replace."""
    runs: list[int] = []
    compare = verify.compare
    monkeypatch.setattr(verify, "compare", lambda piece, seed: runs.append(seed) or compare(piece, seed))
    compilation()
    return len(runs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_right_site_passes(
    toy: ScaledSin, dtype: torch.dtype, requires_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(64, 3, dtype=dtype, requires_grad=requires_grad)
    assert verified(monkeypatch, lambda: run(lambda x: torch.sin(x) * 3.0, x)) == 1


def wrong_scale(site: Any) -> Call:
    return Call("scaled_sin", site.call.tensors, {"scale": site.call.options["scale"] * 1.01}, "fusion_pass_toy")


def test_a_wrong_argument_raises_and_the_script_reproduces_it(only: Callable[..., None], tmp_path: Path) -> None:
    only(ScaledSin(call=wrong_scale))
    with pytest.raises(
        Exception, match=r"verify: scaled_sin of 'toy' .* result 0 is off by .* the gradient of"
    ) as caught:
        run(lambda x: torch.sin(x) * 3.0, torch.randn(64, requires_grad=True), repro_dir=str(tmp_path))
    (script,) = tmp_path.iterdir()
    assert str(script) in str(caught.value)
    # The toy operator is this test's own: the script has to find it.
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import toy\n" + script.read_text()
    )
    output = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True).stdout
    assert output.count("MISMATCH") == 2, output


def test_a_wrong_backward_alone_is_caught(toy: ScaledSin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("toy.scaled_sin_backward", lambda grad, x, scale: grad * torch.cos(x) * scale * 1.01)
    with pytest.raises(Exception, match=r"replaces: the gradient of \w+ is off"):
        run(lambda x: torch.sin(x) * 3.0, torch.randn(64, requires_grad=True), repro_dir=str(tmp_path))


def test_each_distinct_site_is_run_once(toy: ScaledSin, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8)
    assert verified(monkeypatch, lambda: run(lambda x: torch.sin(torch.sin(torch.sin(x) * 3.0) * 3.0) * 2.0, x)) == 2


def test_dynamic_shapes_use_their_hints(toy: ScaledSin, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8, 3, requires_grad=True)
    compiled = torch.compile(lambda x: torch.sin(x) * 3.0, backend=backend(verify=True), fullgraph=True, dynamic=True)
    assert verified(monkeypatch, lambda: compiled(x)) == 1


def test_the_random_state_of_the_program_is_left_alone(toy: ScaledSin) -> None:
    x = torch.randn(8)
    torch.manual_seed(1)
    run(lambda x: torch.sin(x) * 3.0, x)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1))
