"""Positions of sequences that are laid end to end."""

from collections.abc import Sequence

import numpy as np


def drop_firsts(stream: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Drop the first entry of each sequence: ``[M, ...]``, sizes ``[B]`` above 0 -> ``[M - B, ...]``, as a copy."""
    return np.delete(stream, np.cumsum(sizes) - sizes, axis=0)


def drop_lasts(stream: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Drop the last entry of each sequence: ``[M, ...]``, sizes ``[B]`` above 0 -> ``[M - B, ...]``, as a copy."""
    return np.delete(stream, np.cumsum(sizes) - 1, axis=0)


def count_up(lengths: np.ndarray, starts: np.ndarray | None = None) -> np.ndarray:
    """Count up by one within each sequence, from ``starts`` ``[B]`` or 0: lengths ``[B]`` -> ``[N]``.

    ``count_up(np.array([2, 0, 3]))`` is ``[0, 1, 0, 1, 2]``, the place of each token in its own sequence.
    """
    full = lengths > 0
    firsts, sizes = np.zeros_like(lengths[full]) if starts is None else starts[full], lengths[full]
    # The steps from each number to the next, summed up in place: one array of N in all.
    steps = np.ones(int(sizes.sum()), dtype=np.int64)
    steps[np.cumsum(sizes) - sizes] = firsts - np.concatenate([[0], (firsts + sizes - 1)[:-1]])[: len(sizes)]
    return np.cumsum(steps, out=steps)


def find_tokens(lengths: Sequence[int] | np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the places of the tokens of sequences ``rows`` ``[b]`` in the stream: lengths ``[B]`` -> ``[n]``.

    ``find_tokens([2, 3, 1], [2, 0])`` is ``[5, 0, 1]``.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    return count_up(sizes[rows], (np.cumsum(sizes) - sizes)[rows])
