"""What a step says about itself in numbers."""

import torch
from torch import Tensor

from engines.batch.batch import TrainBatch
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
        "groups": len(groups),
        "zero_variance_groups": sum(group.is_alike for group in groups),
        "completion_tokens": sum(len(sample.token_ids) for sample in samples) / len(samples),
        "truncated": sum(not sample.finished for sample in samples) / len(samples),
        "samples": len(samples),
    }


def of_step(metrics: dict[str, float], version: int, times: dict[str, float]) -> dict[str, float]:
    """A step's metrics, with the version of the weights that sampled it, and the seconds that everything took.

    Args:
        metrics: ``of_groups`` of the step, and whatever else it has.
    """
    tokens = metrics["completion_tokens"] * metrics["samples"]
    return metrics | {"version": version, "tokens_per_second": tokens / times["time_step"]} | times


def of_batch(batch: TrainBatch) -> dict[str, float]:
    """What a step learned from, where it has penalties or a critic's values."""
    metrics = {}
    if batch.penalties is not None:
        metrics["penalty"] = float(batch.penalties[batch.mask].mean())
    if batch.values is not None:  # how much of the returns the critic knew before the update
        returns, values = batch.returns[batch.mask], batch.values[batch.mask]
        metrics["explained_variance"] = 1 - _variance(returns - values) / max(_variance(returns), 1e-8)
        metrics["value_mean"] = float(values.mean())
    return metrics


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
