"""Waits that name who died or stands still. Workers are tiny ones of Ray, in processes of their own."""

import os
import signal
import time
from collections import deque
from itertools import repeat

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


def test_who_stands_still_is_named_and_whoever_takes_long_is_not(start, monkeypatch):
    from rlworker.cluster import watch

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


def test_who_computes_without_an_answer_does_not_stand_still(start, monkeypatch):
    from rlworker.cluster import watch

    monkeypatch.setattr(watch, "_ASK_EVERY_S", 0.1)
    monkeypatch.setattr(watch, "_SLICE_S", 0.1)
    (worker,) = start("actor rank 0").values()
    watch.wait_for([worker.work.remote(0.3)])  # it has answered before
    found, is_computing = [], watch.is_computing
    monkeypatch.setattr(watch, "is_computing", lambda place: found.append(is_computing(place)) or found[-1])
    with watch.limiting_stalls(0.3):
        assert watch.wait_for([worker.answer_nobody.remote(10**9)]) == ["done"]
    assert found and all(found)


def test_a_wait_ends_with_the_first_that_dies(start):
    from rlworker.cluster import watch

    workers = start("actor rank 0", "actor rank 1")
    (_, pid) = watch.wait_for([worker.get_pid.remote() for worker in workers.values()])
    calls = [worker.work.remote(100) for worker in workers.values()]
    os.kill(pid, signal.SIGKILL)
    with (
        pytest.raises(watch.WorkerFailure, match=r"^phase sync: actor rank 1 died .*; go on$") as failure,
        watch.naming_failures("phase sync", lambda: workers, "; go on"),
    ):
        watch.wait_for(calls)
    assert list(failure.value.lost) == ["actor rank 1"]
