"""Pytest plugin: pytest-xdist's workers take whole files, and those of one pool of processes go to one worker.

A run with large tests takes the cluster's files folder by folder, so that two workers share them, each with a Ray of
its own. The default run, which is short, starts one.

Its own ``--dist loadgroup`` would do, but sets a node id that pytest 9.2 no longer reads.
"""

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

POOLS = {"cluster": ("cluster",), "ranks": ("four_ranks", "two_ranks", "one_rank", "real_rank", "pool_of")}
"""Pool -> the fixtures of conftest.py that start it."""


@cache
def find_lane(config, file: Path) -> str:
    """Find the pool that the tests or fixtures of a file take; a file that takes none has a lane of its own."""
    text = file.read_text(encoding="utf-8")
    for pool, fixtures in POOLS.items():
        if re.search(rf"\b(def \w+|usefixtures)\([^)]*\b({'|'.join(fixtures)})\b", text):
            is_cut = pool == "cluster" and "not large" not in config.option.markexpr
            return f"{pool} {file.relative_to(config.rootpath).parts[1]}" if is_cut else pool
    return file.name


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items) -> None:
    """Put the pools first, then files of few tests: their tests are long, and none should begin at the end."""
    if hasattr(config, "workerinput"):
        counts = Counter(find_lane(config, item.path) for item in items)
        sizes = {lane: -count if lane.startswith(tuple(POOLS)) else count for lane, count in counts.items()}
        items.sort(key=lambda item: sizes[find_lane(config, item.path)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Hand out lanes, in the order in which their tests were collected."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False

    class ByLane(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:  # a method that subclasses replace
            return find_lane(config, config.rootpath / nodeid.split("::")[0])

    return ByLane(config, log)
