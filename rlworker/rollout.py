"""Rollouts: prompts to completions over the vLLM actors, and completions to a batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
import torch

from engines.batch import Completion, TrainBatch
from engines.config import VllmConfig
from engines.interfaces import Sampling
from engines.models import ModelSpec
from hardware.platform import get_platform
from rlworker.data import Row
from rlworker.worker import RolloutWorker


@dataclass(frozen=True)
class Group:
    """A prompt with its G completions, their texts and rewards."""

    row: Row
    completions: list[Completion]
    texts: list[str]
    rewards: list[float]

    @property
    def is_alike(self) -> bool:
        """Every completion has the same reward, so that none is better than the others."""
        return len(set(self.rewards)) == 1


class Rollouts:
    """The vLLM engines of a run. They start when this is built; ``ready()`` waits for them."""

    def __init__(self, platform: str, model: ModelSpec, config: VllmConfig):
        actor = ray.remote(RolloutWorker).options(**get_platform(platform).ray_options)
        self.actors = [actor.remote(platform, index) for index in range(config.engines)]
        self._started = [a.start.remote(model, config) for a in self.actors]

    def ready(self) -> "Rollouts":
        ray.get(self._started)
        return self

    def generate(self, rows: Sequence[Row], sampling: Sampling) -> list[list[Completion]]:
        """``[P][count]`` completions; each engine takes a run of consecutive prompts and draws from its own seed."""
        prompts = [row.prompt_ids for row in rows]
        bounds = [len(prompts) * i // len(self.actors) for i in range(len(self.actors) + 1)]
        calls = [
            actor.generate.remote(prompts[a:b], replace(sampling, seed=sampling.seed + i))
            for i, (actor, a, b) in enumerate(zip(self.actors, bounds, bounds[1:]))
            if b > a
        ]
        return [group for part in ray.get(calls) for group in part]

    def call(self, method: str, *args: Any) -> list:
        """``method(*args)`` on every engine; the results in order."""
        return ray.get([getattr(actor, method).remote(*args) for actor in self.actors])

    def workers(self) -> dict[str, ray.actor.ActorHandle]:
        """Every engine by the name that a message gives it."""
        return {f"rollout engine {i}": actor for i, actor in enumerate(self.actors)}

    def stop(self) -> None:
        for actor in self.actors:
            ray.kill(actor)


def to_batch(rows: Sequence[Row], completions: Sequence[Sequence[Completion]], rewards: Sequence[float]) -> TrainBatch:
    """Prompts ``[P]``, completions ``[P][G]``, rewards ``[P * G]`` -> a batch of ``P * G`` sequences, by group."""
    pairs = [(row, sample) for row, group in zip(rows, completions, strict=True) for sample in group]
    prompt_lengths = [len(row.prompt_ids) for row, _ in pairs]
    sequences = [[*row.prompt_ids, *sample.token_ids] for row, sample in pairs]
    group = np.repeat(np.arange(len(rows)), [len(g) for g in completions])
    batch = TrainBatch.from_ids(
        sequences,
        prompt_lengths,
        rewards=torch.tensor(rewards, dtype=torch.float32),
        group=torch.from_numpy(group),
        versions=torch.tensor([sample.version for _, sample in pairs]),
    )
    logprobs = torch.zeros(batch.num_tokens)
    # The batch's counting targets are the sampled tokens, in the same order.
    logprobs[batch.mask] = torch.tensor([x for _, sample in pairs for x in sample.logprobs], dtype=torch.float32)
    return TrainBatch(lengths=batch.lengths, **batch.columns() | {"rollout_logprobs": logprobs})


def batch_of(groups: Sequence[Group]) -> TrainBatch:
    """The completions of some groups, with their rewards."""
    rewards = [reward for group in groups for reward in group.rewards]
    return to_batch([group.row for group in groups], [group.completions for group in groups], rewards)


def logprob_difference(batch: TrainBatch, logprobs: torch.Tensor) -> dict[str, float]:
    """|rollout - trainer logprob| over the sampled tokens, both taken from the same weights."""
    difference = (batch.rollout_logprobs - logprobs)[batch.mask].abs()
    return {"logprob_diff_mean": float(difference.mean()), "logprob_diff_max": float(difference.max())}
