"""Pytest plugin: pytest-xdist's workers take whole files, and those of one pool of processes go to one worker.

Its own ``--dist loadgroup`` would do, but sets a node id that pytest 9.2 no longer reads.
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
    """Find the pool that the tests or fixtures of a file take; a file that takes none has a lane of its own."""
    text = file.read_text(encoding="utf-8")
    for pool, fixtures in POOLS.items():
        if re.search(rf"\b(def \w+|usefixtures)\([^)]*\b({'|'.join(fixtures)})\b", text):
            return pool
    return file.name


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items) -> None:
    """Put the pools first, then files of few tests: their tests are long, and none should begin at the end."""
    if hasattr(config, "workerinput"):
        counts = Counter(find_lane(item.path) for item in items)
        sizes = dict(counts) | {pool: -counts[pool] for pool in POOLS}
        items.sort(key=lambda item: sizes[find_lane(item.path)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Hand out lanes, in the order in which their tests were collected."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False

    class ByLane(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:  # a method that subclasses replace
            return find_lane(config.rootpath / nodeid.split("::")[0])

    return ByLane(config, log)
