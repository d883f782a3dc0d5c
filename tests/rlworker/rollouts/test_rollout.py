from dataclasses import replace

import numpy as np
import pytest
import torch
from support.rollout_workers import make_completion, make_completions

from engines.batch.samples import Completion
from rlworker.data.rows import Row
from rlworker.rollouts.trajectory import to_batch


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


def test_the_likeliest_ids_stand_at_sampled_targets_alone():
    rows = [Row("ab", (1, 2), "", {}), Row("c", (3,), "", {})]
    completions = make_completions(([5, 6], [-0.5, -0.6], 0), ([7], [-0.7], 0))
    ids = np.array([[5, 9, 8], [6, 5, -1], [4, 7, 2]], np.int32)
    logprobs = np.array([[-0.5, -1, -2], [-0.6, -1, -np.inf], [-0.1, -0.7, -3]], np.float32)
    parts = zip(completions, (ids[:2], ids[2:]), (logprobs[:2], logprobs[2:]), strict=True)
    likeliest = [replace(one, top_ids=top, top_logprobs=scores) for one, top, scores in parts]
    batch = to_batch(rows, likeliest, [1.0, 0.0])
    assert batch.rollout_top_ids.tolist() == [[-1] * 3, [5, 9, 8], [6, 5, -1], [4, 7, 2]]
    assert torch.equal(batch.rollout_top_logprobs[batch.mask], torch.from_numpy(logprobs))
    assert batch.rollout_top_logprobs[0].tolist() == [-float("inf")] * 3
    types = batch.rollout_top_ids.dtype, batch.rollout_top_logprobs.dtype
    assert types == (torch.int32, torch.float32)
    with pytest.raises(ValueError, match="1 of 2 have the logprobs of the likeliest ids, expected all or none"):
        to_batch(rows, [likeliest[0], completions[1]], [1.0, 0.0])


def test_logprobs_of_some_completions_alone_are_refused():
    rows = [Row("ab", (1, 2), "", {}), Row("c", (3,), "", {})]
    with pytest.raises(ValueError, match=r"3 sampled ids and logprobs of 2, expected of all or of none; draw all"):
        to_batch(rows, make_completions(([5, 6], [-0.5, -0.6]), ([7],)), [1.0, 0.0])
    greedy = to_batch(rows, make_completions(([5, 6],), ([7],)), [1.0, 0.0])
    assert not greedy.rollout_logprobs.any() and greedy.mask.tolist() == [False, True, True, True]
