"""Operators and their kernels. Usable eagerly, without the pass.

`docs/operators.md` is the contract of the norm + rotation operators, `docs/attention.md` that of `attention`.
"""

from __future__ import annotations

# By full name: where the repository is the current folder, transformers finds this folder as `kernels` and imports
# it. Then these lines lead to the package itself, and the operators are not registered a second time.
from fusion_pass.kernels import ops
from fusion_pass.kernels.attention_ops import attention
from fusion_pass.kernels.functional import norm_rope, qk_norm_rope, qkv_norm_rope, rope
from fusion_pass.kernels.registry import Choice, Kernel, Request, Status, choose, doctor, kernels, register

__all__ = [
    "Choice",
    "Kernel",
    "Request",
    "Status",
    "attention",
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
