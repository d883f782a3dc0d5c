"""Metrics and samples of what a step has drawn."""

import torch

from rlworker.rollouts.to_batch import PromptGroup

SAMPLES_KEPT = 8
"""Samples kept of a step that is evaluated."""


def summarise_groups(groups: list[PromptGroup]) -> dict[str, float]:
    """Summarise what was sampled and rewarded, over every group that a step has drawn."""
    samples = [sample for group in groups for sample in group.completions]
    rewards = torch.tensor([group.rewards for group in groups])
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std(dim=1).mean()) if rewards.shape[1] > 1 else 0.0,
        "groups": len(groups),
        "zero_variance_groups": sum(group.has_zero_variance for group in groups),
        "completion_tokens": sum(len(sample.token_ids) for sample in samples) / len(samples),
        "truncated": sum(not sample.finished for sample in samples) / len(samples),
        "samples": len(samples),
    }


def pick_samples(groups: list[PromptGroup]) -> list[dict]:
    """Pick the first completion of the first prompts."""
    return [
        {"prompt": group.row.prompt, "completion": group.texts[0], "answer": group.row.answer}
        | {"reward": group.rewards[0], "version": group.completions[0].version}
        | ({"images": [image.path for image in group.row.images]} if group.row.images else {})
        for group in groups[:SAMPLES_KEPT]
    ]
