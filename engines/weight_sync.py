"""Weights between a training engine and rollout engines: buckets of bytes, each with a checksum.

The driver imports this module, and no torch with it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

if TYPE_CHECKING:
    from torch import Tensor

_ALIGN = 16
"""Tensors start at multiples of this many bytes, so that any dtype can be viewed in place."""


@dataclass(frozen=True)
class WeightBucket:
    """Some weights as one run of bytes.

    Attributes:
        entries: ``(HF name, shape, torch dtype name, first byte)`` of each tensor.
        data: ``[bytes]`` uint8. checksum: xxh3-64 of ``data``.
        first: whether it begins an update; an unfinished update is then dropped.
        skipped: for a bucket with a piece of one tensor, the number of its bytes that came in earlier buckets.
    """

    entries: tuple[tuple[str, tuple[int, ...], str, int], ...]
    data: np.ndarray
    checksum: int
    first: bool = True
    skipped: int = 0

    @property
    def is_piece(self) -> bool:
        """Tell whether the bucket holds only a piece of a tensor."""
        _, shape, dtype_name, _ = self.entries[0]
        return len(self.data) < _count_bytes(shape, dtype_name)

    def check(self) -> None:
        """Raise ValueError if the bytes do not match the checksum."""
        checksum = xxhash.xxh3_64_intdigest(self.data.data)
        if checksum != self.checksum:
            names = [name for name, *_ in self.entries]
            raise ValueError(
                f"weight sync: bucket of {len(names)} tensors from {names[0]!r} on has checksum {checksum:x}, "
                f"expected {self.checksum:x}; the weights were damaged on the way"
            )

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Unpack the bucket to ``(HF name, tensor)`` in their shapes and dtypes, as views of its bytes.

        Raises:
            ValueError: the bytes do not match the checksum.
        """
        import torch

        self.check()
        data = torch.from_numpy(self.data if self.data.flags.writeable else self.data.copy())
        views = []
        for name, shape, dtype_name, start in self.entries:
            size = _count_bytes(shape, dtype_name)
            views.append((name, data[start : start + size].view(getattr(torch, dtype_name)).view(shape)))
        return views


class PieceJoiner:
    """Joins the pieces of a tensor, which come one after another."""

    def __init__(self):
        self._name, self._data, self._end = "", np.empty(0, np.uint8), 0

    def join(self, bucket: WeightBucket) -> WeightBucket | None:
        """Return a bucket of whole tensors; None while pieces of a tensor are still to come.

        Raises:
            ValueError: a piece of the tensor is missing.
        """
        name, shape, dtype_name, _ = bucket.entries[0]
        if not bucket.is_piece:
            return bucket
        if bucket.skipped == 0:
            self._name, self._data, self._end = name, np.empty(_count_bytes(shape, dtype_name), np.uint8), 0
        if (name, bucket.skipped) != (self._name, self._end):
            raise ValueError(
                f"weight sync: a piece of {name!r} came that begins at byte {bucket.skipped}, expected byte "
                f"{self._end} of {self._name!r}; send the update again from its first bucket"
            )
        self._data[self._end : self._end + len(bucket.data)] = bucket.data
        self._end += len(bucket.data)
        if self._end < len(self._data):
            return None
        data, self._name, self._data, self._end = self._data, "", np.empty(0, np.uint8), 0
        return replace(bucket, data=data, checksum=xxhash.xxh3_64_intdigest(data.data), skipped=0)


@dataclass(frozen=True)
class SharedBucket:
    """A bucket in shared memory of this machine, which each process maps by itself.

    Attributes:
        bucket: the bucket without its bytes. path: path of the shared bytes.
    """

    bucket: WeightBucket
    path: str

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Unpack the bucket, as ``WeightBucket.tensors`` does. Writes to the tensors stay in this process."""
        return replace(self.bucket, data=np.memmap(self.path, dtype=np.uint8, mode="c")).tensors()


@contextmanager
def share_bucket(bucket: WeightBucket) -> Iterator[SharedBucket]:
    """Share a bucket with the processes of this machine in this context.

    A process that unpacks it in time keeps it as long as needed. The memory has no name in any file system: it is not
    bound by the size of /dev/shm, which is small in containers, and nothing is left behind by a process that is killed.
    """
    with os.fdopen(os.memfd_create("weight bucket"), "wb") as file:
        file.write(bucket.data.data)
        file.flush()
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        yield SharedBucket(replace(bucket, data=np.empty(0, dtype=np.uint8)), path)


class _Part(NamedTuple):
    """Bytes ``start`` to ``end`` of a tensor: all of them, or a piece."""

    name: str
    tensor: Tensor
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def is_piece(self) -> bool:
        return self.nbytes < self.tensor.nbytes


def pack_buckets(weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[tuple[WeightBucket, bool]]:
    """Pack a stream of weights into buckets. Yields ``(bucket, is_last)``, with one bucket in memory at a time.

    Args:
        weights: HF name and tensor of each weight.
        bucket_bytes: most bytes of a bucket; a larger tensor is cut into pieces, each in a bucket of its own.
    """
    pending: list[_Part] = []
    size, first = 0, True
    for part in _cut(weights, bucket_bytes):
        if pending and (size + part.nbytes > bucket_bytes or part.is_piece or pending[-1].is_piece):
            yield replace(_pack(pending), first=first), False
            pending, size, first = [], 0, False
        pending.append(part)
        size += part.nbytes
    if pending:
        yield replace(_pack(pending), first=first), True


def _cut(weights: Iterable[tuple[str, Tensor]], most: int) -> Iterator[_Part]:
    for name, tensor in weights:
        tensor = tensor.detach().cpu().contiguous()
        for start in range(0, max(tensor.nbytes, 1), most):
            yield _Part(name, tensor, start, min(start + most, tensor.nbytes))


def _pack(parts: Sequence[_Part]) -> WeightBucket:
    import torch

    entries, end = [], 0
    for name, tensor, first, last in parts:
        start = -(-end // _ALIGN) * _ALIGN
        entries.append((name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), start))
        end = start + last - first
    # Written by torch: a tensor that numpy has seen could not be offloaded any more.
    packed = torch.zeros(end, dtype=torch.uint8)
    for (*_, start), part in zip(entries, parts, strict=True):
        packed[start : start + part.nbytes] = part.tensor.view(-1).view(torch.uint8)[part.start : part.end]
    data = packed.numpy()
    return WeightBucket(tuple(entries), data, xxhash.xxh3_64_intdigest(data.data), skipped=parts[0].start)


def _count_bytes(shape: tuple[int, ...], dtype_name: str) -> int:
    import torch

    return math.prod(shape) * getattr(torch, dtype_name).itemsize
