"""Pytest plugin: the costs of a run, and the budget of process starts that the default run is held to.

Counted are all processes below the run, Ray's workers and those of subprocesses included, by what they became:

- ``vllm``: they imported vLLM.
- ``rank``: they imported Megatron, or were forked from a server that had, which they say by ``process_ledger.note``.
- ``torch``: they imported torch, as all of the above do but those that were forked.
- ``unwatched``: Python that a test starts without ``ledger`` on PYTHONPATH, or with ``-S`` or ``-I``, so that nothing
  more is known of it.

A process counts for the test in which it became so: Ray starts workers long before they are given anything to do. The
pytest process counts as nothing. CPU-seconds are those of the process tree. What tests share falls to the first that
takes it.

With pytest-xdist each of its workers counts for itself, and the process that hands out the tests adds them up.
"""

import json
import os
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path

import pytest
from support.suite.ledger.process_ledger import VARIABLE, watch
from support.suite.process_tree import ProcessTree

NAMES = {"vllm": "vLLM processes", "rank": "ranks", "torch": "heavy Python starts", "unwatched": "unwatched Python"}
TABLE = "suite-budget"
"""The budget is ``[tool.rlworker.suite-budget]`` of pyproject.toml: the most processes of a kind that a run starts."""
COLLECTION = "collection"
"""Name for costs that come before the first test."""
LEDGER_FOLDER = str(Path(__file__).parent / "ledger")
_WORKER_COSTS = "suite-costs"
_READ_EVERY_S = 1.0
"""A reading of the process tree takes 10 ms, most tests take less."""
_NAMED = 10
"""Number of tests that a broken budget names."""


def pytest_addoption(parser) -> None:
    parser.addoption("--costs", metavar="FILE", help="write what every file of tests cost, and every test started")


def pytest_configure(config) -> None:
    costs = Costs()
    if not config.getoption("numprocesses", None):
        config.pluginmanager.register(Meter(costs, config), "suite-meter")
    if not hasattr(config, "workeroutput"):
        config.pluginmanager.register(Report(costs, config), "suite-costs")


def read_budget(config) -> dict[str, int]:
    """Read the budget that this run is held to.

    There is none but in the default run, whose marker expression is that of addopts.

    Raises:
        pytest.UsageError: it limits something that is not counted, or not by a number.
    """
    project = config.rootpath / "pyproject.toml"
    tools = tomllib.loads(project.read_text())["tool"] if project.exists() else {}
    budget = tools.get("rlworker", {}).get(TABLE, {})
    for kind, limit in budget.items():
        if kind not in NAMES or type(limit) is not int:
            raise pytest.UsageError(
                f"{project}: [tool.rlworker.{TABLE}] has {kind} = {limit!r}; give a whole number for any of "
                f"{', '.join(NAMES)}"
            )
    options = config.getini("addopts")
    default = options[options.index("-m") + 1] if "-m" in options else ""
    return budget if config.option.markexpr == default else {}


class Costs:
    """Processes that tests started, and CPU-seconds that they used.

    Attributes:
        starts: test -> how many processes of each kind it started. cpu_s: file -> CPU-seconds.
    """

    def __init__(self):
        self.starts: dict[str, Counter] = defaultdict(Counter)
        self.cpu_s = Counter()

    def add(self, starts: Mapping[str, Mapping[str, int]], cpu_s: Mapping[str, float]) -> None:
        for test, kinds in starts.items():
            self.starts[test].update(kinds)
        self.cpu_s.update(cpu_s)

    def sum_by_place(self, find_place: Callable[[str], str]) -> dict[str, dict[str, float]]:
        """Return place -> kind -> processes, with the CPU-seconds; ``find_place`` names the place of a file."""
        rows = {find_place(file): dict.fromkeys((*NAMES, "cpu_s"), 0) for file in sorted(self.cpu_s)}
        for test, kinds in self.starts.items():
            for kind, count in kinds.items():
                rows[find_place(get_file(test))][kind] += count
        for file, seconds in self.cpu_s.items():
            rows[find_place(file)]["cpu_s"] += seconds
        return rows


class Meter:
    """Counts what the tests of this process start and use."""

    def __init__(self, costs: Costs, config):
        self.costs, self.config = costs, config
        self.test = COLLECTION
        self._tree, self._used, self._read_at = ProcessTree(), 0.0, time.monotonic()
        self._counted = set()
        descriptor, self._path = tempfile.mkstemp(prefix="suite-ledger-")
        self._ledger = open(descriptor)
        self._before = {name: os.environ.get(name) for name in (VARIABLE, "PYTHONPATH")}
        for name, first in ((VARIABLE, self._path), ("PYTHONPATH", LEDGER_FOLDER)):
            os.environ[name] = os.pathsep.join(filter(None, (first, self._before[name])))
        watch(silent=set(NAMES))
        sys.addaudithook(self._audit)

    def pytest_unconfigure(self) -> None:
        for name, value in self._before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        self._ledger.close()
        os.unlink(self._path)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if get_file(nodeid) != get_file(self.test):
            self._read_cpu()
        self.test = nodeid

    def pytest_runtest_logfinish(self) -> None:
        self._read_ledger()
        if time.monotonic() - self._read_at > _READ_EVERY_S:
            self._read_cpu()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._read_ledger()
        self._read_cpu()
        if hasattr(self.config, "workeroutput"):
            starts = {test: dict(kinds) for test, kinds in self.costs.starts.items()}
            self.config.workeroutput[_WORKER_COSTS] = (starts, dict(self.costs.cpu_s))

    def _audit(self, event: str, arguments: tuple) -> None:
        if event == "subprocess.Popen" and not is_watched(*arguments):
            self.costs.starts[self.test]["unwatched"] += 1

    def _read_ledger(self) -> None:
        for line in self._ledger:
            if line not in self._counted:
                self._counted.add(line)
                self.costs.starts[self.test][line.split()[0]] += 1

    def _read_cpu(self) -> None:
        seconds = self._tree.read_seconds()
        self.costs.cpu_s[get_file(self.test)] += round(seconds - self._used, 2)
        self._used, self._read_at = seconds, time.monotonic()


class Report:
    """Holds the run to its budget, and tells what it cost at its end."""

    def __init__(self, costs: Costs, config):
        self.costs, self.config, self.budget = costs, config, read_budget(config)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        """A worker of pytest-xdist has ended; one that crashed tells nothing, and its test has failed."""
        self.costs.add(*getattr(node, "workeroutput", {}).get(_WORKER_COSTS, ({}, {})))

    def pytest_sessionfinish(self, session) -> None:
        if self.config.getoption("numprocesses", None):
            self.costs.add({}, {COLLECTION: time.process_time()})
        if self._find_exceeded() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter) -> None:
        if set(self.costs.cpu_s) - {COLLECTION}:
            terminalreporter.section("costs")
            for line in self._format_table():
                terminalreporter.write_line(line)
            for kind in self._find_exceeded():
                terminalreporter.write_line(self._format_complaint(kind), red=True)
        if path := self.config.getoption("costs"):
            Path(path).write_text(json.dumps(self._collect(), indent=1) + "\n")

    def _find_exceeded(self) -> list[str]:
        counts = sum(self.costs.starts.values(), Counter())
        return [kind for kind, limit in self.budget.items() if counts[kind] > limit]

    def _format_table(self) -> list[str]:
        rows = self.costs.sum_by_place(lambda file: file if file == COLLECTION else str(Path(file).parent))
        (total,) = self.costs.sum_by_place(lambda file: "the run").values()
        texts = {place: {**row, "cpu_s": f"{row['cpu_s']:.1f}"} for place, row in (rows | {"the run": total}).items()}
        if self.budget:
            texts["at most"] = self.budget
        heads = NAMES | {"cpu_s": "CPU-s"}
        width = max(map(len, texts))
        lines = [" " * width + "".join(f"  {head}" for head in heads.values())]
        for place, row in texts.items():
            cells = (f"  {row.get(kind, ''):>{len(head)}}" for kind, head in heads.items())
            lines.append(f"{place:<{width}}" + "".join(cells))
        return lines

    def _format_complaint(self, kind: str) -> str:
        by_test = Counter({test: kinds[kind] for test, kinds in self.costs.starts.items() if kinds[kind]})
        lines = [f"{count:>5}  {test}" for test, count in by_test.most_common(_NAMED)]
        if len(by_test) > _NAMED:
            lines.append(f"       and {len(by_test) - _NAMED} more tests, which --costs FILE lists")
        return "\n".join(
            (
                f"FAILED: {sum(by_test.values())} {NAMES[kind]} started, of at most {self.budget[kind]} "
                f"([tool.rlworker.{TABLE}] of pyproject.toml), by",
                *lines,
                "A new test takes the processes that others keep: a fixture of tests/conftest.py, or a function of the",
                "module in place of a program. One that cannot displaces one of these, or is marked large or product.",
                'CONTRIBUTING.md, "What a test may cost", has the rule.',
            )
        )

    def _collect(self) -> dict:
        from rlworker.tracking.provenance import collect_provenance

        return {
            "head": asdict(collect_provenance("cpu")),
            "markers": self.config.option.markexpr,
            "budget": self.budget,
            "files": self.costs.sum_by_place(lambda file: file),
            "tests": self.costs.starts,
        }


def get_file(test: str) -> str:
    """Return the file of a test, by its node id."""
    return test.split("::")[0]


def is_watched(executable, command: list, cwd, environment: Mapping | None) -> bool:
    """Tell whether a program that ``subprocess`` starts is no Python, or one whose processes are counted."""
    if not Path(os.fsdecode(executable)).name.startswith("python"):
        return True
    options = takewhile(lambda option: not option.endswith(("-c", "-m", ".py")), map(os.fsdecode, command[1:]))
    if not {"-S", "-I", "-E"}.isdisjoint(options):
        return False
    path = (os.environ if environment is None else environment).get("PYTHONPATH", "")
    return LEDGER_FOLDER in path.split(os.pathsep)
