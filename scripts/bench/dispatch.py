"""Measure how long a batch takes to four Ray actors and back.

    python scripts/bench/dispatch.py [--tiny] [--json FILE]

50 MB of columns go out as each replica's shard and come back as they were, through the dispatch that every step uses;
beside it the plain way, a dict of tensors per actor, in the same run. Medians.
"""

import os
from types import SimpleNamespace

import ray
import torch
from timing import make_parser, measure_ms, write_figures

from engines.batch.batch import TrainBatch
from engines.batch.schedule import plan_schedule
from engines.config import MegatronConfig
from hardware.platforms import DEFAULT_PLATFORM, get_platform
from rlworker.cluster.ray import running_ray
from rlworker.cluster.train_group import WorkerGroup
from rlworker.cluster.workers import Role, TrainWorker

OPTIONS = make_parser(__doc__).parse_args()
ACTORS, MEGABYTES, ROUNDS = (4, 1, 1) if OPTIONS.tiny else (4, 50, 15)


class Echo:
    def forward(self, role, batch):
        return batch


def make_batch() -> TrainBatch:
    """Make sequences of 512 inputs with every column of a GRPO step: ``MEGABYTES`` of them."""
    per_token = 3 * 8 + 1 + 4 * 4  # inputs, positions, targets; mask; four float columns
    count = MEGABYTES * 10**6 // (per_token * 512)
    batch = TrainBatch.from_ids(torch.randint(0, 1000, (count, 513)).tolist(), [100] * count)
    floats = {
        name: torch.rand(batch.num_tokens)
        for name in ("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages")
    }
    return TrainBatch(lengths=batch.lengths, **batch.columns() | floats)


def send_and_return(group: WorkerGroup, batch: TrainBatch) -> dict[str, torch.Tensor]:
    """Send the batch's columns ``[N]`` balanced over the actors, and return them in order, by name."""
    schedule = plan_schedule(batch.lengths, group.role.config, group.role.model.hidden, ACTORS)
    parts = [shard.batch for shard in group.call_sharded(TrainWorker.forward, schedule.shards(batch))]
    return {
        name: schedule.restore_order(torch.cat([getattr(part, name) for part in parts])) for name in batch.columns()
    }


def main() -> None:
    platform = get_platform(DEFAULT_PLATFORM)
    os.environ.update(platform.get_driver_env())
    batch = make_batch()
    size = sum(column.nbytes for column in batch.columns().values()) / 1e6
    with running_ray(ACTORS, DEFAULT_PLATFORM):
        actors = [ray.remote(Echo).options(num_cpus=1).remote() for _ in range(ACTORS)]
        role = Role("actor", SimpleNamespace(hidden=4096), MegatronConfig(ranks=ACTORS))
        group = WorkerGroup(role, platform, actors, [{"dp_rank": rank, "is_leader": True} for rank in range(ACTORS)])
        columns = send_and_return(group, batch)
        assert all(torch.equal(columns[name], column) for name, column in batch.columns().items())
        chunks = [shard.columns() for shard in batch.split(ACTORS)]
        dispatch_ms, plain_ms = measure_ms(
            lambda: send_and_return(group, batch),
            lambda: ray.get([a.forward.remote("actor", c) for a, c in zip(actors, chunks, strict=True)]),
            rounds=ROUNDS,
        )
    print(f"{size:.0f} MB to {ACTORS} actors and back: {dispatch_ms:.0f} ms; dicts of torch views {plain_ms:.0f} ms")
    times = {"ours ms": dispatch_ms, "dicts of views ms": plain_ms, "ratio": dispatch_ms / plain_ms}
    write_figures(OPTIONS.json, [{"MB": round(size), "actors": ACTORS} | times])


if __name__ == "__main__":
    main()
