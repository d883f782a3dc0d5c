"""Advantages: plain functions ``advantage(batch) -> [N]`` of what was rewarded."""

from collections.abc import Callable

import torch
from torch import Tensor

from engines.batch import TrainBatch

AdvantageFn = Callable[[TrainBatch], Tensor]


def grpo(batch: TrainBatch, eps: float = 1e-4) -> Tensor:
    """Group-relative advantage (DeepSeekMath, arXiv:2402.03300, section 4.1.2).

    ``(reward - mean of the prompt's group) / (standard deviation of the group + eps)``, the same for every token of a
    completion. The deviation is the sample's (n - 1); a group of one has none and gets an advantage of zero.

    Args:
        batch: with ``rewards`` and ``group``, both ``[B]``; groups are numbered from 0.

    Returns:
        ``[N]`` float32.
    """
    group, rewards = batch.group, batch.rewards.float()
    groups = int(group.max()) + 1
    count = torch.bincount(group, minlength=groups).float()
    mean = torch.zeros(groups).index_add_(0, group, rewards) / count.clamp_min(1)
    centred = rewards - mean[group]
    variance = torch.zeros(groups).index_add_(0, group, centred**2) / (count - 1).clamp_min(1)
    return batch.per_token(centred / (variance.sqrt() + eps)[group])
