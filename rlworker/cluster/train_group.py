"""Groups of workers that hold training engines; a call goes to all ranks of an engine."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.actor import ActorHandle

from engines.batch.batch import COLUMNS, TrainBatch
from engines.batch.beginnings import find_beginnings
from engines.batch.schedule import Schedule, number_image_sets, plan_schedule
from engines.batch.shard import Outputs
from engines.interfaces import LossFn
from engines.megatron.memory.activations import count_copied_slots
from engines.weight_digest import DigestPlan
from hardware.platform import Platform
from hardware.platforms import get_platform
from rlworker.base.digests import FileDigest
from rlworker.cluster.placement import DeviceSlot
from rlworker.cluster.watch import unwatch_workers, wait_for, watch_workers
from rlworker.cluster.weights.receiver import find_receivers
from rlworker.cluster.weights.sender import BUCKET_BYTES
from rlworker.cluster.worker_pool import end_workers, start_workers
from rlworker.cluster.workers import Role, TrainWorker

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

StepObserver = Callable[[TrainBatch, LossFn, float, Schedule], Callable[[dict[str, float], Outputs], None]]
"""``observer(batch, loss, denominator, schedule)``, called before an optimizer step; what it returns is called after
it, with metrics and outputs."""
_ENGINES, _MOST_TIMES = 16, 8
"""From how many engines on a bucket is larger, and by how much at most."""
SHARD_BYTES = 4 * 2**30
"""Most bytes of a file of a saved HuggingFace model."""


class WorkerGroup:
    """All ranks of one training engine.

    Args:
        role: the engine, since the workers may hold several.
        workers: Ray's handle of each rank.
        places: for each rank its ``dp_rank``, and ``is_leader``, true of the rank that returns its replica's results.
    """

    def __init__(self, role: Role, platform: Platform, workers: list, places: list[dict]):
        self.role, self.name, self.platform, self.workers, self.places = role, role.name, platform, workers, places
        self.dp_size = 1 + max(place["dp_rank"] for place in places)
        self.observer: StepObserver | None = None

    def call(
        self, method: Callable[Concatenate[TrainWorker, str, P], R], *args: P.args, **keywords: P.kwargs
    ) -> list[R]:
        """Call a method of ``TrainWorker`` for this engine on every rank; returns the results in rank order."""
        calls = [getattr(worker, method.__name__).remote(self.name, *args, **keywords) for worker in self.workers]
        return wait_for(calls)

    def run(self, function: str, *args: Any) -> list:
        """Call ``function(engine, *args)`` on every rank; returns the results in rank order.

        Args:
            function: ``module:function``.
        """
        return self.call(TrainWorker.run, function, *args)

    def forward(self, batch: TrainBatch, raw: bool = False) -> Outputs:
        """Compute the engine's outputs of a batch, ``[N]``.

        Args:
            raw: whether to take the logits as they are, at temperature 1 and with no token banned.
        """
        batch = self._drop_unread(batch)
        schedule = self.plan_shards(batch)
        parts = self.call_sharded(TrainWorker.forward, schedule.shards(batch), raw)
        return schedule.restore([outputs for outputs in parts if outputs])

    def train_step(self, batch: TrainBatch, loss: LossFn, denominator: float) -> tuple[dict[str, float], Outputs]:
        """Take one optimizer step on ``sum(loss) / denominator``.

        Returns:
            the metrics: means over the batch's counting tokens, or maxima, ``grad_norm``, ``lr``, ``prompt_sharing``
                and those of routers; and the outputs ``[N]`` of the weights before the step.

        Raises:
            ValueError: targets that do not count have a weight, but no old or reference logprobs.
        """
        _check_weights(batch)
        batch = self._drop_unread(batch)
        schedule = self.plan_shards(batch)
        note_result = self.observer(batch, loss, denominator, schedule) if self.observer else None
        results = self.call_sharded(TrainWorker.train_step, schedule.shards(batch), loss, denominator)
        metrics, tokens = {"grad_norm": results[0].grad_norm, "lr": results[0].lr}, float(batch.mask.sum())
        metrics["prompt_sharing"] = batch.num_tokens / schedule.count_computed()
        metrics |= results[0].routing
        for name in dict.fromkeys(name for result in results for name in result.metrics):
            values = [result.metrics[name] for result in results if name in result.metrics]
            metrics[name] = max(values) if name.endswith("_max") else sum(values) / tokens
        outputs = schedule.restore([result.outputs for result in results if result.outputs])
        if note_result:
            note_result(metrics, outputs)
        return metrics, outputs

    def sync_weights(
        self,
        rollouts: Sequence[ActorHandle],
        version: int,
        plan: DigestPlan | None = None,
    ) -> dict[str, int]:
        """Send the weights to rollout workers as ``version``; those that are lost are left out.

        Returns:
            tensor -> digest by ``plan``, from the rank that sends; empty without a plan.
        """
        largest = choose_bucket_bytes(len(rollouts))
        while None in (sent := self.call(TrainWorker.sync_weights, find_receivers(rollouts), version, largest, plan)):
            pass
        return next(filter(None, sent), {})

    def call_sharded(
        self,
        method: Callable[Concatenate[TrainWorker, str, S, P], R],
        shards: Sequence[S],
        *args: P.args,
        **keywords: P.kwargs,
    ) -> list[R]:
        """Call a method of ``TrainWorker`` on every rank, each with the shard of its replica.

        Returns:
            the results of the leaders, in order of their data-parallel rank.
        """
        # One copy per shard in shared memory, read by all ranks of the replica.
        parts = [ray.put(shard) for shard in shards]
        shared = [ray.put(argument) for argument in args]
        calls = [
            getattr(worker, method.__name__).remote(self.name, parts[place["dp_rank"]], *shared, **keywords)
            for worker, place in zip(self.workers, self.places, strict=True)
        ]
        results = wait_for(calls)
        leaders = {p["dp_rank"]: r for p, r in zip(self.places, results, strict=True) if p["is_leader"]}
        return [leaders[rank] for rank in range(self.dp_size)]

    def _drop_unread(self, batch: TrainBatch) -> TrainBatch:
        """Drop the columns ``[N, k]`` that the role's engine or loss does not read."""
        if self.role.model.head == "value":
            batch = replace(batch, support=None)
        if self.name != "actor":  # routes are those of its weights
            batch = replace(batch, routes=None)
        if self.role.needs_topk_logprobs:
            return batch
        return replace(batch, **{name: None for name, about in COLUMNS.items() if about.of_likeliest})

    def plan_shards(self, batch: TrainBatch) -> Schedule:
        """Plan which rank computes which sequences of a batch."""
        config, most = self.role.config, self.platform.max_pack_sequences
        model, whole_images = self.role.model, any(rule.images for rule in self.role.model.rules)
        found = find_beginnings(batch, config, self.platform, whole_images)
        if found:
            found = replace(found, copied_slots=count_copied_slots(model, config, self.platform.kernel_memory))
        together = number_image_sets(batch)
        return plan_schedule(batch.lengths, config, model.hidden, self.dp_size, most, together, found)


def choose_bucket_bytes(engines: int) -> int:
    """Choose the most bytes of a bucket that so many engines load.

    The sender makes a call for each bucket and engine. So buckets grow with the engines, up to half a GiB.
    """
    return BUCKET_BYTES * max(1, min(engines // _ENGINES, _MOST_TIMES))


def _check_weights(batch: TrainBatch) -> None:
    """Raise ValueError where targets that do not count have a weight, and logprobs that are known of others alone."""
    known = [name for name in ("old_logprobs", "ref_logprobs") if getattr(batch, name) is not None]
    if batch.weights is not None and known and (batch.weights[~batch.mask] != 0).any():
        count = int((batch.weights[~batch.mask] != 0).sum())
        raise ValueError(
            f"aggregation: it gives a weight other than 0 to {count} tokens outside batch.mask, for which the batch "
            f"has no {' or '.join(known)}; multiply the weights by batch.mask"
        )


def save_groups(groups: Sequence[WorkerGroup], folder: Path) -> dict[str, FileDigest]:
    """Write each engine's state and its HuggingFace folder into a checkpoint.

    The folders are ``actor`` and ``hf``, and for a critic ``critic`` and ``hf_critic``. Adapters of an actor are also
    in ``adapter``, as a folder of PEFT's; ``hf`` has them merged into the weights.

    Returns:
        path in the checkpoint -> digest, for all files; each rank digests the files that it wrote.
    """
    digests = {}
    for group in groups:
        (folder / group.name).mkdir()
        hf = "hf" if group.name == "actor" else f"hf_{group.name}"
        saved = (
            group.call(TrainWorker.save, str(folder / group.name)),
            group.call(TrainWorker.save_hf, str(folder / hf), SHARD_BYTES),
        )
        for name, of_ranks in zip((group.name, hf), saved, strict=True):
            digests |= {f"{name}/{file}": digest for part in of_ranks for file, digest in part.items()}
        if group.name == "actor" and group.role.config.lora.rank:
            parts = group.call(TrainWorker.save_adapters, str(folder / "adapter"))
            digests |= {f"adapter/{file}": digest for part in parts for file, digest in part.items()}
    return digests


class StartingGroup:
    """Training engines that are starting, all in the same processes; ``wait()`` returns them once they are ready.

    Leaving it as a context manager ends the processes.

    Args:
        name: name of the processes in messages.
        platform: name of the platform.
        roles: one engine or more, with the same parallel sizes.
        seed: seed of the processes' random numbers.
    """

    def __init__(self, name: str, platform: str, roles: tuple[Role, ...], seed: int):
        self.name, self.roles, self.platform, self.seed = name, roles, get_platform(platform), seed
        self._start_processes()

    def _start_processes(self) -> None:
        config = self.roles[0].config
        ranks = [(self.name, rank) for rank in range(config.ranks)]
        self.workers = start_workers(TrainWorker, self.platform.name, ranks, together=config.tp)
        watch_workers(self.name_workers())
        self._device_slots = [worker.find_device_slot.remote() for worker in self.workers]
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
        """End every process and start new processes; call ``wait`` for their engines."""
        self._end_processes(keep=False)
        self._start_processes()

    def _end_processes(self, keep: bool) -> None:
        workers, self.workers = self.workers, []
        unwatch_workers(workers)
        end_workers(workers, keep)

    def wait(self) -> dict[str, WorkerGroup]:
        """Wait until the engines are ready, and return role -> engine."""
        places = wait_for(self._places)
        return {role.name: WorkerGroup(role, self.platform, self.workers, places) for role in self.roles}

    def list_device_slots(self) -> list[DeviceSlot]:
        """Return where Ray has put each rank, as soon as the processes are up."""
        return wait_for(self._device_slots)

    def name_workers(self) -> dict[str, ActorHandle]:
        """Return Ray's handle of every rank by the name that messages use."""
        return {f"{self.name} rank {rank}": worker for rank, worker in enumerate(self.workers)}

    def __enter__(self) -> "StartingGroup":
        return self

    def __exit__(self, kind, *_) -> None:
        self._end_processes(keep=kind is None)
