"""A platform of any name whose device is not there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from hardware.platform import Platform

if TYPE_CHECKING:
    import torch


def make_shaped(platform: Platform) -> Platform:
    """Return the platform with the device of ``hardware.shapes.device`` in place of its own, and fake collectives.

    Lowering, layers and attention stay the platform's own.

    Raises:
        ValueError: the platform computes by operators of its own, whose shapes are not known here.
    """
    if platform.name.startswith("npu"):
        raise ValueError(
            f"platform: {platform.name} computes by operators of torch_npu, which have no shapes here; run shapes by "
            "--platform cuda, where parameters, gradients and optimizer take the same bytes"
        )

    def init_process(self, local_rank: int) -> torch.device:
        device, runtime = platform.load("device", "hardware.shapes").open_device()
        platform.load("shims", "hardware.megatron").install(runtime)
        return device

    own: dict[str, Any] = {"dist_backend": "fake", "init_process": init_process, "get_device_key": lambda self: None}
    return cast(Platform, type(f"Shaped{type(platform).__name__}", (type(platform),), own)())
