"""From a schema and two plans to an operator in `torch.ops.fusion_pass`: kernel, fake, autograd, and the short way in.

A call reaches the kernel by one of three ways, with the same result:

    torch.ops       schema check, autograd key (`Operator.autograd`), then `Operator.forward`. The dispatcher takes
                    more time to convert the arguments than a launch takes.
    the short way   `Operator(...)`, which the Python functions call, and `torch.ops.fusion_pass.<name>.default(...)`,
                    which Inductor's code calls. In plain eager mode, for shapes that were seen, straight to the replay
                    of the earlier call; all else (tracing, modes, subclasses, a profiler, new shapes) takes the way
                    above.
    the fake        stops after planning.

The backward is an operator too (`<name>_backward`), so AOTAutograd traces it like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.autograd import forward_ad

from . import registry
from .replay import Key, Replay, call_key
from .same_call import same_call

_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter, type(None)})
_BACKENDS = frozenset({DispatchKey.CPU, DispatchKey.CUDA})
_KEPT_REPLAYS = 4096
_RECENT = 8
"""Calls of the same options and other shapes that are compared with a call before its key is made."""
_operators: list[Operator] = []
_is_compiling: Callable[[], bool] = torch.compiler.is_compiling
_is_grad_enabled: Callable[[], bool] = torch._C.is_grad_enabled
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_functorch_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active
_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
_torchscript_tracing: Callable[[], object] = torch._C._get_tracing_state


class Planned(Protocol):
    """A checked call whose results are allocated."""

    def run(self) -> list[Tensor]:
        """Fill the results and return them."""

    def replay(self, arguments: Sequence[Tensor | None], results: Sequence[Tensor]) -> Replay | None:
        """After `run`, which returned `results`: how to make the call again, if that is possible."""

    def fake(self) -> list[Tensor]:
        """The results, unfilled."""


def no_state() -> tuple[object, ...]:
    """Of an operator whose kernels do the same whatever the settings of the process are."""
    return ()


@dataclass(frozen=True)
class Differentiable:
    """How an operator is differentiated: its backward takes the gradients of the results, then what was saved."""

    indices: tuple[int, ...]
    """Positions of the differentiable arguments, in the order of `output_mask` and of the backward's results."""
    saves_results: bool = False
    """The results are saved, before the arguments. A result may then have no gradient; the first one gets zeros."""
    inputs: int = 0
    """So many arguments, the first ones, are not saved if the call is `linear` in them."""
    linear: Callable[[Mapping[str, Any], Mapping[int, bool]], bool] = lambda options, needed: False
    """By options, and which arguments need a gradient."""
    refused: Mapping[int, str] = field(default_factory=dict)
    """Arguments that have no gradient, by position, with the sentence that says so."""


class Operator:
    """One operator. `plan` checks a call and allocates its results. `state`: settings of the process that a plan
    depends on."""

    def __init__(
        self,
        library: torch.library.Library,
        name: str,
        schema: str,
        plan: Callable[..., Planned],
        returns_list: bool,
        state: Callable[[], tuple[object, ...]] = no_state,
    ) -> None:
        self.name = name
        self._plan = plan
        self._returns_list = returns_list
        self._state = state
        self._replays: dict[Key, Replay] = {}
        # By options and settings: the latest calls, each as what says whether another one is the same, and makes it.
        self._recent: dict[Key, tuple[tuple[Callable[..., bool], Callable[..., Any]], ...]] = {}
        self.function: type[torch.autograd.Function] | None = None
        self.describe: Callable[..., Recorded] | None = None
        self._apply: Callable[..., Any] | None = None
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
        self.overload = getattr(getattr(torch.ops, library.ns), name).default
        arguments = self.overload._schema.arguments
        self._names = [a.name for a in arguments if not a.kwarg_only]
        self.defaults = {a.name: a.default_value for a in arguments if a.kwarg_only}
        # By the number of positional arguments: the names of all others.
        self._by_name = [{*self._names[count:], *self.defaults} for count in range(len(self._names) + 1)]
        self._default_items = list(self.defaults.items())
        self._lists = [index for index, a in enumerate(a for a in arguments if a.kwarg_only) if "List" in str(a.type)]
        library.impl(name, self.forward, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        library.impl(name, self.autograd, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"{library.ns}::{name}", self.fake, lib=library)
        self._through_dispatcher = self.overload._op
        self.overload._op = self._from_overload
        _operators.append(self)

    def __call__(self, tensors: Sequence[Tensor | None], values: tuple[Any, ...]) -> Any:
        """As `torch.ops.fusion_pass.<name>(*tensors, **options)`. `tensors`: one for each positional argument, or None;
        `values`: of all options, in the schema's order."""
        if _is_compiling():
            return self.overload(*tensors, **dict(zip(self.defaults, values, strict=True)))
        result = self._shortly(tensors, values)
        if result is NotImplemented:
            return self._through_dispatcher(*tensors, **dict(zip(self.defaults, values, strict=True)))
        return result

    def _from_overload(self, *args: Any, **given: Any) -> Any:
        """`torch.ops.fusion_pass.<name>.default(*args, **given)`. Inductor gives optional tensors by name."""
        count = len(args)
        if count < len(self._by_name) and given.keys() <= self._by_name[count]:
            result = self._shortly((*args, *map(given.get, self._names[count:])), self.values(given))
            if result is not NotImplemented:
                return result
        return self._through_dispatcher(*args, **given)

    def _shortly(self, tensors: Sequence[Tensor | None], values: tuple[Any, ...]) -> Any:
        """The results, if the same call was made before and this one is made in plain eager mode (`plain_mode`, of
        which `same_call` asks the rest); else NotImplemented."""
        if _dispatch_modes() or _function_modes() or _profiled() or forward_ad._current_level >= 0:
            return NotImplemented
        key = values, _is_grad_enabled(), self._state()
        recents = self._recent.get(key, ())
        for same, call in recents:
            if same(*tensors):
                return call(*tensors)
        if not plain(tensors):
            return NotImplemented
        replay = self._replays.get(self._key(tensors, values))
        if replay is None:
            return NotImplemented
        call = self._short_way(replay, self._recorded(tensors, values, replay))
        if len(self._recent) >= _KEPT_REPLAYS:
            self._recent.clear()
        self._recent[key] = ((same_call(tensors), call), *recents[: _RECENT - 1])
        return call(*tensors)

    def _short_way(self, replay: Replay, recorded: Recorded | None) -> Callable[..., Any]:
        """A function of all tensors: the results, or NotImplemented if the replay is not for these addresses."""
        repeat, returned, apply = replay.repeat, self._returned, self._apply
        if recorded is not None:
            assert apply is not None
            return lambda *tensors: apply(*recorded.inputs(tensors))
        if not self._returns_list and len(replay.steps.results) > 1:
            return repeat

        def call(*tensors: Tensor | None) -> Any:
            results = repeat(*tensors)
            return NotImplemented if results is NotImplemented else returned(results)

        return call

    def _recorded(
        self, args: Sequence[Tensor | None], values: tuple[Any, ...], way: DispatchKeySet | Replay
    ) -> Recorded | None:
        """What autograd records of the call; None where it records nothing."""
        if not (_is_grad_enabled() and torch._C._any_requires_grad(*args)):
            return None
        assert self.describe is not None
        return self.describe(args, values, way)

    def differentiate_by(self, function: type[torch.autograd.Function], describe: Callable[..., Recorded]) -> None:
        """Set the gradient: `function` takes the inputs of what `describe(args, values, way)` gives."""
        self.function, self.describe = function, describe
        # `Function.apply` looks for functorch's wrappers, which are not there in plain mode.
        self._apply = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def forward(self, *args: Tensor | None, **options: Any) -> Any:
        """The kernel behind all dispatch keys."""
        args, values = self.padded(args), self.values(options)
        key = self._key(args, values)
        replay = self._replays.get(key)
        if replay is not None:
            repeated = replay(args)
            if repeated is not NotImplemented:
                return self._returned(repeated)
        with torch._C._AutoDispatchBelowAutograd():
            planned = self._plan(*args, **dict(zip(self.defaults, values, strict=True)))
            results = planned.run()
            replay = planned.replay(args, results)
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
        if has_tangent(args):
            raise NotImplementedError(
                f"fusion_pass::{self.name} has no forward-mode derivative (jvp); leave this site unfused."
            )
        below = keyset & torch._C._after_autograd_keyset
        way: DispatchKeySet | Replay = below
        if below.highestPriorityTypeId() in _BACKENDS:
            way = self._replays.get(self._key(args, values), below)
        recorded = self._recorded(args, values, way)
        if recorded is not None:
            assert self.function is not None
            return self.function.apply(*recorded.inputs(args))  # type: ignore[no-untyped-call]
        return self.run(way, values, args)

    def run(self, way: DispatchKeySet | Replay, values: tuple[Any, ...], args: Sequence[Tensor | None]) -> Any:
        """The results, without a recorded gradient. `way`: the replay of an earlier call, or the dispatch keys that are
        left."""
        if isinstance(way, Replay):
            results = way(args)
            if results is not NotImplemented:
                return self._returned(results)
        options = dict(zip(self.defaults, values, strict=True))
        if isinstance(way, Replay) or way.highestPriorityTypeId() in _BACKENDS:
            return self.forward(*args, **options)
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload.redispatch(way, *args, **options)

    def values(self, options: Mapping[str, Any]) -> tuple[Any, ...]:
        """Of all options, in the schema's order, hashable. One that is left out has its default. AOTInductor gives None
        for an empty list."""
        given = [options.get(name, default) for name, default in self._default_items]
        for index in self._lists:
            given[index] = tuple(given[index] or ())
        return tuple(given)

    def padded(self, args: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """All positional arguments: callers and the dispatcher leave out those at the end that are None."""
        return (*args, *(None,) * (len(self._names) - len(args)))

    def forget(self) -> None:
        """Plan every call anew."""
        self._replays.clear()
        self._recent.clear()

    def _key(self, args: Sequence[Tensor | None], values: tuple[Any, ...]) -> Key:
        return self._state(), call_key(args, values)

    def _returned(self, results: Sequence[Tensor]) -> Any:
        if self._returns_list:
            return list(results)
        return tuple(results) if len(results) > 1 else results[0]


def forget_replays() -> None:
    """Plan every call anew: for those who change what planning depends on (tile searches)."""
    for operator in _operators:
        operator.forget()


registry.when_changed(forget_replays)


def plain(args: Sequence[object]) -> bool:
    """Plain tensors in plain eager mode: nobody traces, transforms, overrides or profiles the call."""
    return all(type(argument) in _PLAIN_TYPES for argument in args) and plain_mode()


def plain_mode() -> bool:
    """Nobody traces, transforms, overrides or profiles calls."""
    return not (
        _dispatch_modes()
        or _function_modes()
        or _functorch_transforms()
        or _profiled()
        or _torchscript_tracing()
        or forward_ad._current_level >= 0
    )


def has_tangent(args: Sequence[Tensor | None]) -> bool:
    """A forward-mode derivative is asked for (`torch.func.jvp`, `torch.autograd.forward_ad`)."""
    if forward_ad._current_level < 0:
        return False
    duals = (forward_ad.unpack_dual(x) for x in args if x is not None)  # type: ignore[no-untyped-call]
    return any(dual.tangent is not None for dual in duals)


class Recorded:
    """What autograd records of all calls of one key: the same arguments need gradients, the same ones are saved.

    `run`: the results, of the arguments. `needed`: positions of the arguments that need a gradient. `saved`: positions
    of those that the backward is given, the others are None there.
    """

    __slots__ = ("backward_values", "needed", "run", "saved")

    def __init__(
        self, run: Callable[..., Any], needed: Sequence[int], saved: Sequence[int], backward_values: tuple[Any, ...]
    ) -> None:
        self.run, self.needed, self.saved, self.backward_values = run, needed, saved, backward_values

    def inputs(self, args: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """Of the `Function`: autograd looks at every tensor that stands among them, so only those that need a gradient
        do."""
        return self, args, *[args[position] for position in self.needed]


def register(
    library: torch.library.Library,
    name: str,
    schemas: tuple[str, str],
    plans: tuple[Callable[..., Planned], Callable[..., Planned]],
    differentiable: Differentiable,
    state: Callable[[], tuple[object, ...]] = no_state,
) -> Operator:
    """Define `name` and `name_backward` (`schemas`, `plans`: of the two)."""
    operator = Operator(library, name, schemas[0], plans[0], returns_list=False, state=state)
    backward = Operator(library, f"{name}_backward", schemas[1], plans[1], returns_list=True, state=state)
    describe = _describer(operator, backward, differentiable)
    operator.differentiate_by(_differentiable(operator, backward, differentiable), describe)
    backward.differentiate_by(_not_differentiable(backward, name), _describe_run(backward))
    return operator


def _describer(operator: Operator, backward: Operator, rules: Differentiable) -> Callable[..., Recorded]:
    """A function of (arguments, values, way) that says what autograd records."""
    names = list(operator.defaults)
    # The backward has the forward's options but those of the result, and `output_mask` and `in_dtype` of its own.
    shared = [names.index(name) if name in names else None for name in backward.defaults]

    def describe(args: Sequence[Tensor | None], values: tuple[Any, ...], way: DispatchKeySet | Replay) -> Recorded:
        needed = {index: x is not None and x.requires_grad for index, x in enumerate(args)}
        for index, sentence in rules.refused.items():
            if needed[index]:
                raise NotImplementedError(sentence)
        mask = tuple(needed[index] for index in rules.indices)
        first = args[0]
        assert first is not None
        own = {"output_mask": mask, "in_dtype": first.dtype}
        backward_values = tuple(
            own[name] if index is None else values[index] for name, index in zip(backward.defaults, shared, strict=True)
        )
        linear = rules.linear(dict(zip(names, values, strict=True)), needed)
        first_saved = rules.inputs if linear else 0
        saved = [index for index, x in enumerate(args) if x is not None and index >= first_saved]
        wanted = [index for index in rules.indices if needed[index]]
        return Recorded(_runner(operator, way, values), wanted, saved, backward_values)

    return describe


def _runner(operator: Operator, way: DispatchKeySet | Replay, values: tuple[Any, ...]) -> Callable[..., Any]:
    return lambda args: operator.run(way, values, args)


def _differentiable(operator: Operator, backward: Operator, rules: Differentiable) -> type[torch.autograd.Function]:
    count = len(operator._names)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, recorded: Recorded, args: Sequence[Tensor | None], *_: Tensor) -> Any:
            results = recorded.run(args)
            ctx.recorded = recorded
            saved = [args[position] for position in recorded.saved]
            if rules.saves_results:
                ctx.set_materialize_grads(False)
                ctx.save_for_backward(*saved, *results)
            else:
                ctx.save_for_backward(*saved)
            return results

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            recorded, saved = ctx.recorded, ctx.saved_tensors
            results = saved[len(recorded.saved) :]
            args: list[Tensor | None] = [None] * count
            for position, tensor in zip(recorded.saved, saved, strict=False):
                args[position] = tensor
            if grads[0] is None:
                grads = (torch.zeros_like(results[0]), *grads[1:])
            return None, None, *backward((*grads, *results, *args), recorded.backward_values)

    Function.__name__ = Function.__qualname__ = operator.name
    return Function


def _describe_run(operator: Operator) -> Callable[..., Recorded]:
    def describe(args: Sequence[Tensor | None], values: tuple[Any, ...], way: DispatchKeySet | Replay) -> Recorded:
        needed = [index for index, x in enumerate(args) if x is not None and x.requires_grad]
        return Recorded(_runner(operator, way, values), needed, (), ())

    return describe


def _not_differentiable(operator: Operator, name: str) -> type[torch.autograd.Function]:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, recorded: Recorded, args: Sequence[Tensor | None], *_: Tensor) -> Any:
            return tuple(recorded.run(args))

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            raise NotImplementedError(
                f"{name} cannot be differentiated twice: its backward is a hand-written kernel. "
                "Leave this site unfused."
            )

    Function.__name__ = Function.__qualname__ = operator.name
    return Function
