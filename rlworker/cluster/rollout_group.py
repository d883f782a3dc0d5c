"""The vLLM actors of a run: prompts to completions.

Without torch at its top, so that the processes can start while the controller is still importing it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

from engines.batch.samples import Prompt
from engines.config import VllmConfig
from engines.models.spec import ModelSpec
from rlworker.cluster.actors import end_workers, start_workers
from rlworker.cluster.workers import RolloutWorker
from rlworker.data.rows import Row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engines.batch.samples import Completion, Sampling


class Rollouts:
    """The vLLM engines of a run: processes that import vLLM from now on, and hold a model once it was ``start``ed.

    As a context manager it ends the processes.
    """

    def __init__(self, platform: str, engines: int):
        self.actors = start_workers(RolloutWorker, platform, [(index,) for index in range(engines)])
        for worker in self.actors:
            worker.prepare.remote()

    def start(self, model: ModelSpec, config: VllmConfig) -> Rollouts:
        """Begin to load a model; ``ready`` waits for it."""
        self._started = [actor.start.remote(model, config) for actor in self.actors]
        return self

    def ready(self) -> Rollouts:
        ray.get(self._started)
        return self

    def generate(self, rows: Sequence[Row], sampling: Sampling) -> list[list[Completion]]:
        """``[P][count]`` completions; each engine takes a run of consecutive prompts and draws from a stream of
        its own."""
        prompts = [Prompt(row.prompt_ids, row.images) for row in rows]
        bounds = [len(prompts) * i // len(self.actors) for i in range(len(self.actors) + 1)]
        calls = [
            actor.generate.remote(prompts[a:b], replace(sampling, stream=(*sampling.stream, i)))
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

    def __enter__(self) -> Rollouts:
        return self

    def __exit__(self, kind, *_) -> None:
        actors, self.actors = self.actors, []
        end_workers(actors, keep=kind is None)
