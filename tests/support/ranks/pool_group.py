"""A training engine on a pool of ranks, called as a run calls it; its imports bring Ray, so a test imports it late."""

from support.ranks.engines_cases import build_engine
from support.ranks.pool import Ranks, draw_address

from engines.config import MegatronConfig
from engines.models.spec import ModelSpec
from hardware.platforms import get_platform
from rlworker.cluster.train_group import WorkerGroup
from rlworker.cluster.workers import Role, TrainWorker

TEMPERATURE = 0.8
HELD: dict[str, TrainWorker] = {}
"""The worker of this rank."""


class PoolGroup(WorkerGroup):
    """A training engine of one replica on a pool of ranks, in place of Ray's workers."""

    def __init__(self, pool: Ranks, model: ModelSpec, settings: dict):
        self.pool, config = pool, MegatronConfig(ranks=pool.world, timeout_s=60, **settings)
        role, arguments = Role("actor", model, config, TEMPERATURE), (draw_address(), model, settings)
        super().__init__(role, get_platform("cpu"), [], pool.run(start_worker, *arguments))

    def call(self, method, *args, **keywords) -> list:
        return self.pool.run(call_worker, method.__name__, args, keywords)

    def call_sharded(self, method, shards, *args, **keywords) -> list:
        results = self.pool.run(call_worker, method.__name__, (shards[0], *args), keywords)
        return [next(r for r, place in zip(results, self.places, strict=True) if place["is_leader"])]


def start_worker(rank: int, world: int, address: str, model: ModelSpec, settings: dict) -> dict:
    worker = HELD["worker"] = TrainWorker.__new__(TrainWorker)  # its start is Ray's
    engine = build_engine(rank, world, address, model, settings, temperature=TEMPERATURE)
    worker.engines = {"actor": engine}
    return {"dp_rank": engine.dp_rank, "is_leader": engine.is_leader}


def call_worker(rank: int, world: int, method: str, args: tuple, keywords: dict):
    return getattr(HELD["worker"], method)("actor", *args, **keywords)
