"""What sequences cost, and work dealt out evenly."""

from heapq import heappop, heapreplace

import numpy as np


def estimate_costs(lengths: np.ndarray, hidden: int) -> np.ndarray:
    """``[B]`` work of a sequence in a layer, in units of ``hidden`` multiplications.

    ``12 * hidden * L + L^2``: 12 hidden^2 weights see each token, and causal attention multiplies each token with half
    of the L others twice (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, appendix).
    """
    return 12 * hidden * lengths + lengths**2


def balance_costs(costs: np.ndarray, parts: int, counts_matter: bool = True) -> np.ndarray:
    """``[B]`` whole costs -> ``[B]``, the part that each goes to: the dearest first, to whoever has least so far.

    Args:
        counts_matter: all parts hold equally many, to one.
    """
    each, extra = divmod(len(costs), parts) if counts_matter else (len(costs), 0)
    order = np.argsort(-costs, kind="stable")
    bits = parts.bit_length()  # a load and the part that has it in one number, which a heap compares faster than a pair
    heap, left, chosen = list(range(parts)), [each] * parts, []
    for cost in (costs[order] << bits).tolist():
        part = heap[0] & ((1 << bits) - 1)
        chosen.append(part)
        left[part] -= 1
        if left[part] > 0:
            heapreplace(heap, heap[0] + cost)
        elif left[part] == 0 and extra:
            extra -= 1
            heapreplace(heap, heap[0] + cost)
        else:
            heappop(heap)
    owner = np.empty(len(costs), dtype=np.int64)
    owner[order] = chosen
    return owner
