"""What a step says about itself in numbers."""

import torch
from torch import Tensor

from engines.batch import TrainBatch
from engines.interfaces import StepResult
from rlworker.rollout import Group

SAMPLES_KEPT = 8
"""Samples kept of a step that is evaluated."""


def of_update(results: list[StepResult], tokens: float, prefix: str = "") -> dict[str, float]:
    """Means over the tokens of an optimizer step, from each replica's sums."""
    metrics = {f"{prefix}grad_norm": results[0].grad_norm, f"{prefix}lr": results[0].lr}
    for name in results[0].metrics:
        values = [result.metrics[name] for result in results]
        metrics[name] = max(values) if name.endswith("_max") else sum(values) / tokens
    return metrics


def over_mini_batches(parts: list[dict[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps of one rollout."""
    means = {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
    return means | {name: max(part[name] for part in parts) for name in means if name.endswith("_max")}


def of_groups(groups: list[Group]) -> dict[str, float]:
    """What was sampled and rewarded, of every group that a step has drawn."""
    samples = [sample for group in groups for sample in group.completions]
    rewards = torch.tensor([group.rewards for group in groups])
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std(dim=1).mean()) if rewards.shape[1] > 1 else 0.0,
        "groups_alike": sum(group.is_alike for group in groups) / len(groups),
        "completion_tokens": sum(len(sample.token_ids) for sample in samples) / len(samples),
        "truncated": sum(not sample.finished for sample in samples) / len(samples),
        "samples": len(samples),
    }


def of_step(batch: TrainBatch, drawn: dict[str, float], times: dict[str, float]) -> dict[str, float]:
    """What a step learned from, and the seconds that everything took.

    Args:
        drawn: ``of_groups`` of the step.
    """
    tokens = drawn["completion_tokens"] * drawn["samples"]
    metrics = {"version": int(batch.versions.min()), "tokens_per_second": tokens / times["time_step"]}
    if batch.penalties is not None:
        metrics["penalty"] = float(batch.penalties[batch.mask].mean())
    if batch.values is not None:  # how much of the returns the critic knew before the update
        returns, values = batch.returns[batch.mask], batch.values[batch.mask]
        metrics["explained_variance"] = 1 - _variance(returns - values) / max(_variance(returns), 1e-8)
        metrics["value_mean"] = float(values.mean())
    return metrics | times


def _variance(x: Tensor) -> float:
    return float(x.var(correction=0))


def some_samples(groups: list[Group]) -> list[dict]:
    """The first completion of the first prompts."""
    return [
        {"prompt": group.row.prompt, "completion": group.texts[0], "answer": group.row.answer}
        | {"reward": group.rewards[0], "version": group.completions[0].version}
        | ({"images": [image.path for image in group.row.images]} if group.row.images else {})
        for group in groups[:SAMPLES_KEPT]
    ]
