"""The metrics of a step."""

from torch import Tensor

from engines.batch.batch import TrainBatch


def complete_step(metrics: dict[str, float], version: int, times: dict[str, float]) -> dict[str, float]:
    """Complete a step's metrics, with the version of the weights that sampled it, and the seconds that everything took.

    Args:
        metrics: ``summarise_groups`` of the step, and further metrics.
    """
    tokens = metrics["completion_tokens"] * metrics["samples"]
    return metrics | {"version": version, "tokens_per_second": tokens / times["time_step"]} | times


def measure_batch(batch: TrainBatch) -> dict[str, float]:
    """Measure a step's penalties and critic's values, where it has them."""
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
