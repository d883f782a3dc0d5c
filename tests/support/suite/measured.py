"""Pytest plugin: numbers that tests measure, of which a run tells the largest of each test at its end.

``--measured-json FILE`` writes all of them, test by test.
"""

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def measured(record_property) -> Callable[..., None]:
    """``measured({"logits": 2e-6}, {"logits": 0.3})``: differences, or counts of what should be none, by their names.

    The second, if a limit is measured too, is the share of it that a difference uses up.
    """

    def note(values, shares=()) -> None:
        record_property("measured", dict(values))
        if shares:
            record_property("shares", dict(shares))

    return note


def pytest_addoption(parser) -> None:
    parser.addoption("--measured-json", metavar="FILE", help="write what each test measured, and its outcome")


def pytest_terminal_summary(terminalreporter) -> None:
    reports = [report for name in ("passed", "failed", "error") for report in terminalreporter.stats.get(name, [])]
    largest: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: {"measured": {}, "shares": {}})
    for report in reports:
        row = largest[report.nodeid.split("[")[0]]
        for kind, values in getattr(report, "user_properties", ()):  # a file that cannot be imported has none
            if kind in row:
                row[kind] |= {name: max(value, row[kind].get(name, value)) for name, value in values.items()}
    for test, row in sorted(largest.items()):
        if row["measured"]:
            numbers = [describe(name, value, row["shares"]) for name, value in row["measured"].items()]
            terminalreporter.write_line(f"measured at most by {test}: {'  '.join(numbers)}")
    if target := terminalreporter.config.getoption("--measured-json"):
        Path(target).write_text(json.dumps(list_results(reports), indent=1), encoding="utf-8")


def describe(name: str, value: float, shares: dict[str, float]) -> str:
    number = f"{name} {value}" if isinstance(value, int) else f"{name} {value:.1e}"
    return f"{number} ({shares[name]:.0%} of its limit)" if name in shares else number


def list_results(reports) -> dict[str, dict]:
    """List by test its ``outcome``, and by number all values ``measured`` and ``shares`` of limits, in order."""
    results: dict[str, dict] = {}
    for report in reports:
        result = results.setdefault(report.nodeid, {"outcome": "passed", "measured": {}, "shares": {}})
        if report.outcome != "passed":
            result["outcome"] = "failed"
        for kind, values in getattr(report, "user_properties", ()):  # a file that cannot be imported has none
            for name, value in values.items() if kind in ("measured", "shares") else ():
                result[kind].setdefault(name, []).append(value)
    return results
