"""The metrics of a step."""

from torch import Tensor

from engines.batch.batch import TrainBatch
from engines.batch.shard import Outputs
from engines.interfaces import LossFn, StepResult
from rlworker.cluster.train_group import WorkerGroup


def take_optimizer_step(
    group: WorkerGroup, batch: TrainBatch, loss: LossFn, denominator: float, prefix: str = ""
) -> tuple[dict[str, float], Outputs]:
    """Take one optimizer step on ``sum(loss) / denominator``: its metrics, and the outputs ``[N]`` from before it."""
    results, outputs = group.train_step(batch, loss, denominator)
    sharing = {} if prefix else {"prompt_sharing": group.prompt_sharing}
    return average_update(results, float(batch.mask.sum()), prefix) | sharing, outputs


def average_update(results: list[StepResult], tokens: float, prefix: str = "") -> dict[str, float]:
    """Take the means over the tokens of an optimizer step, from each replica's sums."""
    metrics = {f"{prefix}grad_norm": results[0].grad_norm, f"{prefix}lr": results[0].lr}
    for name in results[0].metrics:
        values = [result.metrics[name] for result in results]
        metrics[name] = max(values) if name.endswith("_max") else sum(values) / tokens
    return metrics


def average_mini_batches(parts: list[dict[str, float]]) -> dict[str, float]:
    """Take the means over the optimizer steps of one rollout."""
    means = {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
    return means | {name: max(part[name] for part in parts) for name in means if name.endswith("_max")}


def complete_step(metrics: dict[str, float], version: int, times: dict[str, float]) -> dict[str, float]:
    """Complete a step's metrics, with the version of the weights that sampled it, and the seconds that everything took.

    Args:
        metrics: ``summarise_groups`` of the step, and whatever else it has.
    """
    tokens = metrics["completion_tokens"] * metrics["samples"]
    return metrics | {"version": version, "tokens_per_second": tokens / times["time_step"]} | times


def measure_batch(batch: TrainBatch) -> dict[str, float]:
    """Measure what a step learned from: penalties and a critic's values, where it has them."""
    metrics = {}
    if batch.penalties is not None:
        metrics["penalty"] = float(batch.penalties[batch.mask].mean())
    if batch.values is not None:  # how much of the returns the critic knew before the update
        returns, values = batch.require_column("returns")[batch.mask], batch.values[batch.mask]
        metrics["explained_variance"] = 1 - _compute_variance(returns - values) / max(_compute_variance(returns), 1e-8)
        metrics["value_mean"] = float(values.mean())
    return metrics


def _compute_variance(x: Tensor) -> float:
    return float(x.var(correction=0))
