"""The budget of the suite counts processes where they start, a run above it fails, and a pool is started once."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.suite.budget import read_limits
from support.suite.ledger.sitecustomize import LEDGER

pytest_plugins = ["pytester"]
TESTS = Path(__file__).parents[1]
PACKAGES = {  # each imports a part of its own, as the real ones do
    "vllm/__init__.py": "import vllm.version",
    "vllm/version.py": "",
    "vllm/late.py": "",
    "vllm/model_executor/models/registry.py": "import torch",
    "torch/__init__.py": "from torch import storage",
    "torch/storage.py": "",
    "torch/late.py": "",
    "megatron/core/__init__.py": "from megatron.core import utils\nimport torch",
    "megatron/core/utils.py": "",
}
PROJECT = """
[tool.pytest.ini_options]
addopts = ["-m", "not large", "-p", "no:cacheprovider"]

[tool.rlworker.suite-budget]
vllm = {most}
"""
STARTS = """
import multiprocessing, os, subprocess, sys, time
import pytest

def python(*options):
    subprocess.run([sys.executable, *options], check=True)

def run_rank():
    from support.suite.ledger.sitecustomize import note
    note("rank")
    note("rank")

def test_child():
    python("-c", "import vllm, torch")

def test_grandchild():
    python("-c", "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import vllm'], check=True)")

def test_it_only_asks():
    python("-c", "from importlib.util import find_spec; assert find_spec('vllm') and find_spec('torch')")

def test_vllm_looks_a_model_up():
    python("-m", "vllm.model_executor.models.registry")

def test_a_fork_inherits_what_was_imported():
    python("-c", "import os, torch; os.fork(); import torch.late; import vllm.late")

def test_ranks_of_a_fork_server():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megatron.core"])
    for _ in range(2):
        process = context.Process(target=run_rank)
        process.start()
        process.join()
        assert process.exitcode == 0

def test_burn():
    python("-c", "import time\\nwhile time.process_time() < 2: pass")
"""
CONFTEST = """
import pytest

@pytest.fixture(scope="session")
def four_ranks():
    with open("started", "a") as file:
        file.write("x")

@pytest.fixture
def pool_of(four_ranks):
    return lambda size: None
"""
TAKES = """
import subprocess, sys, time
import pytest

@pytest.mark.parametrize("value", {values})
def test_it({fixture}, measured, value):
    subprocess.run([sys.executable, "-c", "import vllm"], check=True)
    measured({{"apart": value}})
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """``run(most, *options, file=source)``: a run of pytest over toy packages, with a budget of vLLM processes."""
    for name in (LEDGER, "PYTEST_XDIST_WORKER"):  # toys are none of this run's processes
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (TESTS, TESTS.parent))))

    def run(most: int, *options: str, **sources: str) -> pytest.RunResult:
        for name, text in PACKAGES.items():
            (pytester.path / name).parent.mkdir(parents=True, exist_ok=True)
            (pytester.path / name).write_text(text)
        pytester.makepyprojecttoml(PROJECT.format(most=most))
        pytester.makepyfile(**sources)
        return pytester.runpytest_subprocess("-p", "support.suite.budget", *options)

    return run


@pytest.mark.large
def test_processes_count_once_for_what_they_became(run):
    """vLLM: a child, a grandchild and two forks. torch: a child, the fork's parent and a server, which is no rank."""
    done = run(4, conftest="import torch", test_starts=STARTS)
    assert done.ret == 0, done.stdout.str()
    (line,) = (line for line in done.outlines if line.startswith("started "))
    assert line.startswith("started 4 vLLM processes of at most 4, 2 ranks, 3 heavy Python starts; ")
    assert 1 <= int(line.split()[-2]) <= 9, line


def test_workers_share_the_budget_and_start_no_pool_twice(run, pytester):
    files = {
        "test_one": TAKES.format(fixture="four_ranks", values=[1e-6, 3e-6, 2e-6]),
        "test_two": TAKES.format(fixture="pool_of", values=[4e-6]),
        "test_three": TAKES.format(fixture="tmp_path", values=[5e-7] * 8),
    }
    plugins = [f"-p{name}" for name in ("xdist", "support.suite.lanes", "support.suite.measured")]
    done = run(11, *plugins, "-n2", "-v", conftest=CONFTEST, **files)
    done.assert_outcomes(passed=12)
    assert done.ret == pytest.ExitCode.TESTS_FAILED and (pytester.path / "started").read_text() == "x"
    assert {line.split()[0] for line in done.outlines if "PASSED" in line} == {"[gw0]", "[gw1]"}
    done.stdout.fnmatch_lines(
        [
            "started 12 vLLM processes of at most 11, *",
            "FAILED: more vLLM processes than the budget of pyproject.toml allows. These tests started them:",
        ],
        consecutive=True,
    )
    assert sum("    1  test_" in line for line in done.outlines) == 10, "the first ten tests are named"
    largest = {"one": "3.0e-06", "three": "5.0e-07", "two": "4.0e-06"}
    for name, value in largest.items():
        done.stdout.fnmatch_lines(f"measured at most by test_{name}.py::test_it: apart {value}")


@pytest.mark.parametrize("text", ["gpus = 1", "vllm = true", 'rank = "9"'])
def test_a_budget_that_limits_nothing_is_refused(tmp_path, text):
    (tmp_path / "pyproject.toml").write_text(f"[tool.rlworker.suite-budget]\n{text}\n")
    config = SimpleNamespace(rootpath=tmp_path, getini=lambda name: [], option=SimpleNamespace(markexpr=""))
    with pytest.raises(pytest.UsageError, match=f"{text.split()[0]} = .*whole number for any of vllm, rank, torch"):
        read_limits(config)
    (tmp_path / "pyproject.toml").write_text("[tool.rlworker.suite-budget]\nvllm = 3\n")
    assert read_limits(config) == {"vllm": 3}
    config.option.markexpr = "large"
    assert read_limits(config) == {}, "another run has no budget"
