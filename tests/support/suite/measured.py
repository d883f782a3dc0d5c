"""Pytest plugin: numbers that tests measure, of which the run tells the largest of each test at its end.

They pass through the test's report, so that they arrive from the workers of pytest-xdist too. ``--measured FILE``
writes them for scripts/tables.py.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.factors import FAMILIES, IMAGE_FAMILIES, LAYOUTS

_PROPERTY = "measured"


def pytest_addoption(parser) -> None:
    parser.addoption("--measured", metavar="FILE", help="write the largest numbers that each test measured")


@pytest.fixture
def measured(record_property) -> Callable[[Mapping[str, float]], None]:
    """``measured({"logits": 2e-6})``: differences, or counts of what should be none, by their names."""
    return lambda values: record_property(_PROPERTY, dict(values))


def pytest_terminal_summary(terminalreporter) -> None:
    reports = terminalreporter.stats.get("passed", []) + terminalreporter.stats.get("failed", [])
    if rows := find_largest(reports):
        terminalreporter.section("measured, the largest of each test")
        for test, (count, values) in sorted(rows.items()):
            numbers = "  ".join(f"{k} {v}" if isinstance(v, int) else f"{k} {v:.1e}" for k, v in values.items())
            terminalreporter.write_line(f"{test}, {count} times: {numbers}")
    if path := terminalreporter.config.getoption("measured"):
        from rlworker.tracking.provenance import collect_provenance

        results = [{"test": test, "cases": count, "largest": values} for test, (count, values) in sorted(rows.items())]
        head, families = asdict(collect_provenance("cpu")), find_largest(reports, name_family)
        by_family = [
            {"family": family, "part": part, "cases": count, "largest": values}
            for (family, part), (count, values) in sorted(families.items())
        ]
        Path(path).write_text(json.dumps({"head": head, "rows": results, "families": by_family}, indent=1) + "\n")


def name_test(nodeid: str) -> str:
    """Name a test without its parameters."""
    return nodeid.split("[")[0]


def name_family(nodeid: str) -> tuple[str, str] | None:
    """Name the family that a test's parameters have, and what it was about: a layout of the trainer, or a rollout."""
    words = nodeid.partition("[")[2].rstrip("]").split("-")
    family = next((family for family in (*FAMILIES, *IMAGE_FAMILIES) if family in words), None)
    part = "rollout" if "engines/vllm/" in nodeid else next((layout for layout in LAYOUTS if layout in words), None)
    if part and "/test_video_" in nodeid:
        part += " of videos"
    return (family, part) if family and part else None


def find_largest(reports: list[pytest.TestReport], name_row: Callable[[str], Any] = name_test) -> dict[Any, tuple]:
    """Return row -> how often its tests measured, and the largest value under each name.

    Args:
        name_row: from a test with its parameters to its row; None is in none.
    """
    counts, rows = defaultdict(int), defaultdict(dict)
    for report in reports:
        if (row := name_row(report.nodeid)) is None:
            continue
        for values in (value for name, value in report.user_properties if name == _PROPERTY):
            counts[row] += 1
            for name, value in values.items():
                rows[row][name] = max(value, rows[row].get(name, value))
    return {row: (counts[row], rows[row]) for row in rows}
