"""Weights on their way from a training engine to rollout engines: buckets of bytes, each with a checksum."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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
    """

    entries: tuple[tuple[str, tuple[int, ...], str, int], ...]
    data: np.ndarray
    checksum: int

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Unpack the bucket: ``(HF name, tensor)`` in their shapes and dtypes, views of its bytes.

        Raises:
            ValueError: the bytes are not the ones that were packed.
        """
        checksum = xxhash.xxh3_64_intdigest(self.data.data)
        if checksum != self.checksum:
            names = [name for name, *_ in self.entries]
            raise ValueError(
                f"weight sync: bucket of {len(names)} tensors from {names[0]!r} on has checksum {checksum:x}, "
                f"expected {self.checksum:x}; the weights were damaged on the way"
            )
        data = torch.from_numpy(self.data if self.data.flags.writeable else self.data.copy())
        views = []
        for name, shape, dtype_name, start in self.entries:
            dtype = getattr(torch, dtype_name)
            size = int(np.prod(shape)) * dtype.itemsize
            views.append((name, data[start : start + size].view(dtype).view(shape)))
        return views


def pack_buckets(weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[tuple[WeightBucket, bool]]:
    """Cut a stream of weights into buckets: yields ``(bucket, is_last)``, one bucket in memory at a time.

    Args:
        bucket_bytes: most bytes in a bucket; a tensor larger than this gets a bucket of its own.
    """
    pending: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if pending and size + tensor.nbytes > bucket_bytes:
            yield _pack(pending), False
            pending, size = [], 0
        pending.append((name, tensor.detach().cpu().contiguous()))
        size += tensor.nbytes
    if pending:
        yield _pack(pending), True


def _pack(weights: list[tuple[str, Tensor]]) -> WeightBucket:
    entries, end = [], 0
    for name, tensor in weights:
        entries.append((name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), end))
        end += -(-tensor.nbytes // _ALIGN) * _ALIGN
    data = np.zeros(end, dtype=np.uint8)
    for (_, _, _, start), (_, tensor) in zip(entries, weights, strict=True):
        data[start : start + tensor.nbytes] = tensor.view(-1).view(torch.uint8).numpy()
    return WeightBucket(tuple(entries), data, xxhash.xxh3_64_intdigest(data.data))
