"""Steps that are kept and computed anew: the same bits, the same within rounding, or the first place that differs."""

import re
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
from support.ranks.capsule_cases import (
    DIFFERENCES,
    TEMPERATURE,
    PoolGroup,
    exchange_sequences,
    make_groups,
    mend_difference,
    plant_difference,
)

from engines.batch.batch import TrainBatch
from engines.models.spec import ModelSpec
from engines.validation import parse_steps
from rlworker.algorithms.objective import configure_loss
from rlworker.config.algorithm import AlgorithmConfig
from rlworker.tracking.capsule.files import Capsule, read_capsule, write_capsule
from rlworker.tracking.capsule.functions import describe_function, find_function

SETTINGS = {"micro_batch_tokens": 64, "share": "prompts"}


def find_loss():
    return configure_loss(AlgorithmConfig(name="grpo", kl_coef=0.0, entropy_coef=0.01), "truncated")


def keep_step(group: PoolGroup, batch: TrainBatch, folder: Path, steps: int = 1) -> Capsule:
    """Take optimizer steps on a batch, keep them as a capsule, and read it."""
    from rlworker.tracking.capsule.record import digest_weights, recording

    loss, weights = find_loss(), digest_weights(group)
    with recording(group, group.role.config.dtype) as (updates, losses):
        for _ in range(steps):
            group.train_step(batch, loss, float(batch.mask.sum()))
    role = group.role
    model = role.config, TEMPERATURE, 0, role.model.folder, "", weights, describe_function(losses[0])
    write_capsule(Capsule(folder, 1, "cpu", *model, {}, updates))
    return read_capsule(folder)


def replay(capsule: Capsule, pool, model: ModelSpec, settings: dict = SETTINGS, plant: str = "", place=(1, 12)) -> list:
    """Compute a capsule anew on a new engine, with a difference planted; the findings beside that of the weights."""
    from rlworker.tracking.capsule.replay import replay

    with ExitStack() as planted:
        if plant == "two sequences exchanged":
            place_of = "rlworker.cluster.train_group.plan_schedule"
            from rlworker.cluster.train_group import plan_schedule

            planted.enter_context(patch(place_of, exchange_sequences(plan_schedule)))
        group = PoolGroup(pool, model, settings)
        if plant in DIFFERENCES:
            pool.run(plant_difference, plant, place)
            planted.callback(pool.run, mend_difference)
        return replay(capsule, group)


@pytest.fixture(scope="module")
def model(make_hf_model) -> ModelSpec:
    return ModelSpec.from_folder(make_hf_model("llama", True))


@pytest.fixture(scope="module")
def capsule(one_rank, model, tmp_path_factory) -> Capsule:
    group = PoolGroup(one_rank, model, SETTINGS)
    return keep_step(group, make_groups(99), tmp_path_factory.mktemp("run") / "capsules" / "step_1", steps=2)


def test_a_step_is_computed_anew_bit_for_bit(one_rank, model, capsule):
    assert len(capsule.updates[0].rows[0]) == 3, "micro-batches"
    found = replay(capsule, one_rank, model)
    assert [finding.outcome for finding in found] == ["ok"] * 3, found
    assert all(re.match(r"bit for bit in 10 stages; loss -?0\.\d+", finding.text) for finding in found[1:]), found


def test_another_layout_is_alike_within_rounding(one_rank, model, capsule):
    found = replay(capsule, one_rank, model, {"layout": "bshd"})
    assert [finding.outcome for finding in found] == ["ok"] * 3, found
    for finding in found[1:]:
        assert re.match(r"(bit for bit|alike within rounding; .* at most 0\.\d+ of the limit)", finding.text), finding


def name_place(capsule: Capsule, sequence: int, position: str) -> str:
    number = next(i for i, micro in enumerate(capsule.updates[0].rows[0]) if sequence in micro)
    return rf"replica 0, micro-batch {number}, STAGE, sequence {sequence}, position {position} "


PLACES = {
    "a layer's weight": ("layer 3", 0, 0),
    "the rope base": ("layer 1", 0, 1),
    "a norm's eps": ("layer 2", 0, 0),
    "a norm in bf16": ("layer 2", 0, 0),
    "a mask cell": ("layer 1", 1, 12),
    "a window": ("layer 1", 0, 6),
    "a token id": ("embeddings", 1, 12),
    "a label": ("logprobs", 1, 12),
    "the temperature": ("entropy", 0, 10),
    "an advantage's sign": ("d_loss/d_logprobs", 1, 10),
}
"""Difference -> stage, place of the sequence in the first micro-batch, and position, at which it must be named."""


@pytest.mark.parametrize("name", PLACES)
def test_a_difference_is_named_at_its_place(one_rank, model, capsule, name):
    stage, member, position = PLACES[name]
    found = {finding.where: finding for finding in replay(capsule, one_rank, model, plant=name)}
    sequence = capsule.updates[0].rows[0][0][member]
    where = f"differs first in replica 0, micro-batch 0, {stage}, sequence {sequence}, position {position} "
    first = found["optimizer step 1"]
    assert first.outcome == "FAILED" and first.text.startswith(where), first
    assert found["before the step"].outcome == ("FAILED" if name == "a layer's weight" else "ok")


def test_two_sequences_that_are_exchanged_are_named(one_rank, model, capsule):
    found = replay(capsule, one_rank, model, plant="two sequences exchanged")
    rows = capsule.updates[0].rows[0]
    assert [finding.check for finding in found] == ["weights", "schedule", "step", "schedule", "step"]
    assert f"micro-batch 0 differs from place 0 on: it has sequences [{rows[1][0]}, " in found[1].text, found


def test_several_tokens_share_a_sketch_where_a_step_is_long(one_rank, model, capsule, tmp_path, monkeypatch):
    pass
    size = write_capsule(Capsule(**{**vars(capsule), "folder": tmp_path / "step_1"}))
    short = read_capsule(tmp_path / "step_1")
    assert short.updates[0].span == 4 and size < 90_000
    found = replay(short, one_rank, model)
    assert [finding.outcome for finding in found] == ["ok"] * 3, found
    assert found[1].text.startswith("bit for bit in 10 stages"), found
    first = replay(short, one_rank, model, plant="a mask cell")[1]
    assert "layer 1" in first.text and "position 12 to 15 " in first.text, first


def test_a_loss_is_kept_by_its_names():
    described = describe_function(find_loss())
    assert described["bound"]["entropy_coef"] == 0.01
    assert describe_function(find_function(described)) == described
    with pytest.raises(ValueError, match="has no name in a module"):
        describe_function(lambda outputs, batch: None)
    with pytest.raises(ValueError, match="cannot be found"):
        find_function({"function": "rlworker.algorithms.losses:gone", "bound": {}})


def test_a_folder_without_a_capsule_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds none: .* give a folder that --capsule-steps wrote"):
        read_capsule(tmp_path)


def test_steps_that_are_none_are_refused():
    with pytest.raises(ValueError, match=r"^config: capsule_steps='2:1' must .* set --capsule-steps, such as 2:3"):
        parse_steps("capsule_steps", "2:1", 5)
