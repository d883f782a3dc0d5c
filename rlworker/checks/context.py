"""The engines under check: one model at one set of sizes."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory

import torch
from ray.actor import ActorHandle

from hardware.vllm_versions import list_version_warnings
from rlworker.checks.case import make_case
from rlworker.checks.config import CheckConfig
from rlworker.checks.reference.ensemble import compute_reference
from rlworker.checks.reference.huggingface import probe_loss
from rlworker.checks.trainer import FACTORS, LIMITS, CheckedTrainer
from rlworker.cluster.ray import running_ray
from rlworker.cluster.rollout_group import Rollouts
from rlworker.cluster.train_group import StartingGroup, WorkerGroup
from rlworker.cluster.watch import naming_failures
from rlworker.cluster.workers import Role, RolloutWorker
from rlworker.config.model_checks import list_model_warnings

_PROBES = "engines.probes.megatron:"
_FLOOR, _MOST = 5.0, 0.5
"""In bfloat16, the limit on rollout - trainer logprob: this multiple of HuggingFace's own rounding, and at most so many
nats."""


@dataclass(frozen=True)
class CheckedEngines:
    """The engines under check.

    Attributes:
        config: settings of the check.
        trainer: checks of the training ranks. actor: the training ranks. rollouts: the rollout engines.
    """

    config: CheckConfig
    trainer: CheckedTrainer
    actor: WorkerGroup
    rollouts: Rollouts

    @property
    def rollout_limits(self) -> tuple[float, float, float]:
        """Limits of rollout - trainer logprob by the coarser dtype: mean absolute difference, absolute mean,
        maximum."""
        mean, bias, largest = LIMITS["float32" if self.is_exact else "bfloat16"]["rollout"]
        reference = self.trainer.reference
        if reference and reference.rounding:
            own = reference.rounding.outputs["logprob mean"]
            if self.config.actor.dtype == "bfloat16":
                mean = min(_FLOOR * own, _MOST)
            elif self.is_exact:
                mean = max(mean, FACTORS["mean"] * own)
                bias = mean / 2
        return mean, bias, largest

    def name_workers(self) -> dict[str, ActorHandle]:
        """Return Ray's handles of all processes by the names that messages use."""
        ranks = {f"{self.actor.name} rank {rank}": worker for rank, worker in enumerate(self.actor.workers)}
        return ranks | self.rollouts.name_workers()

    @property
    def is_exact(self) -> bool:
        """Tell whether trainer and rollout engines both compute in float32."""
        return {self.config.actor.dtype, self.config.rollout.dtype} == {"float32"}


@contextmanager
def start_engines(
    config: CheckConfig, tell: Callable[[str], None], rollouts: Rollouts | None = None, folder: str = ""
) -> Iterator[CheckedEngines]:
    """Start the engines in this context. HuggingFace computes before: memory may not have room for both.

    Args:
        tell: is called with a line of text at the start of each part.
        rollouts: rollout engines that run already; None starts them.
        folder: folder for the images of the case; empty makes one for as long as the engines run.
    """
    model = config.check_model()
    warnings = list_version_warnings(config.ignore_versions)
    for warning in warnings + list_model_warnings(model, config.platform, config.rollout):
        tell(warning)
    temperature = config.rollout.temperature
    with ExitStack() as running:
        images = folder or running.enter_context(TemporaryDirectory(prefix="rlworker-check-"))
        case = make_case(model, config.actor.dp, images)
        longest = max(len(row.prompt_ids) for row in case.rows) + config.rollout.max_new_tokens
        if longest > config.rollout.max_model_len:
            raise ValueError(
                f"check: prompts with images and their answers have up to {longest} tokens, expected at most "
                f"rollout.max_model_len={config.rollout.max_model_len}; raise --rollout.max-model-len"
            )
        reference = None
        if config.huggingface:
            sizes = case.denominator, temperature, getattr(torch, config.actor.dtype)
            lora = config.actor.lora if config.actor.lora.rank else None
            reference = compute_reference(model, case.batch, probe_loss, *sizes, tell, lora)
        tell("engines start")
        if rollouts is None:
            running.enter_context(running_ray(config.actor.ranks + config.rollout.devices, config.platform))
            rollouts = running.enter_context(Rollouts(config.platform, config.rollout.engines, config.rollout.tp))
            rollouts.start(model, config.rollout)
        role = Role("actor", model, config.actor, temperature)
        actor = running.enter_context(StartingGroup("actor", config.platform, (role,), seed=0))
        with naming_failures("check: start", lambda: actor.name_workers() | rollouts.name_workers()):
            group = actor.wait()["actor"]
            trainer = CheckedTrainer(
                config.platform,
                config.actor,
                model,
                case,
                reference,
                lambda function, *args: group.run(_PROBES + function, *args),
                tell=tell,
            )
            engines = CheckedEngines(config, trainer, group, rollouts.wait())
            if config.actor.lora.rank:  # adapters that change something, which the folder's weights are without
                trainer.call_ranks("restore_weights")
                rollouts.call(RolloutWorker.rewind, 0)
                group.sync_weights(rollouts.workers, 0)
        yield engines
