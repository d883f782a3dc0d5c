"""The vLLM workers of a run: prompts to completions.

Without torch at its top, so that the processes can start while the controller is still importing it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle

from engines.batch.samples import Prompt
from engines.config import VllmConfig
from engines.models.spec import ModelSpec
from rlworker.cluster.worker_pool import end_workers, start_workers
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
        self.workers = start_workers(RolloutWorker, platform, [(index,) for index in range(engines)])
        for worker in self.workers:
            worker.prepare.remote()

    def start(self, model: ModelSpec, config: VllmConfig) -> Rollouts:
        """Begin to load a model; ``wait`` waits for it."""
        self._started = [worker.start.remote(model, config) for worker in self.workers]
        return self

    def wait(self) -> Rollouts:
        ray.get(self._started)
        return self

    def generate(self, rows: Sequence[Row], sampling: Sampling) -> list[list[Completion]]:
        """Sample ``[P][count]`` completions; each engine takes a run of consecutive prompts and draws from a stream of
        its own."""
        prompts = [Prompt(row.prompt_ids, row.images) for row in rows]
        bounds = [len(prompts) * i // len(self.workers) for i in range(len(self.workers) + 1)]
        calls = [
            worker.generate.remote(prompts[a:b], replace(sampling, stream=(*sampling.stream, i)))
            for i, (worker, a, b) in enumerate(zip(self.workers, bounds, bounds[1:]))
            if b > a
        ]
        return [group for part in ray.get(calls) for group in part]

    def call(self, method: str, *args: Any) -> list:
        """Call ``method(*args)`` on every engine; the results in order."""
        return ray.get([getattr(worker, method).remote(*args) for worker in self.workers])

    def name_workers(self) -> dict[str, ActorHandle]:
        """List every engine by the name that a message gives it."""
        return {f"rollout engine {i}": worker for i, worker in enumerate(self.workers)}

    def __enter__(self) -> Rollouts:
        return self

    def __exit__(self, kind, *_) -> None:
        workers, self.workers = self.workers, []
        end_workers(workers, keep=kind is None)
