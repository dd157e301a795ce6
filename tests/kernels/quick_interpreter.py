"""Triton's interpreter without the work it repeats, which is more than half of its time. What a kernel computes is not
touched: each function of Triton 3.6 is replaced by one with the same results, and where another Triton does not have
it, nothing is.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest


def install(monkeypatch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """Into `triton.runtime.interpreter`, for the duration of a test."""
    core = interpreter.tl.core
    # A third of the time goes into checks of integers for overflow whose outcome is looked at only in debug mode.
    options = interpreter.interpreter_builder.options
    checked = {"sanitize_overflow": False} if hasattr(options, "sanitize_overflow") else {}
    monkeypatch.setattr(interpreter.interpreter_builder, "options", dataclasses.replace(options, **checked))
    if hasattr(interpreter, "_LangPatchScope"):
        monkeypatch.setattr(interpreter, "_patch_lang", replaced_once_a_launch(interpreter))
    if hasattr(interpreter, "_get_np_dtype"):
        monkeypatch.setattr(interpreter, "_get_np_dtype", known_dtypes(interpreter))
    monkeypatch.setattr(core.block_type, "__init__", known_blocks(core))
    monkeypatch.setattr(core.tensor, "__init__", known_shapes(core))


def replaced_once_a_launch(interpreter: Any) -> Callable[[Any], Any]:
    """Triton's `_patch_lang`, which replaces the functions of its language by interpreted ones, without repetition.

    Triton 3.6 does it at each launch and again at every call of a function inside the kernel, where all of it is found
    done already.
    """
    replace, languages = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    replaced: set[str] = set()
    used: dict[int, set[str]] = {}
    """By the globals of a function: the languages among them."""

    class Launch(interpreter._LangPatchScope):
        def restore(self) -> None:
            replaced.clear()
            super().restore()

    def replace_new(function: Any) -> Any:
        names = function.__globals__
        if id(names) not in used:
            modules = [value for value in names.values() if inspect.ismodule(value)]
            used[id(names)] = {module.__name__ for module in modules if module in languages}
        scope = Launch()
        if not used[id(names)] <= replaced:
            scope._changes = replace(function)._changes
            replaced.update(used[id(names)])
        return scope

    return replace_new


def known_blocks(core: Any) -> Callable[..., None]:
    """`block_type.__init__`, which checks and names a type of the same element and sizes once."""
    make = core.block_type.__init__
    known: dict[Any, tuple[Any, int, str]] = {}

    def __init__(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.value if isinstance(shape, core.constexpr) else shape
        key = type(element_ty), element_ty.name, *[s.value if isinstance(s, core.constexpr) else s for s in sizes]
        if key in known:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = known[key]
        else:
            make(self, element_ty, shape)
            known[key] = self.shape, self.numel, self.name

    return __init__


def known_shapes(core: Any) -> Callable[..., None]:
    """`tensor.__init__`, which wraps the same sizes as constants once."""
    make = core.tensor.__init__
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def __init__(self: Any, handle: Any, type: Any) -> None:
        sizes = (*type.shape,) if type.is_block() else ()
        if sizes in known:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known[sizes]
        else:
            make(self, handle, type)
            known[sizes] = self.shape, self.numel

    return __init__


def known_dtypes(interpreter: Any) -> Callable[[Any], Any]:
    """`_get_np_dtype`, which builds a table of all dtypes at each call."""
    find = interpreter._get_np_dtype
    known: dict[Any, Any] = {}

    def _get_np_dtype(dtype: Any) -> Any:
        key = type(dtype.scalar), dtype.scalar.name
        if key not in known:
            known[key] = find(dtype)
        return known[key]

    return _get_np_dtype
