"""Metrics and samples of what a step has drawn."""

from collections.abc import Sequence

import numpy as np
import torch

from rlworker.rollouts.to_batch import Group, PromptGroup

SAMPLES_KEPT = 8
"""Samples kept of a step, where some are."""


def summarise_groups(groups: Sequence[Group]) -> dict[str, float]:
    """Summarise what was sampled and rewarded, over every group that a step has drawn."""
    lengths = np.concatenate([group.completions.lengths for group in groups])
    finished = np.concatenate([group.completions.finished for group in groups])
    rewards = torch.tensor([group.rewards for group in groups])
    samples = rewards.numel()
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std(dim=1).mean()) if rewards.shape[1] > 1 else 0.0,
        "groups": len(groups),
        "zero_variance_groups": sum(group.has_zero_variance for group in groups),
        "completion_tokens": int(lengths.sum()) / samples,
        "truncated": int((~finished).sum()) / max(len(finished), 1),
        "samples": samples,
    }


def pick_completions(groups: Sequence[PromptGroup]) -> list[dict]:
    """Pick the first completion of each prompt."""
    return [
        {"prompt": group.row.prompt, "completion": group.texts[0], "answer": group.row.answer}
        | {"reward": group.rewards[0], "version": group.completions[0].version}
        | ({"images": [image.path for image in group.row.images]} if group.row.images else {})
        for group in groups
    ]
