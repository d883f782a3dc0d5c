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


def test_per_token_repeats_over_empty_sequences_too():
    assert make().repeat_per_token(torch.tensor([1.0, 2.0, 3.0])).tolist() == [1, 1, 3, 3, 3]


def test_a_column_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="advantages has 4 entries, the batch has 5 tokens"):
        make(advantages=torch.zeros(4))
    with pytest.raises(ValueError, match="rewards has 5 entries, the batch has 3 sequences"):
        make(rewards=torch.zeros(5))


def test_a_column_that_would_broadcast_is_refused():
    with pytest.raises(ValueError, match=r"advantages has shape \(5, 1\), expected \[5\]"):
        make(advantages=torch.zeros(5, 1))


@pytest.mark.parametrize(("ids", "prompt"), [([], 1), ([1, 2], 0), ([1, 2], 3)])
def test_impossible_prompts_are_refused(ids, prompt):
    with pytest.raises(ValueError, match="sequence 0"):
        TrainBatch.from_ids([ids], [prompt])


def test_every_cut_puts_together_what_it_cut():
    sequences = [list(range(3 + i)) for i in range(7)]
    batch = TrainBatch.from_ids(sequences, [1] * 7, rewards=torch.arange(7.0), group=torch.arange(7))
    parts = batch.split(3)
    assert sum((p.lengths for p in parts), ()) == batch.lengths
    for name, column in batch.columns().items():
        assert torch.equal(torch.cat([getattr(p, name) for p in parts]), column), name


def test_sequences_are_gathered_with_all_that_is_theirs():
    batch = make(rewards=torch.tensor([0.5, 1.0, 1.5]), advantages=torch.arange(5.0))
    gathered = batch.gather(np.array([2, 1, 0]))
    assert gathered.lengths == (3, 0, 2) and gathered.inputs.tolist() == [1, 2, 3, 7, 8]
    assert gathered.targets.tolist() == [2, 3, 5, 8, 9] and gathered.mask.tolist() == [False, True, True, True, True]
    assert gathered.advantages.tolist() == [2, 3, 4, 0, 1] and gathered.rewards.tolist() == [1.5, 1.0, 0.5]
    assert batch.gather(np.arange(3)) is batch


def test_too_few_sequences_to_split_is_refused():
    with pytest.raises(ValueError, match="3 sequences cannot be split over 4"):
        make().split(4)


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
