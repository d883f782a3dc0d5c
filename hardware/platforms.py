"""The platforms by name. To add one, add a folder ``hardware/NAME/`` and its line in ``PLATFORMS``."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Literal

from hardware.platform import Platform

PLATFORMS = {
    "cpu": "hardware.cpu.platform:CpuPlatform",
    "cuda": "hardware.cuda.platform:CudaPlatform",
    "cuda-emulated": "hardware.cuda.emulated:EmulatedCudaPlatform",
    "npu": "hardware.npu.platform:NpuPlatform",
    "npu-emulated": "hardware.npu.emulated:EmulatedNpuPlatform",
}
"""Name of a platform -> ``module:class``, which is imported on first use, since settings need only the names."""

if TYPE_CHECKING:  # a checker of types wants the names of a Literal written out, and they stand above
    PlatformName = str
else:
    PlatformName = Literal[tuple(PLATFORMS)]

DEFAULT_PLATFORM: PlatformName = "cpu"
"""The default platform, which runs on every machine."""


def get_platform(name: str) -> Platform:
    """Return the platform of this name; ValueError if there is none."""
    if name not in PLATFORMS:
        raise ValueError(f"platform: {name!r} is not available, expected one of {list(PLATFORMS)}")
    return resolve_name(PLATFORMS[name])()
