"""A fusion pass for torch.compile: QK-norm + (M)RoPE and attention become hand-written kernels, forward and backward.

    model = torch.compile(model, backend="fusion_pass")
    report = fusion_pass.explain(model, *example_inputs)

Importing this changes nothing outside the package and needs torch alone.
"""

from fusion_pass.capture import explain
from fusion_pass.compiler import FusionBackend, backend, inductor_options
from fusion_pass.config import FusionConfig, add_arguments
from fusion_pass.errors import ConfigError, FusionError
from fusion_pass.extensions import register, unregister
from fusion_pass.report import Report, SiteReport

__all__ = [
    "ConfigError",
    "FusionBackend",
    "FusionConfig",
    "FusionError",
    "Report",
    "SiteReport",
    "add_arguments",
    "backend",
    "explain",
    "inductor_options",
    "register",
    "unregister",
]
