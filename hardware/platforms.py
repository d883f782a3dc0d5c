"""The platforms there are, by name: the one list of them."""

from hardware.platform import Platform


def get_platform(name: str) -> Platform:
    """The platform called ``name``. Raises ValueError when there is none."""
    from hardware.cpu.platform import CpuPlatform
    from hardware.npu.platform import EmulatedNpuPlatform, NpuPlatform

    platforms = {platform.name: platform for platform in (CpuPlatform, NpuPlatform, EmulatedNpuPlatform)}
    if name not in platforms:
        raise ValueError(f"platform: {name!r} is not available, expected one of {list(platforms)}")
    return platforms[name]()
