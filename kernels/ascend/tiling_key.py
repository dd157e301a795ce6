"""The tiling key: one decimal number that names an attention template uniquely.

Each field of the template is one decimal digit, lowest first, on top of an offset of 10^19, so a key can be read off
a log line by eye and any two templates that differ in one field have different keys. The scheme and the digits of the
enumerations are those of the vendor's operators (ops-transformer, "FA/FAG operator design", section 2.2, and
`tiling_type.h`), so that a key of ours can be set beside one of theirs; the order of the digits is our own and is the
order of the fields below. No kernel of ours has a key yet (see `tiling.py`); `decode` is for whoever reads one in a
log.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Final

OFFSET: Final = 10**19
"""Keys are 64-bit unsigned: 10^19 plus up to 18 free digits stays below 2^64."""


class Axis(IntEnum):
    """Axes of attention: batch, key/value heads, query heads per key/value head, query and key/value length,
    head_dim."""

    B = 0
    N2 = 1
    G = 2
    S1 = 3
    S2 = 4
    D = 5
    NONE = 9


class Mode(IntEnum):
    """How the softmax is computed."""

    HIGH_PRECISION = 0
    HIGH_PERFORMANCE = 1
    INVALID_ROWS = 2
    """High precision, and rows with every key masked give zero."""


class DType(IntEnum):
    """Element type of query, key, value."""

    FLOAT16 = 0
    FLOAT32 = 1
    BFLOAT16 = 2

    @property
    def itemsize(self) -> int:
        return 4 if self is DType.FLOAT32 else 2


class Layout(IntEnum):
    """Memory order of query, key, value."""

    BSND = 0
    SBND = 1
    BNSD = 2
    TND = 3


class Format(IntEnum):
    """Order of a matrix in memory: row-major, or the cube unit's 16x16 fractals."""

    ND = 0
    NZ = 1


class Sparse(IntEnum):
    """Which score tiles are never computed."""

    NONE = 1
    CAUSAL = 3
    BAND = 4
    RIGHT_DOWN_CAUSAL = 7


class Buffering(IntEnum):
    """Single or double buffers in the vector core."""

    SINGLE = 1
    DOUBLE = 2


@dataclass(frozen=True)
class TemplateKey:
    """Everything that selects the template, one decimal digit a field. Sizes are run-time data and not part of it."""

    ub0: Axis
    """Axes split within a core; `NONE` where fewer than two are."""
    ub1: Axis
    block: Axis
    """Innermost axis split between cores."""
    mode: Mode
    dtype: DType
    layout: Layout
    score_format: Format
    """Format of the score matrix handed from the cube to the vector cores."""
    sparse: Sparse
    buffering: Buffering
    dropout: bool
    mask: bool
    pse: bool
    """Whether a bias is added to the scores (the vendor's `pse`, position shift encoding)."""
    l1_reuse: bool
    """Whether the keys of one step stay in L1 for every query row of the block."""


_FIELD_TYPES: Final[dict[str, type[IntEnum] | type[bool]]] = {
    "ub0": Axis,
    "ub1": Axis,
    "block": Axis,
    "mode": Mode,
    "dtype": DType,
    "layout": Layout,
    "score_format": Format,
    "sparse": Sparse,
    "buffering": Buffering,
    "dropout": bool,
    "mask": bool,
    "pse": bool,
    "l1_reuse": bool,
}


def encode(key: TemplateKey) -> int:
    """The decimal tiling key of `key`."""
    digits: list[int] = [int(getattr(key, field.name)) for field in fields(key)]
    return OFFSET + int("".join(str(digit) for digit in reversed(digits)))


def decode(number: int) -> TemplateKey:
    """The template that `number` names; the inverse of `encode`.

    Raises:
        ValueError: `number` is no key: below the offset, too long, or a digit names nothing.
    """
    rest = number - OFFSET
    if not 0 <= rest < 10 ** len(_FIELD_TYPES):
        raise ValueError(
            f"number={number} is not a tiling key: a key is 10^19 plus {len(_FIELD_TYPES)} decimal digits. "
            "Pass a number made by encode()."
        )
    values: dict[str, IntEnum | bool] = {}
    for name, kind in _FIELD_TYPES.items():
        rest, digit = divmod(rest, 10)
        if kind is bool and digit > 1:
            raise ValueError(f"number={number} is not a tiling key: its digit for {name} is {digit}, not 0 or 1.")
        try:
            values[name] = kind(digit)
        except ValueError:
            raise ValueError(f"number={number} is not a tiling key: its digit for {name} is {digit}.") from None
    return TemplateKey(**values)  # type: ignore[arg-type]  # _FIELD_TYPES has the type of each field
