"""The suite side by side: pools in one worker each, and what tests measure arrives from all of them."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from support.suite.lanes import find_lane, make_sort_key

pytest_plugins = ["pytester"]
TESTS, ROOT = str(Path(__file__).parents[1]), str(Path(__file__).parents[2])

CONFTEST = """
import os, pytest

@pytest.fixture(scope="session")
def four_ranks():
    with open("started", "a") as file:
        file.write("x")

@pytest.fixture
def pool_of(four_ranks):
    return lambda size: None
"""
TAKES = """
import pytest, time

@pytest.mark.parametrize("value", {values})
def test_it({fixture}, measured, value):
    time.sleep(0.05)
    measured({{"apart": value}})
    measured({{"missing": 0}})
"""


def test_a_pool_is_started_once_and_the_largest_of_each_test_is_told(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((ROOT, TESTS, os.environ["PYTHONPATH"])))
    files = {
        "test_one": TAKES.format(fixture="four_ranks", values=[1e-6, 3e-6, 2e-6]),
        "test_two": TAKES.format(fixture="pool_of", values=[4e-6]),
        "test_three": TAKES.format(fixture="tmp_path", values=[5e-7] * 8),
    }
    pytester.makepyfile(conftest=CONFTEST, **files)
    plugins = [part for name in ("xdist", "support.suite.lanes", "support.suite.measured") for part in ("-p", name)]
    done = pytester.runpytest_subprocess(*plugins, "-n", "2", "-v", "--measured", "measured.json")
    done.assert_outcomes(passed=12)
    assert (pytester.path / "started").read_text() == "x"
    done.stdout.fnmatch_lines(
        [
            "test_one.py::test_it, 6 times: apart 3.0e-06  missing 0",
            "test_three.py::test_it, 16 times: apart 5.0e-07  missing 0",
            "test_two.py::test_it, 2 times: apart 4.0e-06  missing 0",
        ],
        consecutive=True,
    )
    written = json.loads((pytester.path / "measured.json").read_text())
    assert written["head"]["commit"] and written["rows"][0] == {
        "test": "test_one.py::test_it",
        "cases": 6,
        "largest": {"apart": 3e-6, "missing": 0},
    }
    workers = {line.split()[0] for line in done.outlines if "PASSED" in line}
    assert workers == {"[gw0]", "[gw1]"}


@pytest.mark.parametrize(
    ("text", "lane"),
    [
        ("def test_it(tmp_path, cluster):", "cluster"),
        ("def made(\n    one_rank,\n):", "ranks"),
        ('pytestmark = pytest.mark.usefixtures("by_value", "cluster")', "cluster"),
        ("from rlworker import cluster\n\ndef test_it(tmp_path):\n    cluster.start(pool_of(2))", "test_x.py"),
    ],
)
def test_the_lane_of_a_file_is_the_pool_that_it_takes(tmp_path, text, lane):
    (tmp_path / "test_x.py").write_text(text)
    assert find_lane(tmp_path / "test_x.py") == lane


def test_the_pools_are_first_and_a_file_of_many_short_tests_is_last():
    counts = Counter({"test_many.py": 400, "cluster": 60, "test_few.py": 2, "ranks": 500})
    assert sorted(counts, key=lambda lane: make_sort_key(lane, counts)) == [
        "ranks",
        "cluster",
        "test_few.py",
        "test_many.py",
    ]
