import json
import os
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.program import run_program

from rlworker.__main__ import main


def test_report_draws_a_run_cut_short(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model": "m<script>", "platform": "cpu"}))
    step = {"step": 1, "reward": 0.25, "time_step": 2.0, "time_rollout": 1.5, "time_update": 0.4, "time_wall": 21.5}
    step |= {"episode_failures": 3, "episode_raised": 3}
    start = {"step": 0, "heldout": 0.5, "time_evaluate": 1.0, "time_wall": 19.0}
    start |= {"time_start_trainers": 4.0, "time_start_rollouts": 8.5}
    lines = [json.dumps(start), json.dumps(step), '{"step": 2, "rew']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    done = run_program(main, "report", tmp_path)
    assert done.returncode == 0, done.stderr
    page = Path(done.stdout.strip()).read_text()
    body = page[page.index("<body>") :]
    assert "75.0 %" in body and "<td>heldout</td><td>0.5</td><td>0.5</td><td>0.5</td><td>0</td>" in body
    assert "<td>start rollouts</td><td>8.5 s</td>" in body
    assert "<td>from the start of the program</td><td>21.5 s</td>" in body
    assert "all that came before</td><td>6.0 s</td>" in body, "what is left of 21.5 s"
    assert "<th>episode_failures</th><td>3</td>" in body and "skipped_train" not in body
    assert "m&lt;script&gt;" in body, "what a run wrote is shown, not run"


@pytest.mark.parametrize("kind", ["gemma3", "internvl", "mistral", "phi3"])
def test_check_makes_the_tiny_model_that_it_is_asked_for(monkeypatch, kind):
    asked = []

    def find_nothing(config, tell):
        asked.append(json.loads(Path(config.model, "config.json").read_text())["model_type"])
        return []

    monkeypatch.setattr("rlworker.checks.check.run_check", find_nothing)
    done = run_program(main, "check", "--tiny", kind)
    assert (done.returncode, asked) == (0, [kind]), done.stderr


def test_the_installed_command_ends_with_a_message(tmp_path):
    """A process as a shell starts it; elsewhere ``main`` is called."""
    command = [Path(sys.executable).parent / "rlworker", "report", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: report: ") and "is not a run folder" in done.stderr
    assert done.stderr.count("\n") == 1


def test_python_runs_the_package_as_the_command(tmp_path):
    done = run_program(partial(runpy.run_module, "rlworker", run_name="__main__"), "report", tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("error: report: ") and "is not a run folder" in done.stderr


@pytest.mark.parametrize("size", [10, 10**6])
def test_a_reader_that_leaves_ends_the_command_without_a_traceback(monkeypatch, size):
    """As head does: what is printed may be held back until the end, or fail at once."""
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr("rlworker.__main__.write_report", lambda run: "x" * size)
    monkeypatch.setattr(sys, "argv", ["rlworker", "report", "run"])
    with open(writing, "w") as output, pytest.raises(SystemExit) as ended:
        monkeypatch.setattr(sys, "stdout", output)
        main()
    assert ended.value.code == 1


def test_a_pipe_of_another_that_breaks_is_an_error_of_its_own(monkeypatch):
    reading, writing = os.pipe()
    monkeypatch.setattr("rlworker.__main__.write_report", Mock(side_effect=BrokenPipeError("a worker's")))
    monkeypatch.setattr(sys, "argv", ["rlworker", "report", "run"])
    with open(reading), open(writing, "w") as output, pytest.raises(BrokenPipeError, match="a worker's"):
        monkeypatch.setattr(sys, "stdout", output)
        main()
