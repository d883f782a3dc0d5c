"""The metrics of a step."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from engines.batch.batch import TrainBatch


def complete_step(metrics: dict[str, float], version: int, times: dict[str, float]) -> dict[str, float]:
    """Complete a step's metrics, with the version of the weights that sampled it, and the seconds that everything took.

    Args:
        metrics: ``summarise_groups`` of the step, and further metrics.
    """
    tokens = metrics["completion_tokens"] * metrics["samples"]
    return metrics | {"version": version, "tokens_per_second": tokens / times["time_step"]} | times


def average(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Average the metrics of optimizer steps, and of a name that ends in ``_max`` take the largest."""
    parts = list(parts)
    means = {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
    return means | {name: max(part[name] for part in parts) for name in means if name.endswith("_max")}


def measure_policy_kl(batch: TrainBatch, logprobs: Tensor) -> dict[str, float]:
    """Estimate KL(rollout's policy || trained policy) of a mini-batch by k3, ``r - 1 - log r`` with ``r`` the ratio of
    the policies (Schulman, "Approximating KL Divergence", 2020); nothing where one step takes the whole rollout.

    Args:
        logprobs: ``[N]``, of the policy before the optimizer step.
    """
    if batch.old_logprobs is None:
        return {}
    log_ratio = (logprobs - batch.old_logprobs)[batch.mask].double()
    return {"policy_kl": float((log_ratio.expm1() - log_ratio).mean())}


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
