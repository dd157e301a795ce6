"""The registry of operations that the reader understands, each as a function on `Value`s.

A handler gets the context (the node and its shape), then the node's arguments with tensors replaced by values. It
raises `Opaque` for a use it does not model; the result of the node is then a new source. Only analytic functions are
listed: on random numbers `abs(x)` and `x` can agree, so piecewise functions (`abs`, `relu`, `clamp`, `where`,
comparisons) stay opaque. The handlers themselves are in `movement.py` and `arithmetic.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torch import fx

from .lanes import Opaque, Value, number
from .vocabulary import Size, fake_tensor, sizes


class Context(Protocol):
    """What a handler may ask of the evaluator."""

    def scalar(self, literal: float) -> Value:
        """A small literal that is added to a variance (eps), blown up to a random number that stands for it."""
        ...

    def filler(self, node: fx.Node) -> Value:
        """Uninitialised memory: unknown lanes."""
        ...


Handler = Callable[..., Any]
H = TypeVar("H", bound=Handler)
HANDLERS: dict[str, Handler] = {}


def handler(*names: str) -> Callable[[H], H]:
    """Register a handler under canonical names."""

    def register(function: H) -> H:
        for name in names:
            HANDLERS[name] = function
        return function

    return register


def apply(context: Context, node: fx.Node, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The value of operation `name` on evaluated arguments."""
    if name not in HANDLERS:
        raise Opaque(f"{name} is not modelled")
    if kwargs:
        kwargs = {_KEYWORDS.get(key, key): value for key, value in kwargs.items()}
    try:
        return HANDLERS[name](context, node, *args, **kwargs)
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise
        raise Opaque(f"{name}: {error}") from None  # arguments that the handler does not take


_KEYWORDS = {
    "axis": "dim",
    "self": "x",
    "input": "x",
    "tensor": "x",
    "tensors": "xs",
    "split_size_or_sections": "split_size",
    "split_sizes": "split_size",
    "sections": "indices",
}


def tensor(x: Any) -> Value:
    """An argument that is a tensor or a number."""
    if isinstance(x, Value):
        return x
    if isinstance(x, bool | str) or not isinstance(x, int | float | complex):
        raise Opaque("an argument is neither a tensor nor a number")
    return number(x)


def integer(x: Any) -> int:
    """An argument that is a known integer."""
    if isinstance(x, bool) or not isinstance(x, int):
        raise Opaque("an argument is not a known integer")
    return x


def axes_of(value: Value, dim: Any) -> list[int]:
    """The `dim` argument of a reduction."""
    if dim is None or dim == []:
        return list(range(value.rank))
    return [value.axis(integer(d)) for d in (dim if isinstance(dim, tuple | list) else [dim])]


def shape_of(node: fx.Node) -> tuple[Size, ...]:
    """The recorded shape of `node`."""
    fake = fake_tensor(node)
    if fake is None:
        raise Opaque("no shape")
    return sizes(fake)


def sizes_argument(args: tuple[Any, ...]) -> Sequence[Any]:
    """Sizes or axes that are given one by one or as one tuple."""
    return args[0] if len(args) == 1 and isinstance(args[0], tuple | list) else args
