"""How the benchmarks take time."""

import statistics
import time
from collections.abc import Callable

_WARM_UP = 2
"""First rounds, which do not count."""


def median_ms(*calls: Callable[[], object], rounds: int) -> list[float]:
    """Median milliseconds of each call, run in turn so that all of them see the same machine."""
    times = [[] for _ in calls]
    for _ in range(rounds + _WARM_UP):
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            taken.append(1000 * (time.perf_counter() - start))
    return [statistics.median(taken[_WARM_UP:]) for taken in times]
