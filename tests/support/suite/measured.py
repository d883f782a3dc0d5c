"""Pytest plugin: numbers that tests measure, of which a run tells the largest of each test at its end."""

from collections import defaultdict
from collections.abc import Callable, Mapping

import pytest


@pytest.fixture
def measured(record_property) -> Callable[[Mapping[str, float]], None]:
    """``measured({"logits": 2e-6})``: differences, or counts of what should be none, by their names."""
    return lambda values: record_property("measured", dict(values))


def pytest_terminal_summary(terminalreporter) -> None:
    largest: dict[str, dict[str, float]] = defaultdict(dict)
    for report in terminalreporter.stats.get("passed", []) + terminalreporter.stats.get("failed", []):
        row = largest[report.nodeid.split("[")[0]]
        for values in (values for name, values in report.user_properties if name == "measured"):
            row |= {name: max(value, row.get(name, value)) for name, value in values.items()}
    for test, values in sorted(largest.items()):
        if values:
            numbers = "  ".join(f"{k} {v}" if isinstance(v, int) else f"{k} {v:.1e}" for k, v in values.items())
            terminalreporter.write_line(f"measured at most by {test}: {numbers}")
