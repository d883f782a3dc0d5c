"""Sums along the sequences of a flat stream, without a loop over time."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

_torch = cast(Any, torch)
"""Torch with its multi-tensor operations, which it leaves out of its types."""
_BLOCK = 64
"""Length of the blocks that one row of a matrix product sums."""
_LONG_RUN = 16
"""Mean run length from which runs are copied one by one; shorter runs are faster by index."""


@dataclass(frozen=True)
class Selection:
    """The places of a flat stream of sequences that a mask selects, to gather their numbers and to scatter them back.

    Attributes:
        total: N, all places.
        lengths: ``[B]``, number of selected places of each sequence.
        runs: lengths of the unselected and selected runs in turn, the first possibly 0.
        index: ``[n]``, the selected places, where runs are short; else None.
    """

    total: int
    lengths: Tensor
    runs: tuple[int, ...]
    index: Tensor | None

    @classmethod
    def from_mask(cls, mask: Tensor, lengths: tuple[int, ...]) -> "Selection":
        """Select the true places of ``mask`` ``[N]``; ``lengths`` are those of the sequences."""
        sizes = torch.tensor(lengths)
        if mask.all():
            return cls(len(mask), sizes, (0, len(mask)), None)
        ends = sizes.cumsum(0)
        counted = mask.cumsum(0, dtype=torch.int32)[(ends - 1).clamp_min(0)].long() * (ends > 0)  # to each one's end
        chosen = counted.diff(prepend=counted.new_zeros(1))
        edges = (mask[1:] != mask[:-1]).nonzero()[:, 0] + 1
        if len(edges) * _LONG_RUN > len(mask):
            return cls(len(mask), chosen, (), mask.nonzero()[:, 0])
        bounds = [0, *([0] if mask[0] else []), *edges.tolist(), len(mask)]
        runs = tuple(b - a for a, b in zip(bounds, bounds[1:]))
        return cls(len(mask), chosen, runs, None)

    def gather(self, column: Tensor) -> Tensor:
        """Return the numbers of ``column`` at the n selected places, ``[N] -> [n]``.

        If all places are selected, it returns ``column`` itself: do not write into the result.
        """
        if self.index is not None:
            return column[self.index]
        return column if self.runs == (0, self.total) else torch.cat(column.split(self.runs)[1::2])

    def scatter(self, numbers: Tensor) -> Tensor:
        """Put ``numbers`` at the selected places, ``[n] -> [N]``, with zero elsewhere.

        If all places are selected, it returns ``numbers`` itself.
        """
        if self.runs == (0, self.total):
            return numbers
        flat = numbers.new_zeros(self.total)
        if self.index is not None:
            return flat.index_copy_(0, self.index, numbers)
        _torch._foreach_copy_(list(flat.split(self.runs)[1::2]), list(numbers.split(self.runs[1::2])))
        return flat


def sum_discounted(x: Tensor, lengths: Tensor, decay: float) -> Tensor:
    """Compute ``y_n = x_n + decay * y_{n+1}`` within each sequence of a flat stream: ``[N] -> [N]``.

    Each sequence is split into blocks, and a matrix product with a triangular matrix sums all blocks at once. The rest
    of a sequence after a block is the sum at the start of the next block, which is the same problem over fewer numbers.
    """
    if not len(x):
        return x.clone()
    blocks = -(-lengths // _BLOCK)
    # Each sequence from a row's start, zeros after its end.
    sizes = torch.stack([lengths, blocks * _BLOCK - lengths], dim=1).flatten().tolist()
    aligned = len(x) == sum(sizes)
    rows = x if aligned else x.new_zeros(sum(sizes))
    if not aligned:
        _torch._foreach_copy_(list(rows.split(sizes)[::2]), list(x.split(sizes[::2])))
    powers = decay ** torch.arange(_BLOCK + 1, dtype=torch.float64)
    apart = torch.arange(_BLOCK)[:, None] - torch.arange(_BLOCK)  # [from, to]
    sums = rows.view(-1, _BLOCK) @ torch.where(apart >= 0, powers[apart.clamp_min(0)], 0.0).to(x.dtype)
    if (blocks > 1).any():
        starts = sum_discounted(sums[:, 0].contiguous(), blocks, decay**_BLOCK)
        sums.addr_(find_next(starts, blocks), powers.flip(0)[:-1].to(x.dtype))
    flat = sums.view(-1)
    return flat if aligned else torch.cat(flat.split(sizes)[::2])


def find_next(numbers: Tensor, lengths: Tensor) -> Tensor:
    """Return for each number the next number of its sequence, and zero for the last, ``[N] -> [N]``."""
    after = torch.empty_like(numbers)
    after[:-1] = numbers[1:]
    after[find_last_places(lengths)] = 0.0
    return after


def find_last_places(lengths: Tensor) -> Tensor:
    """Return the place of the last number of each sequence that is not empty."""
    return (lengths.cumsum(0) - 1)[lengths > 0]
