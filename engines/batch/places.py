"""The places of sequences that are laid end to end."""

from collections.abc import Sequence

import numpy as np


def drop_firsts(stream: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Drop the first entry of each sequence, ``[M]`` and sizes ``[B]`` from 1 on -> ``[M - B]``, as a copy."""
    return _drop(stream, np.cumsum(sizes) - sizes)


def drop_lasts(stream: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Drop the last entry of each sequence, ``[M]`` and sizes ``[B]`` from 1 on -> ``[M - B]``, as a copy."""
    return _drop(stream, np.cumsum(sizes) - 1)


def _drop(stream: np.ndarray, places: np.ndarray) -> np.ndarray:
    keep = np.ones(len(stream), bool)
    keep[places] = False
    return stream[keep]


def count_up(lengths: np.ndarray) -> np.ndarray:
    """Count up from 0 within each sequence: lengths ``[B]`` -> ``[N]``, the place of each token in its own.

    ``count_up(np.array([2, 0, 3]))`` is ``[0, 1, 0, 1, 2]``.
    """
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def mark_completions(prompts: Sequence[int] | np.ndarray, completions: np.ndarray) -> np.ndarray:
    """Mark the ids of completions in sequences of a prompt and a completion: the lengths of both, ``[B]`` each, ->
    ``[M]`` bool."""
    counts = np.stack([np.asarray(prompts, dtype=np.int64), completions], axis=1)
    return np.repeat(np.tile([False, True], len(counts)), counts.reshape(-1))


def find_tokens(lengths: Sequence[int] | np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Find where sequences lie in the stream: lengths ``[B]``, rows ``[b]`` -> ``[n]``, the places of their tokens.

    ``find_tokens([2, 3, 1], [2, 0])`` is ``[5, 0, 1]``.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    row_sizes = sizes[rows]
    # [b]: what takes a sequence's start in the result to its start in the stream; an exclusive sum is a start.
    shift = (np.cumsum(sizes) - sizes)[rows] - (np.cumsum(row_sizes) - row_sizes)
    return np.arange(row_sizes.sum()) + np.repeat(shift, row_sizes)
