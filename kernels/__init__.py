"""Operators and their kernels. Usable eagerly, without the pass.

`docs/operators.md` is the contract of the norm + rotation operators.
"""

from __future__ import annotations

from . import ops
from .functional import norm_rope, qk_norm_rope, qkv_norm_rope, rope
from .registry import Choice, Kernel, Request, Status, choose, doctor, kernels, register

__all__ = [
    "Choice",
    "Kernel",
    "Request",
    "Status",
    "choose",
    "doctor",
    "kernels",
    "norm_rope",
    "ops",
    "qk_norm_rope",
    "qkv_norm_rope",
    "register",
    "rope",
]
