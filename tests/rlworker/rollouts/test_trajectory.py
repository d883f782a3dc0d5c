"""Trajectories to a batch: columns worked by hand, and positions of images against transformers."""

from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
import torch
from support.rollout_workers import make_completion, make_completions

from engines.batch.samples import Completion, Image
from engines.images.placeholders import make_placeholders
from engines.models.spec import ModelSpec
from rlworker.checks.tiny.models import make_tiny_model
from rlworker.data.rows import Row
from rlworker.environments.record import CONTEXT, Segment, Trajectory
from rlworker.rollouts.metrics import summarise_groups
from rlworker.rollouts.trajectory import batch_groups, to_batch

ROW = Row("", (9,), "", {})


def make_sequence(marks: str, start: int = 10, top: bool = False) -> tuple[Segment, ...]:
    """A sequence of an id for each mark: ``p`` and ``e`` are written by prompt and environment, a digit is the turn
    that sampled the id. An id's logprob is its negative, its version 100 more, and its likeliest ids the two next."""
    segments = []
    for mark, part in groupby(marks):
        ids = np.arange(start, start := start + len(list(part)), dtype=np.int32)
        if not mark.isdigit():
            segments.append(Segment(ids))
            continue
        spans = tuple((int(one) + 100, 1) for one in ids)
        likeliest = (np.stack([ids + 1, ids + 2], 1), -np.stack([ids, ids], 1).astype(np.float32)) if top else ()
        said = Completion(ids, -ids.astype(np.float32), True, spans, *likeliest)
        segments.append(Segment(ids, int(mark), (), said))
    return tuple(segments)


def batch(*groups: list[Trajectory], vision=None):
    return batch_groups(groups, vision)


def make_episode(*sequences: tuple[Segment, ...], rewards=()) -> Trajectory:
    return Trajectory(ROW, sequences, tuple(rewards))


def test_columns_by_hand():
    rewards = [(1, 1.0), (0, 0.25), (1, 2.0), (2, 4.0)]
    forked = make_episode(make_sequence("pp00e11", 10), make_sequence("ppp2", 20), rewards=rewards)
    silent = make_episode(make_sequence("ppp", 30), rewards=[(CONTEXT, -1.0), (CONTEXT, -0.5)])
    early = make_episode(make_sequence("p0e1", 40), rewards=[(CONTEXT, 8.0), (1, 0.125)])
    made = batch([forked, silent], [early])
    assert made.lengths == (6, 3, 0, 3)
    assert made.inputs.tolist() == [10, 11, 12, 13, 14, 15, 20, 21, 22, 40, 41, 42]
    assert made.targets.tolist() == [11, 12, 13, 14, 15, 16, 21, 22, 23, 41, 42, 43]
    assert made.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1, 2]
    sampled = [12, 13, 15, 16, 23, 41, 43]
    assert made.targets[made.mask].tolist() == sampled
    assert made.rollout_logprobs.tolist() == [-float(t) if t in sampled else 0 for t in made.targets.tolist()]
    assert made.versions.tolist() == [t + 100 if t in sampled else -1 for t in made.targets.tolist()]
    assert made.turn.tolist() == [-1, 0, 0, -1, 1, 1, -1, -1, 2, 0, -1, 1]
    # At a sequence's last sampled id, and where there is none; the others at their ids, one too early at the first.
    assert made.rewards.tolist() == [3.0, 4.0, -1.5, 0.125]
    assert made.turn_rewards.tolist() == [0, 0, 0.25, 0, 0, 0, 0, 0, 0, 8.0, 0, 0]
    assert made.episode.tolist() == [0, 0, 1, 2] and made.group.tolist() == [0, 0, 0, 1]
    types = {name: getattr(made, name).dtype for name in ("rollout_logprobs", "versions", "turn", "turn_rewards")}
    assert list(types.values()) == [torch.float32, torch.int32, torch.int32, torch.float32]


def test_an_early_reward_is_at_the_only_sampled_id():
    made = batch([make_episode(make_sequence("pp0e"), rewards=[(CONTEXT, 8.0), (0, 1.0)])])
    assert made.rewards.tolist() == [9.0] and made.turn_rewards is None
    made = batch([make_episode(make_sequence("pp00"), rewards=[(CONTEXT, 8.0), (0, 1.0)])])
    assert made.rewards.tolist() == [1.0] and made.turn_rewards.tolist() == [0, 8.0, 0]


def test_one_sequence_of_two_turns_is_told_and_so_are_two_of_one_turn():
    turns = batch([make_episode(make_sequence("p0e1"))])
    assert turns.turn.tolist() == [0, -1, 1] and turns.episode.tolist() == [0]
    forked = batch([make_episode(make_sequence("pp"), make_sequence("p0"))])
    assert forked.turn.tolist() == [0] and forked.episode.tolist() == [0, 0]


def test_the_likeliest_ids_are_those_of_sampled_ids_alone():
    """Of several sequences, one of which has none because nothing was sampled; else of all or of none."""
    first, second = make_sequence("pp00e1", 10, top=True), make_sequence("p2", 20, top=True)
    silent = make_episode(make_sequence("ppp", 30))
    made = batch([make_episode(first, second), silent])
    none = [-1, -1]
    assert made.rollout_top_ids.tolist() == [none, [13, 14], [14, 15], none, [16, 17], [22, 23]]
    assert made.rollout_top_logprobs[made.mask].tolist() == [[-12, -12], [-13, -13], [-15, -15], [-21, -21]]
    with pytest.raises(ValueError, match="4 sampled ids and top_ids of 3, expected of all or of none; draw all"):
        batch([make_episode(first, make_sequence("p2", 20))])


def give_routes(sequence: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Give each completion experts of 2 layers, 1 a token: its own number, from 10 on, and the place of the token."""
    given, end, number = [], 0, 9
    for segment in sequence:
        end += len(segment.token_ids)
        if segment.completion:
            number += 1
            routes = np.array([[[number], [place]] for place in range(end - 1)], np.int16)
            segment = replace(segment, completion=replace(segment.completion, routes=routes))
        given.append(segment)
    return tuple(given)


def test_experts_are_those_of_the_first_completion_that_follows_a_token():
    """What comes after the last sample has none, and so has a sequence in which nothing was sampled."""
    turns, fork = give_routes(make_sequence("pp00e11ee", 10)), give_routes(make_sequence("p2", 30))
    made = batch([make_episode(turns, fork), make_episode(make_sequence("ppp", 40))])
    assert made.lengths == (8, 1, 0) and made.routes.dtype == torch.int16
    assert made.routes[:, 0, 0].tolist() == [10, 10, 10, 11, 11, 11, -1, -1, 10]
    assert made.routes[:, 1, 0].tolist() == [0, 1, 2, 3, 4, 5, -1, -1, 0]
    assert batch([make_episode(make_sequence("p0"))]).routes is None
    for other in (make_sequence("pp0"), (fork[0], fork[0], fork[1])):
        with pytest.raises(ValueError, match=r"has the experts of [01] tokens, expected of the 2 before its last"):
            batch([make_episode(fork), make_episode(other)])


def make_image_sequence(model: ModelSpec, *parts: tuple[str, int | Image]) -> tuple[Segment, ...]:
    """A sequence of ``("text", n)``, ``("sampled", n)`` and ``("image", image)``; every sample is a turn."""
    segments, turn = [], 0
    for kind, part in parts:
        ids = np.array(make_placeholders([part], model) if isinstance(part, Image) else range(20, 20 + part), np.int32)
        if kind != "sampled":
            segments.append(Segment(ids, images=(part,) if isinstance(part, Image) else ()))
            continue
        said = Completion(ids, np.zeros(len(ids), np.float32), True, ((0, len(ids)),))
        segments.append(Segment(ids, turn, (), said))
        turn += 1
    return tuple(segments)


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
    first = make_image_sequence(
        model, ("text", 3), ("image", wide), ("text", 2), ("sampled", 4), ("image", tall), ("sampled", 3)
    )
    second = make_image_sequence(model, ("image", small), ("image", wide), ("sampled", 2), ("text", 5), ("sampled", 1))
    silent = make_image_sequence(model, ("text", 1), ("image", tall))
    text = make_image_sequence(model, ("text", 2), ("sampled", 2))
    made = batch([make_episode(first, second), make_episode(silent)], [make_episode(text)], vision=model.vision)
    assert made.images == ((wide, tall), (small, wide), (), ()) and made.lengths[2] == 0
    with torch.device("meta"):
        reference = Qwen2_5_VLModel(AutoConfig.from_pretrained(model.folder))
    for number, sequence in ((0, first), (1, second), (3, text)):
        ids = torch.from_numpy(np.concatenate([segment.token_ids for segment in sequence]))[None].long()
        is_image = (ids == model.vision.image_token).int()
        grids = torch.tensor([image.grid for segment in sequence for image in segment.images])
        want, _ = reference.get_rope_index(ids, is_image, grids)
        one = made.select(number, number + 1)
        assert torch.equal(one.positions, want[:, 0, :-1].T)
        assert (one.image_block >= 0).tolist() == is_image[0, :-1].bool().tolist()
    blocks = made.select(0, 1).image_block
    assert blocks.unique_consecutive().tolist() == [-1, 0, -1, 1, -1]
    with pytest.raises(ValueError, match="a sequence has runs of"):
        batch([make_episode(tuple(replace(segment, images=()) for segment in first))], vision=model.vision)


def test_episodes_without_a_reward_have_a_mean_of_zero():
    episode = make_episode(make_sequence("p0"))
    metrics = summarise_groups([[episode, episode]])
    assert (metrics["reward"], metrics["zero_variance_groups"], metrics["samples"]) == (0.0, 1, 2)


# -- completions of one turn


def test_columns_stand_at_their_tokens():
    from rlworker.trainers.agreement import compare_logprobs

    rows = [Row("ab", (1, 2), "", {}), Row("c", (3,), "", {})]
    completions = [
        ([5, 6], [-0.5, -0.6], 4),
        ([7], [-0.7], 4),
        ([8, 9, 9], [-0.8, -0.9, -1.0], 3),
        ([], [], 3),
    ]
    joined = make_completions(*completions)
    batch = to_batch(rows, joined, [1.0, 0.0, 0.5, 0.25])
    assert batch.lengths == (3, 2, 3, 0)
    assert batch.inputs.tolist() == [1, 2, 5, 1, 2, 3, 8, 9]
    assert batch.targets.tolist() == [2, 5, 6, 2, 7, 8, 9, 9]
    assert batch.mask.tolist() == [False, True, True, False, True, True, True, True]
    assert batch.rollout_logprobs.tolist() == pytest.approx([0, -0.5, -0.6, 0, -0.7, -0.8, -0.9, -1.0])
    assert {name for name in batch.columns() if name.startswith(("rollout_top", "turn", "episode"))} == set()
    assert batch.group.tolist() == [0, 0, 1, 1] and batch.versions.tolist() == [-1, 4, 4, -1, 4, 3, 3, 3]
    trainer = batch.rollout_logprobs + torch.tensor([9.0, 0.1, 0, 9.0, 0, 0, -0.3, 0])
    difference = compare_logprobs(batch, trainer)
    assert difference["logprob_diff_max"] == pytest.approx(0.3)
    assert difference["logprob_diff_mean"] == pytest.approx(0.4 / 6)


def test_rows_with_other_numbers_of_completions_are_refused():
    rows = [Row("", (1,), "", {})] * 2
    with pytest.raises(ValueError, match="3 completions for 2 rows, expected equally many for each row"):
        to_batch(rows, make_completions(*[([5], [-1.0], 0)] * 3), [0.0] * 3)


def test_weights_that_changed_within_a_completion_are_told_token_by_token():
    spanned = Completion(np.array([5, 6, 7], np.int32), np.zeros(3, np.float32), True, ((4, 1), (5, 2)))
    other = make_completion([8], [-1.0], version=2)
    batch = to_batch([Row("", (1, 2), "", {})], [spanned, other], [0.0, 0.0])
    assert batch.versions.tolist() == [-1, 4, 5, 5, -1, 2]


def test_logprobs_of_some_completions_alone_are_refused():
    rows = [Row("ab", (1, 2), "", {}), Row("c", (3,), "", {})]
    with pytest.raises(ValueError, match=r"3 sampled ids and logprobs of 2, expected of all or of none; draw all"):
        to_batch(rows, make_completions(([5, 6], [-0.5, -0.6]), ([7],)), [1.0, 0.0])
    greedy = to_batch(rows, make_completions(([5, 6],), ([7],)), [1.0, 0.0])
    assert not greedy.rollout_logprobs.any() and greedy.mask.tolist() == [False, True, True, True]
