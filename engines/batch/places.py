"""The places of sequences that are laid end to end."""

from collections.abc import Sequence

import numpy as np


def find_tokens(lengths: Sequence[int] | np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Find where sequences lie in the stream: lengths ``[B]``, rows ``[b]`` -> ``[n]``, the places of their tokens.

    ``find_tokens([2, 3, 1], [2, 0])`` is ``[5, 0, 1]``.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    row_sizes = sizes[rows]
    # [b]: what takes a sequence's start in the result to its start in the stream; an exclusive sum is a start.
    shift = (np.cumsum(sizes) - sizes)[rows] - (np.cumsum(row_sizes) - row_sizes)
    return np.arange(row_sizes.sum()) + np.repeat(shift, row_sizes)
