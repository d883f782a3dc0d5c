"""Pytest plugin: numbers that tests measure, of which the run tells the largest of each test at its end.

They pass through the test's report, so that they arrive from the workers of pytest-xdist too. ``--measured FILE``
writes them for scripts/tables.py.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

_PROPERTY = "measured"


def pytest_addoption(parser) -> None:
    parser.addoption("--measured", metavar="FILE", help="write the largest numbers that each test measured")


@pytest.fixture
def measured(record_property) -> Callable[[Mapping[str, float]], None]:
    """``measured({"logits": 2e-6})``: differences, or counts of what should be none, by their names."""
    return lambda values: record_property(_PROPERTY, dict(values))


def pytest_terminal_summary(terminalreporter) -> None:
    if rows := find_largest(terminalreporter.stats.get("passed", []) + terminalreporter.stats.get("failed", [])):
        terminalreporter.section("measured, the largest of each test")
        for test, (count, values) in sorted(rows.items()):
            numbers = "  ".join(f"{k} {v}" if isinstance(v, int) else f"{k} {v:.1e}" for k, v in values.items())
            terminalreporter.write_line(f"{test}, {count} times: {numbers}")
    if path := terminalreporter.config.getoption("measured"):
        from rlworker.tracking.provenance import collect_provenance

        results = [{"test": test, "cases": count, "largest": values} for test, (count, values) in sorted(rows.items())]
        head = asdict(collect_provenance("cpu"))
        Path(path).write_text(json.dumps({"head": head, "rows": results}, indent=1) + "\n")


def find_largest(reports: list[pytest.TestReport]) -> dict[str, tuple[int, dict[str, float]]]:
    """Return test, without its parameters -> how often it measured, and the largest value under each name."""
    counts, rows = defaultdict(int), defaultdict(dict)
    for report in reports:
        test = report.nodeid.split("[")[0]
        for values in (value for name, value in report.user_properties if name == _PROPERTY):
            counts[test] += 1
            for name, value in values.items():
                rows[test][name] = max(value, rows[test].get(name, value))
    return {test: (counts[test], rows[test]) for test in rows}
