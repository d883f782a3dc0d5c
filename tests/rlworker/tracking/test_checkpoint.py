"""The run folder: who has it, what a resumed run takes up, and which checkpoints stay."""

import errno
import json
import math
import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
from filelock import FileLock

from engines.config import MegatronConfig, OptimizerConfig, VllmConfig
from rlworker.config.algorithm import AlgorithmConfig
from rlworker.config.run import RunConfig
from rlworker.config.sections import CriticConfig, CurriculumConfig, DataConfig, EnvironmentConfig
from rlworker.config.sft import SftConfig
from rlworker.config.validation import ValidationConfig
from rlworker.environments import exact_match
from rlworker.tracking import step_lines
from rlworker.tracking.run_folder import RunFolder, Score

HELDOUT = Score("heldout", +1)


def begin(folder, config):
    folder.claim(config)
    return folder.begin(config)


def write_metrics(folder, *steps, tail=""):
    lines = "".join(json.dumps({"step": step, "reward": 0.5}) + "\n" for step in steps)
    (folder.path / "metrics.jsonl").write_text(lines + tail)


def save(folder, step, **state):
    partial = folder.begin_checkpoint(step)
    (partial / "weights").write_text(f"weights of {step}")
    return folder.finish_checkpoint(partial, {"step": step, "version": step} | state)


def names(folder):
    return sorted(path.name for path in (folder.path / "checkpoints").iterdir())


def test_a_folder_with_a_run_is_refused(tmp_path):
    folder = RunFolder(str(tmp_path / "run"))
    folder.check(RunConfig())
    assert not folder.path.exists(), "to look at it does not make it"
    begin(folder, RunConfig())
    folder.release()
    for look in (folder.check, RunFolder(str(tmp_path / "run")).claim):
        with pytest.raises(ValueError, match="already holds a run; choose another --run-dir, or add --resume"):
            look(RunConfig())


OTHER_PROCESS = """
import sys
from rlworker.tracking.run_folder import RunFolder
from rlworker.config.run import RunConfig
folder = RunFolder(sys.argv[1])
for _ in sys.stdin:
    try:
        folder.claim(RunConfig(resume=True))
        print("claimed", flush=True)
    except ValueError as error:
        print(error, flush=True)
"""


def test_a_folder_belongs_to_one_process_at_a_time(tmp_path):
    """Another process is refused, told whose it is, and can have it once that one has let it go or has ended."""
    command = [sys.executable, "-c", OTHER_PROCESS, str(tmp_path / "run")]
    held = "is being written to by process {} on host " + socket.gethostname() + "; wait for its end"
    folder = RunFolder(str(tmp_path / "run"))
    folder.claim(RunConfig(resume=True))
    folder.claim(RunConfig(resume=True))  # its own
    with pytest.raises(ValueError, match="is being written to by process"):
        RunFolder(str(tmp_path / "run")).claim(RunConfig(resume=True))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:

        def ask() -> str:
            print(file=other.stdin, flush=True)
            return other.stdout.readline()

        assert held.format(os.getpid()) in ask()
        folder.release()
        assert ask() == "claimed\n"
        with pytest.raises(ValueError, match=held.format(other.pid)):
            folder.claim(RunConfig(resume=True))
    assert other.returncode == 0
    folder.claim(RunConfig(resume=True))


@pytest.mark.parametrize(("number", "goes_on"), [(errno.ENOLCK, True), (errno.EOPNOTSUPP, True), (errno.EACCES, False)])
def test_a_file_system_without_locks_is_written_to_all_the_same(tmp_path, monkeypatch, number, goes_on):
    def refuse(lock):
        raise OSError(number, "no lock")

    monkeypatch.setattr(FileLock, "acquire", refuse)
    folder = RunFolder(str(tmp_path / "run"))
    with nullcontext() if goes_on else pytest.raises(ValueError, match=r"cannot be written to: .* no lock"):
        folder.claim(RunConfig(resume=True))


def test_a_claim_that_comes_too_late_is_given_back(tmp_path, monkeypatch):
    """Another run came and went between the look and the claim. Who holds on to the folder keeps others out."""
    late, looks = RunFolder(str(tmp_path / "run")), []

    def check(config):
        looks.append(config)
        if len(looks) == 2:
            raise ValueError("already holds a run")

    monkeypatch.setattr(late, "check", check)
    with pytest.raises(ValueError, match="already holds a run"):
        late.claim(RunConfig())
    RunFolder(str(tmp_path / "run")).claim(RunConfig())


def test_what_is_written_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    sizes = []
    monkeypatch.setattr(os, "fsync", lambda number: sizes.append((os.fstat(number).st_size, (tmp_path / "a").exists())))
    step_lines.write_whole(tmp_path / "a", "12345")
    assert sizes == [(5, False)] and (tmp_path / "a").read_text() == "12345"


def test_a_stored_setting_that_there_is_not_is_named(tmp_path):
    folder = RunFolder(str(tmp_path))
    begin(folder, RunConfig(steps=10))
    stored = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stored | {"level": 3}))
    with pytest.raises(ValueError, match=r"other settings .*: level was 3, is None\."):
        folder.check(RunConfig(steps=10, resume=True))


def test_a_resumed_run_takes_other_settings_and_says_so(tmp_path):
    """Rate, KL, batch and length: on the terminal and in the run folder, where each program finds the last one's."""
    folder, resumed = RunFolder(str(tmp_path)), RunConfig(steps=10, resume=True)
    begin(folder, RunConfig(steps=10))
    save(folder, 1)
    actor = MegatronConfig(ranks=2, tp=2, optimizer=OptimizerConfig(lr=0.1))
    algorithm, rollout = AlgorithmConfig(kl_coef=0.5, mini_batches=2), VllmConfig(temperature=0.5)
    parts = {"actor": actor, "algorithm": algorithm, "rollout": rollout, "environment": EnvironmentConfig(workers=2)}
    parts |= {"curriculum": CurriculumConfig(pass_rates=(0.1, 1.0))}
    other = replace(resumed, steps=20, prompts_per_step=16, **parts)
    state, text = begin(folder, other)
    assert state["step"] == 1 and text == (
        "run: goes on from step 1 (checkpoints/step_1); with other settings: actor.optimizer.lr 1e-06 -> 0.1, "
        "actor.ranks 1 -> 2, actor.tp 1 -> 2, algorithm.kl_coef None -> 0.5, algorithm.mini_batches 1 -> 2, "
        "curriculum.pass_rates [0.0, 1.0] -> [0.1, 1.0], "
        "environment.workers 1 -> 2, prompts_per_step 32 -> 16, rollout.temperature 1.0 -> 0.5, steps 10 -> 20"
    )
    folder.record_start(1, other)
    assert json.loads((tmp_path / "config.json").read_text())["actor"]["optimizer"]["lr"] == 0.1
    (line,) = map(json.loads, (tmp_path / "starts.jsonl").open())
    assert line["changed"]["actor.optimizer.lr"] == [1e-6, 0.1] and len(line["changed"]) == 10
    again = RunFolder(str(tmp_path))
    folder.release()
    assert begin(again, other)[1] == "run: goes on from step 1 (checkpoints/step_1)"
    again.record_start(1, other)
    assert "changed" not in json.loads((tmp_path / "starts.jsonl").read_text().splitlines()[-1])
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match=r"config\.json in .* cannot be read: expected an object, got a list"):
        folder.check(resumed)


@pytest.mark.parametrize(
    ("settings", "was"),
    [
        (dict(model="other", seed=1), "model was '', is 'other', seed was 0, is 1"),
        (dict(data=DataConfig(max_prompt_tokens=8)), "data.max_prompt_tokens was 1024, is 8"),
        (dict(actor=MegatronConfig(dtype="bfloat16")), "actor.dtype was 'float32', is 'bfloat16'"),
        (dict(critic=CriticConfig(train=True)), "critic.train was False, is True"),
        (dict(algorithm=AlgorithmConfig(reference="t")), "algorithm.reference was '', is 't'"),
        (dict(curriculum=CurriculumConfig({"b": 1.0})), r"curriculum.sources was \{\}, is \{'b': 1.0\}"),
        (dict(curriculum=CurriculumConfig(buckets={1: 1.0})), r"curriculum.buckets was \{\}, is \{'1': 1.0\}"),
    ],
)
def test_another_model_or_other_data_are_another_run(tmp_path, settings, was):
    folder = RunFolder(str(tmp_path))
    begin(folder, RunConfig())
    advice = "start a new run from its weights: --run-dir ANOTHER --model .*/checkpoints/step_N/hf"
    with pytest.raises(ValueError, match=rf"cannot be resumed with .*: {was}\. Set them back, or {advice}"):
        folder.check(RunConfig(resume=True, **settings))


def test_a_setting_that_is_there_no_more_is_told_and_not_refused(tmp_path):
    """Of a section that is there; a whole section is another kind of run."""
    folder = RunFolder(str(tmp_path))
    begin(folder, RunConfig())
    save(folder, 1)
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["curriculum"]["threshold"] = 0.5
    (tmp_path / "config.json").write_text(json.dumps(stored))
    _, text = begin(folder, RunConfig(resume=True))
    assert text.endswith("with other settings: curriculum.threshold 0.5 -> None")
    (tmp_path / "config.json").write_text(json.dumps(stored | {"teacher": {"model": "a"}}))
    with pytest.raises(ValueError, match=r"cannot be resumed with .*: teacher.model was 'a', is None\. "):
        folder.check(RunConfig(resume=True))


def test_a_decay_over_the_whole_run_is_not_counted_in_other_optimizer_steps(tmp_path):
    folder, optimizer = RunFolder(str(tmp_path)), OptimizerConfig(lr_scheduler="linear")
    begin(folder, RunConfig(actor=MegatronConfig(optimizer=optimizer)))
    other = RunConfig(resume=True, actor=MegatronConfig(optimizer=optimizer), algorithm=AlgorithmConfig(mini_batches=2))
    with pytest.raises(ValueError, match=r"mini_batches=2, which changes .*: the linear decay .*; set"):
        folder.check(other)
    folder.check(replace(other, actor=MegatronConfig(optimizer=replace(optimizer, lr_decay_steps=200))))


def test_folders_that_cannot_be(tmp_path):
    for none in ("", "."):
        with pytest.raises(ValueError, match="set --run-dir"):
            RunFolder(none).check(RunConfig())
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "runs" / "mine"):
        with pytest.raises(ValueError, match=r"cannot be a folder: '.*/file' is a file; choose another --run-dir"):
            RunFolder(str(path)).check(RunConfig())


UNABLE_PROCESS = """
import os, resource, sys
from rlworker.tracking.run_folder import RunFolder
from rlworker.config.run import RunConfig

def claim(folder):
    try:
        RunFolder(folder).claim(RunConfig())
    except ValueError as error:
        print(error)

_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))
claim(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
if os.geteuid() == 0:
    os.setuid(65534)
claim(sys.argv[2])
"""


def test_a_folder_that_cannot_be_made_or_written_to(tmp_path):
    """In a process that may write only so much, as on a disk that is full, and then not at all, as on another's."""
    (tmp_path / "theirs").mkdir(mode=0o555)
    tmp_path.chmod(0o755)
    full, theirs = tmp_path / "run", tmp_path / "theirs" / "run"
    command = [sys.executable, "-c", UNABLE_PROCESS, str(full), str(theirs)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    for path, line in zip((full, theirs), said, strict=True):
        assert line.startswith("run_dir: ") and str(path) in line and "cannot be written to: [Errno" in line
        assert "free disk space, make it writable, or choose another --run-dir" in line
    assert [file.name for file in full.iterdir()] == [".lock"] and not theirs.exists()


def test_resuming_takes_the_newest_and_cuts_the_metrics_back(tmp_path):
    folder = RunFolder(str(tmp_path))
    begin(folder, RunConfig())
    for step in (8, 16, 100):
        save(folder, step)
    (tmp_path / "checkpoints" / "step_best").mkdir()  # the user's own
    (tmp_path / "checkpoints" / "step_best" / "trainer.json").write_text("{}")
    write_metrics(folder, 0, 99, 100, 101, tail='{"step": 102, "rew')
    state, text = begin(folder, RunConfig(resume=True))
    assert state == {"step": 100, "version": 100, "folder": str(tmp_path / "checkpoints" / "step_100")}
    assert text.startswith("run: goes on from step 100 (checkpoints/step_100); 2 lines of metrics.jsonl are of later")
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()] == [0, 99, 100]


def test_resuming_begins_where_there_is_nothing_to_take_up(tmp_path):
    """And says so; what a run without a checkpoint has measured is kept."""
    folder = RunFolder(str(tmp_path / "run"))
    assert begin(folder, RunConfig(resume=True)) == (None, f"run: begins in {folder.path}, which holds none to resume")
    for aside in ("metrics.before.jsonl", "metrics.before.1.jsonl"):
        write_metrics(folder, 0, 1)
        state, text = begin(folder, RunConfig(resume=True))
        assert state is None and text.startswith(f"run: begins again at step 0, since {folder.path} has no checkpoint")
        assert text.endswith(f"what metrics.jsonl had so far is kept as {aside}")
        assert len((folder.path / aside).read_text().splitlines()) == 2
        assert not (folder.path / "metrics.jsonl").exists()


def test_a_checkpoint_that_was_cut_short_does_not_count(tmp_path):
    folder = RunFolder(str(tmp_path))
    for text in ("worse", "better"):  # a step that is saved again takes the place of what was saved
        partial = folder.begin_checkpoint(5)
        (partial / "weights").write_text(text)
        final = folder.finish_checkpoint(partial, {"step": 5, "version": 6})
    assert (final / "weights").read_text() == "better" and names(folder) == ["step_5"]
    partial = folder.begin_checkpoint(6)
    (partial / "weights").write_text("half of the weig")
    assert folder.find_newest().name == "step_5"
    again = folder.begin_checkpoint(6)
    assert not list(again.iterdir()), "what a killed save left is cleared before the next"


def test_the_newest_and_the_best_checkpoints_stay(tmp_path):
    folder = RunFolder(str(tmp_path))
    assert folder.find_best(HELDOUT) is None
    for step, heldout in ((2, 0.3), (4, 0.7), (6, 0.7), (8, None), (10, 0.1), (12, 0.2), (14, 0.3)):
        save(folder, step, **({} if heldout is None else {"heldout": heldout}))
    (tmp_path / "checkpoints" / "step_best").mkdir()
    path, score = folder.find_best(HELDOUT)
    assert (path.name, score) == ("step_6", 0.7), "of equals the latest"
    assert folder.find_best(Score("heldout", -1))[0].name == "step_10"
    folder.prune(0, None)
    assert len(names(folder)) == 8, "0 keeps all"
    folder.prune(3, path)
    assert names(folder) == ["step_10", "step_12", "step_14", "step_6", "step_best"]
    folder.prune(1, None)
    assert names(folder) == ["step_14", "step_best"]


def test_a_score_that_is_no_number_is_no_best(tmp_path):
    folder = RunFolder(str(tmp_path))
    save(folder, 1, heldout=math.nan)
    assert folder.find_best(HELDOUT) is None
    for step, heldout in ((2, 0.5), (3, 0.25), (4, math.nan)):
        save(folder, step, heldout=heldout)
    best, score = folder.find_best(HELDOUT)
    assert (best.name, score) == ("step_2", 0.5)


class StartedError(Exception):
    """An engine was about to start."""


@pytest.fixture
def go_on(tmp_path, monkeypatch):
    """``go_on(whole, config)``: launch a run whose folder holds the first ``done`` steps; what it returns."""
    import rlworker.trainers.launch as launcher

    def start(*_, **__):
        raise StartedError

    def launch(config, done: int, **scores: list[float]):
        folder = RunFolder(str(tmp_path / "run"))
        if not folder.path.exists():
            begin(folder, replace(config, resume=False))
            save(folder, done)
            lines = [{"step": step, "reward": 0.5 * step} for step in range(done + 1)]
            lines = [line | {name: values[line["step"]] for name, values in scores.items()} for line in lines]
            (folder.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        monkeypatch.setattr(launcher, "check_run", lambda config: folder)
        monkeypatch.setattr(launcher, "try_rewards", lambda *_: None)
        monkeypatch.setattr(launcher, "running_ray", start)
        monkeypatch.setattr(launcher, "_build_trainer", start)
        monkeypatch.setattr("rlworker.trainers.sft.SftTrainer", start)
        if isinstance(config, RunConfig):
            return launcher.launch(config, exact_match)
        return launcher.launch_supervised(config)

    return launch


@pytest.mark.parametrize("kind", [RunConfig, SftConfig])
def test_a_finished_run_says_so_and_starts_nothing(go_on, capsys, kind):
    found = go_on(kind(steps=3, resume=True), 3)
    said = capsys.readouterr().out
    assert "has all of its 3 steps; raise --steps to go on. Nothing was started" in said and found == {"reward": 1.5}
    assert go_on(kind(steps=2, resume=True), 3) == {"reward": 1.5}
    for config in (kind(steps=4, resume=True), kind(steps=3)):
        with pytest.raises(StartedError):
            go_on(config, 3)


@pytest.mark.parametrize(
    ("kind", "metric", "values"),
    [(RunConfig, "heldout", [0.5, 0.4, 0.3]), (SftConfig, "heldout_loss", [0.5, 0.6, 0.7])],
)
def test_a_run_that_stopped_early_says_so_and_starts_nothing(go_on, capsys, kind, metric, values):
    config = kind(
        steps=9,
        eval_every=1,
        resume=True,
        data=DataConfig(heldout="rows"),
        validation=ValidationConfig(patience=2),
    )
    go_on(config, 2, **{metric: values})
    said = capsys.readouterr().out
    assert f"ended after step 2 of 9: {metric} has had no new best for 2 validations" in said
    with pytest.raises(StartedError):
        go_on(replace(config, validation=ValidationConfig(patience=3)), 2)
