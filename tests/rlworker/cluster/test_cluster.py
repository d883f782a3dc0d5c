import gc
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from rlworker.errors import RunError


class Worker:
    def __repr__(self):
        return "actor rank 1"

    def die(self):
        os._exit(1)

    def fail(self):
        raise KeyError("level")

    def hang(self):
        time.sleep(100)


def test_a_ray_that_does_not_start_is_an_error_to_be_read(monkeypatch):
    import ray

    from rlworker.cluster.ray import running_ray

    def init(**_):
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(RunError, match=r"ray: it did not start \(The current node timed out"), running_ray(1, "cpu"):
        pass


def test_who_failed_is_named_among_workers_that_hang(cluster, by_value):
    import ray

    from rlworker.cluster.watch import WorkerFailure, naming_failures

    workers = {f"actor rank {i}": ray.remote(Worker).options(num_cpus=0).remote() for i in range(3)}
    named = r"(?s)^step 2, phase update: .*repr=actor rank 1.*KeyError: 'level'"
    with pytest.raises(WorkerFailure, match=named), naming_failures("step 2, phase update", lambda: workers):
        ray.get(workers["actor rank 1"].fail.remote())
    died = r"^step 3, phase sync: actor rank 0 died .*say more\); go on$"
    with pytest.raises(WorkerFailure, match=died), naming_failures("step 3, phase sync", lambda: workers, "; go on"):
        ray.get([workers["actor rank 2"].hang.remote(), workers["actor rank 0"].die.remote()])
    for worker in workers.values():
        ray.kill(worker)


def test_whoever_found_ray_there_leaves_it_there(cluster):
    import ray

    from rlworker.cluster.ray import running_ray

    with running_ray(1, "cpu"):
        pass
    with pytest.raises(RuntimeError, match="need 2 NPUs and Ray has 0"), running_ray(2, "npu"):
        pass
    with pytest.raises(RuntimeError, match="need 40 CPUs"), running_ray(40, "cpu"):
        pass
    assert ray.is_initialized()


@pytest.mark.parametrize("workers", [1, 1000])
def test_a_ray_of_ones_own_has_room_for_the_workers_and_ends_with_them(monkeypatch, workers):
    import ray

    from rlworker.cluster.ray import running_ray

    started, ended = [], []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **settings: started.append(settings))
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": started[0]["num_cpus"]})
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(True))
    with pytest.raises(KeyError), running_ray(workers, "cpu"):
        assert not ended
        raise KeyError
    (settings,) = started
    assert (settings["address"], settings["num_cpus"]) == ("local", max(workers, os.cpu_count())) and ended == [True]


@pytest.mark.large
def test_ray_that_was_started_for_a_run_ends_with_it():
    """As above, by a Ray of its own in a process of its own."""
    program = (
        "import os, ray\n"
        "from rlworker.cluster.ray import running_ray\n"
        "with running_ray(3, 'cpu'):\n"
        "    assert ray.cluster_resources()['CPU'] == max(3, os.cpu_count())\n"
        "assert not ray.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=60)


def test_collection_goes_on_afterwards():
    from rlworker.cluster.ray import pausing_collection

    with pytest.raises(ImportError), pausing_collection():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled() and gc.get_freeze_count() > 0
    gc.unfreeze()


def test_the_likeliest_ids_are_sent_where_they_are_read_alone():
    """The actor's ranks get them, a reference's and a critic's do not."""
    import torch

    from engines.batch.batch import TrainBatch
    from engines.batch.shard import TokenOutputs
    from engines.config import MegatronConfig
    from hardware.platforms import get_platform
    from rlworker.cluster.train_group import WorkerGroup
    from rlworker.cluster.workers import Role

    class Group(WorkerGroup):
        def call_sharded(self, method, shards, *args):
            (self.sent,) = shards
            return [TokenOutputs(torch.zeros(2), torch.zeros(2))]

    top = {"rollout_top_ids": torch.ones(2, 3), "rollout_top_logprobs": torch.zeros(2, 3)}
    batch = TrainBatch.from_ids([[1, 2, 3]], [1], **top, old_top_logprobs=torch.zeros(2, 4))
    for reads in (True, False):
        role = Role("actor", SimpleNamespace(hidden=8), MegatronConfig(), reads_top=reads)
        group = Group(role, get_platform("cpu"), [None], [{"dp_rank": 0, "is_leader": True}])
        group.forward(batch)
        assert {name for name in group.sent.batch.columns() if "top" in name} == (
            {*top, "old_top_logprobs"} if reads else set()
        )
