"""What each Ascend chip offers to a kernel: cores and on-chip memory, as data.

Source of every row: the device table inside `bishengir-compile` (PyPI `ascendnpu-ir` 1.2.0), which it writes into the
module for `--target=NAME`. `tests/ascend/test_norm_rope_memory.py` reads it back and compares. L0A and L0B are not in
that table; 64 KiB each is from the Ascend C documentation of the 910B architecture (`dav-c220`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

KIB: Final = 1024


@dataclass(frozen=True)
class Platform:
    """One chip. Sizes are bytes of one core; a cube core comes with `vector_cores / cube_cores` vector cores."""

    name: str
    cube_cores: int
    vector_cores: int
    ub: int = 192 * KIB
    """Unified Buffer, the memory of one vector core."""
    l1: int = 512 * KIB
    l0a: int = 64 * KIB
    l0b: int = 64 * KIB
    l0c: int = 128 * KIB
    """Accumulator of one cube core."""

    @property
    def vectors_per_cube(self) -> int:
        return self.vector_cores // self.cube_cores


PLATFORMS: Final[dict[str, Platform]] = {
    platform.name: platform
    for platform in (
        Platform("Ascend910B1", cube_cores=24, vector_cores=48),
        Platform("Ascend910B2", cube_cores=24, vector_cores=48),
        Platform("Ascend910B3", cube_cores=20, vector_cores=40),
        Platform("Ascend910B4", cube_cores=20, vector_cores=40),
        Platform("Ascend910_9382", cube_cores=24, vector_cores=48),
        Platform("Ascend910_9392", cube_cores=24, vector_cores=48),
    )
}

DEFAULT_PLATFORM: Final = PLATFORMS["Ascend910B4"]
"""The smallest chip of the table: what fits it fits the others."""


def platform_named(name: str) -> Platform:
    """The row of `name` as `torch.npu.get_device_name()` spells it (`Ascend910B2C` is a `910B2`).

    Raises:
        ValueError: the chip is not in the table.
    """
    for known in sorted(PLATFORMS, key=len, reverse=True):
        if name.startswith(known):
            return PLATFORMS[known]
    raise ValueError(
        f"platform={name!r} is not in the table of Ascend chips; known are {', '.join(PLATFORMS)}. "
        "Add its cores and memory sizes to kernels/ascend/platform.py."
    )
