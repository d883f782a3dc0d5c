"""Bytes that autograd holds for backward passes, counted by hooks on saved tensors."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def find_place(tensor: Tensor) -> int:
    """Find a number that a tensor's storage has alone while it lives. A storage without numbers has one too."""
    return tensor.untyped_storage()._cdata


class SavedBytes:
    """Counts the bytes of the storages that autograd holds for backward passes.

    Args:
        left_out: places (``find_place``) of storages that are not counted, such as parameters.

    Attributes:
        now, most: bytes at present, and their peak.
    """

    def __init__(self, left_out: set[int]):
        self.left_out, self.holders, self.now, self.most = left_out, Counter(), 0, 0

    @contextmanager
    def counting(self) -> Iterator["SavedBytes"]:
        """Count the bytes that autograd saves within the context."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: getattr(held, "tensor", held)):
            yield self

    def _pack(self, tensor: Tensor) -> "Tensor | _Saved":
        place, size = find_place(tensor), tensor.untyped_storage().nbytes()
        if place in self.left_out or not size:
            return tensor
        return _Saved(self, tensor, place, size)


class _Saved:
    """A saved tensor, for as long as the graph has it."""

    def __init__(self, saved: SavedBytes, tensor: Tensor, place: int, size: int):
        self.saved, self.tensor, self.place, self.size = saved, tensor, place, size
        saved.now += 0 if saved.holders[place] else size
        saved.most = max(saved.most, saved.now)
        saved.holders[place] += 1

    def __del__(self):
        self.saved.holders[self.place] -= 1
        self.saved.now -= 0 if self.saved.holders[self.place] else self.size
