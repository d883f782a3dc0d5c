import pytest
import torch

from engines.batch import TrainBatch
from rlworker.advantages import grpo


def test_grpo_by_hand():
    """Group 0 has rewards 1, 0, 0, 1: mean 1/2, sample deviation sqrt(1/3). Group 1 has 2, 2: all alike."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 2.0, 2.0])
    batch = TrainBatch.from_ids(
        [[5, 6, 7]] * 5 + [[5, 6]], [1] * 6, rewards=rewards, group=torch.tensor([0] * 4 + [1] * 2)
    )
    unit = 0.5 / ((1 / 3) ** 0.5 + 1e-4)
    want = [unit, unit, -unit, -unit, -unit, -unit, unit, unit, 0.0, 0.0, 0.0]
    assert grpo(batch).tolist() == pytest.approx(want)


def test_a_group_of_one_has_no_advantage():
    batch = TrainBatch.from_ids([[5, 6]], [1], rewards=torch.tensor([3.0]), group=torch.tensor([0]))
    assert grpo(batch).tolist() == [0.0]
