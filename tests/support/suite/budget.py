"""Pytest plugin: counts the processes that a run starts, and holds the default run to ``[tool.rlworker.suite-budget]``.

Counted are all Python processes below the run, Ray's workers among them, by what they import (``ledger/``). A process
counts for the test that ends next in the same worker of pytest-xdist. CPU-seconds are read once a second: what a
process uses after its last reading is lost.
"""

import os
import sys
import tempfile
import tomllib
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from unittest.mock import patch

import psutil
import pytest
from support.suite.ledger.sitecustomize import LEDGER

NAMES = {"vllm": "vLLM processes", "rank": "ranks", "torch": "heavy Python starts"}
_NAMED = 10
"""Number of tests that a broken budget names."""


def pytest_configure(config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Budget(config), "suite-budget")
    else:  # a worker of pytest-xdist was started under the ledger, and counts as nothing
        sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "Watch"]


def read_limits(config) -> dict[str, int]:
    """Read the budget, which is that of the default run alone: the one whose marker expression is that of addopts.

    Raises:
        pytest.UsageError: it limits something that is not counted, or not by a number.
    """
    project, options = config.rootpath / "pyproject.toml", config.getini("addopts")
    tools = tomllib.loads(project.read_text())["tool"] if project.exists() else {}
    limits = tools.get("rlworker", {}).get("suite-budget", {})
    for kind, limit in limits.items():
        if kind not in NAMES or type(limit) is not int:
            raise pytest.UsageError(
                f"{project}: [tool.rlworker.suite-budget] has {kind} = {limit!r}; expected a whole number for any of "
                f"{', '.join(NAMES)}"
            )
    default = options[options.index("-m") + 1] if "-m" in options else ""
    return limits if config.option.markexpr == default else {}


class Budget:
    """Processes that tests started, and CPU-seconds that they used, up to now."""

    def __init__(self, config):
        self.limits = read_limits(config)
        self.starts: dict[str, Counter] = defaultdict(Counter)  # test -> kind -> processes
        self._seconds: dict[psutil.Process, float] = {}
        self._unnamed: dict[str, Counter] = defaultdict(Counter)  # worker -> kind -> processes
        self._lines: set[str] = set()
        descriptor, self._path = tempfile.mkstemp(prefix="suite-ledger-")
        self._ledger = open(descriptor)
        folders = filter(None, (str(Path(__file__).parent / "ledger"), os.environ.get("PYTHONPATH")))
        self._environment = patch.dict(os.environ, {LEDGER: self._path, "PYTHONPATH": os.pathsep.join(folders)})
        self._environment.start()
        self._ended = Event()
        self._reader = Thread(target=self._read_seconds, daemon=True)
        self._reader.start()

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "teardown":
            self._name_starts(report.nodeid, getattr(report, "worker_id", "master"))

    def pytest_sessionfinish(self, session) -> None:
        self._ended.set()
        self._reader.join()
        self._name_starts("after the last test", "master")
        for worker in list(self._unnamed):
            self._name_starts("after the last test", worker)
        if self._find_exceeded() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter) -> None:
        counts, limits = self._count(), {kind: f" of at most {limit}" for kind, limit in self.limits.items()}
        parts = [f"{counts[kind]} {name}{limits.get(kind, '')}" for kind, name in NAMES.items()]
        terminalreporter.write_line(f"started {', '.join(parts)}; {sum(self._seconds.values()):.0f} CPU-seconds")
        for kind in self._find_exceeded():
            by_test = Counter({test: kinds[kind] for test, kinds in self.starts.items() if kinds[kind]})
            lines = [f"{count:>5}  {test}" for test, count in by_test.most_common(_NAMED)]
            text = f"FAILED: more {NAMES[kind]} than the budget of pyproject.toml allows. These tests started them:\n"
            text += "\n".join(lines) + '\nCONTRIBUTING.md, "What a test may cost", says what to do.'
            terminalreporter.write_line(text, red=True)

    def pytest_unconfigure(self) -> None:
        self._ended.set()
        self._environment.stop()
        self._ledger.close()
        os.unlink(self._path)

    def _name_starts(self, test: str, worker: str) -> None:
        new = set(self._ledger) - self._lines
        self._lines |= new
        for kind, of, _ in map(str.split, new):
            self._unnamed[of][kind] += 1
        self.starts[test] += self._unnamed.pop(worker, Counter())

    def _read_seconds(self) -> None:
        while not self._ended.wait(1.0):
            top = psutil.Process()
            for process in {top, *top.children(recursive=True), *self._seconds}:
                with suppress(psutil.NoSuchProcess):
                    if process.is_running():
                        self._seconds[process] = sum(process.cpu_times()[:2])

    def _count(self) -> Counter:
        return sum(self.starts.values(), Counter())

    def _find_exceeded(self) -> list[str]:
        counts = self._count()
        return [kind for kind, limit in self.limits.items() if counts[kind] > limit]
