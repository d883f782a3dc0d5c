"""Pytest plugin: the tests side by side, by pytest-xdist's ``-n 2``, with no process started twice.

A worker of pytest-xdist is given whole files, and all files that take the same pool of processes.
"""

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

POOLS = {"cluster": ("cluster",), "ranks": ("four_ranks", "two_ranks", "one_rank", "pool_of")}
"""Pool -> the fixtures of conftest.py that start it."""


@cache
def find_lane(file: Path) -> str:
    """Return what a file of tests must stay together with: the pool that its tests or fixtures take, or itself."""
    text = file.read_text(encoding="utf-8")
    for pool, fixtures in POOLS.items():
        if re.search(rf"\b(def \w+|usefixtures)\([^)]*\b({'|'.join(fixtures)})\b", text):
            return pool
    return file.name


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items) -> None:
    """Put the pools first, then the files of fewest tests, which have the long ones: none should begin at the end."""
    if hasattr(config, "workerinput"):
        counts = Counter(find_lane(item.path) for item in items)
        items.sort(key=lambda item: make_sort_key(find_lane(item.path), counts))


def make_sort_key(lane: str, counts: Counter) -> tuple[bool, int]:
    """Make the key by which lanes are sorted. ``counts``: tests of each lane."""
    return (lane not in POOLS, counts[lane] if lane not in POOLS else -counts[lane])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Hand out lanes, in the order in which their tests were collected."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False

    class ByLane(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:  # the method that is there to be overridden
            return find_lane(config.rootpath / nodeid.split("::")[0])

    return ByLane(config, log)
