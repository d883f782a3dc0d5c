"""Weights on their way from a training engine to rollout engines: buckets of bytes, each with a checksum."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
import xxhash
from torch import Tensor

_ALIGN = 16
"""Tensors start at multiples of this many bytes, so that any dtype can be viewed in place."""


@dataclass(frozen=True)
class WeightBucket:
    """Some weights as one run of bytes.

    Attributes:
        entries: ``(HF name, shape, torch dtype name, first byte)`` of each tensor.
        data: ``[bytes]`` uint8. checksum: xxh3-64 of ``data``.
        first: it begins an update, whatever came before it.
    """

    entries: tuple[tuple[str, tuple[int, ...], str, int], ...]
    data: np.ndarray
    checksum: int
    first: bool = True

    def check(self) -> None:
        """Raise ValueError where the bytes are not the ones that were packed."""
        checksum = xxhash.xxh3_64_intdigest(self.data.data)
        if checksum != self.checksum:
            names = [name for name, *_ in self.entries]
            raise ValueError(
                f"weight sync: bucket of {len(names)} tensors from {names[0]!r} on has checksum {checksum:x}, "
                f"expected {self.checksum:x}; the weights were damaged on the way"
            )

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Unpack the bucket: ``(HF name, tensor)`` in their shapes and dtypes, views of its bytes.

        Raises:
            ValueError: the bytes are not the ones that were packed.
        """
        self.check()
        data = torch.from_numpy(self.data if self.data.flags.writeable else self.data.copy())
        views = []
        for name, shape, dtype_name, start in self.entries:
            dtype = getattr(torch, dtype_name)
            size = int(np.prod(shape)) * dtype.itemsize
            views.append((name, data[start : start + size].view(dtype).view(shape)))
        return views


@dataclass(frozen=True)
class SharedBucket:
    """A bucket whose bytes lie in memory that other processes of this machine map, each by itself.

    Attributes:
        bucket: all but the bytes. path: where they are, as long as they are shared.
    """

    bucket: WeightBucket
    path: str

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Unpack the bucket, as ``WeightBucket.tensors``. What is written to them stays in this process."""
        return replace(self.bucket, data=np.memmap(self.path, dtype=np.uint8, mode="c")).tensors()


@contextmanager
def share_bucket(bucket: WeightBucket) -> Iterator[SharedBucket]:
    """Share a bucket with the processes of this machine; those that unpacked it in time keep it as long as they need.

    The memory has no name in any file system: it is not bound by the size of /dev/shm, which is small in containers,
    and nothing is left behind by a process that is killed.
    """
    with os.fdopen(os.memfd_create("weight bucket"), "wb") as file:
        file.write(bucket.data.data)
        file.flush()
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        yield SharedBucket(replace(bucket, data=np.empty(0, dtype=np.uint8)), path)


def pack_buckets(weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[tuple[WeightBucket, bool]]:
    """Cut a stream of weights into buckets: yields ``(bucket, is_last)``, one bucket in memory at a time.

    Args:
        bucket_bytes: most bytes in a bucket; a tensor larger than this gets a bucket of its own.
    """
    pending: list[tuple[str, Tensor]] = []
    size, first = 0, True
    for name, tensor in weights:
        if pending and size + tensor.nbytes > bucket_bytes:
            yield replace(_pack(pending), first=first), False
            pending, size, first = [], 0, False
        pending.append((name, tensor.detach().cpu().contiguous()))
        size += tensor.nbytes
    if pending:
        yield replace(_pack(pending), first=first), True


def _pack(weights: list[tuple[str, Tensor]]) -> WeightBucket:
    entries, end = [], 0
    for name, tensor in weights:
        entries.append((name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), end))
        end += -(-tensor.nbytes // _ALIGN) * _ALIGN
    # Written by torch: a tensor that numpy has seen could not be offloaded any more.
    packed = torch.zeros(end, dtype=torch.uint8)
    for (_, _, _, start), (_, tensor) in zip(entries, weights, strict=True):
        packed[start : start + tensor.nbytes] = tensor.view(-1).view(torch.uint8)
    data = packed.numpy()
    return WeightBucket(tuple(entries), data, xxhash.xxh3_64_intdigest(data.data))
