"""Workers that hold training engines, called together."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from engines.batch.batch import TrainBatch
from engines.batch.beginnings import find_beginnings
from engines.batch.schedule import Schedule, plan_schedule
from engines.batch.shard import Outputs
from engines.images.plan import number_image_sets
from engines.interfaces import LossFn, StepResult
from engines.megatron.memory.activations import count_copied_slots
from hardware.platform import Platform
from hardware.platforms import get_platform
from rlworker.cluster.placement import Seat
from rlworker.cluster.watch import unwatch_workers, wait_for, watch_workers
from rlworker.cluster.worker_pool import end_workers, start_workers
from rlworker.cluster.workers import Role, TrainWorker
from rlworker.tracking.digests import FileDigest

SHARD_BYTES = 4 * 2**30
"""A saved HuggingFace model is cut into files of this size."""


class WorkerGroup:
    """All ranks of one engine.

    Args:
        role: which of the engines in these workers.
        workers: one handle per rank. places: each rank's ``dp_rank`` and ``is_leader``.

    Attributes:
        prompt_sharing: tokens of the last batch over those that were computed of it, prompts once in a micro-batch.
    """

    prompt_sharing = 1.0

    def __init__(self, role: Role, platform: Platform, workers: list, places: list[dict]):
        self.role, self.name, self.platform, self.workers, self.places = role, role.name, platform, workers, places
        self.dp_size = 1 + max(place["dp_rank"] for place in places)

    def call(self, method: str, *args: Any) -> list:
        """Call ``method(*args)`` on every rank; the results in rank order."""
        return wait_for([getattr(worker, method).remote(self.name, *args) for worker in self.workers])

    def forward(self, batch: TrainBatch, raw: bool = False) -> Outputs:
        """Compute the engine's outputs of a batch, ``[N]``.

        Args:
            raw: of the logits as they are, at temperature 1 and with no token banned.
        """
        batch = self._drop_unread(batch)
        schedule = self._plan_shards(batch)
        return schedule.restore(self.call_sharded("forward", schedule.shards(batch), raw))

    def train_step(self, batch: TrainBatch, loss: LossFn, denominator: float) -> tuple[list[StepResult], Outputs]:
        """Take one optimizer step on ``sum(loss) / denominator``.

        Returns:
            the results of each replica, and the outputs ``[N]`` of the batch from before the step.

        Raises:
            ValueError: weights of targets whose old or reference logprobs are not known.
        """
        _check_weights(batch)
        batch = self._drop_unread(batch)
        schedule = self._plan_shards(batch)
        results = self.call_sharded("train_step", schedule.shards(batch), loss, denominator)
        return results, schedule.restore([result.outputs for result in results])

    def call_sharded(self, method: str, shards: Sequence[Any], *args: Any) -> list:
        """Call ``method(shard, *args)`` on every rank, each with the shard of its replica.

        Returns:
            the leaders' results by data-parallel rank.
        """
        # One copy per shard in shared memory, read by all ranks of the replica.
        parts = [ray.put(shard) for shard in shards]
        shared = [ray.put(argument) for argument in args]
        calls = [
            getattr(worker, method).remote(self.name, parts[place["dp_rank"]], *shared)
            for worker, place in zip(self.workers, self.places, strict=True)
        ]
        results = wait_for(calls)
        leaders = {p["dp_rank"]: r for p, r in zip(self.places, results, strict=True) if p["is_leader"]}
        return [leaders[rank] for rank in range(self.dp_size)]

    def _drop_unread(self, batch: TrainBatch) -> TrainBatch:
        """Drop the columns ``[N, k]`` where the role's loss does not read them."""
        if self.role.reads_top:
            return batch
        return replace(batch, rollout_top_ids=None, rollout_top_logprobs=None, old_top_logprobs=None)

    def _plan_shards(self, batch: TrainBatch) -> Schedule:
        config, most = self.role.config, self.platform.max_pack_sequences
        model, whole_images = self.role.model, any(rule.images for rule in self.role.model.rules)
        found = find_beginnings(batch, config, self.platform, whole_images)
        if found:
            found = replace(found, copied_slots=count_copied_slots(model, config, self.platform.kernel_memory))
        together = number_image_sets(batch)
        schedule = plan_schedule(batch.lengths, config, model.hidden, self.dp_size, most, together, found)
        self.prompt_sharing = batch.num_tokens / schedule.count_computed()
        return schedule


def _check_weights(batch: TrainBatch) -> None:
    """Raise ValueError where targets that do not count have a weight, and logprobs that are known of others alone."""
    known = [name for name in ("old_logprobs", "ref_logprobs") if getattr(batch, name) is not None]
    if batch.weights is not None and known and (batch.weights[~batch.mask] != 0).any():
        count = int((batch.weights[~batch.mask] != 0).sum())
        raise ValueError(
            f"aggregation: {count} targets that were not sampled have a weight, and {' and '.join(known)} of sampled "
            "ones alone are known; give 0 to targets outside the batch's mask"
        )


def save_groups(groups: Sequence[WorkerGroup], folder: Path) -> dict[str, FileDigest]:
    """Write each engine's state and its HuggingFace folder into a checkpoint: ``actor`` and ``hf``, ``critic`` and
    ``hf_critic``.

    Returns:
        the digests of all files, by their paths in the checkpoint: each rank reads what it wrote.
    """
    digests = {}
    for group in groups:
        (folder / group.name).mkdir()
        hf = "hf" if group.name == "actor" else f"hf_{group.name}"
        saved = group.call("save", str(folder / group.name)), group.call("save_hf", str(folder / hf), SHARD_BYTES)
        for name, of_ranks in zip((group.name, hf), saved, strict=True):
            digests |= {f"{name}/{file}": digest for part in of_ranks for file, digest in part.items()}
    return digests


def digest_on_ranks(group: WorkerGroup, folder: Path, names: Sequence[str]) -> dict[str, FileDigest]:
    """Digest files of a checkpoint, dealt out among the ranks of a group; returned by their names."""
    shares = [list(names[rank :: len(group.workers)]) for rank in range(len(group.workers))]
    calls = [worker.digest_files.remote(str(folder), share) for worker, share in zip(group.workers, shares)]
    return {name: digest for part in wait_for(calls) for name, digest in part.items()}


class StartingGroup:
    """Training engines on their way up, all in the same processes; ``wait()`` waits for them.

    As a context manager it ends the processes.

    Args:
        name: what messages call the processes.
        roles: one or more engines, of the same parallel sizes.
    """

    def __init__(self, name: str, platform: str, roles: tuple[Role, ...], seed: int):
        self.name, self.roles, self.platform, self.seed = name, roles, get_platform(platform), seed
        self._start_processes()

    def _start_processes(self) -> None:
        config = self.roles[0].config
        ranks = [(self.name, rank) for rank in range(config.ranks)]
        self.workers = start_workers(TrainWorker, self.platform.name, ranks, together=config.tp)
        watch_workers(self.name_workers())
        self._seats = [worker.find_seat.remote() for worker in self.workers]
        # Imports are a core's work for seconds. No more ranks import at a time than there are cores beside the one
        # that vLLM needs, which takes longest and would otherwise wait for them.
        at_once = max(1, (os.cpu_count() or 1) - 1)
        prepared = [None] * at_once
        for rank, worker in enumerate(self.workers):
            prepared[rank % at_once] = worker.prepare.remote(prepared[rank % at_once])
        # The first rank's address is passed on as a reference, so that nobody waits for it here.
        address = self.workers[0].find_address.remote()
        self._places = [worker.start.remote(address, self.roles, self.seed) for worker in self.workers]

    def restart(self) -> None:
        """End every process and start new ones in their places; ``wait`` waits for their engines."""
        self._end_processes(keep=False)
        self._start_processes()

    def _end_processes(self, keep: bool) -> None:
        workers, self.workers = self.workers, []
        unwatch_workers(workers)
        end_workers(workers, keep)

    def wait(self) -> dict[str, WorkerGroup]:
        """Wait for the engines; returned by the names of their roles."""
        places = wait_for(self._places)
        return {role.name: WorkerGroup(role, self.platform, self.workers, places) for role in self.roles}

    def list_seats(self) -> list[Seat]:
        """List where Ray has put each rank, as soon as their processes are there."""
        return wait_for(self._seats)

    def name_workers(self) -> dict[str, ActorHandle]:
        """List every rank by the name that a message gives it."""
        return {f"{self.name} rank {rank}": worker for rank, worker in enumerate(self.workers)}

    def __enter__(self) -> "StartingGroup":
        return self

    def __exit__(self, kind, *_) -> None:
        self._end_processes(keep=kind is None)
