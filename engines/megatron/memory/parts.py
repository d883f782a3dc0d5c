"""The parts of an engine on its device: what moves them to the host's memory comes in here."""

from collections.abc import Sequence
from typing import Any

import torch

from engines.interfaces import OffloadPart


class DeviceParts:
    """The parts of an engine on its device (weights, gradients, optimizer state), which can be offloaded and come back.

    Args:
        module: wrapped in Megatron's DistributedDataParallel where it learns. optimizer: None where it does not.
        visits: its weights are on the host anyway, but while it computes.
        base: the parts of the engine that moves its frozen weights, which are that one's too; None where this one does.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: Any,
        device: torch.device,
        visits: bool = False,
        base: "DeviceParts | None" = None,
    ):
        self.module = module
        self.optimizer = optimizer
        self.device = device
        self.visits = visits
        self.base = base
        self._left: dict[str, Any] = {}

    def offload(self, parts: Sequence[OffloadPart]) -> None:
        """Move these parts from the device to the host's memory, and free the memory that they had on the device."""
        offload = import_offload()
        for name in parts:
            if name not in self._left:
                storages = offload.list_storages(
                    name,
                    self.module,
                    self.optimizer,
                    self.device,
                    moves_weights=not self.visits,
                    moves_frozen=self.base is None,
                )
                self._left[name] = offload.move_to_host(storages, keeps=name != "gradients")
        offload.empty_cache(self.device)

    def onload(self, parts: Sequence[OffloadPart]) -> None:
        """Bring these back onto the device, where they have left it."""
        for name in parts:
            if name in self._left:
                import_offload().move_to_device(self._left.pop(name))

    def require(self, who: str, *parts: OffloadPart) -> None:
        """Raise RuntimeError where one of these is not on the device."""
        if self.base and "weights" in parts:
            self.base.require(who, "weights")
        if missing := [name for name in parts if name in self._left]:
            raise RuntimeError(
                f"engine: {who} was called while {' and '.join(missing)} were offloaded, expected them on the device; "
                "it is another's turn there: call onload first"
            )


def import_offload():
    """Import what moves memory to the host, which most engines keep on their device."""
    from engines.megatron.memory import offload

    return offload
