"""Measure how long weights take from training ranks to rollout engines, on three ways.

    python scripts/bench/transport.py [--engines 1] [--tp 1] [--bucket-mb 64] [--rounds 7] [--tiny] [--json FILE]

A Qwen2 of 500 MB in fp32 on two pipeline stages of Megatron, and vLLM, which loads what comes. In turn, in each round:

- one by one: a bucket is gathered, packed, put into Ray's store and loaded before the next one is begun
- pipelined: the next one is gathered and packed while this one is loaded, which is what runs do
- broadcast: nothing is gathered; the leader of each stage broadcasts its layers to vLLM's workers, over gloo

On all of them buckets have checksums, every name must arrive and a prompt's logprobs must be the same afterwards. CPU
seconds are those of all processes that this one started, Ray's own among them. RAY_ADDRESS names a cluster of several
machines, where they are not counted; --interface is then the network interface of the broadcast.
"""

import os
import statistics
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import ray
import torch.distributed as dist
from timing import make_parser, write_figures

from engines.batch.samples import Request, Sampling
from engines.config import MegatronConfig, VllmConfig
from engines.models.spec import ModelSpec
from hardware.platforms import DEFAULT_PLATFORM, get_platform
from rlworker.checks.tiny_models import make_tiny_text
from rlworker.cluster.ray import running_ray
from rlworker.cluster.rollout_group import Rollouts
from rlworker.cluster.train_group import StartingGroup, WorkerGroup
from rlworker.cluster.transport import BUCKET_BYTES
from rlworker.cluster.workers import Role, RolloutWorker, TrainWorker

PARSER = make_parser(__doc__)
for _name, _default in (("engines", 1), ("tp", 1), ("bucket-mb", BUCKET_BYTES // 2**20), ("rounds", 7)):
    PARSER.add_argument(f"--{_name}", type=int, default=_default)
PARSER.add_argument("--interface", default="lo")
OPTIONS = PARSER.parse_args()
STAGES, TIMEOUT = 2, timedelta(seconds=60)
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


# -- broadcast: runs in the training ranks and in vLLM's workers


def open_groups(worker, address: tuple[str, int], stages: list[int], rank: int, size: int) -> None:
    """Join the groups of some stages: rank 0 is the stage's leader, the others are vLLM's workers."""
    os.environ["GLOO_SOCKET_IFNAME"] = OPTIONS.interface
    store = dist.TCPStore(*address, None, False, TIMEOUT)
    stores = [dist.PrefixStore(f"stage {stage}", store) for stage in stages]
    worker.stage_groups = [dist.ProcessGroupGloo(each, rank, size, TIMEOUT) for each in stores]


def broadcast(group, tensor):
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([tensor], options)


def send_stage(worker) -> None:
    """Broadcast this stage's weights; a bucket is packed while the one before is on its way."""
    import pickle

    import torch

    from engines.megatron.weights import _split, _unshard, name_parameters
    from engines.models.weight import OUTPUT
    from engines.weight_sync import pack_buckets

    engine, (group,), works = worker.engines["actor"], worker.stage_groups, []

    def export():
        for name, parameter in name_parameters(engine.decoder).items():
            if not (engine.model.tied and name == OUTPUT):
                weight = engine.model.find_weight(name)
                whole = _unshard(weight, parameter.data)
                yield from zip(weight.tensors, _split(weight, whole, engine.model), strict=True)

    for bucket, last in pack_buckets(export(), SIZE):
        head = torch.frombuffer(
            bytearray(pickle.dumps((bucket.entries, bucket.checksum, bucket.skipped, last))), dtype=torch.uint8
        )
        sizes = torch.tensor([head.nbytes, bucket.data.nbytes])
        for work in works:
            work.wait()
        works = [broadcast(group, tensor) for tensor in (sizes, head, torch.from_numpy(bucket.data))]
    for work in works:
        work.wait()


def receive_stages(worker) -> set[str]:
    """Load what the stages send, one thread for each; returns the names that came."""
    import pickle
    from queue import Queue
    from threading import Thread

    import torch

    from engines.weight_sync import PieceJoiner, WeightBucket

    arrived: Queue = Queue(maxsize=1)

    def receive(group) -> None:
        joiner, last = PieceJoiner(), False
        while not last:
            sizes = torch.empty(2, dtype=torch.int64)
            broadcast(group, sizes).wait()
            head, data = (torch.empty(size, dtype=torch.uint8) for size in sizes.tolist())
            broadcast(group, head).wait()
            broadcast(group, data).wait()
            entries, checksum, skipped, last = pickle.loads(head.numpy().tobytes())
            arrived.put((joiner.join(WeightBucket(entries, data.numpy(), checksum, skipped=skipped)), last))

    threads = [Thread(target=receive, args=(group,)) for group in worker.stage_groups]
    for thread in threads:
        thread.start()
    worker.begin_sync()
    names, ended = set(), 0
    while ended < len(threads):
        bucket, last = arrived.get(timeout=TIMEOUT.total_seconds())
        if bucket:
            worker.take_weights(bucket.tensors())
            names |= {name for name, *_ in bucket.entries}
        ended += last
    worker.end_sync()
    return names


def ask_workers(rollout, function, *args) -> list:
    """Call ``function(worker, *args)`` in every vLLM worker of an engine."""
    return rollout.engine.llm.collective_rpc(function, args=args)


def open_engine(rollout, address: tuple[str, int], first: int, size: int) -> None:
    """Join the groups of all stages with the vLLM workers of an engine, whose ranks begin at ``first``."""

    def join(worker):
        return open_groups(worker, address, list(range(STAGES)), first + worker.rank, size)

    ask_workers(rollout, join)


def receive(rollout, version: int) -> None:
    for names in ask_workers(rollout, receive_stages):
        assert names == rollout.engine.model.list_hf_names()
    rollout.engine._begin_version(version)


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
    store = dist.TCPStore(ray.util.get_node_ip_address(), 0, None, True, TIMEOUT, False)
    address, size = (store.host, store.port), 1 + OPTIONS.engines * OPTIONS.tp
    joining = [r for stage, w in enumerate(group.workers) for r in call([w], open_groups, address, [stage], 0, size)]
    for index, worker in enumerate(rollouts.workers):
        joining += call([worker], open_engine, address, 1 + index * OPTIONS.tp, size)
    ray.get(joining)
    workers, version = rollouts.workers, 0
    ways: dict[str, Any] = {
        "one by one": lambda: ray.get(call(group.workers, send_one_by_one, workers, version)),
        "pipelined": lambda: group.call(TrainWorker.sync_weights, workers, version, SIZE),
        "broadcast": lambda: ray.get(call(group.workers, send_stage) + call(workers, receive, version)),
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
        engines=OPTIONS.engines, tp=OPTIONS.tp, max_new_tokens=8, max_model_len=64, max_num_seqs=8, kv_cache_mb=64
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
