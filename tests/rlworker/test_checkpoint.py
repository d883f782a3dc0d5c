import json

import pytest

from engines.config import MegatronConfig
from rlworker.checkpoint import RunFolder
from rlworker.config import RunConfig
from rlworker.errors import RunError


def write_metrics(folder, *steps, tail=""):
    lines = "".join(json.dumps({"step": step, "reward": 0.5}) + "\n" for step in steps)
    (folder.path / "metrics.jsonl").write_text(lines + tail)


def save(folder, step):
    partial = folder.begin_checkpoint(step)
    (partial / "weights").write_text(f"weights of {step}")
    return folder.finish_checkpoint(partial, {"step": step, "version": step})


def test_a_folder_with_a_run_is_refused(tmp_path):
    folder = RunFolder(str(tmp_path / "run"))
    folder.check(RunConfig())
    folder.claim(RunConfig())
    with pytest.raises(ValueError, match="already holds a run; choose another --run-dir, or add --resume"):
        folder.check(RunConfig())
    with pytest.raises(RunError, match="another run took"):
        folder.claim(RunConfig())


def test_a_resumed_run_keeps_its_settings(tmp_path):
    folder = RunFolder(str(tmp_path))
    folder.claim(RunConfig(steps=10))
    save(folder, 1)
    folder.check(RunConfig(steps=20, resume=True, actor=MegatronConfig(ranks=2, tp=2)))
    with pytest.raises(ValueError, match=r"actor\.lr was 1e-06, is 0\.1, model was '', is 'other', seed was 0, is 1"):
        folder.check(RunConfig(model="other", seed=1, resume=True, actor=MegatronConfig(lr=0.1)))


def test_saving_a_step_again_replaces_it(tmp_path):
    folder = RunFolder(str(tmp_path))
    save(folder, 5)
    partial = folder.begin_checkpoint(5)
    (partial / "weights").write_text("better")
    final = folder.finish_checkpoint(partial, {"step": 5, "version": 6})
    assert (final / "weights").read_text() == "better"
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_5"]


def test_no_folder_and_nothing_to_resume(tmp_path):
    for none in ("", "."):
        with pytest.raises(ValueError, match="set --run-dir"):
            RunFolder(none).check(RunConfig())
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match="is not a folder; choose another --run-dir"):
        RunFolder(str(file)).check(RunConfig())
    with pytest.raises(ValueError, match="holds no run to resume"):
        RunFolder(str(tmp_path)).check(RunConfig(resume=True))


def test_resuming_takes_the_newest_and_cuts_the_metrics_back(tmp_path):
    folder = RunFolder(str(tmp_path))
    folder.claim(RunConfig())
    for step in (8, 16, 100):
        save(folder, step)
    write_metrics(folder, 0, 99, 100, 101, tail='{"step": 102, "rew')
    state = folder.claim(RunConfig(resume=True))
    assert state == {"step": 100, "version": 100, "folder": str(tmp_path / "checkpoints" / "step_100")}
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()] == [0, 99, 100]


def test_a_checkpoint_that_was_cut_short_does_not_count(tmp_path):
    folder = RunFolder(str(tmp_path))
    save(folder, 5)
    partial = folder.begin_checkpoint(6)
    (partial / "weights").write_text("half of the weig")
    assert folder.newest().name == "step_5"
    again = folder.begin_checkpoint(6)
    assert not list(again.iterdir()), "what a killed save left is cleared before the next"
