"""The options of the norm + rotation operators, and the sentences a caller reads when an argument is wrong.

The meaning of every option is the table in `docs/operators.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

NORMS = ("none", "rms", "rms_one_plus", "layer")
NORM_SCOPES = ("head", "hidden")
PAIRINGS = ("halves", "adjacent", "adjacent_to_halves")
MROPE_LAYOUTS = ("none", "sectioned", "interleaved")
PACKINGS = ("blocked", "grouped")
OUT_ORDERS = ("bshd", "bhsd")
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGER_DTYPES = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)


@dataclass(frozen=True)
class Options:
    """What is computed for each head of each token. The defaults are those of the operators' schemas.

    `eps` is a float (under `torch.compile(dynamic=True)` possibly a `SymFloat` while tracing) and has no default for
    a norm.
    """

    norm: str = "none"
    eps: float | None = None
    norm_scope: str = "head"
    norm_first: bool = True
    rotary_dim: int = 0
    rotary_start: int = 0
    pairing: str = "halves"
    conjugate: bool = False
    mrope_layout: str = "none"
    mrope_section: Sequence[int] = ()

    @property
    def reads_adjacent(self) -> bool:
        """A pair is lanes (2i, 2i + 1) of the input; otherwise (i, i + R/2)."""
        return self.pairing != "halves"

    @property
    def writes_adjacent(self) -> bool:
        """A pair is lanes (2i, 2i + 1) of the result; otherwise (i, i + R/2)."""
        return self.pairing == "adjacent"

    def mrope_rows(self) -> list[int]:
        """The row of the table (0 = T, 1 = H, 2 = W) that each pair reads."""
        pairs = self.rotary_dim // 2
        if self.mrope_layout == "sectioned":
            return [row for row, size in enumerate(self.mrope_section) for _ in range(size)]
        return [j % 3 if j < 3 * self.mrope_section[j % 3] else 0 for j in range(pairs)]


def one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raise unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it takes one of {', '.join(map(repr, allowed))}.")


def check_options(options: Options, head_dim: int) -> None:
    """Raise a sentence if the options contradict each other or do not fit `head_dim`."""
    if options.eps is None and options.norm != "none":
        raise ValueError(f"eps is missing: norm={options.norm!r} has no default; pass the model's eps.")
    # A SymFloat is not compared: that would guard on its value.
    if type(options.eps) is float and not options.eps >= 0:
        raise ValueError(f"eps is {options.eps}; it must be zero or positive.")
    _check_rotation(
        options.norm,
        options.norm_scope,
        options.rotary_dim,
        options.rotary_start,
        options.pairing,
        options.mrope_layout,
        tuple(options.mrope_section),
        int(head_dim),  # a SymInt is specialised: kernels are compiled for one head_dim
    )


@lru_cache(maxsize=1024)
def _check_rotation(
    norm: str,
    norm_scope: str,
    rotary_dim: int,
    rotary_start: int,
    pairing: str,
    mrope_layout: str,
    mrope_section: tuple[int, ...],
    head_dim: int,
) -> None:
    one_of("norm", norm, NORMS)
    one_of("norm_scope", norm_scope, NORM_SCOPES)
    one_of("pairing", pairing, PAIRINGS)
    one_of("mrope_layout", mrope_layout, MROPE_LAYOUTS)
    if rotary_dim < 0 or rotary_dim % 2:
        raise ValueError(f"rotary_dim is {rotary_dim}; it must be even and not negative (0 means no rotation).")
    if rotary_start < 0 or rotary_start + rotary_dim > head_dim:
        raise ValueError(
            f"rotary_start is {rotary_start} and rotary_dim is {rotary_dim}, but a head has only {head_dim} lanes; "
            "the rotated lanes [rotary_start, rotary_start + rotary_dim) must lie within the head."
        )
    if mrope_layout == "none":
        if mrope_section:
            raise ValueError(
                f"mrope_section is {list(mrope_section)}, but mrope_layout is 'none'; "
                "pass 'sectioned' or 'interleaved'."
            )
        return
    if len(mrope_section) != 3 or min(mrope_section) < 0:
        raise ValueError(f"mrope_section is {list(mrope_section)}; it takes three sizes, for T, H and W.")
    if sum(mrope_section) != rotary_dim // 2:
        raise ValueError(
            f"mrope_section is {list(mrope_section)} (sum {sum(mrope_section)}); "
            f"the sizes must add up to rotary_dim / 2 = {rotary_dim // 2}."
        )


def check_heads(name: str, x: Tensor) -> None:
    """Raise unless `x` is a [batch, sequence, heads, head_dim] float tensor whose lanes are next to each other."""
    if x.dim() != 4:
        raise ValueError(f"{name} has shape {list(x.shape)}; it takes [batch, sequence, heads, head_dim].")
    _check_lanes(name, x)


def check_packed(qkv: Tensor, num_heads: int, num_kv_heads: int, head_dim: int, packing: str) -> None:
    """Raise unless `qkv` is [batch, sequence, (num_heads + 2 num_kv_heads) head_dim]."""
    one_of("packing", packing, PACKINGS)
    if min(num_heads, num_kv_heads, head_dim) < 1:
        raise ValueError(
            f"num_heads is {num_heads}, num_kv_heads is {num_kv_heads}, head_dim is {head_dim}; each must be positive."
        )
    width = (num_heads + 2 * num_kv_heads) * head_dim
    if qkv.dim() != 3 or qkv.shape[2] != width:
        raise ValueError(
            f"qkv has shape {list(qkv.shape)}; it takes [batch, sequence, {width}], where {width} = "
            f"({num_heads} + 2 x {num_kv_heads}) heads of {head_dim} lanes."
        )
    if packing == "grouped" and num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads is {num_heads}, not a multiple of num_kv_heads {num_kv_heads}; "
            "packing='grouped' needs whole groups."
        )
    _check_lanes("qkv", qkv)


def _check_lanes(name: str, x: Tensor) -> None:
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} has dtype {x.dtype}; it takes bfloat16, float16, float32 or float64.")
    if x.stride(-1) != 1:
        raise ValueError(
            f"{name} has strides {list(x.stride())}; the last must be 1 (other axes may have any). "
            "Call .contiguous() on it."
        )


def check_affine(
    name: str, value: Tensor | None, heads: int, head_dim: int, options: Options, device: torch.device
) -> None:
    """Raise unless the norm's weight or bias has a shape the norm takes."""
    if value is None:
        return
    if options.norm == "none":
        raise ValueError(f"{name} is given, but norm is 'none'; drop it or name the norm.")
    shape = tuple(value.shape)
    if options.norm_scope == "hidden":
        if shape != (heads * head_dim,):
            raise ValueError(f"{name} has shape {list(shape)}; with norm_scope='hidden' it takes [{heads * head_dim}].")
    elif shape != (head_dim,) and shape != (heads, head_dim):
        raise ValueError(
            f"{name} has shape {list(shape)}; it takes [{head_dim}] or, one row a head, [{heads}, {head_dim}]."
        )
    if value.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} has dtype {value.dtype}; it takes a float dtype.")
    check_device(name, value, device)


def check_device(name: str, value: Tensor, device: torch.device) -> None:
    """Raise unless `value` is on `device`."""
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}, but the input is on {device}; move it there.")


def check_tables(
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    x: Tensor,
    options: Options,
    counted: bool = False,
) -> None:
    """Raise unless cos, sin and positions fit `x` ([B, S, …]) and the options. `counted`: the positions are counted."""
    if options.rotary_dim == 0:
        if cos is not None or sin is not None or positions is not None:
            raise ValueError("cos, sin or positions is given, but rotary_dim is 0; pass the number of rotated lanes.")
        return
    if cos is None or sin is None:
        raise ValueError(f"cos or sin is missing, but rotary_dim is {options.rotary_dim}; pass both tables.")
    batch, sequence = x.shape[0], x.shape[1]
    mrope = options.mrope_layout != "none"
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dtype not in FLOAT_DTYPES:
            raise TypeError(f"{name} has dtype {table.dtype}; it takes a float dtype.")
        check_device(name, table, x.device)
        if table.shape != cos.shape:
            raise ValueError(f"sin has shape {list(table.shape)} and cos has {list(cos.shape)}; they must be equal.")
        if table.shape[-1] not in (options.rotary_dim // 2, options.rotary_dim):
            raise ValueError(
                f"{name} has {table.shape[-1]} entries a position; with rotary_dim={options.rotary_dim} it takes "
                f"{options.rotary_dim // 2} (one a pair) or {options.rotary_dim} (one a lane)."
            )
        if positions is None and not counted:
            ok = (
                table.dim() == (4 if mrope else 3)
                and table.shape[-3] in (1, batch)
                and table.shape[-2] in (1, sequence)
            )
            if not ok or (mrope and table.shape[0] != 3):
                raise ValueError(
                    f"{name} has shape {list(table.shape)}; for {batch} x {sequence} tokens it takes "
                    f"{'[3, ' if mrope else '['}1 or {batch}, 1 or {sequence}, entries]. "
                    "A table of all positions needs `positions`."
                )
        elif table.dim() != 2:
            raise ValueError(f"{name} has shape {list(table.shape)}; with positions it takes [max_position, entries].")
    if positions is not None:
        _check_positions(positions, batch, sequence, mrope, x.device)


def _check_positions(positions: Tensor, batch: int, sequence: int, mrope: bool, device: torch.device) -> None:
    if positions.dtype not in INTEGER_DTYPES:
        raise TypeError(f"positions has dtype {positions.dtype}; it takes an integer dtype.")
    check_device("positions", positions, device)
    token_shape = tuple(positions.shape[1:] if mrope else positions.shape)
    rows_fit = not mrope or (positions.dim() > 0 and positions.shape[0] == 3)
    if not rows_fit or token_shape not in ((sequence,), (batch, sequence), (1, sequence)):
        rows = "3, " if mrope else ""
        raise ValueError(
            f"positions has shape {list(positions.shape)}; for {batch} x {sequence} tokens it takes "
            f"[{rows}{sequence}] or [{rows}{batch}, {sequence}]."
        )
