"""Workers that sleep in the place of ranks and rollout engines, several of them in a process."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from engines.batch.samples import Completion, Request
from engines.weight_sync import WeightBucket
from hardware.platform import HOST
from rlworker.cluster.watch import LIVENESS
from rlworker.cluster.weights.sender import send_buckets
from rlworker.cluster.worker_pool import POLL
from rlworker.cluster.workers import RolloutWorker, TrainWorker

TP = 8
"""Ranks of a replica."""
BUCKET = 2**20
"""Bytes of a bucket in the simulation; a real one has up to ``choose_bucket_bytes``."""
LOGPROB = -1.0
"""Logprob of every token, by engines and trainers alike."""


@dataclass(frozen=True)
class Seconds:
    """Seconds that each kind of call takes, by the forecast; and the number of buckets of a sync."""

    sample: float
    forward: float
    update: float
    sync: float
    buckets: int


class Rank(TrainWorker):
    """A rank that sleeps. Its outputs are constants; the metrics are those of the real loss on them."""

    def simulate(self, seconds: Seconds) -> None:
        self.seconds = seconds

    def prepare(self, after: None) -> None:
        import engines.batch.shard  # noqa: F401

    def find_address(self) -> str:
        return ""

    def start(self, address: str, roles: tuple, seed: int) -> dict:
        self.is_leader = self.rank % TP == 0
        return {"dp_rank": self.rank // TP, "is_leader": self.is_leader}

    def _answer(self, shard: Any):
        import torch

        from engines.batch.shard import TokenOutputs

        batch = shard.batch.select(0, sum(shard.counts))
        return batch, TokenOutputs(torch.full((batch.num_tokens,), LOGPROB), torch.ones(batch.num_tokens))

    def forward(self, role: str, shard: Any, raw: bool = False) -> Any:
        time.sleep(self.seconds.forward)
        return self._answer(shard)[1] if self.is_leader else None

    def train_step(self, role: str, shard: Any, loss_fn: Any, denominator: float) -> Any:
        from engines.interfaces import StepResult

        began = time.monotonic()
        metrics, outputs = {}, None
        if self.is_leader:
            batch, outputs = self._answer(shard)
            metrics = {name: float(value) for name, value in loss_fn(outputs, batch)[1].items()}
        time.sleep(max(0.0, self.seconds.update - (time.monotonic() - began)))
        return StepResult(metrics, outputs, 1.0, 1e-6)

    def sync_weights(self, role: str, receivers: Sequence, version: int, max_bytes: int, plan: Any = None) -> dict:
        if self.rank == 0:
            data, number, used = np.zeros(BUCKET, np.uint8), self.seconds.buckets, time.process_time()
            buckets = ((WeightBucket((), data, 0, not i), i == number - 1) for i in range(number))
            send_buckets(buckets, [each.worker for each in receivers], version)
            self.sender_seconds = time.process_time() - used
        return {"weights": version} if self.rank == 0 else {}

    def read_sender_seconds(self) -> float:
        """Return the CPU-seconds of the last sync in the process that sent it."""
        return self.sender_seconds

    def save(self, role: str, folder: str) -> dict:
        return {}

    def save_hf(self, role: str, folder: str, shard_bytes: int) -> dict:
        return {}

    def measure_peak_memory(self) -> int:
        return 0


class Engine(RolloutWorker):
    """A rollout engine that sleeps. Every sample is as long as it may be."""

    def simulate(self, seconds: Seconds) -> None:
        self.seconds, self.version = seconds, 0

    def prepare(self) -> None:
        pass

    def start(self, model: Any, config: Any) -> None:
        pass

    def sample(self, requests: Sequence[Request], seed: int) -> list[Completion]:
        draw, began = np.random.default_rng(seed), time.monotonic()
        answers = [self._complete(each, draw) for each in requests for _ in range(each.sampling.count)]
        if not any(each.sampling.scores_prompt for each in requests):
            time.sleep(max(0.0, self.seconds.sample - (time.monotonic() - began)))
        return answers

    def _complete(self, request: Request, draw: np.random.Generator) -> Completion:
        ids = draw.integers(3, 90, request.sampling.max_tokens).astype(np.int32)
        if request.sampling.scores_prompt:
            ids = np.asarray(request.token_ids[1:], np.int32)
        logprobs = np.full(len(ids), LOGPROB, np.float32)
        return Completion(ids, logprobs, False, ((self.version, len(ids)),))

    def describe_receiver(self) -> tuple[str, int]:
        return HOST, 1

    def load_weights(self, bucket: WeightBucket, version: int, last: bool) -> None:
        time.sleep(self.seconds.sync / self.seconds.buckets)
        self.version = version if last else self.version

    def digest_weights(self, plan: Any) -> dict:
        return {"weights": self.version}

    def get_version(self) -> int:
        return self.version

    def rewind(self, version: int) -> None:
        self.version = version - 1

    def measure_peak_memory(self) -> int:
        return 0


class Host:
    """A process that stands for several workers."""

    def __init__(self, kind: type, platform: str, arguments: list[tuple], seconds: Seconds):
        self.workers: list[Any] = [kind(platform, *each) for each in arguments]
        for worker in self.workers:
            worker.simulate(seconds)

    def call(self, number: int, method: str, *args: Any, **keywords: Any) -> Any:
        return getattr(self.workers[number], method)(*args, **keywords)


CALLS: Counter[str] = Counter()
"""Ray calls of this process, by method."""


@dataclass(frozen=True)
class StandIn:
    """The handle of one worker of a host, in the place of Ray's handle."""

    host: Any
    number: int

    def __getattr__(self, name: str) -> Any:
        if name in ("__ray_call__", "_actor_id"):  # the id names a lost process in Ray's messages
            return getattr(self.host, name)
        if name.startswith("_"):
            raise AttributeError(name)
        return Method(self, name)


@dataclass(frozen=True)
class Method:
    """A method of a worker that is stood for."""

    worker: StandIn
    name: str

    def remote(self, *args: Any, **keywords: Any) -> Any:
        CALLS[self.name] += 1
        return self.worker.host.call.remote(self.worker.number, self.name, *args, **keywords)


class Cluster:
    """Starts the workers of a run in at most ``processes`` processes, a share of each kind by its number."""

    def __init__(self, workers: int, processes: int, seconds: Seconds):
        self.workers, self.processes, self.seconds = workers, processes, seconds

    def start(self, kind: type, platform: str, arguments: Sequence[tuple], *_: Any, **__: Any) -> list[StandIn]:
        count = max(1, min(len(arguments), self.processes * len(arguments) // self.workers))
        parts = [list(arguments[first::count]) for first in range(count)]
        simulated = Rank if issubclass(kind, TrainWorker) else Engine
        make: Any = ray.remote(concurrency_groups={LIVENESS: 1, POLL: 1})(Host)
        hosts = [
            make.options(num_cpus=0, max_concurrency=len(part)).remote(simulated, platform, part, self.seconds)
            for part in parts
        ]
        return [StandIn(hosts[i % count], i // count) for i in range(len(arguments))]

    def end(self, workers: Sequence[StandIn], keep: bool) -> None:
        for host in {worker.host for worker in workers}:
            ray.kill(host)
