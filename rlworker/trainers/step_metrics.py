"""The metrics of a step."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from engines.batch.batch import TrainBatch
from engines.models.spec import ModelSpec
from rlworker.cluster.rollout_group import Rollouts
from rlworker.cluster.train_group import StartingGroup
from rlworker.cluster.watch import wait_for

_RATES = {"actor": "lr", "critic": "critic_lr"}
"""Role -> metric of the optimizer steps that it took."""


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


def measure_flops(
    models: Mapping[str, ModelSpec], batch: TrainBatch, metrics: Mapping[str, float], seconds: float
) -> dict[str, float]:
    """Measure the rate of an update: the FLOPs of the models that took optimizer steps on a batch, by the seconds of
    all ranks; nothing where none did.

    Args:
        models: by role. metrics: of the update, with the prompts' sharing and the epochs.
    """
    learners = [models[role] for role, rate in _RATES.items() if rate in metrics]
    if not learners:
        return {}
    computed = batch.num_tokens / metrics["prompt_sharing"]
    flops = sum(model.count_training_flops(batch.lengths, computed) for model in learners)
    return {"flops_per_second": metrics.get("epochs", 1) * flops / seconds}


def measure_memory(processes: Iterable[object]) -> dict[str, float]:
    """Measure the largest memory of a training process and of a rollout engine so far, in GB (10^9 bytes)."""
    peaks: dict[str, float] = {}
    for group in processes:
        if isinstance(group, StartingGroup | Rollouts):
            name = "memory_gb" if isinstance(group, StartingGroup) else "rollout_memory_gb"
            found = wait_for([worker.measure_peak_memory.remote() for worker in group.name_workers().values()])
            peaks[name] = max([peaks.get(name, 0.0), *(peak / 1e9 for peak in found)])
    return peaks


def _compute_variance(x: Tensor) -> float:
    return float(x.var(correction=0))
