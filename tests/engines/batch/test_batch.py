import pickle

import numpy as np
import pytest
import torch

from engines.batch.batch import COLUMNS, TrainBatch


def make(**columns) -> TrainBatch:
    return TrainBatch.from_ids([[7, 8, 9], [4], [1, 2, 3, 5]], [1, 1, 2], **columns)


def test_the_one_shift():
    batch = make()
    assert batch.lengths == (2, 0, 3)
    assert batch.inputs.tolist() == [7, 8, 1, 2, 3]
    assert batch.targets.tolist() == [8, 9, 2, 3, 5]
    assert batch.positions.tolist() == [0, 1, 0, 1, 2]
    assert batch.mask.tolist() == [True, True, False, True, True]

    assert batch.repeat_per_token(torch.tensor([1.0, 2.0, 3.0])).tolist() == [1, 1, 3, 3, 3]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"advantages": torch.zeros(4)}, "advantages has 4 entries, the batch has 5 tokens"),
        ({"rewards": torch.zeros(5)}, "rewards has 5 entries, the batch has 3 sequences"),
        ({"advantages": torch.zeros(5, 1)}, r"advantages has shape \(5, 1\), expected \[5\]"),  # would broadcast
        ({"rollout_top_ids": torch.zeros(5)}, r"rollout_top_ids has shape \(5,\), expected \[5, k\]"),
    ],
)
def test_a_column_of_another_shape_is_refused(columns, message):
    with pytest.raises(ValueError, match=message):
        make(**columns)


def test_columns_of_several_numbers_a_target_say_so():
    top = torch.arange(10).view(5, 2)
    batch = make(rollout_top_ids=top)
    assert batch.gather(np.array([2, 0])).rollout_top_ids.tolist() == [[4, 5], [6, 7], [8, 9], [0, 1], [2, 3]]
    parts = [part.rollout_top_ids.tolist() for part in batch.cut([0, 1, 2, 3])]
    assert parts == [top[:2].tolist(), [], top[2:].tolist()]
    assert torch.equal(pickle.loads(pickle.dumps(batch)).rollout_top_ids, top)


def test_sequences_are_gathered_with_all_that_is_theirs():
    batch = make(rewards=torch.tensor([0.5, 1.0, 1.5]), advantages=torch.arange(5.0))
    gathered = batch.gather(np.array([2, 1, 0]))
    assert gathered.lengths == (3, 0, 2) and gathered.inputs.tolist() == [1, 2, 3, 7, 8]
    assert gathered.targets.tolist() == [2, 3, 5, 8, 9] and gathered.mask.tolist() == [False, True, True, True, True]
    assert gathered.advantages.tolist() == [2, 3, 4, 0, 1] and gathered.rewards.tolist() == [1.5, 1.0, 0.5]
    assert batch.gather(np.arange(3)) is batch


def test_pickling_sends_a_cut_without_the_rest():
    sequences = [list(range(50)) for _ in range(200)]
    batch = TrainBatch.from_ids(sequences, [1] * 200, advantages=torch.randn(200 * 49))
    one = batch.select(3, 4)
    sent = pickle.dumps(one)
    assert len(sent) < 49 * 8 * 5
    back = pickle.loads(sent)
    assert back.lengths == one.lengths
    for name in COLUMNS:
        mine, theirs = getattr(back, name), getattr(one, name)
        assert (mine is None) == (theirs is None) and (mine is None or torch.equal(mine, theirs))


MARKS = [[False, True, False, True], [False], [False, False, True]]


def make_episodes(**columns) -> TrainBatch:
    episode = torch.tensor([5, 5, 2])
    return TrainBatch.from_ids([[7, 8, 9, 6], [4], [1, 2, 3]], sampled=MARKS, episode=episode, **columns)


def test_each_id_says_whether_it_was_sampled():
    batch = make_episodes()
    assert batch.lengths == (3, 0, 2) and batch.targets.tolist() == [8, 9, 6, 2, 3]
    assert batch.mask.tolist() == [True, False, True, False, True]
    prompts = TrainBatch.from_ids([[7, 8, 9], [4]], [2, 1])
    marked = TrainBatch.from_ids([[7, 8, 9], [4]], sampled=[[False, False, True], np.array([False])])
    assert all(torch.equal(getattr(prompts, name), column) for name, column in marked.columns().items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give either prompt_lengths or sampled"),
        ({"prompt_lengths": [1, 1], "sampled": [[False, True], [False]]}, "give either prompt_lengths or sampled"),
        ({"sampled": [[False, True], [True]]}, "sequence 1 has 1 ids and 1 entries .* the first False"),
        ({"sampled": [[False], [False]]}, "sequence 0 has 2 ids and 1 entries"),
        ({"prompt_lengths": [1, 2]}, "sequence 1 has 1 ids and a prompt of 2"),
        ({"prompt_lengths": [0, 1]}, "sequence 0 has 2 ids and a prompt of 0"),
        ({"prompt_lengths": [1]}, "shorter"),
        ({"sampled": [[False, True]]}, "shorter"),
    ],
)
def test_marks_and_prompts_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TrainBatch.from_ids([[1, 2], [3]], **arguments)
    with pytest.raises(ValueError, match="sequence 0 has 0 ids and 0 entries"):
        TrainBatch.from_ids([[]], sampled=[[]])


def test_episodes_are_numbered_in_their_order():
    batch = make_episodes()
    assert batch.num_episodes == 2 and batch.number_episodes().tolist() == [0, 0, 1]
    assert batch.sum_per_episode(torch.tensor([1.0, 2.0, 4.0])).tolist() == [3.0, 4.0]
    alone = make()
    assert alone.num_episodes == 3 and alone.number_episodes().tolist() == [0, 1, 2]
    assert alone.sum_per_episode(torch.tensor([1.0, 2.0, 4.0])).tolist() == [1.0, 2.0, 4.0]
    with pytest.raises(ValueError, match="sequences of an episode do not follow one another"):
        batch.gather(np.array([0, 2, 1])).number_episodes()


def test_no_cut_goes_through_an_episode():
    sizes = [1, 3, 1, 2, 1, 1]  # sequences of each episode: parts of two, from sequences 0, 4 and 7 on
    episode = torch.arange(6).repeat_interleave(torch.tensor(sizes))
    sequences = [list(range(2 + i)) for i in range(sum(sizes))]
    batch = TrainBatch.from_ids(sequences, [1] * 9, episode=episode, rewards=torch.arange(9.0))
    assert [part.rewards.tolist() for part in batch.split(3)] == [[0, 1, 2, 3], [4, 5, 6], [7, 8]]
    assert [part.lengths for part in batch.split(3)] == [(1, 2, 3, 4), (5, 6, 7), (8, 9)]
    assert [len(part) for part in batch.split(6)] == sizes
    parts = batch.split(3)
    for name, column in batch.columns().items():
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), column), name
    with pytest.raises(ValueError, match="6 episodes cannot be split over 7 parts; use more episodes"):
        batch.split(7)
    with pytest.raises(ValueError, match="3 sequences cannot be split over 4"):
        make().split(4)


def test_cuts_are_views_of_what_lies_between_their_bounds():
    batch = make_episodes(rewards=torch.tensor([0.5, 1.0, 1.5]))
    first, none, last = batch.cut([0, 2, 2, 3])
    assert (first.lengths, none.lengths, last.lengths) == ((3, 0), (), (2,))
    assert last.inputs.tolist() == [1, 2] and last.targets.tolist() == [2, 3] and last.rewards.tolist() == [1.5]
    assert first.episode.tolist() == [5, 5] and len(none.inputs) == 0
    assert last.inputs.untyped_storage().data_ptr() == batch.inputs.untyped_storage().data_ptr()
