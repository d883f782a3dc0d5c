"""The engines under check, of one model at one size, and the findings about them."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Literal

from engines.batch.batch import TrainBatch
from engines.batch.shard import TokenOutputs
from engines.models.spec import ModelSpec
from hardware.platform import Platform, describe
from hardware.platforms import get_platform
from rlworker.checks.case import Case, make_case
from rlworker.checks.config import CheckConfig
from rlworker.checks.huggingface import Reference, compute_reference, probe_loss
from rlworker.cluster.ray import naming_failures, running_ray
from rlworker.cluster.rollout_group import Rollouts
from rlworker.cluster.train_group import StartingGroup, WorkerGroup
from rlworker.cluster.workers import Role

_PROBE = "engines.probes.megatron:"

LIMITS = {
    "float32": {"logprobs": 1e-4, "gradients": 1e-4, "layers": 1e-6, "rollout mean": 2e-5, "rollout max": 5e-3},
    "bfloat16": {"logprobs": 0.2, "gradients": 0.1, "layers": 1e-2, "rollout mean": 0.05, "rollout max": math.inf},
}
"""Limits by the type of weights: largest difference of a logprob, ``|difference| / |gradient|`` of a tensor, what a
layer adds by rounding alone to the relative difference of a token's hidden state, mean and largest |rollout - trainer
logprob|."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        check: what was checked. where: layout, rule, engine.
        outcome: "refused" is the capability table's word: nothing was run, and nothing is wrong.
        text: what was found. evidence: what it shows (``Platform.evidence``), or "table".
    """

    check: str
    where: str
    outcome: Literal["ok", "FAILED", "refused"]
    text: str
    evidence: str


@dataclass(frozen=True)
class CheckedEngines:
    """The engines under check, and what they are checked with."""

    config: CheckConfig
    model: ModelSpec
    actor: WorkerGroup
    rollouts: Rollouts
    case: Case
    reference: Reference | None

    @property
    def limits(self) -> dict[str, float]:
        """The limits of the actor's dtype, and for the rollout those of the coarser dtype of both."""
        actor, both = self.config.actor.dtype, {self.config.actor.dtype, self.config.rollout.dtype}
        rollout = LIMITS["float32" if both == {"float32"} else "bfloat16"]
        return LIMITS[actor] | {name: limit for name, limit in rollout.items() if name.startswith("rollout")}

    def list_comparisons(self, kinds: Sequence[str]) -> list[tuple[str, Reference]]:
        """List the layouts to be compared with HuggingFace, each with what that computed; none where it did not run."""
        return [(kind, self.reference) for kind in kinds if self.reference]

    def call_ranks(self, function: str, *args) -> list:
        return self.actor.call("run", _PROBE + function, *args)

    def compute_outputs(self, kind: str, batch: TrainBatch | None = None) -> TokenOutputs:
        """Compute the outputs of the whole batch, or of one like it, which every replica computes."""
        outputs = self.call_ranks("compute_outputs", kind, batch or self.case.batch)
        return next(part for part, place in zip(outputs, self.actor.places, strict=True) if place["is_leader"])

    def make_finding(self, check: str, where: str, passed: bool, text: str) -> Finding:
        return Finding(check, where, "ok" if passed else "FAILED", text, get_platform(self.config.platform).evidence)


def list_platform_limits(platform: Platform) -> list[Finding]:
    """List what the platform's evidence says nothing about, as the last line of the report."""
    covered = Finding("platform", platform.name, "ok", describe(platform), platform.evidence)
    return [covered] if platform.not_covered else []


@contextmanager
def start_engines(config: CheckConfig, rollouts: Rollouts | None = None) -> Iterator[CheckedEngines]:
    """Start the engines; HuggingFace computes beside them.

    Args:
        rollouts: engines that run already.
    """
    model = config.check_model()
    temperature = config.rollout.temperature
    with ExitStack() as running:
        images = running.enter_context(TemporaryDirectory(prefix="rlworker-check-"))
        case = make_case(model, config.actor.dp, images)
        longest = max(len(prompt.token_ids) for prompt in case.prompts) + config.rollout.max_new_tokens
        if longest > config.rollout.max_model_len:
            raise ValueError(
                f"check: prompts with images and their answers take up to {longest} tokens; raise "
                f"--rollout.max-model-len from {config.rollout.max_model_len}"
            )
        if rollouts is None:
            running.enter_context(running_ray(config.actor.ranks + config.rollout.engines, config.platform))
            rollouts = running.enter_context(Rollouts(config.platform, config.rollout.engines))
            rollouts.start(model, config.rollout)
        role = Role("actor", model, config.actor, temperature)
        actor = running.enter_context(StartingGroup("actor", config.platform, (role,), seed=0))
        reference = None
        if config.huggingface:
            reference = compute_reference(model, case.batch, probe_loss, case.denominator, temperature)
        with naming_failures("check: start", actor.name_workers() | rollouts.name_workers()):
            engines = CheckedEngines(config, model, actor.wait()["actor"], rollouts.wait(), case, reference)
        yield engines
