"""Measure how long weights take from training ranks to rollout engines, on three ways.

    python scripts/bench/transport.py [--engines 1] [--tp 1] [--bucket-mb 64] [--rounds 7] [--tiny] [--json FILE]

A Qwen2 of 500 MB in fp32 on two pipeline stages of Megatron, and vLLM, which loads what comes. In turn, in each round:

- one by one: a bucket is gathered, packed, put into Ray's store and loaded before the next one is begun
- pipelined: the next one is gathered and packed while this one is loaded, which is what runs do
- transfer: vLLM's weight transfer over gloo: the leader broadcasts what is gathered to vLLM's workers

On all of them bytes have checksums, every name must arrive and a prompt's logprobs must be the same bits afterwards.
CPU seconds are those of all processes that this one started, Ray's own among them. RAY_ADDRESS names a cluster of
several machines, where they are not counted.
"""

import os
import statistics
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import ray
from timing import make_parser, write_figures

from engines.batch.samples import Request, Sampling
from engines.config import MegatronConfig, VllmConfig
from engines.models.spec import ModelSpec
from hardware.platform import HOST
from hardware.platforms import DEFAULT_PLATFORM, get_platform
from rlworker.checks.tiny.models import make_tiny_text
from rlworker.cluster.ray import running_ray
from rlworker.cluster.rollout_group import Rollouts
from rlworker.cluster.train_group import StartingGroup, WorkerGroup
from rlworker.cluster.weights.receiver import find_receivers
from rlworker.cluster.weights.sender import BUCKET_BYTES
from rlworker.cluster.workers import Role, RolloutWorker, TrainWorker

PARSER = make_parser(__doc__)
for _name, _default in (("engines", 1), ("tp", 1), ("bucket-mb", BUCKET_BYTES // 2**20), ("rounds", 7)):
    PARSER.add_argument(f"--{_name}", type=int, default=_default)
OPTIONS = PARSER.parse_args()
STAGES = 2
if OPTIONS.tiny:
    OPTIONS.rounds, SIZE, SHAPE = 2, 100_000, dict(num_hidden_layers=2)
else:
    SIZE = OPTIONS.bucket_mb * 2**20
    SHAPE = dict(hidden_size=1024, intermediate_size=4352, num_hidden_layers=8, num_attention_heads=16)


# -- one by one: runs in the training ranks


def send_one_by_one(worker, rollouts: list, version: int) -> None:
    from engines.weight_sync import pack_buckets

    for bucket, last in pack_buckets(worker.engines["actor"].export_weights(), SIZE):
        reference = ray.put(bucket)
        ray.get([rollout.load_weights.remote(reference, version, last) for rollout in rollouts])


# -- measuring


def change_weights(worker) -> None:
    import torch

    with torch.no_grad():
        for parameter in worker.engines["actor"].decoder.parameters():
            parameter.mul_(1.01)


def find_node(worker) -> str:
    return ray.get_runtime_context().get_node_id()


def call(workers: list, function, *args) -> list:
    return [worker.__ray_call__.remote(function, *args) for worker in workers]


def count_cpu_seconds() -> float:
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:2])  # user and system
    return total


def measure_ways(group: WorkerGroup, rollouts: Rollouts, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Measure each way in each round: wall and CPU seconds by way. The first round does not count."""
    receivers, workers, version = find_receivers(rollouts.workers), rollouts.workers, 0
    by_host = [replace(receiver, way=HOST) for receiver in receivers]
    ways = {
        "one by one": lambda: ray.get(call(group.workers, send_one_by_one, workers, version)),
        "pipelined": lambda: group.call(TrainWorker.sync_weights, by_host, version, SIZE),
        "transfer": lambda: group.call(TrainWorker.sync_weights, receivers, version, SIZE),
    }
    figures = {way: [] for way in ways}
    for number in range(1 + rounds):
        ray.get(call(group.workers, change_weights))
        answers = []
        for way, send in ways.items():
            version += 1
            cpu, start = count_cpu_seconds(), time.perf_counter()
            send()
            figures[way].append((time.perf_counter() - start, count_cpu_seconds() - cpu))
            assert set(rollouts.call(RolloutWorker.get_version)) == {version}
            requests = [Request((5, 6, 7), Sampling(1, 1.0, 8, (), ()))]
            answers += rollouts.call(RolloutWorker.sample, requests, number)
        assert len({str((sample.token_ids, sample.logprobs)) for (sample,) in answers}) == 1
    return {way: pairs[1:] for way, pairs in figures.items()}


def main() -> None:
    platform = get_platform(DEFAULT_PLATFORM)
    os.environ.update(platform.get_driver_env())
    rollout = VllmConfig(
        engines=OPTIONS.engines,
        tp=OPTIONS.tp,
        max_new_tokens=8,
        max_model_len=64,
        max_num_seqs=8,
        kv_cache_mb=64,
        weight_transfer=platform.find_weight_ways(False)[-1],
    )
    with TemporaryDirectory() as folder, running_ray(STAGES + rollout.devices, DEFAULT_PLATFORM):
        model = ModelSpec.from_folder(make_tiny_text(Path(folder), "qwen2", 1024, **SHAPE))
        role = Role("actor", model, MegatronConfig(ranks=STAGES, pp=STAGES), trainable=False)
        with StartingGroup("actor", DEFAULT_PLATFORM, (role,), seed=0) as starting:
            group = starting.wait()["actor"]  # first, so that Ray fills this machine with them
            with Rollouts(DEFAULT_PLATFORM, rollout.engines, rollout.tp) as rollouts:
                figures = measure_ways(group, rollouts.start(model, rollout).wait(), OPTIONS.rounds)
                machines = len(set(ray.get(call([*group.workers, *rollouts.workers], find_node))))
        megabytes = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) / 1e6
    rows = []
    for way, pairs in figures.items():
        seconds, cpu = (statistics.median(values) for values in zip(*pairs))
        print(
            f"{megabytes:.0f} MB {way}: {seconds:.2f} s, {megabytes / seconds:.0f} MB/s, {cpu:.2f} CPU s; rounds "
            + " ".join(f"{wall:.2f}" for wall, _ in pairs)
        )
        sizes = {"machines": machines, "engines": rollout.engines, "tp": rollout.tp, "MB": round(megabytes, 1)}
        counted = cpu if machines == 1 else "not counted"
        rows.append({"way": way} | sizes | {"s": seconds, "MB/s": megabytes / seconds, "CPU s": counted})
    write_figures(OPTIONS.json, rows)


if __name__ == "__main__":
    main()
