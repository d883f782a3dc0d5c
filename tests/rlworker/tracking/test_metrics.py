"""What a run shows while it goes on."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engines.batch.batch import TrainBatch
from engines.config import LoraConfig, MegatronConfig
from rlworker.base.terminal import log_start, read_process_age
from rlworker.tracking import log as metrics
from rlworker.tracking.log import RL_LINE, RunLog
from rlworker.tracking.trackers import TrackedRun, Trackers


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock.now)
    return clock


def left_of(folder, clock, capsys, steps: int, told: list[tuple[int, float]], **numbers: float) -> list[str]:
    first = told[0][0] - 1 if told[0][0] else 0
    with RunLog(folder, steps, first, Trackers([], TrackedRun(folder, first, {}))) as log:
        for step, seconds in told:
            clock.now += seconds
            log.step(step, numbers if step else {})
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    return [re.search(r"  left ?(\S*) *$", line)[1] for line in lines]


def test_what_is_left_follows_from_the_steps_so_far(tmp_path, clock, capsys):
    told = [(0, 77.0), (1, 10.0), (2, 20.0), (3, 30.0), (4, 40.0)]
    assert left_of(tmp_path, clock, capsys, 4, told, time_step=1.0) == ["", "0:30", "0:30", "0:20", "0:00"]


def test_a_resumed_run_knows_only_its_own_steps(tmp_path, clock, capsys):
    """The first is known by its own time alone, whatever the start took."""
    told = [(41, 500.0), (42, 7.0)]
    assert left_of(tmp_path, clock, capsys, 100, told, time_step=5.0) == ["4:55", "6:46"]
    assert left_of(tmp_path, clock, capsys, 100, told[:1]) == [""], "nothing is known of a step without a time"


def test_what_is_left_may_be_hours_and_forgets_old_steps(tmp_path, clock, capsys):
    told = [(step, 3600.0 if step <= 10 else 60.0) for step in range(100)]
    assert left_of(tmp_path, clock, capsys, 220, told)[-1] == "2:01:00"
    assert left_of(tmp_path, clock, capsys, 1000, told[:2])[-1] == "999:00:00"


LINES = {
    "log_start('Ray is up')": r"start +\d+\.\d s  Ray is up\n",
    "log.step(1, {'reward': 0.5})": r"step    1/2  reward  0\.500 .*\n",
    "LOGGER.warning('no signal')": r"WARNING no signal\n",
}
"""What says something -> what it says."""
PROGRAM = """
import os, select, sys
from pathlib import Path
from rlworker.tracking.log import RL_LINE, RunLog
from rlworker.base.terminal import LOGGER, log_start
from rlworker.tracking.trackers import TrackedRun, Trackers
log = RunLog(Path(sys.argv[1]), 2, 0, Trackers([], TrackedRun(Path(sys.argv[1]), 0, {})))
for call in sys.argv[2:]:
    eval(call)
    if not select.select([0], [], [], 30)[0]:
        os._exit(1)  # without the line that it may still hold back
    os.read(0, 1)
"""


def test_each_line_is_there_at_once_without_a_terminal(tmp_path):
    """It is read before the program says anything else, which would bring it along."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path), *LINES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        for line in LINES.values():
            assert re.fullmatch(line, program.stdout.readline())
            print(end="x", file=program.stdin, flush=True)
    assert program.returncode == 0


def test_seconds_of_the_start_are_of_this_program(capsys):
    before = read_process_age()
    log_start("rows are read: 2")
    said = re.fullmatch(r"start +(\d+\.\d) s  rows are read: 2\n", capsys.readouterr().out)
    assert before - 0.1 <= float(said[1]) <= read_process_age() + 0.1


def test_a_metric_that_some_optimizer_steps_lack_is_the_mean_of_the_others():
    from rlworker.trainers.step_metrics import average

    parts = [{"a": 1.0, "b_max": 2.0}, {"a": 3.0, "c": 5.0}, {"a": 5.0, "b_max": 4.0, "c": 7.0}]
    assert average(parts) == average(reversed(parts)) == {"a": 3.0, "b_max": 4.0, "c": 6.0}


def test_the_rate_of_an_update_counts_epochs_and_the_models_that_learned():
    """Two sequences of 3 and 2 tokens, of which 4 were computed: worked by hand."""
    from rlworker.trainers.step_metrics import measure_flops

    batch = TrainBatch.from_ids([[1, 2, 3, 4], [1, 2, 5]], prompt_lengths=[2, 2])
    asked, actor = [], MegatronConfig()

    def count(lengths, computed, frozen):
        asked.append((tuple(lengths), computed, frozen))
        return 100.0

    models = {role: SimpleNamespace(count_training_flops=count) for role in ("actor", "critic", "reference")}
    both = {"lr": 1.0, "critic_lr": 1.0, "prompt_sharing": 1.25, "epochs": 3}
    assert measure_flops(models, batch, both | {"time_update": 2.0}, actor) == {"flops_per_second": 3 * 200 / 2}
    assert asked == [((3, 2), 4.0, False)] * 2
    warm_up = {"critic_lr": 1.0, "prompt_sharing": 1.0, "time_update": 0.5}
    adapted = replace(actor, lora=LoraConfig(rank=4))
    assert measure_flops(models, batch, warm_up, adapted) == {"flops_per_second": 200}
    assert asked[-1] == ((3, 2), 5.0, True)
    assert measure_flops(models, batch, {"time_update": 0.5}, actor) == {}


def test_a_column_that_no_step_has_had_has_no_place(tmp_path, capsys):
    with RunLog(tmp_path, 3, 0, Trackers([], TrackedRun(tmp_path, 0, {}))) as log:
        log.step(1, {"reward": 0.5, "zero_variance_share": 0.25})
        log.step(2, {"reward": 0.5, "kl": 0.001, "lr": 1e-6})
        log.step(3, {"reward": 0.5})
    lines = [line.rpartition("  left")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert lines == [
        "step    1/3  reward  0.500  zerovar  25%",
        "step    2/3  reward  0.500  kl 1.0e-03  lr 1.0e-06  zerovar     ",
        "step    3/3  reward  0.500  kl          lr          zerovar     ",
    ]


def test_the_page_shows_a_step_as_the_log_writes_it(tmp_path, capsys):
    """But for the columns that it names as left out."""
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    shown = "  ".join(line.strip() for line in re.search(r"```\n(step  120/240 .*?)\n```", page, re.S)[1].splitlines())
    columns = {label: key for label, key, _ in RL_LINE if f"  {label} " in shown}
    left_out = [label for label, _, _ in RL_LINE if label not in columns]
    assert left_out == ["spread", "kl", "policy-kl", "ratio", "lr", "trunc", "flop/s", "GB"]
    assert "columns of spread, KL, ratio, rate, truncation, FLOP/s and memory:" in page
    texts = {key: re.search(rf"  {re.escape(label)} +(\S+)", shown)[1] for label, key in columns.items()}
    numbers = {key: float(text.rstrip("%")) / (100 if "%" in text else 1) for key, text in texts.items()}
    with RunLog(tmp_path, 240, 0, Trackers([], TrackedRun(tmp_path, 0, {}))) as log:
        log.step(120, numbers)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("step "))
    assert line.partition("  left")[0] == shown.partition("  left")[0]


def test_a_line_of_metrics_is_json_that_any_reader_takes(tmp_path):
    """NaN and infinity are no JSON: they are null, and NaN again where the project reads them. numpy's and torch's
    numbers, which a loss of the user's may give, are numbers."""
    numbers = {"reward": 0.5, "clip": np.float32(0.25), "rows": np.int64(3), "kl": torch.tensor(2.0)}
    lost = {"loss": float("nan"), "grad_norm": float("inf"), "lr": np.float64("-inf")}
    table = [{"set": "", "source": "", "rows": 2, "greedy": float("nan")}]
    with RunLog(tmp_path, 1, 0, Trackers([], TrackedRun(tmp_path, 0, {}))) as log:
        log.step(1, numbers | lost)
        log.validation(1, table)

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    read = json.loads(line, parse_constant=refuse)
    assert {name: read[name] for name in numbers} == {"reward": 0.5, "clip": 0.25, "rows": 3, "kl": 2.0}
    assert [read[name] for name in lost] == [None] * 3 and read["step"] == 1
    (metrics_read,) = metrics.read_metrics(tmp_path)
    assert metrics_read["reward"] == 0.5 and all(math.isnan(metrics_read[name]) for name in lost)
    (line,) = (tmp_path / "validation.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=refuse)["table"][0]["greedy"] is None
