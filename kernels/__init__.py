"""Operators and their kernels. Usable eagerly, without the pass.

`docs/operators.md` is the contract of the norm + rotation operators, `docs/attention.md` that of `attention` and of
`norm_rope_attention`, which joins them.
"""

from __future__ import annotations

# By full name: where the repository is the current folder, transformers finds this folder as `kernels` and imports
# it. Then these lines lead to the package itself, and the operators are not registered a second time.
from fusion_pass.kernels import ops
from fusion_pass.kernels.attention_ops import attention
from fusion_pass.kernels.block import norm_rope_attention
from fusion_pass.kernels.functional import norm_rope, qk_norm_rope, qkv_norm_rope
from fusion_pass.kernels.registry import Choice, Kernel, Request, Status, choose, doctor, kernels, register
from fusion_pass.kernels.rotation import rope, rope_

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
    "norm_rope_attention",
    "ops",
    "qk_norm_rope",
    "qkv_norm_rope",
    "register",
    "rope",
    "rope_",
]
