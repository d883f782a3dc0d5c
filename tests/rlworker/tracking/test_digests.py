"""Damage to a checkpoint is found and named before anything is read from it."""

import json
import random
import shutil
from pathlib import Path

import pytest
import xxhash
from support.ranks.engines_cases import build_engine, make_batch, plan
from support.ranks.pool import draw_address

from engines.models.folders.hf_folder import save_hf_folder
from rlworker.base import digests
from rlworker.base.digests import DIGESTS, FileDigest, digest_files, find_damage, list_files
from rlworker.base.errors import RunError
from rlworker.checks.reference.huggingface import probe_loss
from rlworker.config.run import RunConfig
from rlworker.tracking.run_folder import RunFolder, Score

FLIPS = 40


def save(folder: RunFolder, step: int, **state) -> Path:
    partial = folder.begin_checkpoint(step)
    (partial / "actor").mkdir()
    for rank in range(2):
        (partial / "actor" / f"__{rank}_0.distcp").write_text(f"weights of {step} on rank {rank}")
    return folder.finish_checkpoint(partial, {"step": step} | state)


@pytest.fixture
def run(tmp_path):
    """A claimed folder of a run with three checkpoints and the metrics of six steps."""
    folder = RunFolder(str(tmp_path / "run"))
    folder.claim(RunConfig())
    folder.begin(RunConfig())
    for step, heldout in ((2, 0.5), (4, 0.9), (6, 0.7)):
        save(folder, step, heldout=heldout)
    (folder.path / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(7)))
    yield folder
    folder.release()


def flip(path: Path, place: int, bits: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= bits
    path.write_bytes(data)


def save_engine(rank: int, world: int, address: str, model: str, out: str) -> tuple[dict, dict]:
    """Save a real engine after a step as workers do: the digests of this rank's files of both folders."""
    engine, batch = build_engine(rank, world, address, model, {}), make_batch()
    engine.train_step(plan(engine, batch)[1], probe_loss, float(batch.mask.sum()))
    of_engine = digest_files(f"{out}/actor", engine.save(f"{out}/actor"))
    return of_engine, digest_files(
        f"{out}/hf", save_hf_folder(engine.export_weights(), engine.model, f"{out}/hf", 2**19)
    )


def test_of_forty_flipped_bytes_each_is_named(two_ranks, make_hf_model, tmp_path):
    """In every file of a real checkpoint: both ranks' and the shared ones, the HuggingFace folder, our own."""
    folder = RunFolder(str(tmp_path))
    partial = folder.begin_checkpoint(1)
    (partial / "actor").mkdir()
    ranks = two_ranks.run(save_engine, draw_address(), make_hf_model("qwen2", True), str(partial))
    known = {
        f"{name}/{file}": digest
        for rank in ranks
        for name, own in zip(("actor", "hf"), rank)
        for file, digest in own.items()
    }
    assert known.keys() == list_files(partial), "each file was read by the rank that wrote it"
    checkpoint = folder.finish_checkpoint(partial, {"step": 1}, known)
    names, draw = sorted(list_files(checkpoint)), random.Random(0)
    assert {"trainer.json", DIGESTS, "actor/__0_0.distcp", "actor/__1_0.distcp", "actor/.metadata"} <= set(names)
    assert folder.find_newest_good() == (checkpoint, [])
    for number in range(FLIPS):
        name, bits = names[number % len(names)], draw.randint(1, 255)
        path = checkpoint / name
        place = draw.randrange(path.stat().st_size)
        flip(path, place, bits)
        good, (damage,) = folder.find_newest_good()
        assert good is None and damage.startswith(f"checkpoint {str(checkpoint)!r} is damaged: {name} "), (name, place)
        assert damage.count("expected") == 1, "and no other is"
        flip(path, place, bits)
    assert len(names) < FLIPS and folder.find_newest_good() == (checkpoint, [])


def test_what_is_missing_cut_short_changed_or_extra_is_named(run):
    checkpoint, ranks = run.find_newest(), [f"actor/__{rank}_0.distcp" for rank in range(2)]
    first, second = (checkpoint / name for name in ranks)
    text, digest = first.read_text(), digests.digest_file(first).digest
    shutil.copy(checkpoint.with_name("step_4") / ranks[0], first)
    changed = digests.digest_file(first).digest
    assert find_damage(checkpoint) == [f"{ranks[0]} has the digest {changed}, expected {digest}"]
    assert find_damage(checkpoint, None) == [], "it has the size that it should have"
    first.write_text(text[:5])
    second.unlink()
    (checkpoint / "actor" / "__2_0.distcp").touch()
    damage = [
        f"{ranks[1]} is missing",
        "actor/__2_0.distcp is not of this checkpoint: move it away",
        f"{ranks[0]} has 5 bytes, expected {len(text)}",
    ]
    assert find_damage(checkpoint) == find_damage(checkpoint, None) == damage
    with pytest.raises(ValueError, match=r"step_6' is damaged: actor/__1_0\.distcp is missing, .*goes on from step_4"):
        run.check(RunConfig(resume=True))  # what takes no time to see is seen before anything starts


@pytest.mark.parametrize("name", ["trainer.json", DIGESTS])
def test_a_checkpoint_without_one_of_our_own_files_is_not_passed_over(run, name):
    checkpoint = run.find_newest()
    (checkpoint / name).unlink()
    assert run.find_newest() == checkpoint
    good, (damage,) = run.find_newest_good()
    assert good.name == "step_4" and damage == f"checkpoint {str(checkpoint)!r} is damaged: {name} is missing"


def test_a_damaged_newest_checkpoint_is_refused_and_nothing_is_changed(run):
    checkpoint = run.find_newest()
    flip(checkpoint / "actor" / "__0_0.distcp", 3, 1)

    def read_all():
        return {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}

    before = read_all()
    with pytest.raises(RunError) as refused:
        run.begin(RunConfig(resume=True))
    assert read_all() == before
    assert f"checkpoint {str(checkpoint)!r} is damaged: actor/__0_0.distcp has the digest " in str(refused.value)
    assert str(refused.value).endswith(
        "Nothing was changed: put back from a copy what is damaged, or move the folder out of checkpoints, and "
        "--resume goes on from step_4, which is whole"
    )
    checkpoint.rename(run.path / "step_6")
    state, text = run.begin(RunConfig(resume=True))
    assert state["step"] == 4 and "NOTE" not in text


def test_where_none_is_whole_the_message_says_so(run):
    for checkpoint in run.list_checkpoints():
        (checkpoint / "actor" / "__0_0.distcp").write_text("")
    with pytest.raises(RunError, match=r"no other checkpoint of this run is whole$"):
        run.begin(RunConfig(resume=True))
    good, passed_over = run.find_newest_good()
    assert good is None
    steps = [f"/step_{step}' is damaged: actor/__0_0.distcp has 0 bytes, expected 22" for step in (6, 4, 2)]
    assert [text.endswith(end) for text, end in zip(passed_over, steps, strict=True)] == [True] * 3


def test_a_checkpoint_set_aside_is_kept_and_no_longer_counts(run):
    aside = [run.set_aside(run.find_newest()).name]
    save(run, 6)
    aside.append(run.set_aside(run.find_newest()).name)
    assert run.find_newest().name == "step_4"
    assert sorted(path.name for path in (run.path / "checkpoints").iterdir()) == ["step_2", "step_4", *sorted(aside)]


def test_what_is_damaged_is_not_the_best(run):
    heldout = Score("heldout", +1)
    assert run.find_best(heldout)[0].name == "step_4"
    path = run.path / "checkpoints" / "step_4" / "trainer.json"
    path.write_text(path.read_text().replace("0.9", "0.8"))
    assert run.find_best(heldout) == (run.find_newest(), 0.7)


def test_the_ranks_are_asked_for_what_they_are_to_read(run):
    """By names, sizes having been compared; an answer that differs is damage, whoever gave it."""
    asked = []

    def digest(folder, names):
        asked.append((folder, sorted(names)))
        return digest_files(folder, names) | {"trainer.json": FileDigest(0, "other")}

    checkpoint = run.find_newest()
    (damage,) = find_damage(checkpoint, digest)
    assert damage.startswith("trainer.json has the digest other, expected ")
    assert asked == [(checkpoint, ["actor/__0_0.distcp", "actor/__1_0.distcp", "trainer.json"])]


def test_a_file_that_cannot_be_read_is_damage(run, monkeypatch):
    """Of a disk that fails: the checkpoint before it is found."""
    newest, read = run.find_newest(), digests.digest_file

    def fail(path):
        if path.parent.parent == newest and path.name == "__1_0.distcp":
            path = path.parent  # opens, and is read by nobody
        return read(path)

    monkeypatch.setattr(digests, "digest_file", fail)
    good, (damage,) = run.find_newest_good()
    said = f"is damaged: a file cannot be read: [Errno 21] Is a directory: {str(newest / 'actor')!r}"
    assert good.name == "step_4" and damage.endswith(said)


def test_a_large_file_is_read_in_parts(tmp_path, monkeypatch):
    data = random.Random(0).randbytes(10_001)
    (tmp_path / "file").write_bytes(data)
    for size in (1, 100, 10_001, 2**20):
        monkeypatch.setattr(digests, "_READ_BYTES", size)
        assert digests.digest_file(tmp_path / "file") == FileDigest(10_001, xxhash.xxh3_128(data).hexdigest())


def test_a_run_that_goes_back_leaves_damaged_checkpoints_behind(run):
    """They are kept, and the run goes on from the newest that is whole: nobody is there to be asked."""
    checkpoints = run.path / "checkpoints"
    flip(checkpoints / "step_6" / "actor" / "__0_0.distcp", 3, 1)
    (line,) = run.leave_damaged(digest_files)
    assert "__0_0.distcp has the digest" in line and line.endswith("; kept as step_6.damaged")
    state, _ = run.begin(RunConfig(), None)
    assert state and state["step"] == 4 and run.leave_damaged(digest_files) == []
    assert [path.name for path in run.list_checkpoints()] == ["step_2", "step_4"]
    assert (checkpoints / "step_6.damaged" / "actor" / "__0_0.distcp").exists()
    for step in (2, 4):
        flip(checkpoints / f"step_{step}" / "trainer.json", 0, 1)
    assert len(run.leave_damaged(digest_files)) == 2 and run.begin(RunConfig(), None)[0] is None
