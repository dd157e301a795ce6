"""Tiny models with random weights that run the real code of transformers and diffusers. Nothing is downloaded.

    model, inputs = zoo.build("qwen3", layers=2, dtype=torch.bfloat16)
    model(**inputs)

They are small in every size (hidden 64, 24 tokens) and true in every operation, so what the pass finds in them it
finds in the published models. Needs the extra `zoo`; only `qwen3_fused_qkv` runs on torch alone.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fusion_pass.zoo import diffusion, language, native, vision, vision_language
from fusion_pass.zoo.base import Builder, Inputs, Settings

__all__ = ["Inputs", "build", "names"]

_CHOOSE_ATTENTION: dict[str, Builder] = {**language.MODELS, **vision_language.MODELS, **vision.MODELS}
_CALL_SDPA: dict[str, Builder] = {**diffusion.MODELS, **native.MODELS}
_BUILDERS = {**_CHOOSE_ATTENTION, **_CALL_SDPA}


def names() -> tuple[str, ...]:
    """The names that `build` takes. Needs no extra."""
    return tuple(_BUILDERS)


def build(
    name: str,
    *,
    layers: int = 1,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> tuple[nn.Module, Inputs]:
    """Build one model in training mode, and keyword arguments for one call of it.

    Args:
        name: one of `names()`.
        layers: number of attention layers (of each kind, where a model has several).
        dtype: of the parameters and the floating-point inputs.
        attention: `"sdpa"` or `"eager"` for a model of transformers; by default the model's own choice, which is SDPA
            wherever the model can express its attention that way (gemma2 and gpt_oss cannot).
        device: where parameters and inputs are put. They are drawn on the CPU: one seed is one model on any device.
        seed: of parameters and inputs. The global random state is left as it was.

    Raises:
        ValueError: `name`, `layers` or `attention` is none of these, or the model has no such attention.
        ModuleNotFoundError: transformers or diffusers is not installed.
    """
    if name not in _BUILDERS:
        raise ValueError(f"name is {name!r}, which the zoo does not have; take one of {', '.join(_BUILDERS)}")
    if layers < 1:
        raise ValueError(f"layers is {layers}; take 1 or more")
    if attention not in (None, "sdpa", "eager"):
        raise ValueError(f"attention is {attention!r}; take 'sdpa' or 'eager', or leave it out")
    if attention == "eager" and name in _CALL_SDPA:
        raise ValueError(f"attention is 'eager', but {name!r} always calls SDPA; take 'sdpa' or leave it out")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model, inputs = _BUILDERS[name](Settings(layers=layers, dtype=dtype, attention=attention))
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{name!r} needs the package {error.name!r}; install it with: pip install 'fusion-pass[zoo]'",
                name=error.name,
            ) from error
        _draw_vectors(model)
    model = model.to(device=device, dtype=dtype)
    inputs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), inputs)
    return model, inputs


def _draw_vectors(model: nn.Module) -> None:
    """Move norm weights and biases off 1 and 0, where a forgotten, swapped or doubled one would not show."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim <= 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
