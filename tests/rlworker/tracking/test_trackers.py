"""What trackers wrote is read back from their files."""

import json
import logging.handlers
import os
import struct
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from rlworker.base.terminal import LOGGER
from rlworker.config.command_line import parse_config
from rlworker.config.run import RunConfig
from rlworker.tracking.log import RunLog, read_metrics
from rlworker.tracking.trackers import TrackedRun, Trackers, check_trackers

WANDB_RUNS = """
import json, sys, time
from pathlib import Path
import psutil
from rlworker.tracking.log import RunLog
from rlworker.tracking.trackers import TrackedRun, Trackers, check_trackers

check_trackers(["wandb"])
assert "wandb" not in sys.modules
SETTINGS = {"actor": {"lr": 5e-4}, "trackers": ("wandb",)}
for folder, first_step, steps in json.loads(sys.argv[1]):
    print("RUN in", folder)
    Path(folder).mkdir(exist_ok=True)
    trackers = Trackers(["wandb"], TrackedRun(Path(folder), first_step, SETTINGS))
    with RunLog(Path(folder), 9, first_step, trackers) as log:
        for number, metrics in steps:
            log.step(number, metrics)
            if metrics.get("kill"):
                for child in psutil.Process().children():
                    child.kill()
                    child.wait()
    time.sleep(1.1)  # wandb names a run's folder by the second of its start
"""


@pytest.fixture(scope="module")
def wandb_runs(tmp_path_factory):
    """The folder of a run of wandb and of one that goes on with it, that of a run whose wandb dies, and what a process
    of their own says of each."""
    root = tmp_path_factory.mktemp("wandb")
    mine, dying = root / "mine", root / "dying"
    steps = [(0, {"heldout": 0.25}), (1, {"reward": 0.5, "time_step": 2.0}), (2, {"reward": 0.75})]
    runs = [(str(mine), 0, steps), (str(mine), 1, [(2, {"reward": 0.75}), (3, {"reward": 1.0})])]
    runs += [(str(dying), 0, [(1, {"reward": 0.5, "kill": 1}), (2, {"reward": 0.75}), (3, {"reward": 1.0})])]
    places = {f"WANDB_{name}_DIR": str(root / name) for name in ("CACHE", "CONFIG", "DATA")}
    unset = {"WANDB_MODE", "WANDB_PROJECT", "WANDB_NAME"}
    environment = {k: v for k, v in os.environ.items() if k not in unset} | places | {"WANDB_ERROR_REPORTING": "false"}
    command = [sys.executable, "-W", "ignore", "-c", WANDB_RUNS, json.dumps(runs)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return mine, dying, done.stdout.split("RUN in ")[1:]


def wandb_records(file: Path) -> list:
    """The records of a .wandb file, which is a log of LevelDB's form after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts, records = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # a block's end, too short for a record's header
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last of several parts
            records.append(Record.FromString(parts))
            parts = b""
    return records


def wandb_history(file: Path) -> list[dict]:
    lines = [r.history.item for r in wandb_records(file) if r.WhichOneof("record_type") == "history"]
    return [{"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items} for items in lines]


def tensorboard_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_has_the_numbers_of_every_step(tmp_path):
    trackers = Trackers(["tensorboard"], TrackedRun(tmp_path, 0, {}))
    with RunLog(tmp_path, 2, 0, trackers) as log:
        log.step(0, {"heldout": 0.25, "time_start_trainers": 4.0})
        log.step(1, {"reward": 0.5, "version": 0, "time_step": 2.0, "logprob_diff_mean": 0.125})
        log.step(2, {"reward": 0.75, "version": 1, "time_step": 1.5, "logprob_diff_mean": float("nan")})
    trackers.step(3, {"reward": 1.0})  # closed with the log, so that nothing takes it
    scalars = tensorboard_scalars(tmp_path)
    wall = scalars.pop("time/wall")
    difference = scalars.pop("logprob_diff_mean")
    assert scalars == {
        "heldout": [(0, 0.25)],
        "time/start_trainers": [(0, 4.0)],
        "reward": [(1, 0.5), (2, 0.75)],
        "version": [(1, 0.0), (2, 1.0)],
        "time/step": [(1, 2.0), (2, 1.5)],
    }
    assert difference[0] == (1, 0.125) and difference[1][1] != difference[1][1]
    lines = read_metrics(tmp_path)
    assert [step for step, _ in wall] == [0, 1, 2]
    assert [value for _, value in wall] == pytest.approx([line["time_wall"] for line in lines], rel=1e-6)
    assert lines[1]["time_step"] == 2.0, "metrics.jsonl keeps its names"


@pytest.mark.parametrize("resumed_at", [2, 0])
def test_tensorboard_goes_on_after_the_checkpoint(tmp_path, resumed_at):
    """Steps that were done beyond the checkpoint are done again, and what they first wrote is not shown."""
    with RunLog(tmp_path, 4, 0, Trackers(["tensorboard"], TrackedRun(tmp_path, 0, {}))) as log:
        for step in range(4):
            log.step(step, {"reward": step / 8})
    with RunLog(tmp_path, 4, resumed_at, Trackers(["tensorboard"], TrackedRun(tmp_path, resumed_at, {}))) as log:
        for step in range(resumed_at + 1 if resumed_at else 0, 5):
            log.step(step, {"reward": step / 4})
    want = [(s, s / 8 if resumed_at and s <= resumed_at else s / 4) for s in range(5)]
    assert tensorboard_scalars(tmp_path)["reward"] == want


def test_steps_that_come_again_are_in_metrics_alone(tmp_path):
    """A run that goes back has cut metrics.jsonl; trackers have these numbers already."""
    metrics = tmp_path / "metrics.jsonl"
    with RunLog(tmp_path, 4, 0, Trackers(["tensorboard"], TrackedRun(tmp_path, 0, {}))) as log:
        for step in range(4):
            log.step(step, {"reward": step / 8})
        metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))
        log.go_back(1)
        for step in range(2, 5):
            log.step(step, {"reward": step / 8})
    assert [(line["step"], line["reward"]) for line in read_metrics(tmp_path)] == [(s, s / 8) for s in range(5)]
    assert tensorboard_scalars(tmp_path)["reward"] == [(s, s / 8) for s in range(5)]


@pytest.mark.large
def test_wandb_has_the_numbers_and_a_resumed_run_goes_on(wandb_runs):
    folder, _, said = wandb_runs
    first, second = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert not any("WARNING" in text for text in said[:2])

    history = [wandb_history(file) for file in (first, second)]
    assert [line["_step"] for line in history[0]] == [0, 1, 2] and [line["_step"] for line in history[1]] == [2, 3]
    assert history[0][0]["heldout"] == 0.25 and "reward" not in history[0][0]
    assert (history[0][1]["reward"], history[0][1]["time/step"], history[0][2]["reward"]) == (0.5, 2.0, 0.75)
    assert [line["reward"] for line in history[1]] == [0.75, 1.0]
    walls = [line["time/wall"] for lines in history for line in lines]
    assert walls == pytest.approx([line["time_wall"] for line in read_metrics(folder)])

    runs = [next(r.run for r in wandb_records(f) if r.WhichOneof("record_type") == "run") for f in (first, second)]
    assert {run.run_id for run in runs} == {(folder / "wandb" / "run_id").read_text()}
    assert {(run.project, run.display_name) for run in runs} == {("rlworker", "mine")}
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["actor"] == {"lr": 5e-4} and config["trackers"] == ["wandb"]


@pytest.mark.large
def test_a_wandb_that_dies_is_dropped_and_the_run_goes_on(wandb_runs):
    _, folder, (*_, said) = wandb_runs
    notes = [line for line in said.splitlines() if "WARNING" in line]
    assert len(notes) == 1 and "WARNING tracker wandb failed and is dropped, metrics.jsonl goes on: " in notes[0]
    assert said.index("step    1/9") < said.index("WARNING")  # wandb notices by itself, during step 2 or just after
    assert [line["reward"] for line in read_metrics(folder)] == [0.5, 0.75, 1.0]


def test_a_tracker_that_cannot_start_is_dropped_and_others_go_on(tmp_path, capsys):
    (tmp_path / "wandb").write_text("a file where its folder should be")
    with RunLog(tmp_path, 1, 0, Trackers(["wandb", "tensorboard"], TrackedRun(tmp_path, 0, {}))) as log:
        log.step(1, {"reward": 0.5})
    said = capsys.readouterr().out
    assert said.count("WARNING") == 1 and "WARNING tracker wandb failed and is dropped" in said
    assert tensorboard_scalars(tmp_path)["reward"] == [(1, 0.5)]


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    check_trackers(["tensorboard", "wandb"])
    for name in ("tensorboard", "wandb"):
        (tmp_path / name).mkdir()  # such as a run's own folder beside the program, which is no library
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    check_trackers([])
    for name in ("tensorboard", "wandb"):
        with pytest.raises(
            ValueError, match=rf"^trackers: {name} is not .*\(pip install {name}\) or leave {name} out of"
        ):
            check_trackers([name])


class Listing:
    """A tracker of a user's own, which cannot record everything."""

    def __init__(self):
        self.said = []

    def start(self):
        self.said.append("start")

    def log(self, values, step):
        if step == 3:
            raise OSError("its server is gone")
        self.said.append((step, values))

    def finish(self):
        self.said.append("finish")


def test_a_tracker_of_the_users_own_is_told_every_step(tmp_path, capsys):
    """Two of a kind, each called by its number where it fails; the names of seconds are those of other trackers."""
    mine, other = Listing(), Listing()
    trackers = Trackers([], TrackedRun(tmp_path, 0, {}), [mine, other])
    for step in (1, 2):
        trackers.step(step, {"reward": 0.5, "time_step": 2.0})
    other.log = lambda values, step: None
    trackers.step(3, {"reward": 0.5})
    trackers.step(4, {"reward": 0.5})
    trackers.close()
    told = {"reward": 0.5, "time/step": 2.0}
    assert mine.said == ["start", (1, told), (2, told), "finish"]
    assert other.said == ["start", (1, told), (2, told), "finish"]
    failed = "WARNING tracker Listing (1) failed and is dropped, metrics.jsonl goes on: OSError: its server is gone\n"
    assert capsys.readouterr().out == failed


def test_a_tracker_waits_for_no_other_processes_of_a_launcher(tmp_path, monkeypatch):
    """Accelerate would, to be the main one of them."""
    import torch
    from accelerate import PartialState

    PartialState._reset_state()
    waited = Mock(side_effect=RuntimeError("others do not come"))
    monkeypatch.setattr(torch.distributed, "init_process_group", waited)
    launched = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    mine = Listing()
    Trackers([], TrackedRun(tmp_path, 0, {}), [mine])
    assert mine.said == ["start"] and not waited.called and PartialState().is_main_process
    assert {name: os.environ[name] for name in launched} == launched


def test_the_logger_may_be_silenced_and_routed(capsys):
    routed = logging.handlers.BufferingHandler(10)
    LOGGER.addHandler(routed)
    LOGGER.setLevel("ERROR")
    LOGGER.warning("not heard")
    LOGGER.setLevel("INFO")
    LOGGER.warning("heard")
    LOGGER.info("told")
    LOGGER.removeHandler(routed)
    LOGGER.info("told to the terminal alone")
    assert [(record.levelname, record.message) for record in routed.buffer] == [("WARNING", "heard"), ("INFO", "told")]
    assert capsys.readouterr().out == "WARNING heard\ntold\ntold to the terminal alone\n"


def test_trackers_are_named_on_the_command_line():
    options = ["--trackers", "tensorboard", "wandb"]
    assert parse_config(RunConfig(), args=options).trackers == ("tensorboard", "wandb")
    assert parse_config(RunConfig(), args=[]).trackers == ()
