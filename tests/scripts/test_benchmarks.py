"""Every benchmark runs, small: what it measures is kept in docs/performance.md, and cannot be if it no longer fits."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scripts" / "bench"
BENCHMARKS = sorted(path for path in FOLDER.glob("*.py") if path.name not in ("timing.py", "trl_step.py"))
NUMBER = re.compile(r"(?<![\w.])-?(?:\d[\d.]*(?:e[-+]\d+)?|nan|inf)(?!\w)")


def mark(path: Path) -> pytest.MarkDecorator:
    """CI runs those of a loss's parts and of batches, the others are run when their figures are taken."""
    return pytest.mark.large if path.stem in ("head", "layout") else pytest.mark.product


def run(path: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-W", "ignore", str(path), *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize("path", [pytest.param(path, marks=mark(path), id=path.stem) for path in BENCHMARKS])
def test_it_runs_prints_its_figures_and_writes_them(path, tmp_path):
    done = run(path, "--tiny", "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    printed = [float(number) for number in NUMBER.findall(done.stdout)]
    assert len(printed) >= 3 and all(map(math.isfinite, printed)), done.stdout
    assert any(figure > 0 for figure in printed)
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["head"]["command"] == f"python scripts/bench/{path.name} --tiny"
    figures = [value for row in written["rows"] for value in row.values() if not isinstance(value, str)]
    assert len(figures) >= 3 and all(map(math.isfinite, figures)) and any(figure > 0 for figure in figures)
    titles = {title for row in written["rows"] for title in row}
    assert len(titles) == max(len(row) for row in written["rows"]), "one row has every column"


def test_all_of_them_are_named_where_a_contributor_looks():
    contributing, performance = ((ROOT / name).read_text() for name in ("CONTRIBUTING.md", "docs/performance.md"))
    assert BENCHMARKS
    for path in BENCHMARKS:
        assert f"scripts/bench/{path.name}" in contributing and f"scripts/bench/{path.name}" in performance


@pytest.mark.large
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("step", ["--steps", "1"]),
        ("step", ["--model", "no/such/folder", "--trl", sys.executable]),
        ("update", ["--ratios", "50"]),
        ("update", ["--ratios", "50:16", "--common", "51"]),
        ("head", ["--dtype", "int8"]),
        ("layout", ["--no"]),
        ("layout", ["--json", "no/such/folder/f.json"]),
    ],
)
def test_what_cannot_be_measured_is_an_error(name, options):
    done = run(FOLDER / f"{name}.py", *options)
    assert done.returncode and not done.stdout and "error: " in done.stderr
