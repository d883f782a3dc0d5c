"""Episodes to a batch, by hand, against completions where they are one turn, and with images against transformers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.rollout_workers import make_completion

from engines.batch.samples import Completion, Completions, Image, TokenSequence
from engines.images.placeholders import make_placeholders
from engines.models.spec import ModelSpec
from rlworker.checks.tiny_models import make_tiny_model
from rlworker.data.rows import Row
from rlworker.rollouts.trajectory import batch_sequences, to_batch


def play(marks: str, start: int = 10, rewards=()) -> TokenSequence:
    """A sequence of an id for each mark: ``p`` and ``e`` are written by prompt and environment, a digit is the turn
    that sampled the id. Logprobs and versions stand where nothing was sampled too: they must not be read there."""
    sampled = np.array([mark.isdigit() for mark in marks])
    turns = np.array([int(mark) if mark.isdigit() else 77 for mark in marks], np.int32)
    token_ids = np.arange(start, start + len(marks), dtype=np.int32)
    return TokenSequence(token_ids, sampled, -token_ids.astype(np.float32), token_ids + 100, turns, tuple(rewards))


FORKED = [play("pp00e11", 10, [(6, 1.0), (3, 0.25), (2, 0.5), (6, 2.0)]), play("ppp2", 20, [(3, 4.0)])]
SILENT = [play("ppp", 30, [(-1, -1.0), (-1, -0.5)])]
EARLY = [play("p0e0", 40, [(-1, 8.0), (3, 0.125)])]


def test_columns_by_hand():
    batch = batch_sequences([[FORKED, SILENT], [EARLY]])
    assert batch.lengths == (6, 3, 0, 3)
    assert batch.inputs.tolist() == [10, 11, 12, 13, 14, 15, 20, 21, 22, 40, 41, 42]
    assert batch.targets.tolist() == [11, 12, 13, 14, 15, 16, 21, 22, 23, 41, 42, 43]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1, 2]
    sampled = [12, 13, 15, 16, 23, 41, 43]
    assert batch.targets[batch.mask].tolist() == sampled
    assert batch.rollout_logprobs.tolist() == [-float(t) if t in sampled else 0 for t in batch.targets.tolist()]
    assert batch.versions.tolist() == [t + 100 if t in sampled else -1 for t in batch.targets.tolist()]
    assert batch.turn.tolist() == [-1, 0, 0, -1, 1, 1, -1, -1, 2, 0, -1, 0]
    # At a sequence's last sampled id, and where there is none; the others at their ids, one too early at the first.
    assert batch.rewards.tolist() == [3.0, 4.0, -1.5, 0.125]
    assert batch.turn_rewards.tolist() == [0, 0.5, 0.25, 0, 0, 0, 0, 0, 0, 8.0, 0, 0]
    assert batch.episode.tolist() == [0, 0, 1, 2] and batch.group.tolist() == [0, 0, 0, 1]
    types = {name: getattr(batch, name).dtype for name in ("rollout_logprobs", "versions", "turn", "turn_rewards")}
    assert list(types.values()) == [torch.float32, torch.int32, torch.int32, torch.float32]


def test_an_early_reward_is_at_the_only_sampled_id():
    batch = batch_sequences([[[play("pp0e", 10, [(-1, 8.0), (2, 1.0)])]]])
    assert batch.rewards.tolist() == [9.0] and batch.turn_rewards is None


def test_one_sequence_of_two_turns_is_told_and_so_are_two_of_one_turn():
    turns = batch_sequences([[[play("p0e1")]]])
    assert turns.turn.tolist() == [0, -1, 1] and turns.episode.tolist() == [0]
    forked = batch_sequences([[[play("pp"), play("p0")]]])
    assert forked.turn.tolist() == [0] and forked.episode.tolist() == [0, 0]


def test_one_turn_is_a_batch_of_completions():
    """To the last bit, and with the columns of one turn alone."""
    generator = np.random.default_rng(0)
    rows, completions, groups, rewards = [], [], [], []
    for number in range(5):
        prompt = generator.integers(3, 99, generator.integers(1, 6)).astype(np.int32)
        rows.append(Row("", tuple(prompt.tolist()), "", {}))
        groups.append([])
        for _ in range(3):
            size = int(generator.integers(1, 7))
            ids = generator.integers(3, 99, size)
            one = make_completion(ids, generator.random(size, np.float32), version=number)
            top_ids = generator.integers(0, 99, (size, 3)).astype(np.int32)
            one = replace(one, top_ids=top_ids, top_logprobs=generator.random((size, 3), np.float32))
            completions.append(one)
            rewards.append(float(generator.random()))
            length = len(prompt) + size
            sampled = np.arange(length) >= len(prompt)
            played = TokenSequence(
                np.concatenate([prompt, one.token_ids]),
                sampled,
                np.concatenate([np.zeros(len(prompt), np.float32), one.logprobs]),
                np.full(length, number, np.int32),
                np.zeros(length, np.int32),
                ((length - 1, rewards[-1]),),
                top_ids=one.top_ids,
                top_logprobs=one.top_logprobs,
            )
            groups[-1].append([played])
    want, got = to_batch(rows, Completions.join(completions), rewards), batch_sequences(groups)
    assert got.lengths == want.lengths and got.columns().keys() == want.columns().keys()
    for name, column in want.columns().items():
        assert torch.equal(getattr(got, name), column) and getattr(got, name).dtype == column.dtype, name


def test_the_likeliest_ids_are_those_of_sampled_ids_alone():
    """Of several sequences, one of which has none because nothing was sampled; else of all or of none."""
    first, second = play("pp00e1"), play("p2", 20)
    top = np.array([[1, 2], [3, 4], [5, 6]], np.int32)
    first = replace(first, top_ids=top, top_logprobs=-top.astype(np.float32))
    with_top = replace(second, top_ids=top[:1], top_logprobs=-top[:1].astype(np.float32))
    batch = batch_sequences([[[first, with_top], SILENT]])
    none = [-1, -1]
    assert batch.rollout_top_ids.tolist() == [none, [1, 2], [3, 4], none, [5, 6], [1, 2]]
    assert batch.rollout_top_logprobs[batch.mask].tolist() == [[-1, -2], [-3, -4], [-5, -6], [-1, -2]]
    with pytest.raises(ValueError, match=r"number 1 has likeliest ids at 0 places, expected 1"):
        batch_sequences([[[first, second]]])
    with pytest.raises(ValueError, match="at 2 places, expected 3, one for each sampled id"):
        batch_sequences([[[replace(first, top_ids=top[:2])]]])


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (play("0p"), "sequence 1 has a sampled first id"),
        (play(""), r"sequence 1 has columns of .*expected equal lengths from 1"),
        (play("pp0", rewards=[(1, 1.0)]), "sequence 1 has a reward at place 1, expected -1 or that of a sampled id"),
        (play("pp0", rewards=[(3, 1.0)]), "reward at place 3"),
        (play("p00", rewards=[(-2, 1.0)]), "reward at place -2"),
    ],
)
def test_impossible_sequences_are_refused(sequence, message):
    with pytest.raises(ValueError, match=message):
        batch_sequences([[EARLY], [[sequence]]])


def test_columns_of_other_lengths_and_empty_episodes_are_refused():
    one = play("pp0")
    short = TokenSequence(one.token_ids, one.sampled, one.logprobs[1:], one.versions, one.turns)
    with pytest.raises(ValueError, match=r"sequence 0 has columns of .*'logprobs': 2"):
        batch_sequences([[[short]]])
    with pytest.raises(ValueError, match="episode 1 has no sequence, expected one or more"):
        batch_sequences([[EARLY, []]])


def play_images(model: ModelSpec, *parts: tuple[str, int | Image]) -> TokenSequence:
    """A sequence of ``("text", n)``, ``("sampled", n)`` and ``("image", image)``."""
    ids, sampled, images = [], [], []
    for kind, part in parts:
        if isinstance(part, Image):
            images.append(part)
        piece = make_placeholders([part], model) if isinstance(part, Image) else range(20, 20 + part)
        ids += piece
        sampled += [kind == "sampled"] * len(piece)
    token_ids, zeros = np.array(ids, np.int32), np.zeros(len(ids), np.int32)
    return TokenSequence(token_ids, np.array(sampled), zeros.astype(np.float32), zeros, zeros, images=tuple(images))


def test_images_of_later_turns_have_the_positions_of_transformers(tmp_path):
    """An image that comes after sampled text, two that come one after another, one that is seen again after a fork, and
    one of a sequence in which nothing was sampled."""
    from transformers import AutoConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    model = ModelSpec.from_folder(make_tiny_model(tmp_path, "qwen2_5_vl"))
    assert model.vision
    wide, tall, small = (
        Image("a.png", str(grid), (1, 1), (1, *grid), f"row {grid}") for grid in ((4, 10), (12, 2), (2, 2))
    )
    first = play_images(
        model, ("text", 3), ("image", wide), ("text", 2), ("sampled", 4), ("image", tall), ("sampled", 3)
    )
    second = play_images(model, ("image", small), ("image", wide), ("sampled", 2), ("text", 5), ("sampled", 1))
    silent, text = play_images(model, ("text", 1), ("image", tall)), play_images(model, ("text", 2), ("sampled", 2))
    batch = batch_sequences([[[first, second], [silent]], [[text]]], model.vision)
    assert batch.images == ((wide, tall), (small, wide), (), ()) and batch.lengths[2] == 0
    with torch.device("meta"):
        reference = Qwen2_5_VLModel(AutoConfig.from_pretrained(model.folder))
    for number, played in ((0, first), (1, second), (3, text)):
        ids = torch.from_numpy(played.token_ids)[None].long()
        is_image = (ids == model.vision.image_token).int()
        grids = torch.tensor([image.grid for image in played.images])
        want, _ = reference.get_rope_index(ids, is_image, grids)
        one = batch.select(number, number + 1)
        assert torch.equal(one.positions, want[:, 0, :-1].T)
        assert (one.image_block >= 0).tolist() == is_image[0, :-1].bool().tolist()
    blocks = batch.select(0, 1).image_block
    assert blocks.unique_consecutive().tolist() == [-1, 0, -1, 1, -1]
    with pytest.raises(ValueError, match="a sequence has runs of"):
        batch_sequences([[[replace(first, images=())]]], model.vision)


def test_episodes_without_a_reward_have_a_mean_of_zero():
    from rlworker.environments.record import Segment, Trajectory
    from rlworker.rollouts.metrics import summarise_groups
    from rlworker.rollouts.trajectory import TrajectoryGroup

    row, said = Row("1", (1,), "", {}), Completion(np.asarray([3], np.int32), np.zeros(1, np.float32), True, ((0, 1),))
    record = Trajectory(row, ((Segment((1,)), Segment(said.token_ids, 0, (), said)),))
    metrics = summarise_groups([TrajectoryGroup.collect(row, [record, record])])
    assert (metrics["reward"], metrics["zero_variance_groups"], metrics["samples"]) == (0.0, 1, 2)
