"""Bytes of a device's tensors that are alive, and their peak in each phase."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class LiveBytes:
    """Counts the bytes of storages that are alive on a device.

    Attributes:
        now: bytes at present. peaks: phase -> most bytes at once in it. begins: phase -> bytes at its begin.
    """

    def __init__(self, device: torch.device):
        self.device, self.now, self.peaks, self.begins, self.phase = device, 0, {"": 0}, {"": 0}, ""
        self._held: dict[int, int] = {}

    def begin(self, phase: str) -> None:
        """Begin a phase, with a peak of its own."""
        self.phase, self.begins[phase], self.peaks[phase] = phase, self.now, self.now

    def add(self, outputs: Any) -> None:
        """Add the storages of an operator's outputs, each once for as long as it lives."""
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor) and tensor.device.type == self.device.type:
                storage = tensor.untyped_storage()
                if (key := storage._cdata) not in self._held:
                    self._held[key] = storage.nbytes()
                    self.now += storage.nbytes()
                    self.peaks[self.phase] = max(self.peaks[self.phase], self.now)
                    weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self._held.pop(key, 0)
