"""From a schema and two plans to an operator in `torch.ops.fusion_pass`: kernel, fake, autograd, and the short way in.

A call reaches the kernel by one of three ways, with the same result:

    torch.ops       schema check, autograd key (`Operator.autograd`), then `Operator.forward`. The dispatcher takes
                    more time to convert the arguments than a launch takes.
    Operator(...)   what `functional.py` calls. In plain eager mode, for shapes that were seen, straight to the replay
                    of the earlier call; all else (tracing, modes, subclasses, a profiler, new shapes) takes the way
                    above.
    the fake        stops after planning.

The backward is an operator too (`<name>_backward`), so AOTAutograd traces it like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

from . import registry
from .replay import Key, Replay, Work, call_key

_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter, type(None)})
_BACKENDS = frozenset({DispatchKey.CPU, DispatchKey.CUDA})
_KEPT_REPLAYS = 4096
_operators: list[Operator] = []


class Planned(Protocol):
    """A checked call whose results are allocated."""

    scratch: Sequence[Tensor]
    """After `run`: what else the call allocated for its launches."""
    works: Sequence[Work] | None
    """After `run`: the launches, if repeating them repeats the call."""

    def run(self) -> list[Tensor]:
        """Fill the results and return them."""

    def fake(self) -> list[Tensor]:
        """The results, unfilled."""


@dataclass(frozen=True)
class Differentiable:
    """Where the differentiable arguments of an operator stand: `inputs` are the streams' tensors, then cos, sin,
    weights and biases.

    `positions` and the other integer tensors are passed on to the backward and have no gradient.
    """

    inputs: int
    parameters: int
    integers: int = 1

    def indices(self) -> list[int]:
        first_parameter = self.inputs + 2 + self.integers
        return [*range(self.inputs + 2), *range(first_parameter, first_parameter + self.parameters)]


class Operator:
    """One operator. `plan` checks a call and allocates its results."""

    def __init__(
        self, library: torch.library.Library, name: str, schema: str, plan: Callable[..., Planned], returns_list: bool
    ) -> None:
        self.name = name
        self._plan = plan
        self._returns_list = returns_list
        self._replays: dict[Key, Replay] = {}
        self.function: type[torch.autograd.Function] | None = None
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
        self.overload = getattr(getattr(torch.ops, library.ns), name).default
        arguments = self.overload._schema.arguments
        self._positional = sum(not a.kwarg_only for a in arguments)
        self.defaults = {a.name: a.default_value for a in arguments if a.kwarg_only}
        library.impl(name, self.forward, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        library.impl(name, self.autograd, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"{library.ns}::{name}", self.fake, lib=library)
        _operators.append(self)

    def __call__(self, tensors: Sequence[Tensor | None], values: tuple[Any, ...]) -> Any:
        """As `torch.ops.fusion_pass.<name>(*tensors, **options)`; `values`: of all options, in the schema's order."""
        if torch.compiler.is_compiling() or not plain(tensors):
            return self.overload(*tensors, **dict(zip(self.defaults, values, strict=True)))
        replay = self._replays.get((registry.generation(), call_key(tensors, values)))
        if replay is None:
            return self.overload(*tensors, **dict(zip(self.defaults, values, strict=True)))
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
            assert self.function is not None
            return self.function.apply(replay, values, *tensors)  # type: ignore[no-untyped-call]
        return self._returned(replay(tensors))

    def forward(self, *args: Tensor | None, **options: Any) -> Any:
        """The kernel behind all dispatch keys."""
        args = self.padded(args)
        key = (registry.generation(), call_key(args, self.values(options)))
        replay = self._replays.get(key)
        if replay is not None:
            return self._returned(replay(args))
        with torch._C._AutoDispatchBelowAutograd():
            planned = self._plan(*args, **options)
            results = planned.run()
            replay = Replay.of(args, results, planned.scratch, planned.works)
        if replay is not None:
            if len(self._replays) >= _KEPT_REPLAYS:
                self._replays.clear()
            self._replays[key] = replay
        return self._returned(results)

    def fake(self, *args: Any, **options: Any) -> Any:
        """Results of the right shapes, dtypes and strides."""
        return self._returned(self._plan(*args, **options).fake())

    def autograd(self, keyset: DispatchKeySet, *args: Tensor | None, **options: Any) -> Any:
        """The kernel of the autograd keys."""
        args, values = self.padded(args), self.values(options)
        below = keyset & torch._C._after_autograd_keyset
        way: DispatchKeySet | Replay = below
        if below.highestPriorityTypeId() in _BACKENDS:
            way = self._replays.get((registry.generation(), call_key(args, values))) or below
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            assert self.function is not None
            return self.function.apply(way, values, *args)  # type: ignore[no-untyped-call]
        return self.run(way, values, args)

    def run(self, way: DispatchKeySet | Replay, values: tuple[Any, ...], args: Sequence[Tensor | None]) -> Any:
        """The results, without a recorded gradient. `way`: the replay of an earlier call, or the dispatch keys that are
        left."""
        if isinstance(way, Replay):
            return self._returned(way(args))
        options = dict(zip(self.defaults, values, strict=True))
        if way.highestPriorityTypeId() in _BACKENDS:
            return self.forward(*args, **options)
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload.redispatch(way, *args, **options)

    def values(self, options: Mapping[str, Any]) -> tuple[Any, ...]:
        """Of all options, in the schema's order, hashable. One that is left out has its default."""
        given = (options.get(name, default) for name, default in self.defaults.items())
        return tuple([tuple(value) if type(value) is list else value for value in given])

    def padded(self, args: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """All positional arguments: callers and the dispatcher leave out those at the end that are None."""
        return (*args, *(None,) * (self._positional - len(args)))

    def _returned(self, results: list[Tensor]) -> Any:
        if self._returns_list:
            return results
        return tuple(results) if len(results) > 1 else results[0]


def forget_replays() -> None:
    """Plan every call anew: for those who change what planning depends on (tile searches)."""
    for operator in _operators:
        operator._replays.clear()


def plain(args: Sequence[object]) -> bool:
    """Plain tensors in plain eager mode: nobody traces, transforms, overrides or profiles the call."""
    for argument in args:
        if type(argument) not in _PLAIN_TYPES:
            return False
    c = torch._C
    return not (
        c._len_torch_dispatch_stack()
        or c._len_torch_function_stack()
        or c._are_functorch_transforms_active()
        or c._autograd._profiler_enabled()
        or c._get_tracing_state()
    )


def register(
    library: torch.library.Library,
    name: str,
    schemas: tuple[str, str],
    plan: Callable[..., Planned],
    grad_plan: Callable[..., Planned],
    arguments: Differentiable,
) -> Operator:
    """Define `name` and `name_backward` (`schemas`: of the two)."""
    operator = Operator(library, name, schemas[0], plan, returns_list=False)
    backward = Operator(library, f"{name}_backward", schemas[1], grad_plan, returns_list=True)
    operator.function = _differentiable(operator, backward, arguments)
    backward.function = _not_differentiable(backward, name)
    return operator


def _differentiable(operator: Operator, backward: Operator, arguments: Differentiable) -> type[torch.autograd.Function]:
    indices = arguments.indices()
    names = list(operator.defaults)
    norm = names.index("norm") if "norm" in names else None
    # The backward has the forward's options but those of the result, and `output_mask` and `in_dtype` of its own.
    shared = {name: names.index(name) for name in backward.defaults if name in names}

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, way: DispatchKeySet | Replay, values: tuple[Any, ...], *args: Tensor | None
        ) -> Tensor | tuple[Tensor, ...]:
            results: Tensor | tuple[Tensor, ...] = operator.run(way, values, args)
            needs = ctx.needs_input_grad
            ctx.mask = tuple([needs[i + 2] for i in indices])
            ctx.values = values
            first = args[0]
            assert first is not None
            ctx.in_dtype = first.dtype
            tables_needed = ctx.mask[arguments.inputs] or ctx.mask[arguments.inputs + 1]
            if (norm is None or values[norm] == "none") and not tables_needed:
                # A rotation alone is linear: its input need not outlive the forward.
                args = (*(None,) * arguments.inputs, *args[arguments.inputs :])
            ctx.save_for_backward(*args)
            return results

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            own = {"output_mask": ctx.mask, "in_dtype": ctx.in_dtype}
            values = tuple([own[n] if n in own else ctx.values[shared[n]] for n in backward.defaults])
            saved = ctx.saved_tensors
            gradients = iter(backward((*grads, *saved), values))
            result: list[Tensor | None] = [None] * (2 + len(saved))
            for index, needed in zip(indices, ctx.mask, strict=True):
                if needed:
                    result[index + 2] = next(gradients)
            return tuple(result)

    Function.__name__ = Function.__qualname__ = operator.name
    return Function


def _not_differentiable(operator: Operator, name: str) -> type[torch.autograd.Function]:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, way: DispatchKeySet | Replay, values: tuple[Any, ...], *args: Tensor | None) -> Any:
            return tuple(operator.run(way, values, args))

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            raise NotImplementedError(
                f"{name} cannot be differentiated twice: its backward is a hand-written kernel. "
                "Leave this site unfused."
            )

    Function.__name__ = Function.__qualname__ = operator.name
    return Function
