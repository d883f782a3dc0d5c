"""Runs under settings that choose other kernels: what is said of numbers that changed, and of tests that failed."""

import json
import os
from unittest.mock import patch

from support.program import run_program
from support.suite import processors
from support.suite.processors import SETTINGS, Comparison, compare, describe

pytest_plugins = ["pytester"]


def make_result(outcome: str = "passed", shares: dict | None = None, **measured: list[float]) -> dict:
    return {"outcome": outcome, "measured": measured, "shares": shares or {}}


OWN = {
    "test_a": make_result(shares={"logits": [0.2, 0.3]}, logits=[1e-6, 2e-6], entropy=[0.0]),
    "test_b": make_result(gradients=[3e-7]),
}


def test_numbers_that_changed_are_counted():
    others = {
        "test_a": make_result("failed", {"logits": [0.2, 1.3]}, logits=[1e-6, 9e-6], entropy=[0.0]),
        "test_b": make_result(gradients=[3e-7], weights=[1e-7]),
        "test_c": make_result(gradients=[1.0]),
    }
    assert compare(OWN, OWN) == Comparison(3, 0, (), 0.3, "logits of test_a")
    assert compare(OWN, others) == Comparison(3, 1, ("test_a",), 1.3, "logits of test_a")
    assert describe(SETTINGS[1], compare(OWN, others)).splitlines() == [
        "ATEN_CPU_CAPABILITY=avx2",
        "  of 3 measured numbers 1 changed, 1 tests failed",
        "  failed: test_a",
        "  at most 130% of a measured limit: logits of test_a",
    ]
    assert describe("", Comparison(3, 0, (), 0.0, "")) == "nothing set\n  3 measured numbers, 0 tests failed"


def test_each_setting_runs_the_numeric_tests_once(tmp_path, monkeypatch):
    """Under its own variables and none of the others', and the status is that of the worst."""
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    calls = []

    def run(command, cwd, env):
        target = command[command.index("--measured-json") + 1]
        calls.append((command, env))
        fails = env.get("ATEN_CPU_CAPABILITY") == "default"
        with open(target, "w") as file:
            json.dump(OWN | {"test_b": make_result("failed", gradients=[4e-7])} if fails else OWN, file)
        return type("Ended", (), {"returncode": int(fails)})

    with patch.object(processors.subprocess, "run", run), patch.object(processors, "KEPT", tmp_path / "kept"):
        done = run_program(processors.main, "-k", "parity")
        named = run_program(processors.main, "tests/suite/test_processors.py")
    names = {pair.split("=")[0] for setting in SETTINGS for pair in setting.split()}
    told = [{name: env[name] for name in names & env.keys()} for _, env in calls[:5]]
    assert told == [dict(pair.split("=") for pair in setting.split()) for setting in SETTINGS]
    assert all(set(processors.NUMERIC) < set(command) and command[-2:] == ["-k", "parity"] for command, _ in calls[:5])
    assert not any(folder in command for folder in processors.NUMERIC for command, _ in calls[5:])
    assert done.returncode == named.returncode == 1
    assert "of 3 measured numbers 1 changed, 1 tests failed\n  failed: test_b" in done.stdout
    assert done.stdout.count("of 3 measured numbers 0 changed, 0 tests failed") == 3


def test_folders_of_numeric_tests_are_there():
    assert all((processors.ROOT / folder).is_dir() for folder in processors.NUMERIC)


def test_a_run_writes_what_its_tests_measured(pytester):
    """By the processes of pytest-xdist too."""
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("number", [1, 2])
        def test_measures(measured, number):
            measured({"logits": number * 1e-6}, {"logits": number / 4})
            measured({"logits": 3e-6, "bytes": 7})
            assert number == 1

        def test_measures_nothing():
            pass
        """
    )
    plugins = ["-p", "support.suite.measured", "-p", "no:cacheprovider", "-n", "2"]
    with patch.dict(os.environ, PYTHONPATH=str(processors.ROOT / "tests")):
        done = pytester.runpytest_subprocess(*plugins, "--measured-json", "measured.json")
    done.stdout.fnmatch_lines("*test_measures: logits 3.0e-06 (50% of its limit)  bytes 7*")
    file = "test_a_run_writes_what_its_tests_measured.py"
    assert json.loads((pytester.path / "measured.json").read_text()) == {
        f"{file}::test_measures[1]": make_result(shares={"logits": [0.25]}, logits=[1e-6, 3e-6], bytes=[7]),
        f"{file}::test_measures[2]": make_result("failed", {"logits": [0.5]}, logits=[2e-6, 3e-6], bytes=[7]),
        f"{file}::test_measures_nothing": make_result(),
    }
