"""How long a batch takes to four Ray actors and back.

    python scripts/bench_dispatch.py

50 MB of columns go out as each replica's shard and come back as they were, through the dispatch that every step uses;
beside it the plain way, a dict of tensors per actor, in the same run. Medians.
"""

import statistics
import time

import ray
import torch

from engines.batch import TrainBatch
from rlworker.cluster import ray_for
from rlworker.group import WorkerGroup

ACTORS, MEGABYTES, ROUNDS = 4, 50, 15


class Echo:
    def forward(self, role, batch):
        return batch


def make_batch() -> TrainBatch:
    """Sequences of 512 inputs with every column of a GRPO step."""
    per_token = 3 * 8 + 1 + 4 * 4  # inputs, positions, targets; mask; four float columns
    count = MEGABYTES * 10**6 // (per_token * 512)
    batch = TrainBatch.from_ids(torch.randint(0, 1000, (count, 513)).tolist(), [100] * count)
    floats = {
        name: torch.rand(batch.num_tokens)
        for name in ("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages")
    }
    return TrainBatch(lengths=batch.lengths, **batch.columns() | floats)


def median_ms(run) -> float:
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def main() -> None:
    batch = make_batch()
    size = sum(column.nbytes for column in batch.columns().values()) / 1e6
    with ray_for(ACTORS):
        actors = [ray.remote(Echo).options(num_cpus=1).remote() for _ in range(ACTORS)]
        group = WorkerGroup("actor", actors, [{"dp_rank": rank, "is_leader": True} for rank in range(ACTORS)])
        back = group.call_sharded("forward", batch)
        assert all(torch.equal(got.inputs, sent.inputs) for got, sent in zip(back, batch.split(ACTORS), strict=True))
        ours = median_ms(lambda: group.call_sharded("forward", batch))
        chunks = [shard.columns() for shard in batch.split(ACTORS)]
        plain = median_ms(lambda: ray.get([a.forward.remote("actor", c) for a, c in zip(actors, chunks, strict=True)]))
    print(f"{size:.0f} MB to {ACTORS} actors and back: {ours:.0f} ms; dicts of torch views {plain:.0f} ms")


if __name__ == "__main__":
    main()
