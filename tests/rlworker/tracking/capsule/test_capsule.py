"""Steps that are kept and computed anew: the same bits, the same within rounding, or the first place that differs."""

import re
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support.ranks.capsule_cases import (
    DIFFERENCES,
    exchange_sequences,
    make_groups,
    make_image_groups,
    mend_difference,
    plant_difference,
)

from engines.batch.batch import TrainBatch
from engines.models.spec import ModelSpec
from engines.validation import parse_steps
from rlworker.algorithms.losses import sft_loss
from rlworker.algorithms.objective import configure_loss
from rlworker.config.algorithm import AlgorithmConfig
from rlworker.config.run import RunConfig
from rlworker.tracking.capsule.files import Capsule, read_capsule, write_capsule
from rlworker.tracking.capsule.functions import describe_function, find_function
from rlworker.tracking.run_folder import RunFolder

SETTINGS = {"micro_batch_tokens": 64, "share": "prompts"}


def find_loss():
    return configure_loss(AlgorithmConfig(name="grpo", kl_coef=0.0, entropy_coef=0.01), "truncated")


def start_group(pool, model: ModelSpec, settings: dict):
    """Start a training engine on a pool of ranks."""
    from support.ranks.pool_group import PoolGroup

    return PoolGroup(pool, model, settings)


def keep_step(group, batch: TrainBatch, folder: Path, steps: int = 1) -> Capsule:
    """Take optimizer steps on a batch, keep them as a capsule, and read it."""
    from rlworker.tracking.capsule.record import recording

    # Ratios near 1, so that the loss is not clipped and has a derivative everywhere.
    batch = replace(batch, rollout_logprobs=batch.rollout_logprobs + group.forward(batch).logprobs)
    loss = find_loss()
    with recording(group, group.role.config.dtype) as made:
        for _ in range(steps):
            group.train_step(batch, loss, float(batch.mask.sum()))
    role = group.role
    model = role.config, role.temperature, 0, role.model.folder, "", made.weights, describe_function(made.losses[0])
    write_capsule(Capsule(folder, 1, "cpu", *model, {}, made.updates))
    return read_capsule(folder)


def replay(capsule: Capsule, pool, model: ModelSpec, settings: dict = SETTINGS, plant: str = "", place=(1, 12)) -> list:
    """Compute a capsule anew on a new engine, with a difference planted; the findings beside that of the weights."""
    from rlworker.tracking.capsule.replay import replay

    with ExitStack() as planted:
        if plant == "two sequences exchanged":
            place_of = "rlworker.cluster.train_group.plan_schedule"
            from rlworker.cluster.train_group import plan_schedule

            planted.enter_context(patch(place_of, exchange_sequences(plan_schedule)))
        group = start_group(pool, model, settings)
        if plant in DIFFERENCES:
            pool.run(plant_difference, plant, place)
            planted.callback(pool.run, mend_difference)
        return replay(capsule, group)


@pytest.fixture(scope="module")
def model(make_hf_model) -> ModelSpec:
    return ModelSpec.from_folder(make_hf_model("llama", True))


@pytest.fixture(scope="module")
def capsule(one_rank, model, tmp_path_factory) -> Capsule:
    group = start_group(one_rank, model, SETTINGS)
    return keep_step(group, make_groups(99), tmp_path_factory.mktemp("run") / "capsules" / "step_1")


def test_two_optimizer_steps_are_computed_anew_bit_for_bit(one_rank, model, tmp_path):
    twice = keep_step(start_group(one_rank, model, SETTINGS), make_groups(99), tmp_path / "step_1", steps=2)
    assert len(twice.updates[0].rows[0]) == 2, "micro-batches"
    found = replay(twice, one_rank, model)
    assert [finding.outcome for finding in found] == ["ok"] * 3, found
    assert all(
        re.match(r"bit for bit in 10 stages; loss and gradient norm \d\.\d+ too", finding.text) for finding in found[1:]
    ), found


def test_another_layout_is_alike_within_rounding(one_rank, model, capsule):
    found = replay(capsule, one_rank, model, {"layout": "bshd"})
    assert [finding.outcome for finding in found] == ["ok"] * 2, found
    for finding in found[1:]:
        assert re.match(r"(bit for bit|alike within rounding; .* at most 0\.\d+ of the limit)", finding.text), finding


PLACES = {
    "a layer's weight": ("layer 3", 0, "start"),
    "the rope base": ("layer 1", 0, "second"),
    "a norm's eps": ("layer 2", 0, "start"),
    "a norm in bf16": ("layer 2", 0, "start"),
    "a mask cell": ("layer 1", 1, "own"),
    "a window": ("layer 1", 0, "seventh"),
    "a token id": ("embeddings", 1, "own"),
    "a label": ("logprobs", 1, "own"),
    "the temperature": ("entropy", 0, "counts"),
    "an advantage's sign": ("d_loss/d_logprobs", 1, "counts"),
    "an image's pixels": ("embeddings", 0, "image"),
}
"""Difference -> stage, place of the sequence in the first micro-batch, and position, at which it must be named."""


def check_differences(capsule: Capsule, pool, model: ModelSpec, settings: dict, names: tuple[str, ...]) -> None:
    """Plant differences one at a time; each must be named at its place, and other weights as such too."""
    update = capsule.updates[0]
    starts = np.cumsum([0, *update.batch.lengths])
    for name in names:
        stage, member, kind = PLACES[name]
        sequence = update.rows[0][0][member]
        own = slice(starts[sequence], starts[sequence + 1])
        prompt = int(update.batch.mask[own].nonzero()[0]) + 1
        positions = {"start": 0, "second": 1, "seventh": 6, "own": prompt + 1, "counts": prompt - 1}
        if update.batch.image_block is not None:
            positions["image"] = int((update.batch.image_block[own] >= 0).nonzero()[0])
        found = {one.where: one for one in replay(capsule, pool, model, settings, name, (member, prompt + 1))}
        place = f"micro-batch 0, {stage}, sequence {sequence}, position {positions[kind]} "
        first = found["optimizer step 1"]
        assert first.outcome == "FAILED" and first.text.startswith(f"differs first in replica 0, {place}"), (
            name,
            first,
        )
        assert found["before the step"].outcome == ("FAILED" if name == "a layer's weight" else "ok"), name


QUICK = ("a layer's weight", "the rope base", "a mask cell", "a token id", "the temperature", "an advantage's sign")
"""Differences that every run of the suite plants; the large tests plant all."""


@pytest.mark.parametrize("name", QUICK)
def test_a_difference_is_named_at_its_place(one_rank, model, capsule, name):
    check_differences(capsule, one_rank, model, SETTINGS, (name,))


def test_two_sequences_that_are_exchanged_are_named(one_rank, model, capsule):
    found = replay(capsule, one_rank, model, plant="two sequences exchanged")
    rows = capsule.updates[0].rows[0]
    assert [finding.check for finding in found] == ["weights", "schedule", "step"]
    assert f"micro-batch 0 differs from place 0 on: it has sequences [{rows[1][0]}, " in found[1].text, found


def test_several_tokens_share_a_sketch_where_a_step_is_long(one_rank, model, tmp_path, monkeypatch):
    monkeypatch.setattr("rlworker.tracking.capsule.files.MOST_BYTES", 8_000)
    short = keep_step(start_group(one_rank, model, SETTINGS), make_groups(99), tmp_path / "step_1")
    span, places = short.updates[0].span, len(short.updates[0].places)
    assert span == 4 and places * 6 * 28 <= 8_000
    found = replay(short, one_rank, model)
    assert [finding.outcome for finding in found] == ["ok"] * 2 and found[1].text.startswith("bit for bit"), found
    first = replay(short, one_rank, model, plant="a mask cell")[1]
    assert "layer 1" in first.text and "position 12 to 15 " in first.text, first


@pytest.mark.large
@pytest.mark.timeout(1500)
def test_differences_of_a_model_that_sees_images_are_named_at_two_ranks(two_ranks, tmp_path):
    """Two tensor-parallel ranks, and each prompt once."""
    from support.models import make_vlm
    from support.ranks.vlm_cases import make_images

    (tmp_path / "images").mkdir()
    model = ModelSpec.from_folder(make_vlm(tmp_path / "model", "qwen2_5_vl"))
    settings = {"tp": 2, "share": "prompts", "micro_batch_tokens": 64}
    batch = make_image_groups(model, make_images(tmp_path / "images"))
    capsule = keep_step(start_group(two_ranks, model, settings), batch, tmp_path / "run" / "capsules" / "step_1")
    assert capsule.updates[0].metrics["prompt_sharing"] > 1.5 and len(capsule.updates[0].rows[0]) > 1
    size = sum(path.stat().st_size for path in capsule.folder.rglob("*") if path.is_file())
    assert size < 2**20 and len(list((capsule.folder / "images").iterdir())) == 3
    found = replay(capsule, two_ranks, model, settings)
    assert [one.outcome for one in found] == ["ok", "ok"] and found[1].text.startswith("bit for bit in"), found
    check_differences(capsule, two_ranks, model, settings, tuple(PLACES))
    found = replay(capsule, two_ranks, model, settings, "two sequences exchanged")
    assert found[1].check == "schedule" and "micro-batch 0 differs from place 0 on" in found[1].text, found


@pytest.mark.large
@pytest.mark.timeout(1500)
def test_differences_of_a_real_model_are_named(real_rank, smollm2, tmp_path):
    model = ModelSpec.from_folder(smollm2)
    group = start_group(real_rank, model, SETTINGS)
    capsule = keep_step(group, make_groups(40_000), tmp_path / "capsules" / "step_1")
    found = replay(capsule, real_rank, model)
    assert [one.outcome for one in found] == ["ok", "ok"] and found[1].text.startswith("bit for bit in 36"), found
    check_differences(capsule, real_rank, model, SETTINGS, tuple(name for name in PLACES if "image" not in name))


def test_a_run_keeps_the_steps_that_it_is_asked_for(one_rank, model, tmp_path):
    """The checkpoint before the step is written, and kept for as long as the capsule is there."""
    from rlworker.tracking.capsule.keep import keeping_capsule
    from rlworker.tracking.capsule.replay import find_checkpoint, make_default_config

    run, batch, loss = RunFolder(str(tmp_path)), make_groups(99), find_loss()
    group, written = start_group(one_rank, model, SETTINGS), []

    def save(metrics: dict) -> None:
        written.append(run.finish_checkpoint(run.begin_checkpoint(kept.steps_done), {"step": kept.steps_done}))

    kept: Any = SimpleNamespace(config=RunConfig(steps=3, capsule_steps="2:2"), folder=run, save=save, steps_done=0)
    kept.list_learners = lambda: [group]
    for kept.steps_done in range(3):
        with keeping_capsule(kept, {}):
            group.train_step(batch, loss, float(batch.mask.sum()))
    assert [path.name for path in (tmp_path / "capsules").iterdir()] == ["step_2"]
    capsule = read_capsule(tmp_path / "capsules" / "step_2")
    assert (capsule.step, capsule.config, capsule.checkpoint) == (2, group.role.config, "checkpoints/step_1")
    with pytest.raises(ValueError, match=r"begins at the checkpoint '.*step_1', which is not there; name it by --chec"):
        find_checkpoint(make_default_config(str(capsule.folder)), capsule)
    (written[0] / "actor").mkdir()
    assert find_checkpoint(make_default_config(str(capsule.folder)), capsule) == written[0]
    for step in (2, 3):
        run.finish_checkpoint(run.begin_checkpoint(step), {"step": step})
    run.prune(1, None)
    assert [path.name for path in run.list_checkpoints()] == ["step_1", "step_3"]


def test_a_loss_is_kept_by_its_names():
    described = describe_function(find_loss())
    assert described["bound"]["entropy_coef"] == 0.01
    assert describe_function(find_function(described)) == described
    with pytest.raises(ValueError, match="has no name in a module"):
        describe_function(lambda outputs, batch: None)
    with pytest.raises(ValueError, match="cannot be found"):
        find_function({"function": "rlworker.algorithms.losses:gone", "bound": {}})


@pytest.mark.parametrize("value", [torch.ones(2), {1: 2.0}, {"a": [{2: 3}]}, [len]], ids=str)
def test_a_loss_that_binds_what_json_cannot_hold_is_refused(value):
    """A step with it is not kept, which the run survives. JSON would make texts of other keys."""
    with pytest.raises(ValueError, match=r"capsule: sft_loss binds table=.*, expected what JSON holds"):
        describe_function(partial(sft_loss, table=value))
    plain = {"a": [1, 2.5, None, True], "b": (0.25, 0.5)}
    assert describe_function(partial(sft_loss, table=plain))["bound"] == {"table": plain}


def test_a_loss_of_an_interactive_session_is_refused(monkeypatch):
    def loss(outputs, batch): ...

    loss.__module__, loss.__qualname__ = "__main__", "loss"
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    with pytest.raises(ValueError, match="is defined in an interactive session; define it in a module"):
        describe_function(loss)


def test_a_folder_without_a_capsule_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds none: .* give a folder that --capsule-steps wrote"):
        read_capsule(tmp_path)


def test_steps_that_are_none_are_refused():
    with pytest.raises(ValueError, match=r"^config: capsule_steps='2:1' must .* set --capsule-steps, such as 2:3"):
        parse_steps("capsule_steps", "2:1", 5)
