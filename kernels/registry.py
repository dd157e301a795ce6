"""Which kernels exist, which of them can serve a request, and which one is taken.

A back end is a module of this package with a tuple `KERNELS` of `Kernel` records: to add one, write that tuple and
name the module in `MODULES`. The module must import with torch alone; what needs a GPU, Triton or a vendor's package
is imported by `Kernel.load`. A third party calls `register`.

`ORDER` is the order of preference. `reference` is last, and is taken only where the caller allows it.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

MODULES = ("hopper", "choice", "cuda", "triton", "ascend", "reference", "attention_kernels")
ORDER = (
    "hopper", "sdpa", "measured", "triton", "cuda", "ascend_inference", "ascend", "ascend_packed", "ascend_flash",
    "reference",
)  # fmt: skip

NORM_ROPE_OPS = frozenset({"qkv_norm_rope", "qk_norm_rope", "norm_rope", "rope"})

_NOTHING: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True)
class Request:
    """One operator call, as far as the choice of a kernel depends on it.

    `shapes` and `dtypes` are of the tensor arguments that are present, by name; a size that is not known (dynamic
    shapes) is None. `options` are the operator's keyword arguments. `training`: a gradient will be asked for.
    """

    op: str
    device: torch.device
    dtypes: Mapping[str, torch.dtype]
    shapes: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    training: bool = False


def _always(_: Request) -> str | None:
    return None


@dataclass(frozen=True)
class Kernel:
    """One implementation of some operators.

    `load` returns the implementation (for the norm + rotation operators a `streams.Backend`).
    `available`, `supports` and `gate` return None for yes, or the reason why not, as a sentence: is it usable on
    this machine; can it compute this request; and is it expected to be no slower than what Inductor would generate.
    Only `backend="auto"` asks the gate.
    """

    name: str
    ops: frozenset[str]
    load: Callable[[], object]
    available: Callable[[], str | None]
    supports: Callable[[Request], str | None] = _always
    gate: Callable[[Request], str | None] = _always


@dataclass(frozen=True)
class Choice:
    """The kernel taken (None if there is none) and the reason against each one that stood before it."""

    kernel: Kernel | None
    reasons: Mapping[str, str]

    def sentence(self) -> str:
        """Why there is no kernel, for a report or an error."""
        return " ".join(f"{name}: {reason}" for name, reason in self.reasons.items()) or "no kernel is registered."


_kernels: list[Kernel] = []
_discovered = False
_lock = threading.RLock()
"""Held while `_kernels` changes. Who reads it sees what it was before a change or after it: it is replaced."""
_watchers: list[Callable[[], None]] = []
_joined: dict[str, Callable[[Request], Sequence[Request]]] = {}


def when_changed(watcher: Callable[[], None]) -> None:
    """Call `watcher` whenever a kernel was registered: a choice made earlier may not be the choice now."""
    _watchers.append(watcher)


def register_joined(op: str, parts: Callable[[Request], Sequence[Request]]) -> None:
    """Add an operator without kernels of its own: it runs those of the operators whose requests `parts` gives."""
    _joined[op] = parts


def register(kernel: Kernel) -> None:
    """Add a kernel. It stands where `ORDER` puts its name; an unknown name stands before all of them, the latest
    first."""
    _discover()
    with _lock:
        _insert(kernel)


def _insert(kernel: Kernel) -> None:
    global _kernels
    if any(k.name == kernel.name and k.ops & kernel.ops for k in _kernels):
        raise ValueError(f"kernel {kernel.name!r} is registered already for {sorted(kernel.ops)}; choose another name.")
    place = {name: index for index, name in enumerate(ORDER)}
    _kernels = sorted((kernel, *_kernels), key=lambda k: place.get(k.name, -1))
    for watcher in _watchers:
        watcher()


def _discover() -> None:
    """Import the back ends, once. A thread that asks in the meantime waits until all of them are there."""
    global _discovered
    if _discovered:
        return
    with _lock:
        if _discovered:
            return
        package = __name__.rpartition(".")[0]
        names = (f"{package}.{name}" for name in MODULES)
        modules = [importlib.import_module(name) for name in names if importlib.util.find_spec(name) is not None]
        for kernel in (kernel for module in modules for kernel in getattr(module, "KERNELS", ())):
            _insert(kernel)
        _discovered = True


def kernels(op: str | None = None) -> tuple[Kernel, ...]:
    """All kernels, or those of one operator, in order of preference."""
    _discover()
    return tuple(k for k in _kernels if op is None or op in k.ops)


def get(op: str, name: str) -> Kernel:
    """The kernel of that name; raises if there is none or it is not usable on this machine."""
    for kernel in kernels(op):
        if kernel.name == name:
            reason = kernel.available()
            if reason is not None:
                raise RuntimeError(f"backend={name!r} cannot run here: {reason}")
            return kernel
    known = ", ".join(repr(k.name) for k in kernels(op)) or "none"
    raise ValueError(f"backend is {name!r}; {op} takes 'auto' or one of: {known}.")


def choose(request: Request, allow_reference: bool = False, only: Iterable[str] | None = None) -> Choice:
    """The first kernel that serves the request, or the reason against each one.

    `only` restricts the choice to kernels of these names (then the cost gate is not asked: they were named).
    Where the reference is allowed, a kernel that only its cost gate refuses stands before it: Inductor's code is no
    longer to be had, and the reference is slower than both.
    """
    names = None if only is None else set(only)
    if request.op in _joined:
        return _choose_parts(request, allow_reference, names)
    reasons: dict[str, str] = {}
    able: Kernel | None = None
    for kernel in kernels(request.op):
        if names is not None and kernel.name not in names:
            continue
        if kernel.name == "reference" and not allow_reference:
            reasons[kernel.name] = "it is for checking, not for speed, and allow_reference is off."
            continue
        if kernel.name == "reference" and able is not None:
            return Choice(able, reasons)
        reason = kernel.available() or kernel.supports(request)
        if reason is None and names is None:
            reason = kernel.gate(request)
            able = able or kernel
        if reason is None:
            return Choice(kernel, reasons)
        reasons[kernel.name] = reason
    return Choice(None, reasons)


def _choose_parts(request: Request, allow_reference: bool, names: set[str] | None) -> Choice:
    """A kernel for each of the operators that a joined one stands for, named as in "triton+hopper"."""
    choices = [choose(part, allow_reference, names) for part in _joined[request.op](request)]
    found = [choice.kernel.name for choice in choices if choice.kernel is not None]
    if len(found) < len(choices):
        return Choice(None, {name: reason for choice in choices for name, reason in choice.reasons.items()})
    name = found[0] if len(set(found)) == 1 else "+".join(found)
    return Choice(Kernel(name, frozenset({request.op}), load=lambda: None, available=lambda: None), {})


@dataclass(frozen=True)
class Status:
    """One line of `doctor`: a kernel, its operators, and None or the reason why this machine cannot run it."""

    name: str
    ops: tuple[str, ...]
    reason: str | None


def doctor() -> tuple[Status, ...]:
    """Every registered kernel and whether it is usable on this machine."""
    return tuple(Status(k.name, tuple(sorted(k.ops)), k.available()) for k in kernels())
