"""Estimate the costs of sequences, and assign sequences to parts of equal cost."""

from collections.abc import Sequence
from heapq import heappop, heapreplace

import numpy as np


def estimate_costs(lengths: np.ndarray, hidden: int) -> np.ndarray:
    """Estimate the work of sequences in a layer: lengths ``[B]`` -> costs ``[B]``, in units of ``hidden`` products.

    ``12 * hidden * L + L^2``: 12 hidden^2 weights see each token, and causal attention multiplies each token with half
    of the L others twice (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, appendix).
    """
    return 12 * hidden * lengths + lengths**2


def balance_costs(costs: np.ndarray, parts: int, equal_counts: bool = True) -> np.ndarray:
    """Assign costs ``[B]``, whole numbers, to parts, and return the part of each, ``[B]``.

    The largest cost goes first, each to the part with the smallest sum so far (Graham 1969, longest processing time
    first).

    Args:
        equal_counts: whether the numbers of costs in the parts may differ by one at most.
    """
    # Parts take `capacity` each, and the first `extra` of them to fill up take one more.
    capacity, extra = divmod(len(costs), parts) if equal_counts else (len(costs), 0)
    order = np.argsort(-costs, kind="stable")
    # The heap holds `load << bits | part` of every part that is not full: its root is the smallest load, of equal ones
    # the first part. One number is compared faster than a pair.
    bits = parts.bit_length()
    heap, capacities, parts_in_order = list(range(parts)), [capacity] * parts, []
    for cost in (costs[order] << bits).tolist():
        part = heap[0] & ((1 << bits) - 1)
        parts_in_order.append(part)
        capacities[part] -= 1
        if capacities[part] > 0:
            heapreplace(heap, heap[0] + cost)
        elif capacities[part] == 0 and extra:
            extra -= 1
            heapreplace(heap, heap[0] + cost)
        else:
            heappop(heap)
    owner = np.empty(len(costs), dtype=np.int64)
    owner[order] = parts_in_order  # from the order of costs back to that of the argument
    return owner


def split_by_budget(costs: Sequence[int], budget: int) -> list[slice]:
    """Split items into runs of neighbours whose costs sum to the budget at most; an item above it is a run alone.

    ``split_by_budget([3, 3, 9, 1], 6)`` is ``[slice(0, 2), slice(2, 3), slice(3, 4)]``.
    """
    bounds, spent = [0], 0  # starts of the runs, and the cost of the last one so far
    for number, cost in enumerate(costs):
        if spent + cost > budget and number > bounds[-1]:
            bounds.append(number)
            spent = 0
        spent += cost
    return [slice(start, stop) for start, stop in zip(bounds, [*bounds[1:], len(costs)])]


def choose_largest(sizes: Sequence[int], fraction: float) -> set[int]:
    """Return the places of the largest sizes that together are at least ``fraction`` of the sum."""
    chosen: set[int] = set()
    total = 0
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        if total >= fraction * sum(sizes):
            break
        chosen.add(place)
        total += sizes[place]
    return chosen
