"""Bytes of a device's tensors that are alive, and their peak in each phase."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class LiveBytes:
    """Counts the bytes of the storages that are alive on a device.

    Attributes:
        now: bytes at present. peaks: phase -> most bytes at once. begins: phase -> bytes at its begin.
    """

    def __init__(self, device: torch.device):
        self.device, self.now = device, 0
        self.peaks: dict[str, int] = {}
        self.begins: dict[str, int] = {}
        self._phase, self._held = "", {}
        self.begin("")

    def begin(self, phase: str) -> None:
        """Begin a phase, which has a peak of its own."""
        self._phase, self.begins[phase], self.peaks[phase] = phase, self.now, self.now

    def add(self, outputs: Any, inside: int = 0) -> None:
        """Add the storages of an operator's outputs, each once for as long as it lives.

        Args:
            inside: bytes that the operator held in addition while it ran.
        """
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor) and tensor.device.type == self.device.type:
                storage = tensor.untyped_storage()
                if (key := storage._cdata) not in self._held:
                    self._held[key] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._drop, key)
        self.peaks[self._phase] = max(self.peaks[self._phase], self.now + inside)

    def _drop(self, key: int) -> None:
        self.now -= self._held.pop(key, 0)
