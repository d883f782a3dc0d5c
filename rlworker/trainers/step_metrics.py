"""The metrics of a step."""

import math
from collections.abc import Iterable, Mapping

from torch import Tensor

from engines.batch.batch import TrainBatch
from engines.config import MegatronConfig
from engines.models.spec import ModelSpec
from rlworker.cluster.rollout_group import Rollouts
from rlworker.cluster.train_group import StartingGroup
from rlworker.cluster.watch import wait_for
from rlworker.config.run import RunConfig

_RATES = {"actor": "lr", "critic": "critic_lr"}
"""Role -> metric of the optimizer steps that it took."""
OF_ENGINE = ("grad_norm", "lr", "expert_load_min", "expert_load_max", "router_aux_loss", "router_z_loss")
"""Metrics of an optimizer step that the actor and the critic each have of their own."""


def complete_step(metrics: dict[str, float], version: int, times: dict[str, float]) -> dict[str, float]:
    """Add the version of the weights that sampled the step, the tokens per second and the seconds of each phase.

    Args:
        metrics: metrics of the step, with those of ``summarise_groups``.
        version: version of the weights. times: ``time_{phase}`` -> seconds.
    """
    tokens = metrics["completion_tokens"] * metrics["samples"]
    return metrics | {"version": version, "tokens_per_second": tokens / times["time_step"]} | times


def average(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Average the metrics of optimizer steps, each over those that have it; of a metric whose name ends in ``_max``,
    take the largest."""
    found: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            found.setdefault(name, []).append(value)
    return {name: max(values) if name.endswith("_max") else sum(values) / len(values) for name, values in found.items()}


def measure_policy_kl(batch: TrainBatch, logprobs: Tensor) -> dict[str, float]:
    """Estimate KL(rollout's policy || trained policy) of a mini-batch by k3, as the metric ``policy_kl``.

    k3 is ``r - 1 - log r``, with ``r`` the ratio of the policies (Schulman, "Approximating KL Divergence", 2020). The
    result is empty where one optimizer step takes the whole rollout.

    Args:
        logprobs: ``[N]``, of the policy before the optimizer step.
    """
    if batch.old_logprobs is None:
        return {}
    log_ratio = (logprobs - batch.old_logprobs)[batch.mask].double()
    return {"policy_kl": float((log_ratio.expm1() - log_ratio).mean())}


def measure_batch(batch: TrainBatch) -> dict[str, float]:
    """Measure the mean penalty, and mean and explained variance of the critic's values, of a batch that has them."""
    metrics = {}
    if batch.penalties is not None:
        metrics["penalty"] = float(batch.penalties[batch.mask].mean())
    if batch.values is not None:  # how much of the returns the critic knew before the update
        returns, values = batch.require_column("returns")[batch.mask], batch.values[batch.mask]
        metrics["explained_variance"] = 1 - _compute_variance(returns - values) / max(_compute_variance(returns), 1e-8)
        metrics["value_mean"] = float(values.mean())
    return metrics


def list_limits(config: RunConfig, floor: float | None) -> dict[str, float]:
    """List the limits on the mean and the largest |rollout - trainer logprob|, and the number of refused attention
    rules in use. A limit that is infinite is left out.

    Args:
        floor: as of ``RunConfig.find_logprob_limits``.
    """
    approximate = config.rollout.attention_override
    mean, largest = config.find_logprob_limits(floor)
    limits = {"logprob_diff_limit": mean, "logprob_diff_max_limit": largest}
    finite_limits = {name: limit for name, limit in limits.items() if math.isfinite(limit)}
    return finite_limits | ({"approximate_rules": len(approximate)} if approximate else {})


def measure_flops(
    models: Mapping[str, ModelSpec], batch: TrainBatch, metrics: Mapping[str, float], actor: MegatronConfig
) -> dict[str, float]:
    """Measure the FLOP/s of an update as ``flops_per_second``: FLOPs of all optimizer steps by the seconds of the
    update.

    The result is empty where no engine took an optimizer step.

    Args:
        models: role -> description of its model.
        metrics: metrics of the update, with ``prompt_sharing``, ``epochs`` and ``time_update``.
        actor: settings of the engines; where they have adapters, the weights are frozen.
    """
    learners = [models[role] for role, rate in _RATES.items() if rate in metrics]
    if not learners:
        return {}
    computed = batch.num_tokens / metrics["prompt_sharing"]
    frozen = bool(actor.lora.rank)
    flops = sum(model.count_training_flops(batch.lengths, computed, frozen) for model in learners)
    return {"flops_per_second": metrics.get("epochs", 1) * flops / metrics["time_update"]}


def measure_memory(processes: Iterable[object]) -> dict[str, float]:
    """Measure the peak memory of a training process and of a rollout engine so far, in GB (10^9 bytes).

    Returns:
        ``memory_gb`` and ``rollout_memory_gb``, each the largest over the processes.
    """
    peaks: dict[str, float] = {}
    for group in processes:
        if isinstance(group, StartingGroup | Rollouts):
            name = "memory_gb" if isinstance(group, StartingGroup) else "rollout_memory_gb"
            found = wait_for([worker.measure_peak_memory.remote() for worker in group.name_workers().values()])
            peaks[name] = max([peaks.get(name, 0.0), *(peak / 1e9 for peak in found)])
    return peaks


def _compute_variance(x: Tensor) -> float:
    return float(x.var(correction=0))
