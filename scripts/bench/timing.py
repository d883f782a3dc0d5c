"""How the benchmarks take time, and the options that all of them have."""

import argparse
import statistics
import time
from collections.abc import Callable

_WARM_UP = 2
"""First rounds, which do not count."""


def options(description: str) -> argparse.ArgumentParser:
    """The parser of a benchmark's options: ``--tiny``, and what it adds."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it runs, in seconds")
    return parser


def median_ms(*calls: Callable[[], object], rounds: int) -> list[float]:
    """Median milliseconds of each call, run in turn so that all of them see the same machine."""
    times = [[] for _ in calls]
    for _ in range(rounds + _WARM_UP):
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            taken.append(1000 * (time.perf_counter() - start))
    return [statistics.median(taken[_WARM_UP:]) for taken in times]
