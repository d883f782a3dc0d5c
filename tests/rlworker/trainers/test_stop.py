"""Runs that are asked to end, by real signals to real processes."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from kill_chain import check_folder, measure_survival
from stop_chain import STOPPED, draw_moments, prepare, run_chain, run_link, start

PROGRAM = """
import subprocess, sys, time
from rlworker.trainers.stop import graceful_stop
with graceful_stop() as stop:
    child = subprocess.Popen(["sleep", "60"])
    stop.in_hand = sys.argv[1]
    print(child.pid, flush=True)
    until = time.monotonic() + 20
    while time.monotonic() < until and not (stop.signal and "patient" in sys.argv):
        time.sleep(0.01)
    child.kill()
    print("finished")
"""


def program(*arguments: str) -> tuple[subprocess.Popen, psutil.Process]:
    """A program under ``graceful_stop`` that has started a child, and the child."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    running = subprocess.Popen(command, start_new_session=True, **pipes)
    return running, psutil.Process(int(running.stdout.readline()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_a_step_be_finished(number):
    running, _ = program("step 3", "patient")
    running.send_signal(number)
    said, complained = running.communicate(timeout=20)
    assert said == "finished\n" and running.returncode == 128 + number
    assert complained == f"{number.name}: finishing step 3, then the run is saved and ends; once more ends it at once\n"


@pytest.mark.parametrize(("number", "in_hand"), [(signal.SIGTERM, "step 3"), (signal.SIGINT, "")])
def test_the_second_and_the_first_without_a_step_end_everything_at_once(number, in_hand):
    running, child = program(in_hand)
    running.send_signal(number)
    if in_hand:
        assert "finishing step 3" in running.stderr.readline()
        running.send_signal(number)
    began = time.monotonic()
    said, complained = running.communicate(timeout=20)
    assert time.monotonic() - began < 5 and running.returncode == 128 + number and said == ""
    why = "the newest checkpoint stands" if in_hand else "no step was under way"
    assert complained == f"{number.name}: ends at once; {why}\n"
    assert measure_survival([child.pid], time.time()) < 2


def read_until(link: subprocess.Popen, text: str) -> str:
    """What a program says, up to the line that has ``text``."""
    said = []
    for line in link.stdout:
        said.append(line)
        if text in line:
            return "".join(said)
    raise AssertionError("".join(said)[-3000:])


@pytest.mark.large
@pytest.mark.timeout(600)
def test_a_terminal_a_second_run_and_an_impatient_user(tmp_path, monkeypatch):
    """Ctrl-C goes to every process of a run; another start meanwhile is refused and harms nothing; the same command
    line goes on; two signals end it, engines and all, in five seconds."""
    monkeypatch.setenv("SECONDS_PER_REWARD", "0.1")  # a step takes three seconds
    prepare(tmp_path)
    link = start(tmp_path, "run", steps=50)
    read_until(link, "step    1/50")
    status, said = run_link(tmp_path, "run", steps=50)
    assert status == 1 and f"is being written to by process {link.pid} on host" in said and "Traceback" not in said
    os.killpg(link.pid, signal.SIGINT)
    said = link.communicate(timeout=60)[0]
    assert link.returncode == 128 + signal.SIGINT and said.count("SIGINT: finishing step") == 1, said
    assert "stopped after step" in said and "Traceback" not in said
    check_folder(tmp_path / "run")
    done = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert (tmp_path / "run" / "checkpoints" / f"step_{done}").is_dir() and 1 <= done < 50
    link = start(tmp_path, "run", steps=50)
    assert f"run: goes on from step {done} " in read_until(link, f"step {done + 1:4d}/50")
    everybody = psutil.Process(link.pid).children(recursive=True)
    link.terminate()
    assert "SIGTERM: finishing step" in read_until(link, "SIGTERM")
    began = time.monotonic()
    link.terminate()
    said = link.communicate(timeout=60)[0]
    psutil.wait_procs(everybody, timeout=5)
    assert time.monotonic() - began < 5 and not any(p.is_running() and p.status() != "zombie" for p in everybody)
    assert link.returncode == STOPPED and "SIGTERM: ends at once" in said and "Traceback" not in said, said
    check_folder(tmp_path / "run")


@pytest.mark.product
@pytest.mark.timeout(900)
def test_a_run_stopped_anywhere_ends_as_if_it_had_not_been(tmp_path):
    prepare(tmp_path)
    run_chain(tmp_path, draw_moments(1, seed=3, steps=3), steps=3)
