import gc
import os
import re
import signal
import socket
import subprocess
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.program import run_recipe

from engines.batch.batch import COLUMNS, TrainBatch
from engines.batch.shard import TokenOutputs
from engines.config import MegatronConfig
from engines.interfaces import StepResult
from hardware.platforms import get_platform
from rlworker import RunConfig, SftConfig
from rlworker.base.errors import RunError
from rlworker.base.terminal import LOGGER
from rlworker.config.algorithm import AlgorithmConfig
from rlworker.config.sizes import count_batch_bytes


class Worker:
    def __repr__(self):
        return "actor rank 1"

    def die(self):
        os._exit(1)

    def fail(self):
        raise KeyError("level")

    def hang(self):
        time.sleep(100)


@pytest.fixture
def started(monkeypatch) -> list[dict]:
    """No Ray is there, and none starts: the settings that it would be started with, and an empty one at its end."""
    import ray

    found = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **settings: found.append(settings))
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": found[0]["num_cpus"]})
    monkeypatch.setattr(ray, "shutdown", lambda: found.append({}))
    return found


def test_a_ray_that_does_not_start_is_an_error_to_be_read(started, monkeypatch):
    from rlworker.cluster.ray import running_ray

    def init(**_):
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr("ray.init", init)
    with pytest.raises(RunError, match=r"ray: it did not start \(The current node timed out"), running_ray(1, "cpu"):
        pass


def test_a_node_that_is_late_is_started_once_more(started, monkeypatch, caplog):
    """Processes of the first start are ended, and no other child of this program."""
    from rlworker.cluster.ray import running_ray

    caplog.set_level("WARNING", LOGGER.name)
    mine, late = subprocess.Popen(["sleep", "60"]), []

    def init(**settings):
        started.append(settings)
        if not late:
            late.append(subprocess.Popen(["sleep", "60"]))
            raise Exception("The current node timed out during startup. This could happen because some of the raylet")

    monkeypatch.setattr("ray.init", init)
    try:
        with running_ray(1, "cpu"):
            assert len(started) == 2 and started[0] == started[1]
        assert late[0].wait(10) == -signal.SIGKILL and mine.poll() is None
        assert "its node was not there after 30 s" in caplog.text
    finally:
        mine.kill()


def test_engines_that_have_the_weights_may_sample(monkeypatch):
    """One that replaced another was kept from it by a failure, and has been sent the weights since."""
    from rlworker.cluster.rollout_group import Rollouts

    monkeypatch.setattr(Rollouts, "_start_processes", lambda self, indices: [object() for _ in indices])
    rollouts = Rollouts("cpu", 2)
    rollouts.workers[1] = object()
    monkeypatch.setattr(rollouts, "call", lambda method: [3, 3])
    with pytest.raises(RunError, match=r"the rollout engines have \[3, 3\], expected version 4 in all"):
        rollouts.check_version(4)
    assert rollouts.serving[1] is not rollouts.workers[1]
    rollouts.check_version(3)
    assert rollouts.serving == rollouts.workers


def test_a_cluster_that_is_gone_is_named_before_anything_is_read(started, monkeypatch, tmp_path):
    """Nobody listens there; Ray itself would try for 14 minutes."""
    options = "--model", tmp_path, "--run-dir", tmp_path / "run", "--data.train", tmp_path / "rows.jsonl"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody else gets the port, and nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for given, said in ((address, f"nobody answers at RAY_ADDRESS={address} "), ("head", "'head' is no host:port")):
            monkeypatch.setenv("RAY_ADDRESS", given)
            done = run_recipe("grpo", *options)
            assert done.returncode == 1 and said in done.stderr and "unset RAY_ADDRESS" in done.stderr, done.stderr


def test_a_listener_that_is_no_cluster_is_given_up_after_one_attempt(started, monkeypatch):
    from rlworker.cluster.ray import _ATTEMPTS, running_ray

    def init(**_):
        assert os.environ[_ATTEMPTS] == "1"
        raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setattr("ray.init", init)
    given_up = pytest.raises(RunError, match=r"^ray: no cluster at RAY_ADDRESS=127.0.0.1:\d+ \(Failed .*\); start")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        with given_up, running_ray(1, "cpu"):
            pass
    assert _ATTEMPTS not in os.environ


@pytest.mark.parametrize("name", ["TMPDIR", "RAY_TMPDIR"])
def test_a_folder_too_long_for_rays_sockets_is_named(started, monkeypatch, name):
    from rlworker.cluster.ray import check_ray

    folder = "/tmp/" + "é" * 40
    monkeypatch.setenv(name, folder)
    with pytest.raises(RunError, match=rf"^ray: {name}={folder} has 85 bytes.* at most 107; set {name} to .* 39 bytes"):
        check_ray()
    monkeypatch.setenv(name, "/tmp/" + "x" * 34)
    check_ray()


@pytest.mark.large
def test_the_longest_folder_that_is_taken_holds_rays_sockets(monkeypatch):
    """By Ray's own check of paths, and a path of the longest number of a process."""
    from ray._private.utils import validate_socket_filepath

    from rlworker.cluster.ray import _SOCKET

    validate_socket_filepath("/tmp/" + "x" * 34 + _SOCKET)


def test_who_failed_is_named_among_workers_that_hang(cluster, by_value):
    import ray

    from rlworker.cluster.watch import WorkerFailure, naming_failures, wait_for

    workers = {f"actor rank {i}": ray.remote(Worker).options(num_cpus=0).remote() for i in range(3)}
    named = r"(?s)^step 2, phase update: .*repr=actor rank 1.*KeyError: 'level'"
    with pytest.raises(WorkerFailure, match=named), naming_failures("step 2, phase update", lambda: workers):
        ray.get(workers["actor rank 1"].fail.remote())
    died = r"^step 3, phase sync: actor rank 0 died .*say more\); go on$"
    with (
        pytest.raises(WorkerFailure, match=died) as failure,
        naming_failures("step 3, phase sync", lambda: workers, "; go on"),
    ):
        wait_for([workers["actor rank 2"].hang.remote(), workers["actor rank 0"].die.remote()])
    assert list(failure.value.lost) == ["actor rank 0"]
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
    with (
        pytest.raises(RunError, match=r"^ray: LocalRayletDiedError: died with its machine, or with Ray there$"),
        running_ray(1, "cpu"),
    ):
        raise ray.exceptions.LocalRayletDiedError
    assert ray.is_initialized()


@pytest.mark.parametrize("workers", [1, 1000])
def test_a_ray_of_ones_own_has_room_for_the_workers_and_ends_with_them(started, workers):
    from rlworker.cluster.ray import running_ray

    with pytest.raises(KeyError), running_ray(workers, "cpu"):
        (settings,) = started
        raise KeyError
    assert (settings["address"], settings["num_cpus"]) == ("local", max(workers, os.cpu_count()))
    assert started == [settings, {}]


@pytest.mark.parametrize(
    "batch, free, size, warning",
    [
        (0, 2**34, 2**30, ""),
        (2**32, 2**34, 2**32 + 192 * 2**20, ""),
        (2**30, 2**30, 2**30, "1.00 GiB free, .* up to 1.19 GiB: the rest goes over the disk"),
        (0, 2**26, 75 * 2**20, "0.06 GiB free, .* up to 0.19 GiB: .*--shm-size"),  # a container by default
    ],
)
def test_the_object_store_holds_a_batch_and_the_buckets_on_their_way(started, monkeypatch, batch, free, size, warning):
    from rlworker.cluster.ray import running_ray

    told = []
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
    monkeypatch.setattr(LOGGER, "warning", told.append)
    with running_ray(1, "cpu", batch):
        pass
    assert started[0]["object_store_memory"] == size
    assert re.search(warning, told[0]) if warning else not told


def test_a_batch_is_counted_as_it_is():
    """The widest one that there is, against its own tensors."""
    config = RunConfig(algorithm=AlgorithmConfig(score_centering=4))
    tokens = config.samples_per_step * config.longest
    ints = {"positions": torch.zeros(64, 3, dtype=torch.long), "image_block": torch.zeros(64, dtype=torch.long)}
    ints |= {name: torch.zeros(64, dtype=torch.int32) for name in ("versions", "turn")}
    wide = {"rollout_top_ids": torch.zeros(64, 4, dtype=torch.int32), "rollout_top_logprobs": torch.zeros(64, 4)}
    wide |= {"old_top_logprobs": torch.zeros(64, 5)}
    batch = TrainBatch.from_ids([[1] * 65], [1])
    rest = [name for name in COLUMNS if getattr(batch, name) is None and COLUMNS[name].kind != "sequence"]
    # A support stands in the place of the likeliest ids, a teacher's logprobs in that of the old ones. How wide routes
    # are is the model's matter: none is counted.
    counted = {*ints, *wide, "support", "ref_top_logprobs", "routes"}
    floats = {name: torch.zeros(64) for name in rest if name not in counted}
    columns = replace(batch, **floats, **ints, **wide).columns().values()
    taken = sum(column.nbytes for column in columns) / 64 * tokens
    assert taken <= count_batch_bytes(config) / 2 <= 1.5 * taken
    assert count_batch_bytes(SftConfig(rows_per_step=8, max_answer_tokens=100)) > 8 * 100 * 50


def test_collection_goes_on_afterwards():
    from rlworker.cluster.ray import pausing_collection

    with pytest.raises(ImportError), pausing_collection():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled() and gc.get_freeze_count() > 0
    gc.unfreeze()


def make_group(reply, model=None, **changes):
    """Make a group of one rank, which answers ``reply(shard)`` to each call; ``changes`` are of its role."""
    from rlworker.cluster.train_group import WorkerGroup
    from rlworker.cluster.workers import Role

    model = model or SimpleNamespace(hidden=8, rules=(), head="language")
    role = Role("actor", model, MegatronConfig(), **changes)
    group = WorkerGroup(role, get_platform("cpu"), [None], [{"dp_rank": 0, "is_leader": True}])
    group.call_sharded = lambda method, shards, *args: [reply(*shards)]
    return group


def test_the_likeliest_ids_are_sent_where_they_are_read_alone():
    """The actor's ranks get them, a reference's and a critic's do not."""
    sent = []

    def reply(shard) -> TokenOutputs:
        sent.append({name for name in shard.batch.columns() if "top" in name})
        return TokenOutputs(torch.zeros(2), torch.zeros(2))

    top = {"rollout_top_ids": torch.ones(2, 3), "rollout_top_logprobs": torch.zeros(2, 3)}
    batch = TrainBatch.from_ids([[1, 2, 3]], [1], **top, old_top_logprobs=torch.zeros(2, 4))
    for reads in (True, False):
        make_group(reply, needs_topk_logprobs=reads).forward(batch)
    assert sent == [{*top, "old_top_logprobs"}, set()]


def test_metrics_of_a_step():
    """Sums of the replicas, by their counting tokens; those of routers as the engine says."""
    outputs = TokenOutputs(torch.zeros(2), torch.zeros(2))
    for routing in ({}, {"expert_load_min": 0.0, "expert_load_max": 3.5}):
        result = StepResult({"loss": 6.0, "x_max": 3.0}, outputs, grad_norm=1.0, lr=0.5, routing=routing)
        group = make_group(lambda shard, result=result: result)
        metrics, _ = group.train_step(TrainBatch.from_ids([[1, 2, 3]], [1]), None, 1.0)
        rest = {"loss": 3.0, "x_max": 3.0, "grad_norm": 1.0, "lr": 0.5, "prompt_sharing": 1.0}
        assert metrics == rest | routing
    sees, reads = ({"loss": 1.0, "images": 3.0}, {"loss": 2.0})  # a metric that one replica has
    parts = [(reads, outputs), (sees, None)]
    results = [StepResult(sums, kept, grad_norm=1.0, lr=0.5, routing={}) for sums, kept in parts]
    group.call_sharded = lambda *_: results
    metrics, _ = group.train_step(TrainBatch.from_ids([[1, 2, 3]], [1]), None, 1.0)
    assert (metrics["loss"], metrics["images"]) == (1.5, 1.5)


def test_a_weight_outside_the_mask_is_refused_where_logprobs_are_known_within_it_alone():
    group = make_group(lambda shard: shard, model=SimpleNamespace())
    batch = TrainBatch.from_ids([[1, 2, 3]], [2], weights=torch.tensor([0.5, 1.0]))
    with pytest.raises(ValueError, match=r"it gives a weight other than 0 to 1 tokens outside batch\.mask"):
        group.train_step(replace(batch, ref_logprobs=torch.zeros(2)), None, 1.0)
    with pytest.raises(AttributeError):  # it gets further than that, to a model that is not there
        group.train_step(batch, None, 1.0)
