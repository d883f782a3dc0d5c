"""The suite's own costs: processes of every kind are counted where they come from, and a budget holds."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from support.suite.costs import LEDGER_FOLDER, is_watched, read_budget
from support.suite.ledger.process_ledger import VARIABLE, note
from support.suite.process_tree import ProcessTree

pytest_plugins = ["pytester"]
TESTS = str(Path(__file__).parents[1])
ROOT = str(Path(__file__).parents[2])
PYTHON = sys.executable

PACKAGES = {  # which import a part of their own, as the real ones do
    "vllm/__init__.py": "import vllm.version",
    "vllm/version.py": "",
    "vllm/late.py": "",
    "vllm/model_executor/models/registry.py": "import torch",
    "torch/__init__.py": "from torch import storage",
    "torch/storage.py": "",
    "torch/late.py": "",
    "megatron/core/__init__.py": "from megatron.core import utils\nimport torch",
    "megatron/core/utils.py": "",
    "megatron/core/late.py": "",
}
PROJECT = """
[tool.pytest.ini_options]
addopts = ["-m", "not large", "-p", "no:cacheprovider"]
markers = ["large: another run"]

[tool.rlworker.suite-budget]
vllm = {most}
"""
STARTS = """
import importlib.util, multiprocessing, os, subprocess, sys

def python(code, *options, **how):
    subprocess.run([sys.executable, *options, "-c", code], check=True, **how)

def forked(work):
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

def rank():
    import megatron.core.late
    from support.suite.ledger.process_ledger import note
    note("rank")
    note("rank")

def run_rank(context):
    process = context.Process(target=rank)
    process.start()
    process.join()
    assert process.exitcode == 0

def test_child():
    python("import vllm, torch")

def test_grandchild():
    python("import subprocess, sys; subprocess.run([sys.executable, '-c', 'import vllm'], check=True)")

def test_it_only_asks():
    python("from importlib.util import find_spec; assert find_spec('vllm') and find_spec('torch')")

def test_vllm_looks_a_model_up():
    subprocess.run([sys.executable, "-m", "vllm.model_executor.models.registry"], check=True)

def test_its_path_is_its_own():
    python("import vllm", env=os.environ | {"PYTHONPATH": "elsewhere"})

def test_fork_that_imports():
    forked(lambda: __import__("vllm"))

def test_fork_that_inherits():
    import vllm
    forked(lambda: __import__("torch.late") and __import__("vllm.late"))

def test_spawned_rank():
    run_rank(multiprocessing.get_context("spawn"))

def test_ranks_of_a_fork_server():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megatron.core"])
    run_rank(context)
    run_rank(context)
"""
STARTED = {
    "test_child": {"vllm": 1, "torch": 1},
    "test_grandchild": {"vllm": 1},
    "test_its_path_is_its_own": {"unwatched": 1},
    "test_fork_that_imports": {"vllm": 1},
    "test_spawned_rank": {"rank": 1, "torch": 1},
    "test_ranks_of_a_fork_server": {"rank": 2, "torch": 1},  # the server has imported torch, and so has no rank
}
BURNED_S = 0.3
BURNS = f"""
import subprocess, sys

def test_burn():
    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < {BURNED_S}: pass"], check=True)
"""
FEW_AND_MANY = """
import os, pytest

def start(count):
    for _ in range(count):
        child = os.fork()
        if child == 0:
            import vllm
            os._exit(0)
        os.waitpid(child, 0)

@pytest.mark.parametrize("count", [1, 0, 2])
def test_start(count):
    start(count)

@pytest.mark.large
def test_start_many():
    start(5)
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """``run(most, *options, file=source)``: a run of pytest over toy packages, with a budget of vLLM processes."""
    monkeypatch.delenv(VARIABLE, raising=False)  # toys are none of this run's processes
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((LEDGER_FOLDER, TESTS, ROOT)))

    def run(most: int, *options: str, **sources: str) -> pytest.RunResult:
        for name, text in PACKAGES.items():
            (pytester.path / name).parent.mkdir(parents=True, exist_ok=True)
            (pytester.path / name).write_text(text)
        pytester.makepyprojecttoml(PROJECT.format(most=most))
        pytester.makepyfile(**sources)
        return pytester.runpytest_subprocess("-p", "support.suite.costs", *options)

    return run


def test_processes_count_for_the_test_that_started_them(run, pytester):
    """Children, grandchildren and forks, each once for each kind; a burned CPU-second once, in its file."""
    sources = {"conftest": "import torch", "test_starts": STARTS, "test_then_burns": BURNS}
    done = run(9, "--costs", "costs.json", **sources, test_then_rests="def test_it(): pass")
    assert done.ret == 0, done.stdout.str()
    told = json.loads((pytester.path / "costs.json").read_text())
    assert told["head"]["command"].startswith("python -m pytest ") and told["head"]["commit"]
    assert told["tests"] == {f"test_starts.py::{test}": kinds for test, kinds in STARTED.items()}
    files = told["files"]
    whole = sum(map(Counter, STARTED.values()), Counter())
    assert {kind: files["test_starts.py"][kind] for kind in whole} == whole
    assert BURNED_S - 0.05 <= files["test_then_burns.py"]["cpu_s"] < 1.7 * BURNED_S
    assert files["test_then_rests.py"]["cpu_s"] < 0.1 < files["collection"]["cpu_s"]
    table = {line.split()[0]: line.split()[1:] for line in done.outlines if line.startswith((".  ", "collection"))}
    assert table["."][:4] == [str(whole[kind]) for kind in ("vllm", "rank", "torch", "unwatched")]


@pytest.mark.large
def test_workers_of_xdist_count_for_themselves_and_are_added_up(run, pytester):
    """What the workers are does not count, and the time of what they start counts in its file."""
    sources = {"conftest": "import torch", "test_starts": STARTS, "test_then_burns": BURNS}
    done = run(2, "-p", "xdist", "-n", "2", "--dist", "loadfile", "--costs", "costs.json", **sources)
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.assert_outcomes(passed=10)
    done.stdout.fnmatch_lines("FAILED: 3 vLLM processes started, of at most 2 *")
    told = json.loads((pytester.path / "costs.json").read_text())
    assert told["tests"] == {f"test_starts.py::{test}": kinds for test, kinds in STARTED.items()}
    assert BURNED_S - 0.05 <= told["files"]["test_then_burns.py"]["cpu_s"] < 1.7 * BURNED_S


def test_a_run_above_its_budget_fails_and_names_tests(run):
    done = run(2, test_starts=FEW_AND_MANY)
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.assert_outcomes(passed=3, deselected=1)
    done.stdout.fnmatch_lines_random("at most * 2 *")
    done.stdout.fnmatch_lines(
        [
            "FAILED: 3 vLLM processes started, of at most 2 ([[]tool.rlworker.suite-budget[]] of pyproject.toml), by",
            "    2  test_starts.py::test_start[[]2[]]",
            "    1  test_starts.py::test_start[[]1[]]",
            "A new test takes *",
        ],
        consecutive=True,
    )


@pytest.mark.parametrize("most, options, started", [(3, (), 3), (2, ("-m", "large"), 5)], ids=["at it", "other run"])
def test_a_run_passes_at_its_budget_and_where_there_is_none(run, most, options, started):
    done = run(most, *options, test_starts=FEW_AND_MANY)
    assert done.ret == 0, done.stdout.str()
    assert "FAILED" not in done.stdout.str()
    (whole,) = (line.split() for line in done.outlines if line.startswith("the run"))
    assert whole[2] == str(started)
    assert any(line.startswith("at most") for line in done.outlines) == (not options)


@pytest.mark.parametrize("text", ["gpus = 1", "vllm = true", 'rank = "9"'])
def test_a_budget_that_limits_nothing_is_refused(tmp_path, text):
    (tmp_path / "pyproject.toml").write_text(f"[tool.rlworker.suite-budget]\n{text}\n")
    with pytest.raises(pytest.UsageError, match=f"{text.split()[0]} = .*whole number for any of vllm, rank, torch"):
        read_budget(SimpleNamespace(rootpath=tmp_path))


@pytest.mark.parametrize(
    "command, environment, watched",
    [
        ([PYTHON, "-c", "pass"], None, True),
        ([PYTHON, "-W", "ignore", "program.py", "-S"], {"PYTHONPATH": f"more:{LEDGER_FOLDER}"}, True),
        (["sh", "-c", "python"], {}, True),
        ([PYTHON, "-c", "pass"], {"PYTHONPATH": TESTS}, False),
        ([PYTHON, "-c", "pass"], {}, False),
        *(([Path(PYTHON), "-W", "ignore", option, "-c", "pass"], None, False) for option in ("-S", "-I", "-E")),
    ],
)
def test_who_is_watched(command, environment, watched):
    assert is_watched(command[0], command, None, environment) == watched


def test_a_sitecustomize_that_is_hidden_is_loaded(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("FOUND = 'hidden'")
    code = "import sitecustomize, sys; print(sitecustomize.FOUND, [type(f).__name__ for f in sys.meta_path][:1])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((LEDGER_FOLDER, str(tmp_path)))}
    done = subprocess.run([PYTHON, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "hidden ['Watch']\n", done.stderr


def test_every_ledger_around_a_process_is_written_and_a_missing_one_is_none(tmp_path, monkeypatch):
    ledgers = [tmp_path / name for name in ("inner", "gone", "outer")]
    for ledger in (ledgers[0], ledgers[2]):
        ledger.touch()
    monkeypatch.setenv(VARIABLE, os.pathsep.join(map(str, ledgers)))
    note("rank")
    line = ledgers[0].read_text()
    assert line.split()[:2] == ["rank", str(os.getpid())] and line == ledgers[2].read_text()
    assert not ledgers[1].exists()
    monkeypatch.delenv(VARIABLE)
    note("rank")
    assert ledgers[0].read_text() == line


EACH_S = 0.15
FAMILY = f"""
import os, signal, sys, time

if sys.argv[1] == "ignored":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then adds an ended child's time to nobody's
generation = 0
while generation < 2 and (child := os.fork()) == 0:
    generation += 1
until = time.process_time() + {EACH_S}
while time.process_time() < until:
    pass
print(generation, os.getpid(), flush=True)
try:
    if generation < 2:
        os.wait()
except ChildProcessError:
    pass
if generation != 1:
    signal.pause()
"""
"""A program, its child and its grandchild burn time. The child ends when the grandchild has."""


@pytest.mark.parametrize("how", ["waited for", "ignored", "orphaned"])
def test_the_time_of_ended_processes_is_counted_once(how):
    top = subprocess.Popen([PYTHON, "-c", FAMILY, how], stdout=subprocess.PIPE, text=True)
    family = [psutil.Process(top.pid)]
    try:
        pids = dict(map(int, top.stdout.readline().split()) for _ in range(3))
        child, grandchild = family[1:] = map(psutil.Process, (pids[1], pids[2]))
        tree = ProcessTree(top.pid)
        used = tree.read_seconds()
        assert used >= 3 * EACH_S - 0.05
        for killed, gone in ((child, child), (grandchild, grandchild)) if how == "orphaned" else ((grandchild, child),):
            killed.kill()
            psutil.wait_procs([gone], timeout=10)
            assert not gone.is_running() or gone.status() == psutil.STATUS_ZOMBIE
            assert tree.read_seconds() == pytest.approx(used, abs=0.08)
    finally:
        for process in family:
            if process.is_running():
                process.kill()
        top.wait()
        top.stdout.close()
