"""The command `fusion-pass`: explain a model, run the demo, look at this machine."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from torch import nn

from fusion_pass import zoo
from fusion_pass.capture import explain
from fusion_pass.config import FusionConfig
from fusion_pass.report import Report

_DTYPES = ("float32", "bfloat16", "float16", "float64")


class UsageError(Exception):
    """The command line asks for something that is not there; the message is a sentence for the user."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments` (the process's by default); returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except UsageError as error:
        print(f"fusion-pass: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read the output has gone (`fusion-pass models | head`). What is buffered yet has nowhere to go, and
        # the interpreter writes it when it ends (the Python documentation's note on SIGPIPE).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fusion-pass",
        description="A fusion pass for torch.compile. In a program: torch.compile(model, backend='fusion_pass').",
        epilog="Try `fusion-pass doctor`, then `fusion-pass explain --model qwen3 --graph`.",
    )
    commands = parser.add_subparsers(title="commands", required=True)

    command = commands.add_parser("explain", help="what would be fused in a model, and why the rest would not")
    command.set_defaults(run=_explain)
    command.add_argument(
        "--model",
        required=True,
        metavar="NAME",
        help="a model of the zoo (see `fusion-pass models`), or package.module:factory, where factory() returns "
        "(module, inputs) with inputs a dict of keyword arguments or a tuple",
    )
    command.add_argument("--json", action="store_true", help="print the report as JSON and nothing else")
    command.add_argument("--graph", action="store_true", help="also print what changes in the graph")
    command.add_argument("--dynamic", action="store_true", help="capture with dynamic=True")
    mode = command.add_mutually_exclusive_group()
    mode.add_argument(
        "--train", dest="training", action="store_true", default=True, help="with gradients (the default)"
    )
    mode.add_argument("--inference", dest="training", action="store_false", help="eval mode, without gradients")
    command.add_argument(
        "--reference",
        action=argparse.BooleanOptionalAction,
        help="let the reference kernel (plain ATen) count, which runs anywhere; by default it does on the CPU, "
        "where no other kernel runs",
    )
    sizes = command.add_argument_group("models of the zoo")
    sizes.add_argument("--layers", type=int, metavar="N", help="number of attention layers (1)")
    sizes.add_argument("--dtype", choices=_DTYPES, help="of parameters and inputs (float32)")
    sizes.add_argument(
        "--attention", choices=("sdpa", "eager"), help="attention implementation (the model's own choice)"
    )
    sizes.add_argument("--device", help="where the model is put (cpu)")

    command = commands.add_parser("demo", help="fuse and train two small models and compare with the unfused ones")
    command.set_defaults(run=_demo)
    command.add_argument("--layers", type=int, default=3, metavar="N", help="attention layers of each model (3)")
    command.add_argument("--steps", type=int, default=5, metavar="N", help="training steps (5)")

    commands.add_parser("models", help="the names that --model takes").set_defaults(run=_models)
    commands.add_parser("doctor", help="what is installed and which kernels run here").set_defaults(run=_doctor)
    return parser


def _explain(options: argparse.Namespace) -> int:
    model, inputs = _load(options)
    model.train(options.training)
    positional = inputs if isinstance(inputs, tuple) else ()
    keywords = inputs if isinstance(inputs, Mapping) else {}
    config = FusionConfig.load(allow_reference=_reference(options, model))
    with contextlib.nullcontext() if options.training else torch.no_grad():
        report = explain(model, *positional, config=config, dynamic=True if options.dynamic else None, **keywords)
    if options.json:
        print(json.dumps({"model": options.model, **report.to_dict()}, indent=1))
    else:
        _print(report, options)
    return 0


def _reference(options: argparse.Namespace, model: nn.Module) -> bool:
    if options.reference is not None:
        return bool(options.reference)
    return all(parameter.device.type == "cpu" for parameter in model.parameters())


def _print(report: Report, options: argparse.Namespace) -> None:
    from fusion_pass import show

    console = Console()
    kind = "training" if options.training else "inference"
    graphs = "one graph" if report.graphs == 1 else f"{report.graphs} graphs"
    console.print(f"[bold]{options.model}[/bold], {kind}, captured as {graphs}\n")
    if report.sites:
        console.print(show.sites(report))
        console.print()
    console.print(show.counts(report))
    if report.notes:
        console.print(show.notes(report))
    if any(site.kernel == "reference" for site in report.fused):
        console.print(
            "The reference kernel is plain ATen: right on any device, and not faster than the code it replaces."
        )
    if options.graph:
        console.print()
        console.print(show.graph_change(report))


def _load(options: argparse.Namespace) -> tuple[nn.Module, Any]:
    asked = {name: getattr(options, name) for name in ("layers", "dtype", "attention", "device")}
    given = {name: value for name, value in asked.items() if value is not None}
    if ":" in options.model:
        if given:
            flags = ", ".join(f"--{name}" for name in given)
            raise UsageError(f"{flags} is for models of the zoo; {options.model} decides for itself.")
        return _from_factory(options.model)
    if "dtype" in given:
        given["dtype"] = getattr(torch, given["dtype"])
    try:
        return zoo.build(options.model, **given)
    except ModuleNotFoundError as error:
        raise UsageError(str(error)) from error
    except ValueError as error:
        raise UsageError(f"{error}. Your own model is --model package.module:factory.") from error


def _from_factory(path: str) -> tuple[nn.Module, Any]:
    module_name, _, function = path.partition(":")
    sys.path.insert(0, "")  # a console script does not look in the current folder, `python -m` does
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UsageError(f"--model is {path}, but the module {error.name!r} cannot be imported.") from error
    factory = getattr(module, function, None)
    if not callable(factory):
        raise UsageError(f"--model is {path}, but {module_name} has no function {function!r}.")
    made = factory()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise UsageError(f"{path}() returned {type(made).__name__}; it must return (module, inputs).")
    model, inputs = made
    if not isinstance(inputs, Mapping | tuple):
        raise UsageError(f"{path}() returned inputs of type {type(inputs).__name__}; they must be a dict or a tuple.")
    return model, inputs


def _demo(options: argparse.Namespace) -> int:
    from fusion_pass import demo

    return demo.run(Console(), layers=options.layers, steps=options.steps)


def _models(options: argparse.Namespace) -> int:
    print("\n".join(zoo.names()))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from fusion_pass import doctor

    doctor.show(doctor.diagnose(), Console())
    return 0
