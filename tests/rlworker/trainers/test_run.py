"""When a run saves, what it keeps and what it says, without engines."""

import itertools
import json
import math
import os
import re
import time
from collections import Counter
from dataclasses import replace
from unittest.mock import Mock

import pytest

from engines.config import VllmConfig
from hardware.cpu import platform
from rlworker.base import digests
from rlworker.base.errors import NothingScored, RunError
from rlworker.config.run import RunConfig
from rlworker.config.sections import CheckpointConfig
from rlworker.config.validation import ValidationConfig
from rlworker.tracking import run_folder as checkpoint
from rlworker.tracking.log import RL_LINE, read_metrics
from rlworker.tracking.run_folder import Score


@pytest.fixture(scope="module")
def counting():
    """``counting(config, scores, at_step)``: a run whose steps take ten minutes each on the clock that it goes by;
    ``scores`` are of the evaluations."""
    from rlworker.trainers.run import Run

    class Counting(Run):
        line, score = RL_LINE, Score("heldout", +1)

        def __init__(self, config, scores=(), at_step=lambda counting: None):
            super().__init__(config)
            self.scores, self.at_step, self.saved = iter(scores), at_step, []

        def step(self):
            self.steps_done += 1
            self.at_step(self)
            sample = dict(prompt=f"of step {self.steps_done}", completion="2", answer="2", reward=1.0, version=3)
            return {"reward": self.steps_done / 10}, [sample]

        def evaluate(self):
            score = next(self.scores, None)
            return {} if score is None else {"heldout": score}

        def list_learners(self):
            return []

        def digest_files(self, folder, names):
            return digests.digest_files(folder, names)

        def _finish_checkpoint(self, *args):
            super()._finish_checkpoint(*args)
            self.saved.append(self.steps_done)

        def go(self):
            with self.running:
                self.folder.claim(self.config)
                self.running.callback(self.folder.release)
                self.begin()
                self.fit()
            return self

    return Counting


@pytest.fixture
def clock(monkeypatch):
    minutes = Counter()
    monkeypatch.setattr(time, "monotonic", lambda: 60.0 * minutes["now"])
    return lambda counting: minutes.update(now=10)


def config(tmp_path, resume: bool = False, eval_every: int = 0, **saving) -> RunConfig:
    run, saving = str(tmp_path / "run"), CheckpointConfig(**saving)
    return RunConfig(run_dir=run, steps=7, resume=resume, eval_every=eval_every, checkpoint=saving)


def checkpoints(tmp_path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())


def test_it_saves_by_time_and_keeps_the_newest_three(counting, tmp_path, clock):
    """Every 30 minutes by default: after steps 3 and 6, and at the end."""
    assert counting(config(tmp_path), at_step=clock).go().saved == [3, 6, 7]
    every_ten = config(tmp_path / "ten", save_minutes=10.0)
    assert counting(every_ten, at_step=clock).go().saved == [1, 2, 3, 4, 5, 6, 7]
    assert checkpoints(tmp_path / "ten") == ["step_5", "step_6", "step_7"]
    assert counting(config(tmp_path / "none", save_minutes=0.0), at_step=clock).go().saved == [7]
    assert counting(config(tmp_path / "two", save_minutes=0.0, save_every=2), at_step=clock).go().saved == [2, 4, 6, 7]


def test_what_is_best_on_the_held_out_rows_is_saved_and_kept(counting, tmp_path):
    """Scores of steps 0 to 7: 3 and then 2 are the best so far among those saved, and 2 stays."""
    scores, changes = (0.9, 0.1, 0.6, 0.5, 0.4, 0.6, 0.2, 0.3), dict(eval_every=1, keep_newest=1)
    assert counting(config(tmp_path, **changes), scores).go().saved == [1, 2, 7]
    assert checkpoints(tmp_path) == ["step_2", "step_7"]
    assert json.loads((tmp_path / "run/checkpoints/step_2/trainer.json").read_text())["heldout"] == 0.6
    plain = config(tmp_path / "plain", keep_best=False, **changes)
    assert counting(plain, scores).go().saved == [7] and checkpoints(tmp_path / "plain") == ["step_7"]


def test_a_validation_without_a_number_is_no_best(counting, tmp_path):
    """Of steps 0 to 7: the first that has one is the best, and stays when the last have none."""
    scores = (0.9, math.nan, 0.6, 0.5, math.nan, 0.4, 0.2, math.nan)
    assert counting(config(tmp_path, eval_every=1, keep_newest=1), scores).go().saved == [2, 7]
    assert checkpoints(tmp_path) == ["step_2", "step_7"]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        (dict(samples_every=3), [1, 3, 6, 7]),
        (dict(samples_every=0), [1, 7]),
        (dict(samples_every=3, eval_every=2), [1, 2, 3, 4, 6, 7]),
        (dict(steps=21), [1, 10, 20, 21]),
    ],
)
def test_samples_of_every_so_many_steps_are_kept(counting, tmp_path, settings, kept):
    """Beside the first, the last and those that are evaluated; the tenth by default."""
    counting(replace(config(tmp_path), **settings), itertools.repeat(0.5) if "eval_every" in settings else ()).go()
    files = sorted((tmp_path / "run" / "rollouts").iterdir())
    assert [int(file.stem[5:]) for file in files] == kept
    assert [json.loads(file.read_text())["prompt"] for file in files] == [f"of step {step}" for step in kept]


def test_asked_to_stop_it_saves_the_step_in_hand_and_the_same_settings_go_on(counting, tmp_path, capsys):
    def ask(counting):
        assert counting.stop_request.in_hand == f"step {counting.steps_done}"
        counting.stop_request.signal = 15 if counting.steps_done == 2 else None

    settings = config(tmp_path, resume=True, save_minutes=0.0)
    stopped = counting(settings, at_step=ask).go()
    assert (stopped.saved, stopped.steps_done) == ([2], 2)
    told = capsys.readouterr().out
    assert f"run: begins in {tmp_path / 'run'}, which holds none to resume" in told
    assert "stopped after step 2 of 7; the same with --resume goes on" in told and "report: " in told
    again = counting(settings).go()
    assert (again.saved, again.stop_request.in_hand) == ([7], "")
    assert "run: goes on from step 2 (checkpoints/step_2)" in capsys.readouterr().out
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == list(range(8))
    starts = [json.loads(line) for line in (tmp_path / "run" / "starts.jsonl").read_text().splitlines()]
    assert [start["step"] for start in starts] == [0, 2], "each start of the program says where it comes from"
    assert all(start["commit"] and start["versions"] and start["platform"] == "cpu (executed)" for start in starts)


def test_a_step_that_nothing_is_scored_of_ends_the_run_and_loses_none_before(counting, tmp_path, capsys):
    def fail(counting):
        if counting.steps_done == 3:
            counting.steps_done -= 1  # the step is not taken
            raise NothingScored("reward: 8 of 8 rewards failed")

    settings = config(tmp_path, resume=True)
    with pytest.raises(RunError, match="8 of 8 rewards failed"):
        counting(settings, at_step=fail).go()
    assert checkpoints(tmp_path) == ["step_2"]
    assert counting(settings).go().steps_done == 7
    assert "run: goes on from step 2" in capsys.readouterr().out


def test_seconds_of_a_save_are_on_its_steps_line_before_it_counts(counting, tmp_path, monkeypatch):
    """A run that goes on from a checkpoint has the lines up to it: one without the last would stay without it."""
    finish, lines = checkpoint.RunFolder.finish_checkpoint, []

    def look(folder, partial, state, known):
        lines.append([line["step"] for line in read_metrics(tmp_path / "run")])
        return finish(folder, partial, state, known)

    monkeypatch.setattr(checkpoint.RunFolder, "finish_checkpoint", look)
    counting(config(tmp_path, save_every=3)).go()
    assert lines == [list(range(step + 1)) for step in (3, 6, 7)]
    seconds = {line["step"]: line.get("time_save") for line in read_metrics(tmp_path / "run")}
    assert [step for step, value in seconds.items() if value is not None] == [3, 6, 7]
    assert all(0 <= value < 60 for value in seconds.values() if value is not None)


def test_a_disk_that_fills_up_ends_the_run_with_a_message(counting, tmp_path, monkeypatch):
    def fill(counting):
        if counting.steps_done == 3:
            monkeypatch.setattr(checkpoint.os, "fsync", full)

    def full(_):
        raise OSError(28, os.strerror(28))

    with pytest.raises(RunError, match=r"step 3: '.*run' cannot be written to: .*No space left.*; free disk space or"):
        counting(config(tmp_path, save_every=1), at_step=fill).go()
    assert checkpoints(tmp_path)[-2:] == ["step_1", "step_2"]


def test_a_disk_that_stays_full_leaves_the_message_and_trackers_are_finished(counting, tmp_path):
    """Closing the file writes the refused line once more."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/full")
    run, tracker = counting(config(tmp_path)), Mock()
    run.trackers = [tracker]
    with pytest.raises(RunError, match=r"step 0: '.*run' cannot be written to: .*No space left.*; free disk space or"):
        run.go()
    tracker.finish.assert_called_once_with()


def test_a_change_of_a_start_that_failed_is_recorded_by_the_one_that_goes_on(counting, tmp_path):
    folder = tmp_path / "run"
    counting(replace(config(tmp_path), steps=2)).go()
    changed = counting(config(tmp_path, resume=True))  # to 7 steps
    changed.restore = Mock(side_effect=RunError("a rank died"))
    with pytest.raises(RunError, match="a rank died"):
        changed.go()
    assert json.loads((folder / "config.json").read_text())["steps"] == 2
    counting(config(tmp_path, resume=True)).go()
    starts = [json.loads(line) for line in (folder / "starts.jsonl").read_text().splitlines()]
    assert [(start["step"], start.get("changed", {}).get("steps")) for start in starts] == [(0, None), (2, [2, 7])]
    assert json.loads((folder / "config.json").read_text())["steps"] == 7


@pytest.mark.parametrize(
    ("flags", "dtype", "warned"),
    [
        ("fpu avx512f avx512_vnni", "bfloat16", True),
        ("fpu avx512f avx512_bf16", "bfloat16", False),
        ("fpu amx_bf16", "bfloat16", False),
        ("fpu avx512f", "float32", False),
    ],
)
def test_bfloat16_without_its_instructions_is_warned_of_at_the_start(
    counting, tmp_path, monkeypatch, capsys, flags, dtype, warned
):
    from rlworker.trainers import run

    class Started(Exception):
        pass

    def start(*_):
        raise Started

    (tmp_path / "cpuinfo").write_text(f"processor: 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(platform, "_CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(run, "running_ray", start)
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
    config = RunConfig(run_dir=str(tmp_path / "run"), rollout=VllmConfig(dtype=dtype))
    with pytest.raises(Started), counting(config):
        pass
    said = capsys.readouterr().out
    assert ("rollout.dtype=bfloat16 is slow here: this CPU has no instructions for bfloat16" in said) == warned
    assert "actor.dtype" not in said


def test_a_run_without_a_new_best_for_so_many_validations_ends_and_goes_on_with_more_patience(
    counting, tmp_path, capsys
):
    """Scores of steps 0 to 3: the best is that of step 1, and 0.6 again is none. It ends well, and again at once."""
    settings = replace(config(tmp_path, resume=True, eval_every=1), validation=ValidationConfig(patience=2))
    ended = counting(settings, (0.1, 0.6, 0.6, 0.5, 0.9)).go()
    assert (ended.steps_done, ended.saved, ended.stop_request.in_hand) == (3, [1, 3], "")
    said = "ended after step 3 of 7: heldout has had no new best for 2 validations; --resume with a larger"
    assert said in capsys.readouterr().out
    again = counting(settings).go()
    assert (again.steps_done, again.saved) == (3, []) and said in capsys.readouterr().out
    more = replace(settings, validation=ValidationConfig(patience=3))
    assert counting(more, (0.4, 0.7, 0.2, 0.3)).go().steps_done == 4, "three in a row, of which two came before"


@pytest.mark.parametrize(("metric", "best"), [("heldout", "step_2"), ("heldout_pass_at_2", "step_3")])
def test_the_best_checkpoint_is_by_the_named_metric_and_another_name_finds_its_own(counting, tmp_path, metric, best):
    """Checkpoints have every metric of the held-out rows, so that a resumed run may go by another."""
    run = counting(replace(config(tmp_path, eval_every=1, save_every=1, keep_newest=0), steps=3))
    scores = iter([(0.1, 0.1), (0.2, 0.1), (0.5, 0.2), (0.4, 0.3)])
    run.evaluate = lambda: dict(zip(("heldout", "heldout_pass_at_2"), next(scores)))
    run.go()
    assert run.folder.find_best(Score(metric, +1))[0].name == best


def test_the_step_line_shows_the_metric_that_a_checkpoint_is_the_best_by(counting, tmp_path, capsys):
    run = counting(replace(config(tmp_path), steps=1))
    run.score, run.evaluate = Score("heldout/aime", +1), lambda: {"heldout": 0.25, "heldout/aime": 0.75}
    run.go()
    assert re.search(r"step +0/1 .*heldout +0\.750", capsys.readouterr().out)


class Killed(BaseException):
    """The end of a program that could say nothing."""


def test_a_run_killed_in_a_validation_goes_on_and_has_the_table_of_each_once(counting, tmp_path):
    """At step 3, whose table is written and whose line and checkpoint are not."""
    settings, scores = config(tmp_path, resume=True, eval_every=1, save_every=1, keep_newest=0), (0.1, 0.2, 0.3, 0.4)

    def validate(run, is_killed: bool):
        def evaluate():
            run.log.validation(run.steps_done, [{"set": "", "source": "", "rows": 1, "greedy": scores[run.steps_done]}])
            if is_killed and run.steps_done == 3:
                raise Killed
            return {"heldout": scores[run.steps_done]}

        return evaluate

    run = counting(replace(settings, steps=3))
    run.evaluate = validate(run, True)
    with pytest.raises(Killed):
        run.go()
    again = counting(replace(settings, steps=3))
    again.evaluate = validate(again, False)
    again.go()
    tables = [json.loads(line) for line in (tmp_path / "run" / "validation.jsonl").read_text().splitlines()]
    assert [(line["step"], line["table"][0]["greedy"]) for line in tables] == list(enumerate(scores))
    assert [line["heldout"] for line in read_metrics(tmp_path / "run")] == list(scores)
