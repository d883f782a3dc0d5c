"""Waits that name who died or stands still. Workers are tiny ones of Ray, in processes of their own."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from itertools import repeat
from types import SimpleNamespace

import pytest


class Worker:
    def get_pid(self):
        return os.getpid()

    def work(self, seconds):
        time.sleep(seconds)
        return "done"

    def answer_nobody(self, count):
        deque(repeat(None, count), maxlen=0)  # a loop in C, which keeps the interpreter to itself
        return "done"


@pytest.fixture
def start(cluster, by_value):
    """``start(names)`` -> watched workers by name, ended with the test."""
    import ray

    from rlworker.cluster.watch import LIVENESS, unwatch_workers, watch_workers

    workers = {}

    def start_workers(*names):
        kind = ray.remote(concurrency_groups={LIVENESS: 1})(Worker).options(num_cpus=0)
        workers.update({name: kind.remote() for name in names})
        watch_workers(workers)
        return workers

    yield start_workers
    unwatch_workers(list(workers.values()))
    for worker in workers.values():
        ray.kill(worker)


@pytest.fixture
def watch():
    from rlworker.cluster import watch

    return watch


def test_who_stands_still_is_named_and_whoever_takes_long_is_not(start, monkeypatch, watch):
    monkeypatch.setattr(watch, "_ASK_EVERY_S", 0.2)
    monkeypatch.setattr(watch, "_SLICE_S", 0.2)
    workers = start("actor rank 0", "actor rank 1")
    (pid, _) = watch.wait_for([worker.get_pid.remote() for worker in workers.values()])
    with watch.limiting_stalls(1.5):
        # Both answer for as long as they are waited for, far beyond the limit.
        assert watch.wait_for([worker.work.remote(3.5) for worker in workers.values()]) == ["done", "done"]
        os.kill(pid, signal.SIGSTOP)
        begin = time.monotonic()
        still = r"^step 2, phase update: actor rank 0 stood still \(no answer for \d+ s\) and was ended$"
        with (
            pytest.raises(watch.WorkerFailure, match=still) as failure,
            watch.naming_failures("step 2, phase update", lambda: workers),
        ):
            watch.wait_for([workers["actor rank 0"].work.remote(100), workers["actor rank 1"].work.remote(100)])
    assert list(failure.value.lost) == ["actor rank 0"] and failure.value.where == "step 2, phase update"
    assert 1.5 < time.monotonic() - begin < 11.0


def test_who_computes_without_an_answer_does_not_stand_still(start, monkeypatch, watch):
    monkeypatch.setattr(watch, "_ASK_EVERY_S", 0.1)
    monkeypatch.setattr(watch, "_SLICE_S", 0.1)
    (worker,) = start("actor rank 0").values()
    watch.wait_for([worker.work.remote(0.3)])  # it has answered before
    found, is_computing = [], watch.is_computing
    monkeypatch.setattr(watch, "is_computing", lambda place: found.append(is_computing(place)) or found[-1])
    with watch.limiting_stalls(0.3):
        assert watch.wait_for([worker.answer_nobody.remote(10**9)]) == ["done"]
    assert any(found)  # the last look may meet the end of the work


@pytest.mark.large
@pytest.mark.timeout(60)
def test_a_stop_between_short_waits_is_noticed(start, monkeypatch, watch):
    from ray.exceptions import RayActorError

    monkeypatch.setattr(watch, "_SLICE_S", 0.2)
    (worker,) = start("rollout engine 0").values()
    (pid,) = watch.wait_for([worker.get_pid.remote()])
    watch.unwatch_workers([worker])
    watch.watch_workers({"rollout engine 0": worker})  # handed on to another run, whose waits are shorter than a slice
    time.sleep(1.0)
    watch.wait_for([worker.work.remote(0.0)])
    os.kill(pid, signal.SIGSTOP)
    with watch.limiting_stalls(1.0), pytest.raises(RayActorError):
        watch.wait_for([worker.work.remote(0.0)])


MONITORS_WORDS = """2 worker(s) were killed due to the node running low on memory. \
Memory on the node (IP: 10.0.0.2, ID: 89aa05) was 22.18GB used / 23.54GB limit (0.942461)
OOM kill reason: Memory usage 23815602176B exceeded threshold of 23759919595B (94.0% of 25276510208B limit)
Considered workers: [
Selected to kill: (Actor(ab): job ID=01, task name=A.__init__, pid=7812, actual memory used=0.06GB, worker ID=30)
Selected to kill: (Actor(cd): job ID=01, task name=A.__init__, pid=7813, actual memory used=9.31GB, worker ID=ae)
]
Refer to the documentation on how to address the out of memory issue."""
"""Of Ray 2.60, shortened."""


def list_losses() -> dict[str, tuple[Exception, str]]:
    """List errors of Ray's by which something is lost, and what is to be said of each."""
    from ray import exceptions as of

    monitors = of.OutOfMemoryError(MONITORS_WORDS)
    memory = r"was ended by Ray's memory monitor, holding 9.31 GiB, when 22.18 of 23.54 GiB .*--actor.micro-batch"
    died, node = r"died \(killed.*say more\)", "died with its machine, or with Ray there"
    return {
        "memory": (monitors, memory),
        "told": (of.RayTaskError("sync", "Traceback", monitors), "was ended by Ray's memory monitor"),
        "crash": (of.WorkerCrashedError(), died),
        "actor": (of.ActorDiedError(), died),
        "silence": (of.ActorUnavailableError("no answer", b"a" * 16), "could not be reached"),
        "node": (of.NodeDiedError("The node died"), node),
        "raylet": (of.LocalRayletDiedError(), node),
        "place": (of.ActorUnschedulableError("its node is dead"), node),
        "object": (of.ObjectLostError("ab", None, ""), r"was lost \(ObjectLostError\)"),
        "owner": (of.OwnerDiedError("ab", None, ""), r"was lost \(OwnerDiedError\)"),
        "reconstruction": (of.ObjectReconstructionFailedError("ab"), r"was lost \(ObjectReconstructionFailedError\)"),
    }


LOSSES = "memory", "told", "crash", "actor", "silence", "node", "raylet", "place", "object", "owner", "reconstruction"


class Lost:
    """Stands for a handle whose calls end by an error of Ray's. None answers."""

    def __init__(self, error: Exception | None):
        self.error, self._actor_id = error, SimpleNamespace(hex=lambda: "cd")

    @property
    def __ray_call__(self):
        return self

    def options(self, **_):
        return self

    def remote(self, *_):
        import ray

        return ray.put(self.error)  # which ray.get raises


@pytest.mark.parametrize("kind", LOSSES)
def test_whatever_is_lost_is_told_in_a_line_and_may_be_replaced(cluster, kind, monkeypatch, watch):
    """By the one who is asked first, and by whoever else knows of it."""
    import ray

    monkeypatch.setattr(watch, "_VERDICT_S", 0.0)
    error, expected = list_losses()[kind]
    lost_worker = not isinstance(error, ray.exceptions.RayTaskError | ray.exceptions.ObjectLostError)
    workers = {"actor rank 0": Lost(None), "actor rank 1": Lost(error if lost_worker else None)}
    with (
        pytest.raises(watch.WorkerFailure, match=f"(?s)^step 2, phase update: .*{expected}") as failure,
        watch.naming_failures("step 2, phase update", lambda: workers, ". Go on"),
    ):
        watch.wait_for([ray.put(error)])
    (name,) = failure.value.lost
    assert (name == "actor rank 1") == lost_worker
    text = str(failure.value)
    assert "\n" not in text and len(text) < 500 and text.endswith(". Go on")


def test_a_worker_that_cannot_be_reached_is_asked_until_ray_knows_its_end(cluster, monkeypatch, watch):
    from ray import exceptions as of

    monkeypatch.setattr(watch, "_SLICE_S", 0.01)
    silence = of.ActorUnavailableError("no answer", b"a" * 16)
    workers = {name: Lost(silence) for name in ("actor rank 0", "actor rank 1", "rollout engine 0")}
    workers["actor rank 2"] = Lost(of.ActorDiedError())
    ends = {"actor rank 0": [silence, of.NodeDiedError("The node died")], "actor rank 1": [silence, None]}
    ask = watch._ask

    def ask_again(worker):
        question = ask(worker)
        (name,) = [name for name, each in workers.items() if each is worker]
        worker.error = (ends.get(name) or [worker.error]).pop(0)
        return question

    monkeypatch.setattr(watch, "_ask", ask_again)
    monkeypatch.setattr(watch, "_VERDICT_S", 0.5)
    lost = watch.find_lost(workers)
    assert list(lost) == ["actor rank 0", "actor rank 2", "rollout engine 0"]
    assert lost["actor rank 0"] == "died with its machine, or with Ray there"
    assert lost["rollout engine 0"] == "could not be reached"  # Ray did not come to a verdict in time


def test_a_full_store_or_disk_is_told_in_a_line_and_comes_again(cluster, watch):
    from ray import exceptions as of

    lines = "Traceback (most recent call last):", '  File "save.py", line 1', "SafetensorError: No space left on device"
    disk = of.RayTaskError("save", "\n".join(lines), OSError(28, "No space left on device"))
    for error in (of.ObjectStoreFullError("full"), of.OutOfDiskError("ab", b"\0", ""), disk):
        with (
            pytest.raises(watch.WorkerFailure, match=r"^sync: .* full.*: [^\n]*$") as failure,
            watch.naming_failures("sync", lambda: {"actor rank 0": Lost(None)}),
        ):
            raise error
        assert failure.value.lost == {}


def test_who_has_ended_is_asked_no_more_and_who_did_not_start_says_why(cluster, by_value, watch):
    import ray

    watched = watch._Watched("actor rank 0", ray.put(ray.exceptions.OutOfMemoryError(MONITORS_WORDS)))
    watched.listen(True)
    assert watched.is_dead and not watched.is_due()

    class Broken:
        def __init__(self):
            raise RuntimeError("node 10.0.0.2: no network interface holds it")

    worker = ray.remote(num_cpus=0)(Broken).remote()
    lost = watch.find_lost({"actor rank 0": worker})
    assert lost == {"actor rank 0": "did not start (RuntimeError: node 10.0.0.2: no network interface holds it)"}


def test_without_a_ray_under_the_driver_nothing_is_replaced(cluster, watch):
    import ray

    died = ray.exceptions.ActorDiedError()
    died.error_msg = "The actor is dead because its owner has died. Worker exit detail: Owner's node has crashed."
    workers = {f"actor rank {rank}": Lost(died) for rank in range(2)}
    with (
        pytest.raises(watch.WorkerFailure, match=r"^sync: actor rank 0, actor rank 1 lost Ray") as failure,
        watch.naming_failures("sync", lambda: workers),
    ):
        raise died
    assert failure.value.lost == {}


MEMORY_PROGRAM = """
import os, sys, time
import psutil
used = 1 - psutil.virtual_memory().available / psutil.virtual_memory().total
gib = 2**30 / psutil.virtual_memory().total
os.environ |= {"RAY_memory_usage_threshold": str(used + 3 * gib), "RAY_memory_monitor_refresh_ms": "50"}
import ray
from rlworker.cluster.ray import running_ray
from rlworker.cluster.watch import LIVENESS, WorkerFailure, naming_failures, wait_for, watch_workers

class Worker:
    def idle(self, seconds):
        time.sleep(seconds)
    def eat(self):
        while True:
            self.eaten = [*getattr(self, "eaten", []), bytearray(os.urandom(1) * 2**26)]

with running_ray(2, "cpu"):
    kind = ray.remote(concurrency_groups={LIVENESS: 1})(Worker).options(num_cpus=0)
    workers = {f"actor rank {rank}": kind.remote() for rank in range(2)}
    watch_workers(workers)
    wait_for([worker.idle.remote(0) for worker in workers.values()])
    try:
        with naming_failures("step 2, phase update", lambda: workers, ". Go on"):
            wait_for([workers["actor rank 0"].idle.remote(60), workers["actor rank 1"].eat.remote()])
    except WorkerFailure as failure:
        assert "actor rank 1" in failure.lost, failure.lost
        print(failure)
"""


@pytest.mark.large
@pytest.mark.timeout(180)
def test_the_memory_monitor_of_a_real_ray_is_named():
    """Its limit is 3 GiB above what this machine uses, and one worker takes as much."""
    command = [sys.executable, "-W", "ignore", "-c", MEMORY_PROGRAM]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)
    assert done.returncode == 0, done.stderr
    said = r"step 2, phase update: .*actor rank 1 was ended by Ray's memory monitor, holding \d.\d+ GiB, .* Go on\n"
    assert re.fullmatch(said, done.stdout), done.stdout
