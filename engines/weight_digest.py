"""Digests of weights, which compare the trainer's and the rollout engine's weights without moving either.

The digest of a matrix is ``sum_ij a_i * bits_ij * b_j`` modulo 2^64, with fixed odd factors of rows and columns.
Digests of parts of a matrix, which may lie on several devices and come in any order, add up to the digest of the whole.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_EXPONENTS = {torch.float32: (torch.int32, 0x7F800000), torch.bfloat16: (torch.int16, 0x7F80)}
"""dtype -> integers of the same size, and the bits of the exponent."""
_BLOCK = 2**22
"""Number of elements that are digested at a time."""


@dataclass(frozen=True)
class DigestPlan:
    """The columns of every tensor that are digested.

    Attributes:
        dtype: name of the rollout engine's dtype, to which both sides round.
        columns: number of columns of each matrix, chosen by ``seed``; 0 takes all. Vectors are always digested whole.
        seed: chooses the columns.
    """

    dtype: str
    columns: int = 0
    seed: int = 0

    def choose(self, count: int) -> np.ndarray:
        """Choose among ``count`` columns, in the same way for every matrix, and return their numbers in order."""
        if not 0 < self.columns < count:
            return np.arange(count)
        return np.sort(np.random.default_rng((self.seed, count)).choice(count, self.columns, replace=False))

    def digest(self, weights: Iterable[tuple[str, Tensor]], digests: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights unchanged, and put name -> digest of each into ``digests``."""
        dtype = getattr(torch, self.dtype)
        for name, tensor in weights:
            matrix = tensor.detach().reshape(find_matrix_shape(tensor.shape))
            columns = self.choose(matrix.shape[1])
            digests[name] = sum_rows(sum_columns(matrix, columns, columns, dtype), 0)
            yield name, tensor


def find_matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Find the rows and columns of the matrix as which a tensor is digested: a stack of matrices, ``[n, r, c]``, one
    below another; of others each entry of the first axis is a row."""
    rows = shape[:2] if len(shape) == 3 else shape[:1]
    return math.prod(rows), math.prod(shape[len(rows) :])


def checksum(tensor: Tensor) -> int:
    """Compute a checksum of a tensor where it lies: xxh3-64 of bytes on the host, a digest of all columns elsewhere."""
    if tensor.is_cpu:
        import xxhash  # not at the top: the device check imports this module and does without

        # A copy: a tensor that numpy has seen could not be offloaded any more.
        return xxhash.xxh3_64_intdigest(tensor.detach().reshape(-1).view(torch.uint8).clone().numpy().data)
    digests: dict[str, int] = {}
    for _ in DigestPlan(str(tensor.dtype).removeprefix("torch.")).digest([("", tensor)], digests):
        pass
    return digests[""]


def sum_columns(matrix: Tensor, places: np.ndarray, columns: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Sum columns of a matrix ``[r, c]``, each times its factor: ``[r]`` int64.

    Args:
        places: numbers of the columns in ``matrix``. columns: their numbers in the tensor of which it is a part.
    """
    factors = _make_factors(columns).to(matrix.device)
    rows = max(1, _BLOCK // max(1, len(places)))
    picked = torch.from_numpy(places).to(matrix.device)
    whole = len(places) == matrix.shape[1]
    parts = [
        (_read_bits(part if whole else part.index_select(1, picked), dtype) * factors).sum(1)
        for part in matrix.split(rows)
    ]
    return torch.cat(parts)


def sum_rows(sums: Tensor, first: int) -> int:
    """Sum rows ``[r]`` from ``sum_columns``, each times its factor; ``first`` is the number of the first row."""
    factors = _make_factors(np.arange(first, first + len(sums)) + (1 << 40)).to(sums.device)
    return int((sums * factors).sum()) % 2**64


def _make_factors(numbers: np.ndarray) -> Tensor:
    """Make an odd factor of 64 bits of each number, ``[n]`` int64: the mixing of splitmix64."""
    x = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((x ^ (x >> np.uint64(31))) | np.uint64(1)).view(np.int64))


def _read_bits(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Read values as int64. Negative zeros and subnormal numbers count as 0: the product with a unit vector, by which
    some weights are read, keeps neither."""
    rounded = values.to(dtype).contiguous()
    integer, exponent = _EXPONENTS[rounded.dtype]
    bits = rounded.view(integer)
    return torch.where((bits & exponent) != 0, bits, 0).long()
