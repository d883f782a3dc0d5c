"""The vLLM workers of a run: prompts to completions.

Without torch at its top, so that the processes can start while the controller is still importing it.
"""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.actor import ActorHandle

from engines.batch.balance import balance_costs
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

    Args:
        engines: how many. devices: of each.
    """

    def __init__(self, platform: str, engines: int, devices: int = 1):
        arguments = [(index, devices) for index in range(engines)]
        self.workers = start_workers(RolloutWorker, platform, arguments, devices)
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
        """Sample ``[P][count]`` completions; each engine takes an even share of the expected tokens and draws from a
        stream of its own."""
        prompts = [Prompt(row.prompt_ids, row.images) for row in rows]
        parts = deal_prompts([len(prompt.token_ids) for prompt in prompts], sampling, len(self.workers))
        calls = [
            worker.generate.remote([prompts[p] for p in part], replace(sampling, stream=(*sampling.stream, i)))
            for i, (worker, part) in enumerate(zip(self.workers, parts))
            if part
        ]
        groups = zip((p for part in parts for p in part), (group for result in ray.get(calls) for group in result))
        return [group for _, group in sorted(groups, key=itemgetter(0))]

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


def deal_prompts(lengths: Sequence[int], sampling: Sampling, engines: int) -> list[list[int]]:
    """Deal prompts of some ``lengths`` out to engines: the prompts of each, in their order.

    What a prompt is expected to take is its own tokens and those of its completions. The same lengths and expectation
    are dealt alike at any time, as a resumed run needs: the prompts of a call decide what is sampled of each.
    """
    costs = np.asarray(lengths, dtype=np.int64) + round(sampling.count * sampling.expected_tokens)
    owners = balance_costs(costs, engines, counts_matter=False)
    return [np.flatnonzero(owners == engine).tolist() for engine in range(engines)]
