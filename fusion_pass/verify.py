"""verify=True: every distinct site is run once, at compile time, beside the graph it replaces, on random inputs of
the real shapes and dtypes.

    oracle  the graph as written, in float64 from upcast inputs, every cast to a lower precision lifted
    eager   the graph as written
    ours    the operator with the kernel the plan chose

Accepted is `|ours - oracle| <= 2 |eager - oracle| + 4 eps max|oracle|`, largest error of each result and of each
gradient, `eps` that of the result's dtype. The factor and the term cover that two correct roundings differ; a wrong
pairing, sign, weight or table is wrong by the size of the result itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from fusion_pass.config import FusionConfig
from fusion_pass.errors import FusionError
from fusion_pass.excerpt import Excerpt, excerpt
from fusion_pass.plan import Planned

FACTOR, SLACK = 2.0, 4.0

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
_NARROWING = {"float": "double", "half": "double", "bfloat16": "double", "cfloat": "cdouble", "chalf": "cdouble"}


class Verifier:
    """Checks each distinct site it is shown once. Does nothing unless `config.verify`."""

    def __init__(self, config: FusionConfig) -> None:
        self.config = config
        self._seen: set[str] = set()

    def check(self, plan: Planned) -> None:
        """Run `plan` beside the graph it is about to replace. Raises `FusionError` on a mismatch."""
        if not self.config.verify or (key := _key(plan)) in self._seen:
            return
        self._seen.add(key)
        seed = len(self._seen)
        piece = excerpt(plan)
        differences = [d for d in compare(piece, seed) if not d.accepted]
        if differences:
            script = _write_reproducer(piece, plan, seed, Path(self.config.repro_dir))
            raise FusionError(
                f"verify: {_title(plan)}: {'; '.join(map(str, differences))}. The script {script} reproduces it."
            )


@dataclass(frozen=True)
class Difference:
    """The largest error of one value, ours and eager's, against the float64 oracle."""

    what: str
    ours: float
    eager: float
    allowed: float

    @property
    def accepted(self) -> bool:
        """False also for NaN."""
        return self.ours <= self.allowed

    def __str__(self) -> str:
        return f"{self.what} is off by {self.ours:.3g} (eager by {self.eager:.3g}, allowed {self.allowed:.3g})"


def compare(piece: Excerpt, seed: int) -> list[Difference]:
    """Errors of every result and of every gradient."""
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        inputs = list(_random_like(piece.inputs, seed))
        results, cotangents = [], None
        for run in (_Widened(piece.before).run, piece.before, piece.after):
            wide = run is not piece.before and run is not piece.after
            outputs, gradients, cotangents = _run(run, piece, inputs, cotangents, wide)
            results.append([*outputs, *gradients])
        names = [f"result {index}" for index in range(len(outputs))]
        names += [
            f"the gradient of {name}" for name, wanted in zip(piece.names, piece.differentiable, strict=True) if wanted
        ]
        return [_difference(*row) for row in zip(names, *results, strict=True)]


def _run(
    run: Any, piece: Excerpt, inputs: Sequence[torch.Tensor], cotangents: list[torch.Tensor] | None, wide: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    leaves = [
        (tensor.to(_WIDE.get(tensor.dtype, tensor.dtype)) if wide else tensor).detach().requires_grad_(wanted)
        for tensor, wanted in zip(inputs, piece.differentiable, strict=True)
    ]
    outputs = list(run(*leaves))
    if cotangents is None:
        cotangents = list(_random_like([output.detach() for output in outputs], seed=97))
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not wanted:
        return outputs, [], cotangents
    pairs = [(output, grad) for output, grad in zip(outputs, cotangents, strict=True) if output.requires_grad]
    gradients = torch.autograd.grad(
        [output for output, _ in pairs], wanted, [grad.to(output.dtype) for output, grad in pairs], allow_unused=True
    )
    return (
        outputs,
        [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, gradients, strict=True)],
        cotangents,
    )


def _difference(name: str, oracle: torch.Tensor, eager: torch.Tensor, ours: torch.Tensor) -> Difference:
    if ours.dtype != eager.dtype or ours.shape != eager.shape:
        found = f"{ours.dtype} {list(ours.shape)} instead of {eager.dtype} {list(eager.shape)}"
        return Difference(f"{name} ({found})", float("nan"), 0.0, 0.0)
    exact = oracle.detach()

    def error(value: torch.Tensor) -> float:
        return float((value.detach().to(exact.dtype) - exact).abs().max()) if value.numel() else 0.0

    size = float(exact.abs().max()) if exact.numel() else 0.0
    eps = torch.finfo(eager.dtype).eps if eager.is_floating_point() or eager.is_complex() else 0.0
    return Difference(name, error(ours), error(eager), FACTOR * error(eager) + SLACK * eps * size)


class _Widened(fx.Interpreter):
    """Runs a graph in float64: what casts to a lower precision keeps float64."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(target, *_widened((args, kwargs)))

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_method(_NARROWING.get(target, target), *_widened((args, kwargs)))


def _widened(arguments: Any) -> Any:
    return tree_map(lambda value: _WIDE.get(value, value) if isinstance(value, torch.dtype) else value, arguments)


def _random_like(models: Sequence[torch.Tensor], seed: int) -> Iterator[torch.Tensor]:
    """Random tensors with shape, strides, dtype and device of `models`. Integers are small: they index tables."""
    for offset, model in enumerate(models):
        generator = torch.Generator(model.device.type).manual_seed(1000 * seed + offset)
        sizes, strides = [_hint(size) for size in model.shape], [_hint(stride) for stride in model.stride()]
        dense = torch.empty_strided(sizes, strides, dtype=model.dtype, device=model.device)
        if model.dtype.is_floating_point or model.dtype.is_complex:
            yield dense.copy_(torch.randn(sizes, dtype=dense.dtype, device=dense.device, generator=generator))
        else:
            high = 2 if model.dtype == torch.bool else 16
            yield dense.copy_(torch.randint(0, high, sizes, device=dense.device, generator=generator))


def _hint(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def _title(plan: Planned) -> str:
    return f"{plan.site.fusion} of {plan.site.layer!r} with kernel {plan.kernel!r} differs from the graph it replaces"


def _key(plan: Planned) -> str:
    """Two sites with this key in common run the same code on the same shapes."""
    tensors = [
        (name, m.value.dtype, list(m.value.shape), list(m.value.stride()), m.steps) for name, m in plan.tensors.items()
    ]
    region = [(node.op, str(node.target)) for node in sorted(plan.site.region)]
    return repr((str(plan.target), tensors, dict(plan.options), region))


_SCRIPT = '''"""{headline}

Written by fusion_pass (verify=True). Run it where the mismatch was seen.
"""

import operator  # noqa: F401

import torch
from torch import device, inf, nan  # noqa: F401

import fusion_pass.kernels  # noqa: F401  (registers the operators)
from fusion_pass.excerpt import Excerpt
from fusion_pass.verify import compare


class Before(torch.nn.Module):
{before}


class After(torch.nn.Module):
{after}


inputs = (
{inputs}
)
before, after = torch.fx.symbolic_trace(Before()), torch.fx.symbolic_trace(After())
piece = Excerpt(before, after, {names!r}, inputs, {differentiable!r})
for difference in compare(piece, seed={seed}):
    print("ok      " if difference.accepted else "MISMATCH", difference)
'''


def _write_reproducer(piece: Excerpt, plan: Planned, seed: int, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob(f"{plan.site.fusion}_*.py")))
    path = folder / f"{plan.site.fusion}_{number}.py"
    path.write_text(
        _SCRIPT.format(
            headline=f"{_title(plan)}.",
            before=_indented(piece.before),
            after=_indented(piece.after),
            inputs="\n".join(f"    {_constructor(model)}," for model in piece.inputs),
            names=piece.names,
            differentiable=piece.differentiable,
            seed=seed,
        )
    )
    return path.resolve()


def _indented(module: fx.GraphModule) -> str:
    return "\n".join(f"    {line}" if line else "" for line in module.code.strip().splitlines())


def _constructor(model: torch.Tensor) -> str:
    sizes, strides = [_hint(size) for size in model.shape], [_hint(stride) for stride in model.stride()]
    return f"torch.empty_strided({sizes}, {strides}, dtype={model.dtype}, device={str(model.device)!r})"
